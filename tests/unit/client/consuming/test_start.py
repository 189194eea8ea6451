"""The start of reading, against a comparison of each message's id with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consuming.start import Start
from magnetar.client.message import MessageId

SMALL = st.integers(0, 3)


@given(st.tuples(SMALL, SMALL, st.integers(0, 4)), st.tuples(SMALL, SMALL), st.booleans())
def test_messages_before_the_start_are_skipped_as_comparing_ids_says(
    at: tuple[int, int, int], key: tuple[int, int], inclusive: bool
) -> None:
    ledger, entry, index = at
    start = Start(MessageId(-1, ledger, entry, index, 5), inclusive)
    bits = start.skipped(key, 5)
    for place in range(5):
        one = MessageId(-1, *key, place, 5)
        too_early = one < start.message_id or (one == start.message_id and not inclusive)
        assert bool(bits >> place & 1) == too_early


def test_an_id_without_a_place_means_the_whole_entry() -> None:
    at = MessageId(-1, 1, 2)
    assert Start(at, inclusive=False).skipped((1, 2), 1) == 1
    assert Start(at, inclusive=True).skipped((1, 2), 1) == 0
    assert Start(at, inclusive=False).skipped((1, 2), 3) == 0b111
    assert Start(at, inclusive=True).skipped((1, 2), 3) == 0


def test_the_ends_of_a_topic_skip_nothing() -> None:
    for end in (MessageId.earliest, MessageId.latest):
        assert Start(end, inclusive=False).is_sentinel
        assert Start(end, inclusive=False).skipped((1, 2), 3) == 0


def test_a_start_is_before_the_last_message_if_that_message_is_wanted() -> None:
    for place, inclusive, last, wanted in [
        (MessageId(-1, 1, 2, 0, 3), False, MessageId(-1, 1, 2, 2, 3), True),
        (MessageId(-1, 1, 2, 2, 3), False, MessageId(-1, 1, 2, 2, 3), False),
        (MessageId(-1, 1, 2, 2, 3), True, MessageId(-1, 1, 2, 2, 3), True),
        (MessageId(-1, 1, 2), False, MessageId(-1, 1, 2, 2, 3), False),
        (MessageId(-1, 1, 2), True, MessageId(-1, 1, 2, 2, 3), True),
        (MessageId(-1, 1, 2), True, MessageId(-1, 1, 1, 2, 3), False),
        (MessageId.earliest, False, MessageId(-1, 0, 0), True),
    ]:
        assert Start(place, inclusive).is_before(last) == wanted
