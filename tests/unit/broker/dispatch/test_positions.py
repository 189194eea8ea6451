from __future__ import annotations

from fakes.dispatch_world import PlainAcks
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.dispatch.positions import PositionMap, ReplaySet
from magnetar.broker.log.position import Position

POSITIONS = st.builds(Position, st.integers(0, 3), st.integers(0, 8))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["set", "pop", "get"]), POSITIONS, st.integers(1, 5))))
def test_position_map_agrees_with_a_dict(steps: list[tuple[str, Position, int]]) -> None:
    it, twin = PositionMap(), dict[Position, int]()
    for kind, position, number in steps:
        if kind == "set":
            it.set(position, number)
            twin[position] = number
        elif kind == "pop":
            assert it.pop(position) == twin.pop(position, 0)
        assert it.get(position) == twin.get(position, 0)
        assert bool(it) == bool(twin)
        assert (len(it), it.total()) == (len(twin), sum(twin.values()))
        assert sorted(it) == sorted(twin)
    drained = it.drain()
    assert {Position(k, e): n for k, entries in drained.items() for e, n in entries.items()} == twin
    assert not it


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(POSITIONS, st.booleans()), unique_by=lambda it: it[0]),
    st.sets(POSITIONS),
    st.integers(1, 7),
)
def test_replay_set_takes_lowest_unacked_positions(
    added: list[tuple[Position, bool]], acked: set[Position], count: int
) -> None:
    it = ReplaySet()
    for position, bulk in added:
        if bulk:
            it.add_all(position.ledger, [position.entry])
        else:
            it.add(position)
    assert sorted(it) == sorted(position for position, _ in added)
    assert len(it) == len(added)
    acks = PlainAcks([], acked)
    left = sorted(position for position, _ in added if position not in acked)
    while left:
        assert it.take(count, acks) == left[:count]
        del left[:count]
    assert it.take(count, acks) == []
    assert not it
