"""What is accepted and not confirmed: order, indexes and bytes, whatever happens to ledgers."""

from __future__ import annotations

import pytest
from fakes.entries import entry_of
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.errors import EntryTooLarge
from magnetar.broker.log.outstanding import Outstanding
from magnetar.protos.entry import ENTRY_BYTES_MAX, BrokerMetadata, strip_broker_metadata


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "take plain"]), st.integers(1, 4))
        | st.tuples(st.sampled_from(["send", "confirm"]), st.integers(1, 5))
        | st.tuples(st.just("fail"), st.just(0)),
        max_size=60,
    )
)
def test_entries_leave_in_the_order_in_which_they_came(script: list[tuple[str, int]]) -> None:
    outstanding = Outstanding(next_index=100)
    taken = 0
    messages = 0
    confirmed: list[object] = []
    confirmed_index = 100
    for what, count in script:
        match what:
            case "take":
                view = entry_of(*["m"] * count)
                pending = outstanding.take(view, taken, now_ms=taken)
                messages += count
                assert pending.index == 99 + messages
                stored = pending.prefix + bytes(view.data)
                assert len(stored) == pending.size
                assert strip_broker_metadata(stored)[0] == BrokerMetadata(taken, pending.index)
                outstanding.queue.append(pending)
                taken += 1
            case "take plain":
                entries = [bytes(entry_of("m").data)] * count
                contexts = [*range(taken, taken + count)]
                many = outstanding.take_plain(entries, contexts, now_ms=taken)
                for pending, data in zip(many, entries, strict=True):
                    stored = pending.prefix + data
                    assert len(stored) == pending.size
                    assert strip_broker_metadata(stored)[0] == BrokerMetadata(taken, pending.index)
                messages += count
                outstanding.queue.extend(many)
                taken += count
            case "send":
                for _ in range(min(count, len(outstanding.queue))):
                    outstanding.in_flight.append(outstanding.queue.popleft())
            case "confirm":
                done = outstanding.confirm(min(count, len(outstanding.in_flight)))
                confirmed += [pending.context for pending in done]
                confirmed_index = done[-1].index + 1 if done else confirmed_index
            case _:
                in_flight = len(outstanding.in_flight)
                assert outstanding.put_back() == in_flight
        outstanding.check(confirmed_index=confirmed_index)
    assert confirmed + outstanding.give_up() == list(range(taken))
    assert outstanding.bytes == 0


def test_an_entry_that_is_too_large_takes_no_index() -> None:
    outstanding = Outstanding(next_index=0)
    view = entry_of("x")
    view.data = bytes(ENTRY_BYTES_MAX)
    with pytest.raises(EntryTooLarge) as caught:
        outstanding.take(view, None, now_ms=1)
    assert caught.value.limit == ENTRY_BYTES_MAX
    prefix = caught.value.size - ENTRY_BYTES_MAX
    outstanding.check(confirmed_index=0)
    view.data = bytes(ENTRY_BYTES_MAX - prefix)
    assert outstanding.take(view, None, now_ms=1).size == ENTRY_BYTES_MAX
