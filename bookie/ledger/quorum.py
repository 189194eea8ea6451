"""Quorum arithmetic: which bookies hold an entry, and how many answers prove a fact.

A ledger's ensemble has `ensemble_size` (E) *seats*, numbered from 0; the metadata names the bookie
of each seat. An entry is written to the `write_quorum` (Qw) consecutive seats from seat `entry % E`
on, modulo E: its *write set*. The entry may be confirmed once `ack_quorum` (Qa) of these seats hold
it durably.

Two proofs follow. Both show that the other seats of a write set are too few to confirm an entry:

- *Absence*: an entry was never confirmed if Qw - Qa + 1 seats of its write set answer that they
  do not have it. The other seats are fewer than Qa.
- *Coverage*: no other writer can confirm an entry once at least Qw - Qa + 1 seats are fenced in
  each window of Qw neighbouring seats. Each window is some entry's write set. The other seats are
  fewer than Qa.

Sets of seats are integers with one bit per seat, because the code copies, compares and counts them
for every entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from magnetar.metadata.model import LedgerMetadata

ENSEMBLE_SIZE_MAX = 32
"""The largest ensemble. Wider ones have no known use: E beyond Qw only spreads one ledger's
load."""

Seats = int
"""A set of seats: bit i stands for seat i."""


def seats(numbers: Iterable[int]) -> Seats:
    """Return the set of these seats."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


@cache  # few sets occur: each ledger has one ensemble size and few failures
def seat_numbers(mask: Seats) -> tuple[int, ...]:
    """Return the seats of a set, ascending."""
    return tuple(number for number in range(mask.bit_length()) if mask >> number & 1)


@dataclass(frozen=True, slots=True)
class Quorum:
    """The three sizes of a ledger: 1 <= Qa <= Qw <= E. Raises ValueError."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    windows: tuple[Seats, ...] = field(init=False, repr=False, compare=False)
    """The write set of entry e is `windows[e % ensemble_size]`."""

    def __post_init__(self) -> None:
        ordered = 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size
        if not ordered or self.ensemble_size > ENSEMBLE_SIZE_MAX:
            raise ValueError(
                f"quorums E/Qw/Qa = {self} must satisfy 1 <= Qa <= Qw <= E <= {ENSEMBLE_SIZE_MAX}"
            )
        windows = (
            seats((start + step) % self.ensemble_size for step in range(self.write_quorum))
            for start in range(self.ensemble_size)
        )
        object.__setattr__(self, "windows", tuple(windows))

    def __str__(self) -> str:
        return f"{self.ensemble_size}/{self.write_quorum}/{self.ack_quorum}"

    @property
    def absence_quorum(self) -> int:
        """Number of explicit negatives from one write set that prove an entry was not confirmed."""
        return self.write_quorum - self.ack_quorum + 1

    def write_set(self, entry: int) -> Seats:
        assert entry >= 0, entry
        return self.windows[entry % self.ensemble_size]

    def write_order(self, entry: int) -> tuple[int, ...]:
        """Return the write set as seat numbers, beginning with the entry's first seat."""
        first = entry % self.ensemble_size
        return tuple((first + step) % self.ensemble_size for step in range(self.write_quorum))

    def confirmable(self, acked: Seats, entry: int) -> bool:
        """Return whether acks from these seats make the entry durable."""
        return (acked & self.write_set(entry)).bit_count() >= self.ack_quorum

    def absent(self, negatives: Seats, entry: int) -> bool:
        """Return whether explicit negatives from these seats prove that it was never confirmed."""
        return (negatives & self.write_set(entry)).bit_count() >= self.absence_quorum

    def covered(self, fenced: Seats) -> bool:
        """Return whether no entry can be confirmed without one of these seats."""
        return all((window & fenced).bit_count() >= self.absence_quorum for window in self.windows)

    def writable(self, gone: Seats) -> bool:
        """Return whether every entry can be confirmed without these seats."""
        return all((window & ~gone).bit_count() >= self.ack_quorum for window in self.windows)

    def cover(self, first: int, usable: Seats) -> list[tuple[int, int, int]] | None:
        """Return the seats from which to read all entries from `first` on, as (offset, length,
        seat). A seat holds `length` entries from `first + offset` on, and again after every
        `ensemble_size` entries. Each entry is read from one seat. None: at least one
        entry is on no usable seat."""
        parts: list[tuple[int, int, int]] = []
        offset = 0
        while offset < self.ensemble_size:
            entry = first + offset
            holders = [seat for seat in self.write_order(entry) if usable >> seat & 1]
            if not holders:
                return None
            run = self.run_of(holders[-1], entry)  # the last holder has the longest rest of its run
            length = min(run.stop - run.start, self.ensemble_size - offset)
            parts.append((offset, length, holders[-1]))
            offset += length
        return parts

    def run_of(self, seat: int, entry: int) -> range:
        """Return the first run of consecutive entries from `entry` on that this seat holds.

        With E = Qw every seat holds every entry, so the run has no end (it is cut at 2^62).
        """
        if self.write_quorum == self.ensemble_size:
            return range(entry, 1 << 62)
        # Entry e lies on seats e, e+1, … e+Qw-1 (mod E); this seat is `lag` steps after the first.
        lag = (seat - entry) % self.ensemble_size
        if lag < self.write_quorum:
            return range(entry, entry + lag + 1)
        begin = entry + lag - self.write_quorum + 1
        return range(begin, begin + self.write_quorum)


def quorum_of(metadata: LedgerMetadata) -> Quorum:
    """Return the quorums of a ledger."""
    return _quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)


@cache  # a process has one or two quorums
def _quorum(ensemble_size: int, write_quorum: int, ack_quorum: int) -> Quorum:
    return Quorum(ensemble_size, write_quorum, ack_quorum)
