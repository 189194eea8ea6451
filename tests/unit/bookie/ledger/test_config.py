"""The configuration refuses impossible values and names the field in the error."""

import pytest

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.quorum import Quorum


def test_the_default_quorum_is_3_3_2_and_at_least_2_copies() -> None:
    assert LedgerConfig().quorum == Quorum(3, 3, 2)
    assert LedgerConfig().write_quorum_min == 2
    standalone = LedgerConfig(ensemble_size=1, write_quorum=1, ack_quorum=1)
    assert standalone.write_quorum_min == 1


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("ensemble_size", 2, "quorums"),
        ("ack_quorum", 4, "quorums"),
        ("min_write_quorum", 1, "min_write_quorum"),
        ("min_write_quorum", 4, "min_write_quorum"),
        ("add_timeout_s", 0, "add_timeout_s"),
        ("health_half_life_s", -1, "health_half_life_s"),
        ("lag_bytes_max", 1000, "lag_bytes_max"),
        ("ensemble_changes_max", -1, "ensemble_changes_max"),
        ("ensemble_change_delay_s", -1, "ensemble_change_delay_s"),
    ],
)
def test_a_contradictory_setting_is_refused(field: str, value: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LedgerConfig(**{field: value})  # type: ignore[arg-type]
