"""The steps to repair a ledger, from its metadata and its under-replication record. Pure.

Only sealed segments are repaired: all segments of a closed ledger, and all but the last segment of
any other ledger. Their entries are confirmed and final. So copies can be made at any time, and a
member can be replaced without the ledger's writer. The segment being written belongs to its writer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.quorum import Quorum
from magnetar.metadata.model import LedgerState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.metadata.model import LedgerMetadata, Member, Segment
    from magnetar.metadata.under_replication import UnderReplication

COMPARED_AT_ONCE: Final = 10_000
"""The entry ids to compare with a bookie's list in one step of the event loop: up to 10 ms."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the entries first..last that are striped to `seat` to another bookie, which then takes
    the seat of `lost`. An empty segment has `last` = `first - 1`."""

    first: int  # the first entry; it also identifies the segment
    last: int
    seat: int
    lost: Member


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Write these entries to `member` again, as far as they are striped to its seat."""

    first: int
    last: int
    seat: int
    member: Member


@dataclass(frozen=True, slots=True)
class Widen:
    """Add one more bookie that holds all entries."""

    copies: int  # the present number of copies


Step = Move | Rewrite | Widen


@dataclass(frozen=True, slots=True)
class RepairPlan:
    steps: tuple[Step, ...]
    # Members of the last segment, unless it is sealed, that are lost or have bad copies there.
    unwritable: tuple[Member, ...]


def plan_repair(
    metadata: LedgerMetadata,
    faults: UnderReplication,
    gone: frozenset[Member],
    *,
    copies_wanted: int,
) -> RepairPlan:
    """Plan the repair of one ledger. `gone`: the members to replace. Moves come first, because the
    loss of another bookie could make them impossible."""
    moves = [
        Move(first, last, seat, member)
        for first, last, segment in sealed(metadata)
        for seat, member in enumerate(segment.members)
        if member in gone
    ]
    rewrites = [
        Rewrite(max(first, bad.first_entry), min(last, bad.last_entry), seat, member)
        for bad in faults.bad
        for first, last, segment in sealed(metadata)
        for seat, member in enumerate(segment.members)
        if member == bad.member and member not in gone
        if bad.first_entry <= last and first <= bad.last_entry
    ]
    widen = [Widen(metadata.write_quorum)] if is_narrow(metadata, copies_wanted) else []
    unwritable: set[Member] = set()
    if metadata.state is not LedgerState.CLOSED:
        tail = metadata.last_segment
        unwritable = {member for member in tail.members if member in gone} | {
            bad.member
            for bad in faults.bad
            if bad.member in tail.members and bad.last_entry >= tail.first_entry
        }
    return RepairPlan(
        (*moves, *rewrites, *widen), tuple(sorted(unwritable, key=lambda each: each.bookie))
    )


def is_narrow(metadata: LedgerMetadata, copies_wanted: int) -> bool:
    """Return whether the ledger was created with too few bookies, and can get more copies now."""
    return (
        metadata.under_replicated
        and metadata.state is LedgerState.CLOSED
        and metadata.write_quorum < copies_wanted
        and metadata.ensemble_size == metadata.write_quorum
    )


def sealed(metadata: LedgerMetadata) -> Iterator[tuple[int, int, Segment]]:
    """Yield the sealed segments: first entry, last entry (first - 1 if empty), and the segment."""
    starts = [segment.first_entry for segment in metadata.segments]
    for segment, following in zip(metadata.segments, starts[1:], strict=False):
        yield segment.first_entry, following - 1, segment
    if metadata.state is LedgerState.CLOSED:
        assert metadata.last_entry is not None
        yield metadata.last_segment.first_entry, metadata.last_entry, metadata.last_segment


def striped(metadata: LedgerMetadata, seat: int, first: int, last: int) -> Iterator[range]:
    """Yield the runs of entries among first..last that `seat` holds, ascending."""
    quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
    at = first
    while at <= last:
        run = quorum.run_of(seat, at)
        if run.start > last:
            return
        yield range(run.start, min(run.stop, last + 1))
        at = run.stop


def missing(expected: Iterator[range], held: list[range]) -> list[range]:
    """Return the expected entries that are not held. Both arguments are ascending, without
    overlaps."""
    found: list[range] = []
    at = 0
    for run in expected:
        first = run.start
        while at < len(held) and held[at].stop <= first:
            at += 1
        for part in held[at:]:
            if part.start >= run.stop:
                break
            if part.start > first:
                found.append(range(first, part.start))
            first = max(first, part.stop)
        if first < run.stop:
            found.append(range(first, run.stop))
    return found
