from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consuming.chunks import (
    CHUNKED_MESSAGE_BYTES_MAX,
    Assembled,
    ChunkBuffer,
    GivenUp,
    Late,
    Returned,
)
from magnetar.protos.entry import Chunk


def chunk(index: int, uuid: str = "a", count: int = 3, total: int = 3) -> Chunk:
    return Chunk(uuid, index, count, total)


def buffer(messages_max: int = 10, *, acknowledge_oldest: bool = False) -> ChunkBuffer:
    return ChunkBuffer(
        messages_max=messages_max, expire_s=60.0, acknowledge_oldest=acknowledge_oldest
    )


def test_chunks_of_two_messages_may_be_interleaved() -> None:
    machine = buffer()
    for entry, one in enumerate([chunk(0), chunk(0, "b"), chunk(1), chunk(1, "b")]):
        assert machine.on_chunk((1, entry), one, b"%d" % entry, 0.0) == []
    assert machine.on_chunk((1, 4), chunk(2, "b"), b"4", 0.0) == [
        Assembled(((1, 1), (1, 3), (1, 4)), (1, 1), b"134")
    ]
    assert machine.on_chunk((1, 5), chunk(2), b"5", 0.0) == [
        Assembled(((1, 0), (1, 2), (1, 5)), (1, 0), b"025")
    ]
    assert len(machine) == 0


def test_redelivered_chunks_begin_again() -> None:
    machine = buffer()
    machine.on_chunk((1, 0), chunk(0), b"x", 0.0)
    machine.on_chunk((1, 1), chunk(1), b"y", 0.0)
    machine.on_chunk((1, 0), chunk(0), b"x", 1.0)
    machine.on_chunk((1, 1), chunk(1), b"y", 1.0)
    (done,) = machine.on_chunk((1, 2), chunk(2), b"z", 1.0)
    assert done == Assembled(((1, 0), (1, 1), (1, 2)), (1, 0), b"xyz")


def test_chunks_that_the_producer_sent_twice_are_acknowledged_with_the_message() -> None:
    machine = buffer()
    machine.on_chunk((1, 0), chunk(0), b"x", 0.0)
    machine.on_chunk((1, 1), chunk(1), b"y", 0.0)
    machine.on_chunk((1, 2), chunk(1), b"y", 0.0)  # the receipt of the chunk was lost
    (done,) = machine.on_chunk((1, 3), chunk(2), b"z", 0.0)
    assert done == Assembled(((1, 0), (1, 1), (1, 2), (1, 3)), (1, 0), b"xyz")


def test_a_message_that_gets_more_chunks_does_not_expire() -> None:
    machine = buffer()
    for index in range(5):
        machine.on_chunk((1, index), chunk(index, "slow", 9, 9), b"x", 50.0 * index)
        if index == 0:
            machine.on_chunk((2, 0), chunk(0, "dead"), b"x", 0.0)
        machine.check()
        lost = machine.expire(50.0 * index + 10.0)
        assert [one.uuid for one in lost] == (["dead"] if index == 1 else [])
    assert machine.timer_at() == 260.0
    (lost_at_last,) = machine.expire(260.0)
    assert lost_at_last.reason == "no chunk arrived for 60 s"
    assert machine.timer_at() is None


def test_a_message_without_its_first_chunk_is_given_up_when_it_expires() -> None:
    machine = buffer()
    assert machine.on_chunk((1, 1), chunk(1), b"y", 0.0) == []
    assert machine.on_chunk((1, 2), chunk(2), b"z", 1.0) == []
    assert machine.expire(60.0) == []
    assert machine.timer_at() == 61.0
    (lost,) = machine.expire(61.0)
    assert (lost.keys, lost.acknowledge) == (((1, 1), (1, 2)), True)


def test_a_message_with_a_missing_chunk_is_not_delivered() -> None:
    machine = buffer()
    machine.on_chunk((1, 0), chunk(0), b"x", 0.0)
    assert machine.on_chunk((1, 2), chunk(2), b"z", 0.0) == []
    machine.check()
    (lost,) = machine.expire(60.0)
    assert lost.keys == ((1, 0), (1, 2))


def test_the_oldest_message_is_given_up_at_the_limit() -> None:
    for acknowledges in (False, True):
        machine = buffer(1, acknowledge_oldest=acknowledges)
        machine.on_chunk((1, 0), chunk(0), b"x", 0.0)
        (lost,) = machine.on_chunk((1, 1), chunk(0, "b"), b"x", 0.0)
        assert isinstance(lost, GivenUp)
        assert (lost.uuid, lost.acknowledge) == ("a", acknowledges)


def test_all_chunks_of_a_message_that_was_given_up_for_redelivery_are_redelivered() -> None:
    machine = buffer(1)
    machine.on_chunk((1, 0), chunk(0), b"x", 0.0)
    machine.on_chunk((1, 1), chunk(1), b"y", 0.0)
    [lost] = machine.on_chunk((1, 2), chunk(0, "b", 2, 2), b"x", 1.0)
    assert lost.keys == ((1, 0), (1, 1))
    [done] = machine.on_chunk((1, 3), chunk(1, "b", 2, 2), b"y", 1.0)
    assert isinstance(done, Assembled)
    assert machine.on_chunk((1, 4), chunk(2), b"z", 2.0) == [Returned((1, 4))]
    machine.check()
    for index in range(2):
        assert machine.on_chunk((1, index), chunk(index), b"xy"[index : index + 1], 60.0) == []
    [done] = machine.on_chunk((1, 4), chunk(2), b"z", 61.0)
    assert done == Assembled(((1, 0), (1, 1), (1, 4)), (1, 0), b"xyz")


def test_chunks_of_a_message_whose_beginning_is_not_redelivered_expire() -> None:
    machine = buffer(1)
    machine.on_chunk((1, 0), chunk(0), b"x", 0.0)
    machine.on_chunk((1, 1), chunk(0, "b"), b"x", 0.0)
    assert machine.on_chunk((1, 2), chunk(1), b"y", 1.0) == [Returned((1, 2))]
    [other] = machine.on_chunk((1, 2), chunk(1), b"y", 60.0)  # redelivered without chunk 0
    assert other.keys == ((1, 1),), "the other message, by the limit"
    [lost] = machine.expire(120.0)
    assert (lost.keys, lost.acknowledge) == (((1, 2),), True)


def test_messages_with_false_sizes_are_given_up() -> None:
    machine = buffer()
    machine.on_chunk((1, 0), chunk(0), b"x", 0.0)
    assert machine.on_chunk((1, 1), chunk(1), b"too much", 0.0)[0].keys == ((1, 0), (1, 1))
    machine.on_chunk((2, 0), chunk(0, count=2), b"x", 0.0)
    assert isinstance(machine.on_chunk((2, 1), chunk(1, count=2), b"y", 0.0)[0], GivenUp)
    huge = chunk(0, total=CHUNKED_MESSAGE_BYTES_MAX + 1)
    assert isinstance(machine.on_chunk((3, 0), huge, b"x", 0.0)[0], GivenUp)
    assert len(machine) == 0


def test_an_invalid_message_is_given_up_once() -> None:
    machine = buffer()
    for ledger, total in ((1, CHUNKED_MESSAGE_BYTES_MAX + 1), (2, 0)):
        [lost] = machine.on_chunk((ledger, 0), chunk(0, total=total), b"x", 0.0)
        assert isinstance(lost, GivenUp)
        for index in (1, 2):
            key = (ledger, index)
            assert machine.on_chunk(key, chunk(index, total=total), b"x", 0.0) == [Late(key)]
        machine.check()
    assert machine.expire(100.0) == []
    assert machine.on_chunk((3, 0), chunk(0), b"x", 0.0) == [], "the uuid is used again"
    machine.check()


STEP = st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 30))


@given(st.lists(STEP, max_size=60), st.integers(0, 3))
def test_random_chunks_keep_the_limits_and_lose_no_key(
    steps: list[tuple[str, int, int]], messages_max: int
) -> None:
    machine = buffer(messages_max)
    for now, (uuid, index, entry) in enumerate(steps):
        for outcome in machine.on_chunk((1, entry), chunk(index, uuid), b"%d" % index, float(now)):
            if isinstance(outcome, Assembled):
                assert outcome.payload == b"012"
                assert outcome.keys[-1] == (1, entry)
        machine.expire(float(now))
        machine.check()


class Counted(tuple[int, int]):
    """A key that counts its comparisons."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__eq__(other)

    __hash__ = tuple.__hash__


def test_the_cost_of_a_chunk_does_not_grow_with_the_chunks_before_it() -> None:
    machine = buffer()
    for broken in (False, True):
        Counted.compared = 0
        for index in range(broken, 2000):
            key = Counted((1, index))
            machine.on_chunk(key, chunk(index, str(broken), 3000, 3000), b"x", 0.0)
        assert Counted.compared < 20_000
