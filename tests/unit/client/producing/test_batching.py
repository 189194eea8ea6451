"""The batch builder against a list that is divided by the same limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.producing.batching import Batch, BatchBuilder
from magnetar.protos.message import OutgoingMessage


def done(*_: object) -> None:
    raise AssertionError("the builder must not call `done`")


def message(sequence: int, size: int = 10, key: str | None = None) -> OutgoingMessage:
    return OutgoingMessage(bytes(size), sequence, partition_key=key)


def sequences(batches: list[Batch]) -> list[list[int]]:
    return [[one.sequence_id for one in batch.messages] for batch in batches]


def builder(
    bytes_max: int = 100, batch_bytes_max: int = 100, *, by_key: bool = False
) -> BatchBuilder:
    return BatchBuilder(
        messages_max=5,
        bytes_max=bytes_max,
        batch_bytes_max=batch_bytes_max,
        delay_s=0.5,
        by_key=by_key,
    )


ITEMS = st.lists(
    st.tuples(st.integers(0, 120), st.sampled_from([None, "a", "b", "c"])), max_size=60
)


@given(ITEMS, st.booleans())
def test_every_message_once_in_order_within_the_limits(
    items: list[tuple[int, str | None]], by_key: bool
) -> None:
    machine = builder(by_key=by_key)
    rounds: list[list[Batch]] = []
    for sequence, (size, key) in enumerate(items):
        sealed = machine.add(message(sequence, size, key), size, done, float(sequence))
        machine.check()
        rounds.append(sealed)
    rounds.append(machine.seal())
    machine.check()
    batches = [batch for sealed in rounds for batch in sealed]
    numbers = sequences(batches)
    assert sorted(number for batch in numbers for number in batch) == list(range(len(items)))
    assert [batch[0] for batch in numbers] == sorted(batch[0] for batch in numbers)
    assert all(batch == sorted(batch) for batch in numbers)
    for batch in batches:
        assert len(batch.messages) <= 5
        assert batch.message_bytes <= 100 or len(batch.messages) == 1
        assert batch.message_bytes == sum(len(one.payload) for one in batch.messages)
        if by_key:
            assert len({one.partition_key for one in batch.messages}) == 1
    if not by_key:
        assert numbers == cut(items)


def cut(items: list[tuple[int, str | None]]) -> list[list[int]]:
    """A simple model of the batch builder."""
    batches: list[list[int]] = []
    room = 0
    open_batch: list[int] = []
    for number, (size, _) in enumerate(items):
        if open_batch and room + size > 100:
            batches.append(open_batch)
            open_batch, room = [], 0
        open_batch.append(number)
        room += size
        if len(open_batch) == 5 or room >= 100:
            batches.append(open_batch)
            open_batch, room = [], 0
    return [*batches, open_batch] if open_batch else batches


@given(ITEMS, st.booleans())
def test_each_batch_is_within_its_own_limit_too(
    items: list[tuple[int, str | None]], by_key: bool
) -> None:
    machine = builder(100, 60, by_key=by_key)
    batches: list[Batch] = []
    for sequence, (size, key) in enumerate(items):
        sealed = machine.add(message(sequence, size, key), size, done, float(sequence))
        machine.check()
        batches += sealed
    batches += machine.seal()
    for batch in batches:
        assert batch.message_bytes <= 60 or len(batch.messages) == 1
    numbers = sequences(batches)
    assert sorted(number for batch in numbers for number in batch) == list(range(len(items)))
    assert [batch[0] for batch in numbers] == sorted(batch[0] for batch in numbers)


def test_batches_of_several_keys_may_together_exceed_what_one_batch_may_have() -> None:
    machine = builder(1_000, 100, by_key=True)
    for sequence, key in enumerate(("a", "b", "c")):
        assert machine.add(message(sequence, 90, key), 90, done, 0.0) == []
    assert sequences(machine.add(message(3, 20, "b"), 20, done, 0.0)) == [[0], [1], [2]]
    assert sequences(machine.seal()) == [[3]]


def test_a_smaller_limit_of_the_broker_seals_a_batch_that_has_reached_it() -> None:
    machine = builder(1_000, 100, by_key=True)
    machine.add(message(0, 50, "a"), 50, done, 0.0)
    machine.add(message(1, 40, "b"), 40, done, 0.0)
    assert machine.limit(60) == []
    machine.check()
    assert sequences(machine.limit(50)) == [[0], [1]]


def test_the_first_message_sets_the_timer() -> None:
    machine = builder()
    assert machine.timer_at() is None
    machine.add(message(0), 10, done, 7.0)
    machine.add(message(1), 10, done, 7.4)
    assert machine.timer_at() == 7.5
    assert sequences(machine.seal()) == [[0, 1]]
    assert machine.timer_at() is None
    assert machine.seal() == []


def test_the_ordering_key_goes_before_the_key() -> None:
    machine = builder(by_key=True)
    for sequence, (key, ordering) in enumerate(
        [("a", b"1"), ("b", b"1"), ("a", b"2"), ("a", None)]
    ):
        one = message(sequence, key=key)
        one.ordering_key = ordering
        machine.add(one, 10, done, 0.0)
    assert sequences(machine.seal()) == [[0, 1], [2], [3]]


def test_a_message_larger_than_a_batch_is_sent_alone() -> None:
    machine = builder()
    assert machine.add(message(0), 10, done, 0.0) == []
    assert sequences(machine.add(message(1, 500), 500, done, 0.0)) == [[0], [1]]
    assert machine.timer_at() is None
