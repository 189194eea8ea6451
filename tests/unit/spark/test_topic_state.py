from __future__ import annotations

from dataclasses import replace

import pytest

from magnetar.spark.offsets import Place
from magnetar.spark.planner import Span
from magnetar.spark.topic_state import Ledger, TopicState

# Ledgers of 10, 1 and 5 entries with 10 messages each.
STATE = TopicState(
    "grpc://one:1",
    (Ledger(3, 9, 100, 1_000), Ledger(8, 0, 200, 100), Ledger(9, 4, 210, 500)),
    first_index=100,
    next_index=260,
)
EMPTY = TopicState("grpc://one:1", (), first_index=0, next_index=0)
TRIMMED = TopicState("grpc://one:1", (), first_index=260, next_index=260)


def test_a_topic_begins_and_ends_at_its_first_and_next_message() -> None:
    assert STATE.earliest == Place(3, 0, 100)
    assert STATE.latest == Place(9, 5, 260)
    assert EMPTY.earliest == EMPTY.latest == Place(0, 0, 0)
    assert TRIMMED.latest == Place(0, 0, 260)


def test_the_end_counts_the_bytes_that_follow_the_start() -> None:
    assert STATE.end_from(STATE.earliest) == Place(9, 5, 260, 1_600)
    assert STATE.end_from(Place(3, 8, 180, 50)) == Place(9, 5, 260, 50 + 200 + 600)
    assert STATE.end_from(Place(9, 5, 260, 7)) == Place(9, 5, 260, 7)  # nothing is new


@pytest.mark.parametrize(
    ("start", "end", "parts"),
    [
        (Place(3, 0, 100), Place(9, 5, 260), [(3, 0, 9), (8, 0, 0), (9, 0, 4)]),
        (Place(0, 0, 100), Place(9, 5, 260), [(3, 0, 9), (8, 0, 0), (9, 0, 4)]),
        (Place(3, 4, 140), Place(3, 6, 160), [(3, 4, 5)]),
        (Place(3, 10, 200), Place(9, 1, 220), [(8, 0, 0), (9, 0, 0)]),
        (Place(3, 10, 200), Place(8, 0, 200), []),
        (Place(9, 5, 260), Place(9, 5, 260), []),
    ],
)
def test_spans_hold_the_entries_between_two_places(
    start: Place, end: Place, parts: list[tuple[int, int, int]]
) -> None:
    spans = STATE.spans("t", start, end)
    assert [(span.ledger, span.first, span.last) for span in spans] == parts


def test_a_batch_has_the_same_spans_after_the_topic_has_grown() -> None:
    start = Place(3, 0, 100)
    end = STATE.end_from(start)
    last = replace(STATE.ledgers[2], last=400, bytes=40_000)
    grown = TopicState(
        "grpc://two:1", (*STATE.ledgers[:2], last, Ledger(11, 0, 5_000, 9)), 100, 5_010
    )
    assert grown.spans("t", start, end) == STATE.spans("t", start, end)
    assert STATE.spans("t", start, end)[0] == Span(3, 0, 9, 1_000, "t")


@pytest.mark.parametrize(
    "place",
    [Place(3, 0, 100), Place(3, 5, 150), Place(9, 5, 260), Place(0, 0, 100), Place(2, 7, 100)],
)
def test_nothing_is_lost_while_the_next_message_is_stored(place: Place) -> None:
    assert STATE.lost(place) is None


def test_an_owner_that_is_behind_has_lost_nothing() -> None:
    place = Place(9, 8, 300)
    assert STATE.lost(place) is None
    assert STATE.end_from(place) == place


def test_trimmed_messages_are_lost_from_the_place_of_the_query_on() -> None:
    loss = STATE.lost(Place(2, 7, 70, 999))
    assert loss is not None
    assert "messages 70 to 99 were deleted" in loss.what
    assert loss.next == Place(3, 0, 100, 999)
    loss = TRIMMED.lost(Place(9, 0, 210))
    assert loss is not None
    assert "messages 210 to 259" in loss.what
    assert loss.next == Place(9, 0, 260)
    assert TRIMMED.lost(loss.next) is None


@pytest.mark.parametrize(
    "new",
    [
        EMPTY,
        TopicState("", (Ledger(20, 0, 0, 9),), 0, 10),
        TopicState("", (Ledger(20, 99, 0, 9),), 0, 1_000),  # already longer than the old one
    ],
)
def test_a_topic_that_was_created_again_is_not_taken_for_the_old_one(new: TopicState) -> None:
    loss = new.lost(Place(9, 5, 260))
    assert loss is not None
    assert "created again" in loss.what
    assert loss.next.index == 0
