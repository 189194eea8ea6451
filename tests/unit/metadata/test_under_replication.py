"""Under-replication records merge, and stay small."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.model import BookieId, EntryId, Member
from magnetar.metadata.under_replication import (
    BAD_COPIES_MAX,
    FAILURE_CHARS_MAX,
    BadCopy,
    BookieDrain,
    CheckProgress,
    UnderReplication,
    joined,
)

A, B = (Member(BookieId(name), f"{number:032x}") for number, name in enumerate("ab"))


def bad(member: Member, first: int, last: int) -> BadCopy:
    return BadCopy(member, EntryId(first), EntryId(last))


copies = st.builds(
    lambda member, first, count: bad(member, first, first + count),
    st.sampled_from([A, B]),
    st.integers(0, 60),
    st.integers(0, 9),
)


def entries(of: list[BadCopy] | tuple[BadCopy, ...]) -> set[tuple[str, int]]:
    return {
        (each.member.bookie, entry)
        for each in of
        for entry in range(each.first_entry, each.last_entry + 1)
    }


@given(st.lists(copies, max_size=30))
def test_joined_ranges_have_the_same_entries(ranges: list[BadCopy]) -> None:
    together = joined(ranges)
    assert entries(together) == entries(ranges)
    for before, after in pairwise(together):
        if before.member == after.member:
            assert before.last_entry + 1 < after.first_entry
    assert joined(reversed(ranges)) == together


def test_too_many_ranges_are_joined_where_they_lie_closest() -> None:
    ranges = [bad(A, 10 * number, 10 * number) for number in range(BAD_COPIES_MAX)]
    together = joined([*ranges, bad(A, 10_000, 10_000), bad(A, 10_002, 10_002), bad(B, 5, 5)])
    assert len(together) == BAD_COPIES_MAX
    assert bad(A, 10_000, 10_002) in together
    assert bad(B, 5, 5) in together


def test_a_great_many_ranges_are_joined_in_no_time() -> None:
    """A member that lost a striped ledger of a million entries lacks one range for each stripe."""
    ranges = [bad(member, 3 * at, 3 * at) for at in range(50_000) for member in (A, B)]
    began_s = process_time()
    together = joined([*ranges, bad(A, 900_000, 900_000)])
    assert process_time() - began_s < 10, "the join compared every pair of ranges"
    assert len(together) == BAD_COPIES_MAX
    assert bad(A, 900_000, 900_000) in together
    assert {(each.first_entry, each.last_entry) for each in together if each.member == B} == {
        (0, 3 * 49_999)
    }


def test_a_merged_record_has_all_members_and_ranges() -> None:
    first = UnderReplication(5, frozenset({A})).failed("why", 9)
    both = first.merged(UnderReplication(7, frozenset({B}), (bad(B, 1, 2),), narrow=True))
    assert both == UnderReplication(
        5, frozenset({A, B}), (bad(B, 1, 2),), narrow=True, failure="why", failed_ms=9
    )
    assert both.merged(first) == both


@given(st.lists(copies, max_size=30), copies)
def test_rewritten_copies_are_removed_and_no_others(ranges: list[BadCopy], done: BadCopy) -> None:
    before = UnderReplication(5, frozenset({B}), joined(ranges), narrow=True).failed("why", 9)
    after = before.rewritten(done.member, done.first_entry, done.last_entry)
    assert entries(after.bad) == entries(ranges) - entries([done])
    assert after.bad == joined(after.bad)
    assert replace(after, bad=before.bad) == before


def test_a_range_is_not_split_beyond_the_limit() -> None:
    full = UnderReplication(5, bad=tuple(bad(A, 10 * n, 10 * n + 4) for n in range(BAD_COPIES_MAX)))
    assert full.rewritten(A, 12, 12) == full
    assert full.rewritten(A, 10, 12).bad[1] == bad(A, 13, 14)


def test_a_long_reason_is_shortened() -> None:
    assert len(UnderReplication(5).failed("x" * 9999, 1).failure) == FAILURE_CHARS_MAX


def test_an_inconsistent_record_is_refused() -> None:
    for first, last in ((-1, 0), (3, 2)):
        with pytest.raises(InvalidRecord):
            bad(A, first, last)
    with pytest.raises(InvalidRecord):
        UnderReplication(-1)
    with pytest.raises(InvalidRecord):
        BookieDrain(BookieId(""), 1)
    with pytest.raises(InvalidRecord):
        CheckProgress(1, after=-2)
