"""The settings of a process reach its repair. Contradictory settings are refused at the start."""

from __future__ import annotations

import pytest

from magnetar.bookie.repair.config import RepairConfig
from magnetar.bookie.repair.settings import AutorecoveryConfig
from magnetar.runtime.config import ConfigError, load_config

URL = {"metadata_url": "zk://127.0.0.1:2181"}


def test_the_default_settings_equal_those_of_repair_config() -> None:
    assert AutorecoveryConfig(**URL).repair == RepairConfig()


def test_settings_reach_the_repair() -> None:
    config = load_config(
        AutorecoveryConfig, file=None, flags={**URL, "lost_bookie_delay_s": 3, "ledgers_at_once": 9}
    )
    assert (config.repair.lost_bookie_delay_s, config.repair.ledgers_at_once) == (3.0, 9)


@pytest.mark.parametrize(
    "wrong",
    [{"copy_bytes_per_s": 5}, {"check_period_s": 0}, {"write_quorum": 0}, {"write_quorum": 33}],
)
def test_impossible_settings_are_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", ".")):
        load_config(AutorecoveryConfig, file=None, flags={**URL, **wrong})
