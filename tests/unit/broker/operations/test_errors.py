"""The table from errors to HTTP statuses."""

from __future__ import annotations

import pytest

from magnetar.broker import errors as broker_errors
from magnetar.broker.operations import errors
from magnetar.broker.refusal import OPERATING_ERRORS


def test_every_operating_error_has_a_status_that_is_no_bug() -> None:
    kinds = [kind for kind, _ in errors.OUTCOMES]
    for kind in OPERATING_ERRORS:
        assert kind in kinds
    for kind, outcome in errors.OUTCOMES:
        assert outcome.status == 307 or outcome.status in (503, 507) or 400 <= outcome.status < 500
        assert issubclass(kind, OPERATING_ERRORS)


def test_no_row_is_hidden_behind_a_base_class() -> None:
    kinds = [kind for kind, _ in errors.OUTCOMES]
    for place, kind in enumerate(kinds):
        assert not any(issubclass(kind, before) for before in kinds[:place]), kind


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (broker_errors.TopicNotFound("t"), 404),
        (broker_errors.TopicExists("t"), 409),
        (broker_errors.TopicClosing("t"), 503),
        (broker_errors.ConsumersConnected("s", 2), 412),
        (TimeoutError(), 503),
    ],
)
def test_status_of_an_error(error: Exception, status: int) -> None:
    assert errors.outcome_of(error).status == status


def test_a_hostile_value_is_shown_in_part() -> None:
    text = str(errors.InvalidArgument("position", "x" * 1_000_000, "a number"))
    assert len(text) < 300
    assert text.endswith("(1000002 characters): expected a number")
