"""A set of entries of one ledger, one bit each: bit `e & 7` of byte `e >> 3`. Cursors and the index
of delayed messages use bitmaps.

Setting a bit costs the same in any order of acknowledgements. Sorted ranges would cost more: a
million random unacknowledged entries between acknowledged ones take 96 MB as ranges and 0.3 MB as
bits, and each insertion would search the ranges. Ranges are derived for storage and for statistics.
Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEP_BITS: Final = 1 << 16
"""`nth_clear` counts this many bits at once: about 2 us."""

_NOT_FULL: Final = re.compile(rb"[^\xff]")
_RUN_OF_ONES: Final = re.compile(r"1+")
_TRAILING_ONES: Final = bytes(
    next(bit for bit in range(9) if not byte >> bit & 1) for byte in range(256)
)


class Bitmap:
    __slots__ = ("_bytes", "count")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.count = 0  # bits that are set

    def __contains__(self, entry: int) -> bool:
        place = entry >> 3
        return place < len(self._bytes) and bool(self._bytes[place] >> (entry & 7) & 1)

    def add(self, entry: int) -> bool:
        """Set the bit of an entry. Returns False if it is set already."""
        place = entry >> 3
        bit = 1 << (entry & 7)
        held = self._bytes
        try:
            byte = held[place]
        except IndexError:
            # Grow by a quarter more than needed, so that ascending bits do not copy each time.
            held.extend(bytes(place + 1 - len(held) + (place >> 2)))
            byte = held[place]
        if byte & bit:
            return False
        held[place] = byte | bit
        self.count += 1
        return True

    def discard(self, entry: int) -> None:
        """Clear the bit of an entry."""
        if entry in self:
            self._bytes[entry >> 3] &= ~(1 << (entry & 7))
            self.count -= 1

    def discard_through(self, entry: int) -> None:
        """Clear the bits of every entry up to and including this one."""
        place = min((entry + 1) >> 3, len(self._bytes))
        self._bytes[:place] = bytes(place)
        if place < len(self._bytes):
            self._bytes[place] &= ~((1 << (entry + 1 & 7)) - 1)
        self.count = int.from_bytes(self._bytes, "little").bit_count()

    def add_range(self, first: int, last: int) -> None:
        """Set the bits first..last, both ends included."""
        assert 0 <= first <= last, (first, last)
        ones = (1 << (last - first + 1)) - 1
        self.merge(
            first >> 3 << 3,
            (ones << (first & 7)).to_bytes((last >> 3) - (first >> 3) + 1, "little"),
        )

    def merge(self, first: int, bits: bytes) -> None:
        """Add the entries that `bits` has. Bit 0 of `bits` is entry `first`, a multiple of 8."""
        assert first % 8 == 0, first
        start = first >> 3
        end = start + len(bits)
        if len(self._bytes) < end:
            self._bytes.extend(bytes(end - len(self._bytes)))
        before = int.from_bytes(self._bytes[start:end], "little")
        after = before | int.from_bytes(bits, "little")
        self._bytes[start:end] = after.to_bytes(len(bits), "little")
        self.count += after.bit_count() - before.bit_count()

    def count_after(self, entry: int) -> int:
        """The number of set entries after this one."""
        start = entry + 1
        if start >> 3 >= len(self._bytes):
            return 0
        return (int.from_bytes(self._bytes[start >> 3 :], "little") >> (start & 7)).bit_count()

    def first_clear(self, entry: int) -> int:
        """The first entry at or after this one whose bit is clear."""
        held = self._bytes
        place = entry >> 3
        if place >= len(held):
            return entry
        byte = held[place] | ((1 << (entry & 7)) - 1)
        if byte == 0xFF:
            found = _NOT_FULL.search(held, place + 1)
            if found is None:
                return len(held) << 3
            place = found.start()
            byte = held[place]
        return (place << 3) + _TRAILING_ONES[byte]

    def nth_clear(self, after: int, number: int) -> int:
        """The `number`-th entry after `after` whose bit is clear. The first one has number 1."""
        assert number > 0, number
        first, width = after + 1, _STEP_BITS
        while (clear := width - self._count(first, width)) < number:
            first, number = first + width, number - clear
        while width > 1:
            width >>= 1
            clear = width - self._count(first, width)
            if clear < number:
                first, number = first + width, number - clear
        return first

    def _count(self, first: int, width: int) -> int:
        """The number of set bits among the `width` bits from `first` on."""
        bits = int.from_bytes(self._bytes[first >> 3 : (first + width + 7) >> 3], "little")
        return (bits >> (first & 7) & ((1 << width) - 1)).bit_count()

    def ranges(self, *, after: int = -1) -> Iterator[tuple[int, int]]:
        """Runs of set bits after `after`, in order, both ends included."""
        first, bits = self.slice_after(after)
        return ((first + start, first + end) for start, end in runs(bits))

    def slice_after(self, entry: int) -> tuple[int, bytes]:
        """The bits after `entry` as `merge` takes them: (first, bytes), without zero bytes at the
        ends. Bits up to `entry` are 0 in the result. (0, b""): no later bit is set."""
        start = (entry + 1) >> 3
        bits = int.from_bytes(self._bytes[start:], "little")
        bits = bits >> (entry + 1 & 7) << (entry + 1 & 7)
        if bits == 0:
            return 0, b""
        skipped = ((bits & -bits).bit_length() - 1) >> 3
        bits >>= skipped << 3
        return (start + skipped) << 3, bits.to_bytes((bits.bit_length() + 7) >> 3, "little")

    def check(self) -> None:
        assert self.count == int.from_bytes(self._bytes, "little").bit_count()


def runs(bits: bytes) -> Iterator[tuple[int, int]]:
    """The first and last bit of each run of ones, counted from the lowest bit."""
    text = format(int.from_bytes(bits, "little"), "b")[::-1]
    return ((run.start(), run.end() - 1) for run in _RUN_OF_ONES.finditer(text))


def run_count(bits: bytes) -> int:
    number = int.from_bytes(bits, "little")
    return (number & ~(number << 1)).bit_count()
