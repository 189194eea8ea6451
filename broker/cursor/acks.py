"""What one subscription has acknowledged, as a machine.

Three facts: everything up to `mark_delete`; beyond it a bitmap of entries per ledger; and for a
batch that is acknowledged in part, the set of messages that are *not* (a bit set in an ack set
means "not acknowledged", so sets merge by AND, and an empty one acknowledges the entry).

Invariants (`check`):
    1. Nothing is ever un-acknowledged but by `reset`.
    2. The mark moves as far as it can: the entry after it is not acknowledged.
    3. Only existing, confirmed entries are acknowledged: a bit set ahead of the log would swallow
       the entry that is written there later.
    4. A batch with an ack set is neither acknowledged nor empty.

The bits at and below the mark say nothing. Pure; the log's chain says what follows what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.cursor.bitmap import Bitmap
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from magnetar.broker.log.chain import Chain

_WORD: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class AckedRange:
    """Entries first..last of one ledger, both ends included."""

    ledger: int
    first: int
    last: int


class AckState:
    """Acknowledged: everything up to `mark`, to begin with."""

    def __init__(self, chain: Chain, mark: Position) -> None:
        self._chain = chain
        self._counts = chain.counts
        self._ledger, self._entry = mark
        self._bitmaps: dict[int, Bitmap] = {}
        self._partial: dict[Position, int] = {}  # what of a batch is not acknowledged; never 0

    # ---- questions -------------------------------------------------------------------------------

    @property
    def mark_delete(self) -> Position:
        """Everything up to and including this position is acknowledged."""
        return Position(self._ledger, self._entry)

    @property
    def partial(self) -> dict[Position, int]:
        """Batches acknowledged in part: what of each is not. Not to be changed."""
        return self._partial

    def is_acked(self, position: Position) -> bool:
        ledger = position.ledger
        if ledger <= self._ledger and (ledger < self._ledger or position.entry <= self._entry):
            return True
        bitmap = self._bitmaps.get(ledger)
        return bitmap is not None and position.entry in bitmap

    def remaining(self, position: Position) -> int | None:
        """The bits of the messages that are not acknowledged; None: no part of the batch is."""
        return self._partial.get(position)

    def acked_beyond_mark(self) -> Iterator[tuple[int, int]]:
        """How many entries beyond the mark are acknowledged, by ledger."""
        for ledger, bitmap in self._bitmaps.items():
            at_mark = ledger == self._ledger
            yield ledger, bitmap.count_after(self._entry) if at_mark else bitmap.count

    def ranges(self) -> Iterator[AckedRange]:
        """What is acknowledged beyond the mark, in order of ledgers."""
        for ledger in sorted(self._bitmaps):
            after = self._entry if ledger == self._ledger else -1
            for first, last in self._bitmaps[ledger].ranges(after=after):
                yield AckedRange(ledger, first, last)

    def bitmap_slices(self) -> Iterator[tuple[int, int, bytes]]:
        """The same as (ledger, first entry, bits), one for each ledger with such entries."""
        for ledger in sorted(self._bitmaps):
            after = self._entry if ledger == self._ledger else -1
            first, bits = self._bitmaps[ledger].slice_after(after)
            if bits:
                yield ledger, first, bits

    def first_unacked(self, position: Position) -> Position:
        """The first entry at or after `position` that is not acknowledged; the place after the last
        entry of the log when there is none."""
        mark = Position(self._ledger, self._entry)
        position = self._chain.ceiling(max(position, self._chain.next_position(mark)))
        while (bitmap := self._bitmaps.get(position.ledger)) is not None:
            entry = bitmap.first_clear(position.entry)
            following = self._chain.next_ledger(position.ledger)
            if entry < self._counts.get(position.ledger, 0) or following is None:
                return Position(position.ledger, entry)
            position = Position(following, 0)
        return position

    # ---- events ----------------------------------------------------------------------------------

    def on_ack(self, position: Position) -> bool:
        """A whole entry. Returns whether it is newly acknowledged; unknown entries are not."""
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
            self._partial.pop(position, None)
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
            self._advance()  # it may be what follows a mark at the end of an earlier ledger
        return added

    def on_ack_batch_index(self, position: Position, not_acked: int) -> bool:
        """Of this batch everything is acknowledged but these messages. Returns whether that changes
        anything."""
        if self.is_acked(position) or not self._chain.is_entry(position):
            return False
        before = self._partial.get(position)
        after = not_acked if before is None else before & not_acked
        if after == before:
            return False
        if after == 0:
            return self.on_ack(position)
        self._partial[position] = after
        return True

    def on_ack_cumulative(self, position: Position) -> bool:
        """Everything up to and including this position. Returns whether the mark moved."""
        chain = self._chain
        if not chain.is_entry(position):  # the nearest entry before it
            position = chain.previous_position(chain.ceiling(position))
        if position.entry < 0 or position <= (self._ledger, self._entry):
            return False
        self._ledger, self._entry = position
        self._forget_below_mark()
        self._advance()
        return True

    def on_acked_bits(self, ledger: int, first: int, bits: bytes) -> None:
        """Many entries of one ledger, in the form of `bitmap_slices`: state that was stored."""
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
        self._partial = {p: left for p, left in self._partial.items() if not self.is_acked(p)}
        self._advance()

    def reset(self, mark: Position) -> None:
        """Everything up to `mark` is acknowledged and nothing else."""
        self._ledger, self._entry = mark
        self._bitmaps.clear()
        self._partial.clear()

    # ---- mechanics -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Move the mark over what is acknowledged right behind it, across the ends of ledgers."""
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

    def _forget_below_mark(self) -> None:
        for ledger in [ledger for ledger in self._bitmaps if ledger < self._ledger]:
            del self._bitmaps[ledger]
        if self._partial:
            mark = (self._ledger, self._entry)
            self._partial = {p: left for p, left in self._partial.items() if p > mark}

    def check(self) -> None:
        mark = self.mark_delete
        following = self._chain.next_position(mark)
        assert not self.is_acked(following), "2: the mark could move"
        for ledger, bitmap in self._bitmaps.items():
            bitmap.check()
            assert ledger >= mark.ledger, "a bitmap below the mark was kept"
            count = self._counts.get(ledger, 0)
            assert bitmap.count_after(count - 1) == 0, "3: ahead of the log"
        for position, left in self._partial.items():
            assert left > 0, "4: an empty ack set"
            assert not self.is_acked(position), "4: an ack set of an acknowledged entry"


def ack_set_bits(words: Sequence[int]) -> int:
    """An ack set as on the wire (64-bit words, lowest first, signed or not) as one number."""
    bits = 0
    for place, word in enumerate(words):
        bits |= (word & _WORD) << (64 * place)
    return bits


def ack_set_words(bits: int) -> tuple[int, ...]:
    """The inverse: signed words, as protobuf's int64 wants them, without zero words at the end."""
    words = []
    while bits:
        word = bits & _WORD
        words.append(word - (1 << 64) if word >> 63 else word)
        bits >>= 64
    return tuple(words)
