"""BadCopies: each note is returned once, in few ranges. A flood of notes drops the oldest."""

from random import Random

import pytest
from fakes.ledger_rig import member

from magnetar.bookie.ledger.bad_copies import RANGES_MAX, BadCopies, is_bad_copy
from magnetar.metadata.model import EntryId, LedgerId
from magnetar.metadata.under_replication import BadCopy
from magnetar.protos.envelope import BookieCode

A, B = member(0), member(1)
ONE, TWO = LedgerId(1), LedgerId(2)


def bad(number: int, first: int, last: int) -> BadCopy:
    return BadCopy(member(number), EntryId(first), EntryId(last))


def test_drain_returns_each_note_once_in_order() -> None:
    copies = BadCopies()
    copies.on_bad_copy(TWO, EntryId(7), A)
    copies.note(ONE, B, 3, 9)
    copies.on_bad_copy(TWO, EntryId(7), A)
    assert len(copies) == 2
    assert copies.drain() == [(TWO, bad(0, 7, 7)), (ONE, bad(1, 3, 9))]
    assert copies.drain() == []
    assert copies.dropped == 0


def test_neighbours_and_overlaps_are_joined() -> None:
    copies = BadCopies()
    for entry in (5, 3, 4, 9, 1):
        copies.on_bad_copy(ONE, EntryId(entry), A)
    copies.note(ONE, A, 8, 12)
    copies.check()
    assert copies.drain() == [(ONE, bad(0, 1, 1)), (ONE, bad(0, 3, 5)), (ONE, bad(0, 8, 12))]


def test_too_many_ranges_of_a_member_become_one() -> None:
    copies = BadCopies()
    for entry in range(0, 2 * RANGES_MAX + 2, 2):
        copies.on_bad_copy(ONE, EntryId(entry), A)
    assert copies.drain() == [(ONE, bad(0, 0, 2 * RANGES_MAX))]


def test_above_the_limit_the_oldest_note_is_dropped_and_counted() -> None:
    copies = BadCopies(notes_max=2)
    copies.on_bad_copy(ONE, EntryId(0), A)
    copies.on_bad_copy(ONE, EntryId(0), B)
    copies.on_bad_copy(ONE, EntryId(1), A)  # this entry joins the note of entry 0
    assert copies.dropped == 0
    copies.on_bad_copy(TWO, EntryId(0), A)
    assert copies.dropped == 1
    assert [note.member for _, note in copies.drain()] == [B, A]


@pytest.mark.parametrize("seed", range(20))
def test_the_merged_ranges_contain_every_noted_entry(seed: int) -> None:
    random, copies, twin = Random(seed), BadCopies(), set[tuple[int, int, int]]()
    for _ in range(60):
        ledger, number = random.randrange(2), random.randrange(2)
        first = random.randrange(60)
        last = first + random.randrange(3)
        copies.note(LedgerId(ledger), member(number), first, last)
        twin |= {(ledger, number, entry) for entry in range(first, last + 1)}
        copies.check()
    told = {
        (int(ledger), int(note.member.bookie[1:]), entry)
        for ledger, note in copies.drain()
        for entry in range(note.first_entry, note.last_entry + 1)
    }
    assert told >= twin


@pytest.mark.parametrize("code", list(BookieCode))
def test_which_answers_mean_a_bad_copy(code: BookieCode) -> None:
    damaged = code in (BookieCode.CORRUPT, BookieCode.IO_ERROR)
    absent = code in (BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER)
    assert is_bad_copy(code, sealed=False) == damaged
    assert is_bad_copy(code, sealed=True) == (damaged or absent)
