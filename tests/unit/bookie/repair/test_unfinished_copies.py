"""Unfinished copies are remembered up to a limit."""

from __future__ import annotations

from magnetar.bookie.repair.unfinished_copies import UnfinishedCopies, UnfinishedCopy
from magnetar.metadata.model import BookieId, EntryId, LedgerId, Member, Segment

A, B = (Member(BookieId(name), "0" * 32) for name in "ab")
SEGMENT = Segment(EntryId(10), (A,))


def test_the_oldest_copy_is_forgotten_at_the_limit() -> None:
    copies = UnfinishedCopies(copies_max=2)
    first, second, third = (UnfinishedCopy(SEGMENT, B, at, target_fails=False) for at in (1, 2, 3))
    copies.keep(LedgerId(1), 10, 0, first)
    copies.keep(LedgerId(2), 10, 0, second)
    copies.keep(LedgerId(1), 10, 0, third)  # it is the newest now
    copies.keep(LedgerId(1), 10, 1, first)
    assert copies.find(LedgerId(2), 10, 0) is None
    assert copies.find(LedgerId(1), 10, 0) == third
    copies.drop(LedgerId(1), 10, 0)
    assert copies.find(LedgerId(1), 10, 0) is None
    assert copies.find(LedgerId(1), 10, 1) == first


def test_a_target_is_kept_for_an_unchanged_segment_only() -> None:
    assert UnfinishedCopy(SEGMENT, B, 12, target_fails=False).fits(SEGMENT)
    assert not UnfinishedCopy(SEGMENT, B, 12, target_fails=True).fits(SEGMENT)
    moved = Segment(EntryId(10), (B,))
    assert not UnfinishedCopy(SEGMENT, B, 12, target_fails=False).fits(moved)
