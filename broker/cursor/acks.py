"""The acknowledgements of one subscription, as a machine.

The state has three parts:

- the mark-delete position (the mark): every entry up to it is acknowledged;
- for each ledger, a bitmap of the acknowledged entries after the mark;
- for each partly acknowledged batch, its ack set. A set bit means "not acknowledged", so ack sets
  merge by AND, and an empty ack set acknowledges the entry.

Invariants (`check`):
    1. Only `reset` takes acknowledgements back.
    2. The mark is as high as possible: the entry after it is not acknowledged.
    3. Only existing, confirmed entries are acknowledged. A bit beyond the end of the log would
       acknowledge an entry that is written later.
    4. A batch with an ack set is not acknowledged, and the ack set is not empty.
    5. The number of bits of all ack sets is known.

Bitmaps may have bits up to the mark; these bits have no meaning. The log's chain tells which
entries exist and which position follows another. This module is pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.log.bitmap import Bitmap, runs
from magnetar.broker.log.position import Position
from magnetar.protos.entry import BATCH_MESSAGES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from magnetar.broker.log.chain import Chain

_WORD: Final = (1 << 64) - 1

# The bits of the largest batch. An ack set may have more bits, which AckState ignores.
_ANY_BATCH: Final = (1 << BATCH_MESSAGES_MAX) - 1

_SET_BYTES: Final = 200  # the memory of an ack set without its bits: a key, a number, a dict's slot


@dataclass(frozen=True, slots=True)
class AckedRange:
    """Entries first..last of one ledger, both ends included."""

    ledger: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Start:
    """The state to which a cursor is reset: all entries up to `mark` are acknowledged."""

    mark: Position
    remaining: int = 0  # the unacknowledged messages of the next entry, as bits; 0: all of them


class AckState:
    """The state of one subscription. At first every entry up to `mark` is acknowledged."""

    __slots__ = ("_bitmaps", "_chain", "_counts", "_entry", "_ledger", "_partial", "_partial_bits")

    def __init__(self, chain: Chain, mark: Position) -> None:
        self._chain = chain
        self._counts = chain.counts
        self._ledger, self._entry = mark
        self._bitmaps: dict[int, Bitmap] = {}
        self._partial: dict[Position, int] = {}  # bits of unacknowledged messages; never 0
        self._partial_bits = 0  # the sum of the lengths of these ack sets

    # ---- questions -------------------------------------------------------------------------------

    @property
    def mark_delete(self) -> Position:
        """The mark: every entry up to and including this position is acknowledged."""
        return Position(self._ledger, self._entry)

    @property
    def partial(self) -> dict[Position, int]:
        """Partly acknowledged batches, with the bits of their unacknowledged messages.
        Read-only."""
        return self._partial

    @property
    def partial_bytes(self) -> int:
        """The approximate memory of `partial` in bytes."""
        return partial_bytes(len(self._partial), self._partial_bits)

    def is_acked(self, position: Position) -> bool:
        ledger = position.ledger
        if ledger <= self._ledger and (ledger < self._ledger or position.entry <= self._entry):
            return True
        bitmap = self._bitmaps.get(ledger)
        return bitmap is not None and position.entry in bitmap

    def is_open(self, position: Position) -> bool:
        """Return whether `position` is an entry of the log that is not acknowledged."""
        return self._chain.is_entry(position) and not self.is_acked(position)

    def open_entries(self, ledger: int, values: Mapping[int, int]) -> dict[int, int]:
        """Return the items of `values`, keyed by entry, whose entries are open (`is_open`)."""
        if ledger < self._ledger:
            return {}
        mark = self._entry if ledger == self._ledger else -1
        end, bitmap = self._counts.get(ledger, 0), self._bitmaps.get(ledger)
        return {
            entry: value
            for entry, value in values.items()
            if mark < entry < end and (bitmap is None or entry not in bitmap)
        }

    def remaining(self, position: Position) -> int | None:
        """Return the bits of the unacknowledged messages of a batch. None: it has no ack set."""
        return self._partial.get(position)

    def acked_beyond_mark(self) -> Iterator[tuple[int, int]]:
        """Yield each ledger with a bitmap, and its number of acknowledged entries after the
        mark."""
        for ledger, bitmap in self._bitmaps.items():
            at_mark = ledger == self._ledger
            yield ledger, bitmap.count_after(self._entry) if at_mark else bitmap.count

    def ranges(self) -> Iterator[AckedRange]:
        """Yield the ranges of acknowledged entries after the mark, in the order of ledgers."""
        for ledger in sorted(self._bitmaps):
            after = self._entry if ledger == self._ledger else -1
            for first, last in self._bitmaps[ledger].ranges(after=after):
                yield AckedRange(ledger, first, last)

    def bitmap_slices(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the entries of `ranges` as (ledger, first, bits), one item for each ledger that has
        such entries. Bit i stands for entry first + i."""
        for ledger in sorted(self._bitmaps):
            after = self._entry if ledger == self._ledger else -1
            first, bits = self._bitmaps[ledger].slice_after(after)
            if bits:
                yield ledger, first, bits

    def first_unacked(self, position: Position) -> Position:
        """Return the first unacknowledged entry at or after `position`. If there is none, return
        the position after the last entry of the log."""
        mark = Position(self._ledger, self._entry)
        position = self._chain.ceiling(max(position, self._chain.next_position(mark)))
        while (bitmap := self._bitmaps.get(position.ledger)) is not None:
            entry = bitmap.first_clear(position.entry)
            following = self._chain.next_ledger(position.ledger)
            if entry < self._counts.get(position.ledger, 0) or following is None:
                return Position(position.ledger, entry)
            position = Position(following, 0)
        return position

    def nth_unacked(self, number: int) -> Position | None:
        """Return the unacknowledged entry with this number, counted from 1, or None if there are
        fewer. Takes a few steps for each ledger, not for each entry."""
        ledger, entry = self._chain.next_position(Position(self._ledger, self._entry))
        while True:
            bitmap = self._bitmaps.get(ledger)
            clear = max(self._counts.get(ledger, 0) - entry, 0)
            if bitmap is not None:
                clear -= bitmap.count_after(entry - 1)
            if number <= clear:
                if bitmap is None:
                    return Position(ledger, entry + number - 1)
                return Position(ledger, bitmap.nth_clear(entry - 1, number))
            following = self._chain.next_ledger(ledger)
            if following is None:
                return None
            ledger, entry, number = following, 0, number - clear

    # ---- events ----------------------------------------------------------------------------------

    def on_ack(self, position: Position) -> bool:
        """Acknowledge a whole entry. Does nothing if the log does not have the entry. Returns
        whether the entry was not acknowledged before."""
        ledger = position.ledger
        entry = position.entry
        if ledger == self._ledger:
            if entry <= self._entry:
                return False
        elif ledger < self._ledger:
            return False
        if entry < 0 or entry >= self._counts.get(ledger, 0):
            return False
        if self._partial:
            self._forget_partial(position)
        if entry == self._entry + 1 and ledger == self._ledger:
            self._entry = entry
            if self._bitmaps:
                self._advance()
            return True
        bitmap = self._bitmaps.get(ledger)
        if bitmap is None:
            bitmap = self._bitmaps[ledger] = Bitmap()
        added = bitmap.add(entry)
        if added and entry == 0:
            self._advance()  # the mark may be at the end of the previous ledger
        return added

    def on_ack_batch_index(self, position: Position, not_acked: int) -> bool:
        """Acknowledge the messages of a batch whose bit is clear in `not_acked`. Returns whether
        the state changed."""
        if not self.is_open(position):
            return False
        not_acked &= _ANY_BATCH
        before = self._partial.get(position)
        after = not_acked if before is None else before & not_acked
        if after == before:
            return False
        if after == 0:
            return self.on_ack(position)
        self._partial[position] = after
        self._partial_bits += after.bit_length() - (0 if before is None else before.bit_length())
        return True

    def on_batch_size(self, position: Position, messages: int) -> bool:
        """The batch has this number of messages: clear the later bits of its ack set. If no bit is
        left, acknowledge the whole entry. Returns whether the state changed."""
        remaining = self._partial.get(position)
        if remaining is None or remaining.bit_length() <= messages:
            return False
        return self.on_ack_batch_index(position, (1 << messages) - 1)

    def on_ack_cumulative(self, position: Position) -> bool:
        """Acknowledge every entry up to and including `position`. Returns whether the mark
        moved."""
        chain = self._chain
        if not chain.is_entry(position):  # then take the nearest entry before the position
            position = chain.previous_position(chain.ceiling(position))
        if position.entry < 0 or position <= (self._ledger, self._entry):
            return False
        before = self.mark_delete
        self._ledger, self._entry = position
        self._forget_below_mark(before)
        self._advance()
        return True

    def on_acked_bits(self, ledger: int, first: int, bits: bytes) -> None:
        """Acknowledge entries of one ledger, in the form of `bitmap_slices`. Ignores the bits of
        entries that the log does not have."""
        ahead = first + 8 * len(bits) - self._counts.get(ledger, 0)
        if ahead > 0:
            kept = max(8 * len(bits) - ahead, 0)
            bits = (int.from_bytes(bits, "little") & ((1 << kept) - 1)).to_bytes(
                len(bits), "little"
            )
        if ledger < self._ledger or not any(bits):
            return
        bitmap = self._bitmaps.setdefault(ledger, Bitmap())
        bitmap.merge(first, bits)
        partial = self._partial
        if int.from_bytes(bits, "little").bit_count() < len(partial):
            for start, end in runs(bits):
                for entry in range(first + start, first + end + 1):
                    self._forget_partial(Position(ledger, entry))
        elif partial:
            self._keep_partial({p: left for p, left in partial.items() if not self.is_acked(p)})
        self._advance()

    def reset(self, start: Start) -> None:
        """Replace all acknowledgements by the state `start`."""
        self._ledger, self._entry = start.mark
        self._bitmaps.clear()
        self._keep_partial({})
        if start.remaining:
            first = self._chain.next_position(start.mark)
            self.on_ack_batch_index(first, start.remaining)

    def on_head_dropped(self) -> None:
        """Ledgers at the head of the log were dropped. The entries of these ledgers are no longer
        part of the backlog, whether they were acknowledged or not."""
        known = self._counts
        for ledger in [ledger for ledger in self._bitmaps if ledger not in known]:
            del self._bitmaps[ledger]
        if self._partial:
            self._keep_partial({p: left for p, left in self._partial.items() if p.ledger in known})
        self._advance()

    # ---- mechanics -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Move the mark over the acknowledged entries that follow it, also into later ledgers."""
        while True:
            bitmap = self._bitmaps.get(self._ledger)
            if bitmap is not None:
                self._entry = bitmap.first_clear(self._entry + 1) - 1
            if self._entry + 1 < self._counts.get(self._ledger, 0):
                return
            following = self._chain.next_position(Position(self._ledger, self._entry))
            ahead = self._bitmaps.get(following.ledger)
            if following.ledger == self._ledger or ahead is None or 0 not in ahead:
                return
            self._bitmaps.pop(self._ledger, None)
            self._ledger, self._entry = following

    def _forget_below_mark(self, before: Position) -> None:
        """Drop the bitmaps of the ledgers before the mark's, and the ack sets of the entries that
        the mark has passed since `before`. The cost must not grow with the number of ack sets when
        the mark moves by a few entries: a replay moves the mark thousands of times."""
        ledger, last = mark = self.mark_delete
        if ledger != before.ledger:
            for passed in [passed for passed in self._bitmaps if passed < ledger]:
                del self._bitmaps[passed]
        elif last - before.entry < len(self._partial):
            for entry in range(before.entry + 1, last + 1):
                self._forget_partial(Position(ledger, entry))
            return
        if self._partial:
            self._keep_partial({p: left for p, left in self._partial.items() if p > mark})

    def _forget_partial(self, position: Position) -> None:
        left = self._partial.pop(position, None)
        if left is not None:
            self._partial_bits -= left.bit_length()

    def _keep_partial(self, partial: dict[Position, int]) -> None:
        self._partial = partial
        self._partial_bits = sum([left.bit_length() for left in partial.values()])

    def check(self) -> None:
        mark = self.mark_delete
        following = self._chain.next_position(mark)
        assert not self.is_acked(following), "2: the mark could move"
        for ledger, bitmap in self._bitmaps.items():
            bitmap.check()
            assert ledger >= mark.ledger, "a bitmap before the mark"
            count = self._counts.get(ledger, 0)
            assert bitmap.count_after(count - 1) == 0, "3: a bit beyond the end of the log"
        for position, left in self._partial.items():
            assert left > 0, "4: an empty ack set"
            assert not self.is_acked(position), "4: an ack set of an acknowledged entry"
        bits = sum(left.bit_length() for left in self._partial.values())
        assert self._partial_bits == bits, "5: a wrong number of bits"


def partial_bytes(sets: int, bits: int) -> int:
    """Return the approximate memory in bytes of ack sets with this number of bits together."""
    return sets * _SET_BYTES + bits // 8


def ack_set_bits(words: Sequence[int]) -> int:
    """Return an ack set from the wire as one number. The wire has 64-bit words, lowest first,
    signed or unsigned."""
    return int.from_bytes(struct.pack(f"<{len(words)}Q", *[w & _WORD for w in words]), "little")


def ack_set_words(bits: int) -> tuple[int, ...]:
    """Return the words of an ack set, as signed numbers for protobuf's int64. The highest words are
    left out if they are 0. This is the inverse of `ack_set_bits`."""
    count = (bits.bit_length() + 63) >> 6
    return struct.unpack(f"<{count}q", bits.to_bytes(8 * count, "little"))
