"""Bitmap compared with a Python set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.log.bitmap import Bitmap

entries = st.integers(0, 200)


@given(st.lists(entries), st.lists(st.tuples(entries, entries)), entries)
def test_bitmap_agrees_with_a_set(
    single: list[int], ends: list[tuple[int, int]], start: int
) -> None:
    bitmap = Bitmap()
    twin: set[int] = set()
    for entry in single:
        assert bitmap.add(entry) == (entry not in twin)
        twin.add(entry)
    for one, other in ends:
        bitmap.add_range(min(one, other), max(one, other))
        twin.update(range(min(one, other), max(one, other) + 1))

    bitmap.check()
    assert bitmap.count == len(twin)
    assert [entry for entry in range(300) if entry in bitmap] == sorted(twin)
    assert bitmap.count_after(start) == sum(entry > start for entry in twin)
    assert bitmap.first_clear(start) == next(e for e in range(start, 1000) if e not in twin)
    clear = [entry for entry in range(start + 1, 1000) if entry not in twin]
    for number in (1, 2, 77, len(clear)):
        assert bitmap.nth_clear(start, number) == clear[number - 1]
    covered = [e for first, last in bitmap.ranges(after=start) for e in range(first, last + 1)]
    assert covered == sorted(entry for entry in twin if entry > start)


@given(st.sets(entries), st.integers(-1, 220), st.sets(entries))
def test_merged_slice_adds_the_same_entries(held: set[int], after: int, others: set[int]) -> None:
    bitmap, other = Bitmap(), Bitmap()
    for entry in held:
        bitmap.add(entry)
    for entry in others:
        other.add(entry)
    first, bits = bitmap.slice_after(after)
    assert not bits or (bits[0] and bits[-1]), "zero bytes at the ends"
    other.merge(first, bits)
    other.check()
    expected = others | {entry for entry in held if entry > after}
    assert [entry for entry in range(300) if entry in other] == sorted(expected)


@given(st.sets(entries), st.lists(entries), st.integers(-1, 220))
def test_discarded_entries_are_gone(held: set[int], discarded: list[int], through: int) -> None:
    bitmap = Bitmap()
    for entry in held:
        bitmap.add(entry)
    for entry in discarded:
        bitmap.discard(entry)
    bitmap.check()
    left = held - set(discarded)
    assert [entry for entry in range(300) if entry in bitmap] == sorted(left)
    bitmap.discard_through(through)
    bitmap.check()
    assert [entry for entry in range(300) if entry in bitmap] == sorted(
        e for e in left if e > through
    )


def test_runs_are_maximal() -> None:
    bitmap = Bitmap()
    for entry in (0, 1, 2, 7, 8, 30):
        bitmap.add(entry)
    assert list(bitmap.ranges()) == [(0, 2), (7, 8), (30, 30)]
    assert list(bitmap.ranges(after=1)) == [(2, 2), (7, 8), (30, 30)]
    assert list(bitmap.ranges(after=30)) == []


def test_clear_bits_are_counted_across_steps() -> None:
    bitmap = Bitmap()
    bitmap.add_range(3, 150_000)
    bitmap.add(150_003)
    assert [bitmap.nth_clear(0, number) for number in (1, 2, 3, 4)] == [1, 2, 150_001, 150_002]
    assert bitmap.nth_clear(0, 5) == 150_004
    assert bitmap.nth_clear(0, 1_000_005) == 1_150_004


def test_first_clear_bit_is_found_after_long_runs() -> None:
    bitmap = Bitmap()
    bitmap.add_range(3, 50_000)
    assert bitmap.first_clear(0) == 0
    assert bitmap.first_clear(3) == 50_001
    assert bitmap.first_clear(60_000) == 60_000
