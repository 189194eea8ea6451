"""Accepted, unconfirmed entries keep their order, indexes and byte count when ledgers fail or
change."""

from __future__ import annotations

from fakes.entries import entry_of
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.log.outstanding import Outstanding
from magnetar.protos.entry import BrokerMetadata, strip_broker_metadata

SINGLE = entry_of("m")


@given(
    st.lists(
        st.tuples(st.just("take"), st.lists(st.integers(1, 4), min_size=1, max_size=6))
        | st.tuples(st.sampled_from(["send", "confirm", "fail"]), st.integers(1, 5)),
        max_size=60,
    )
)
def test_entries_are_sent_in_the_order_of_their_arrival(
    script: list[tuple[str, int | list[int]]],
) -> None:
    """Runs of messages and batches, sent and confirmed in parts that do not fit the runs."""
    outstanding = Outstanding(next_index=100)
    waiting: list[tuple[int, int, int]] = []  # for each entry: run, place, index
    flying: list[tuple[int, int, int]] = []
    runs = messages = entry = 0
    confirmed: list[tuple[int, int]] = []
    confirmed_index = 100
    for what, argument in script:
        if isinstance(argument, list):
            views = {place: entry_of(*["m"] * n) for place, n in enumerate(argument) if n > 1}
            data = [bytes(views.get(place, SINGLE).data) for place in range(len(argument))]
            outstanding.take(data, views, runs, now_ms=runs)
            for place, count in enumerate(argument):
                messages += count
                waiting.append((runs, place, 99 + messages))
            runs += 1
        elif what == "send" and waiting:
            payloads = outstanding.unsent(entries_max=argument, bytes_max=1 << 20)
            assert len(payloads) == min(argument, len(waiting))
            for prefix, data_sent in payloads:
                run, place, index = waiting.pop(0)
                found, _ = strip_broker_metadata(prefix + data_sent)
                assert found == BrokerMetadata(run, index)
                flying.append((run, place, index))
            size = sum(len(prefix) + len(sent) for prefix, sent in payloads)
            assert outstanding.on_sent(len(payloads)) == size
        elif what == "confirm" and flying:
            done, flying = flying[:argument], flying[argument:]
            parts = outstanding.confirm(len(done), ledger=7, first_entry=entry)
            assert [part.first_entry for part in parts] == [
                entry + sum(before.count for before in parts[:number])
                for number in range(len(parts))
            ]
            entry += len(done)
            for part in parts:
                assert isinstance(part.context, int)
                confirmed += [(part.context, place) for place in range(part.start, part.stop)]
            assert sum(part.messages for part in parts) == done[-1][2] + 1 - confirmed_index
            confirmed_index = done[-1][2] + 1
            assert confirmed[-len(done) :] == [(run, place) for run, place, _ in done]
        elif what == "fail":
            assert outstanding.put_back() == len(flying)
            waiting, flying = flying + waiting, []
        assert (outstanding.queued, outstanding.in_flight) == (len(waiting), len(flying))
        if waiting:
            # The index of the last message of the entry. Its first message follows the earlier
            # entries.
            expected = waiting[0][2]
            assert expected - 4 < outstanding.first_queued_index <= expected
        outstanding.check(confirmed_index=confirmed_index)
    left = {run for run, _, _ in flying + waiting}
    assert [run.context for run in outstanding.give_up()] == sorted(left)
    outstanding_bytes: int = outstanding.bytes
    assert outstanding_bytes == 0


def test_unsent_ends_with_the_entry_that_reaches_the_limit() -> None:
    outstanding = Outstanding(next_index=0)
    data = bytes(SINGLE.data)
    outstanding.take([data] * 3, {}, "a", now_ms=1)
    outstanding.take([data] * 3, {}, "b", now_ms=1)
    size = outstanding.bytes // 6

    def count(bytes_max: int) -> int:
        return len(outstanding.unsent(entries_max=100, bytes_max=bytes_max))

    assert [count(limit) for limit in (0, 1, size, size + 1, 4 * size, 5 * size + 1)] == [
        1, 1, 1, 2, 4, 6
    ]  # fmt: skip
