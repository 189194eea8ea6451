"""Reads of stripes: some entries, then a gap, repeatedly.

A bookie of a ledger with E > Qw holds `run` neighbouring entries of every `stride` entries. A read
that asks only for these entries continues across the gaps; an ordinary read ends at the first gap.
Both reads end at a missing entry that they ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.bookie.contract import ReadRequest
    from magnetar.protos.envelope import BookieCode

    ReadRun = Callable[..., tuple[list[bytes], BookieCode]]

Pieces = list[tuple[int, list[bytes]]]
"""First entry and envelopes of each run, in order."""


def read_stripes(
    read_run: ReadRun, request: ReadRequest, at: int, *, bytes_max: int, entries_max: int
) -> tuple[Pieces, int, BookieCode | None]:
    """Return the stored entries from `at` on, the entry at which the read ends, and the reason.
    None: the read ended at a limit, or after the last entry.

    `read_run(first, last, bytes_max=, entries_max=)` returns a run without gaps, and the code to
    answer if the run is too short.
    """
    pieces: Pieces = []
    while at <= request.last and bytes_max > 0 and entries_max > 0:
        begin = request.first + (at - request.first) // request.stride * request.stride
        end = min(begin + request.run - 1, request.last)
        if at <= end:
            found, why = read_run(at, end, bytes_max=bytes_max, entries_max=entries_max)
            pieces.append((at, found))
            at += len(found)
            bytes_max -= sum(map(len, found))
            entries_max -= len(found)
            if at <= end:
                limited = bytes_max <= 0 or entries_max <= 0
                return pieces, at, None if limited else why
        at = begin + request.stride
    return pieces, at, None
