"""Quorum arithmetic, compared with a simple model that enumerates all subsets."""

from itertools import combinations, product

import pytest

from magnetar.bookie.ledger.quorum import Quorum, seat_numbers, seats

QUORUMS = [
    Quorum(size, write, ack)
    for size in range(1, 7)
    for write in range(1, size + 1)
    for ack in range(1, write + 1)
]


def subsets(quorum: Quorum) -> list[frozenset[int]]:
    everyone = range(quorum.ensemble_size)
    return [frozenset(c) for n in range(len(everyone) + 1) for c in combinations(everyone, n)]


def twin_write_set(quorum: Quorum, entry: int) -> set[int]:
    return {(entry + i) % quorum.ensemble_size for i in range(quorum.write_quorum)}


def twin_ack_sets(quorum: Quorum) -> list[set[int]]:
    """All sets of seats that could confirm an entry."""
    return [
        set(acks)
        for entry in range(quorum.ensemble_size)
        for acks in combinations(sorted(twin_write_set(quorum, entry)), quorum.ack_quorum)
    ]


@pytest.mark.parametrize("quorum", QUORUMS, ids=str)
def test_proofs_agree_with_enumeration(quorum: Quorum) -> None:
    ack_sets = twin_ack_sets(quorum)
    for chosen in subsets(quorum):
        mask = seats(chosen)
        assert seat_numbers(mask) == tuple(sorted(chosen))
        # Covered: the other seats cannot form an ack quorum.
        assert quorum.covered(mask) == all(acks & chosen for acks in ack_sets)
        # Writable without these seats: each entry has an ack quorum among the others.
        assert quorum.writable(mask) == all(
            any(
                not set(acks) & chosen
                for acks in combinations(twin_write_set(quorum, entry), quorum.ack_quorum)
            )
            for entry in range(quorum.ensemble_size)
        )
        for entry in range(quorum.ensemble_size):
            write_set = twin_write_set(quorum, entry)
            own_ack_sets = list(combinations(write_set, quorum.ack_quorum))
            assert quorum.absent(mask, entry) == all(set(a) & chosen for a in own_ack_sets)
            assert quorum.confirmable(mask, entry) == any(set(a) <= chosen for a in own_ack_sets)


@pytest.mark.parametrize("quorum", QUORUMS, ids=str)
def test_runs_list_exactly_the_entries_of_a_seat(quorum: Quorum) -> None:
    for seat in range(quorum.ensemble_size):
        for entry in range(3 * quorum.ensemble_size):
            run = quorum.run_of(seat, entry)
            held = [e for e in range(entry, entry + 40) if seat in twin_write_set(quorum, e)]
            assert run.start == held[0]
            listed = [e for e in run[:40] if e < entry + 40]
            assert listed == held[: len(listed)]
            if run.stop < entry + 40:
                assert seat not in twin_write_set(quorum, run.stop)


def test_write_order_begins_with_the_entrys_own_seat() -> None:
    quorum = Quorum(5, 3, 2)
    assert quorum.write_order(4) == (4, 0, 1)
    for entry in range(12):
        assert seats(quorum.write_order(entry)) == quorum.write_set(entry)


def test_two_unknown_seats_prevent_a_proof_only_as_neighbours() -> None:
    """E=6, Qw=3, Qa=2: two unknown seats matter only if they are neighbours."""
    quorum = Quorum(6, 3, 2)
    everyone = seats(range(6))
    assert quorum.covered(everyone & ~seats([0, 3]))
    assert not quorum.covered(everyone & ~seats([0, 1]))


@pytest.mark.parametrize("sizes", [(3, 3, 0), (3, 4, 2), (3, 2, 3), (0, 0, 0), (33, 3, 2)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="quorums"):
        Quorum(*sizes)


@pytest.mark.parametrize("sizes", [(3, 2, 2), (4, 3, 2), (5, 3, 2), (6, 2, 1), (3, 3, 2)])
def test_a_cover_asks_for_each_entry_once_and_only_from_a_holder(
    sizes: tuple[int, int, int],
) -> None:
    quorum = Quorum(*sizes)
    size = quorum.ensemble_size
    for first, usable in product(range(2 * size), range(1 << size)):
        parts = quorum.cover(first, usable)
        held = [quorum.write_set(first + offset) & usable for offset in range(size)]
        assert (parts is None) == (not all(held))
        if parts is None:
            continue
        asked = [
            (first + offset + step + turn * size, seat)
            for offset, length, seat in parts
            for step in range(length)
            for turn in range(2)
        ]
        assert sorted(entry for entry, _ in asked) == list(range(first, first + 2 * size))
        assert all((quorum.write_set(entry) & usable) >> seat & 1 for entry, seat in asked)
        if usable == (1 << size) - 1:
            assert len(parts) == -(-size // quorum.write_quorum)
