"""Surveys of bookies and ledgers for operators.

A survey only reads: it opens, fences and recovers nothing, so it never disturbs a writer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import BookieUnavailable, LedgerNotFound
from magnetar.bookie.repair.census import all_ledgers
from magnetar.bookie.repair.errors import NoSuchCluster
from magnetar.bookie.repair.pace import Pace
from magnetar.bookie.repair.plan import sealed, striped
from magnetar.bookie.repair.under_replication_records import (
    UnderReplicationRecord,
    UnderReplicationRecords,
)
from magnetar.metadata import paths
from magnetar.metadata.codec import (
    decode_bookie_cookie,
    decode_bookie_drain,
    decode_bookie_registration,
    decode_ledger,
)
from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.model import LedgerState, Member
from magnetar.metadata.under_replication import UnderReplication
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.errors import StreamClosed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from magnetar.bookie.ledger.peer import OpenPeer
    from magnetar.metadata.model import (
        BookieAddress,
        BookieId,
        BookieRegistration,
        LedgerId,
        LedgerMetadata,
    )
    from magnetar.metadata.store import MetadataStore
    from magnetar.metadata.under_replication import BookieDrain
    from magnetar.runtime.clock import Clock

ASK_S: Final = 3.0
"""Time limit of one answer of a bookie."""

SCAN_LEDGERS_PER_S: Final = 2_000
"""Fast, because an operator waits; surveys are rare."""


class BookieState(StrEnum):
    WRITABLE = "writable"
    READ_ONLY = "read-only"
    DRAINING = "draining"  # serves, and gets no new ledgers
    LEAVING = "leaving"  # serves, while its ledgers are moved away
    MISSING = "missing"  # has a cookie, and is not registered
    FORMER = "former"  # a former incarnation of a bookie, which ledgers still name
    UNKNOWN = "unknown"  # ledgers name it, but the cluster has no bookie of this name


@dataclass(frozen=True, slots=True)
class BookieRow:
    member: Member
    state: BookieState
    address: str  # the address of its data port; "": not listed
    zone: str
    disk_total_bytes: int | None  # None: the bookie did not answer
    disk_free_bytes: int | None
    ledgers: int  # the number of ledgers whose metadata names the member
    open_ledgers: int  # ledgers that are not CLOSED and name it in their last segment


@dataclass(frozen=True, slots=True)
class Cluster:
    """The bookies' records in the metadata store."""

    cookies: dict[BookieId, str]  # the present incarnation of each bookie
    listed: dict[Member, BookieRegistration]
    drains: dict[BookieId, BookieDrain]

    def state(self, member: Member) -> BookieState:
        if member not in self.listed:
            incarnation = self.cookies.get(member.bookie)
            if incarnation is None:
                return BookieState.UNKNOWN
            return BookieState.MISSING if incarnation == member.incarnation else BookieState.FORMER
        drain = self.drains.get(member.bookie)
        if drain is not None:
            return BookieState.LEAVING if drain.decommission else BookieState.DRAINING
        return BookieState.READ_ONLY if self.listed[member].read_only else BookieState.WRITABLE


@dataclass(frozen=True, slots=True)
class CopyRow:
    """The numbers of entries that one member of one segment should have, and has."""

    first: int
    last: int | None  # None: the segment is not sealed
    seat: int
    member: Member
    state: BookieState
    expected: int | None  # entries; None: unknown, the segment is not sealed
    held: int | None  # None: the member did not answer
    why: str  # the member's error; "": it answered


@dataclass(frozen=True, slots=True)
class LedgerView:
    metadata: LedgerMetadata
    record: UnderReplicationRecord | None
    copies: tuple[CopyRow, ...]


async def read_cluster(store: MetadataStore) -> Cluster:
    """Read the records of all bookies. Raises NoSuchCluster and the errors of the metadata
    store."""
    await store.sync(paths.CLUSTER)
    if await store.get(paths.CLUSTER) is None:
        raise NoSuchCluster
    cookies = [decode_bookie_cookie(value) for value in await _values(store, paths.BOOKIE_COOKIES)]
    registrations = [
        decode_bookie_registration(value) for value in await _values(store, paths.BOOKIES_AVAILABLE)
    ]
    drains = [decode_bookie_drain(value) for value in await _values(store, paths.BOOKIES_DRAINING)]
    return Cluster(
        {each.bookie: each.incarnation for each in cookies},
        {each.member: each for each in registrations},
        {each.bookie: each for each in drains},
    )


async def survey_bookies(store: MetadataStore, open_peer: OpenPeer) -> list[BookieRow]:
    """Return all bookies that have a cookie, are listed, or are named by a ledger, sorted by name.
    A row has the bookie's disk usage and the number of its ledgers. Raises the errors of
    `read_cluster`."""
    cluster = await read_cluster(store)
    ledgers: Counter[Member] = Counter()
    still_open: Counter[Member] = Counter()
    async for batch in all_ledgers(store, Pace(SCAN_LEDGERS_PER_S)):
        for _, metadata in batch:
            if metadata is not None:
                ledgers.update({member for part in metadata.segments for member in part.members})
                if metadata.state is not LedgerState.CLOSED:
                    still_open.update(metadata.last_segment.members)
    members = {Member(bookie, incarnation) for bookie, incarnation in cluster.cookies.items()}
    members |= {*cluster.listed, *ledgers}
    disks = await _disks(cluster.listed.values(), open_peer)
    rows = []
    for member in sorted(members, key=lambda each: (each.bookie, each.incarnation)):
        registration = cluster.listed.get(member)
        total, free = disks.get(member, (None, None))
        rows.append(
            BookieRow(
                member=member,
                state=cluster.state(member),
                address=registration.address.data if registration is not None else "",
                zone=registration.zone if registration is not None else "",
                disk_total_bytes=total,
                disk_free_bytes=free,
                ledgers=ledgers[member],
                open_ledgers=still_open[member],
            )
        )
    return rows


async def survey_under_replication(
    store: MetadataStore, clock: Clock
) -> list[tuple[UnderReplicationRecord, bool]]:
    """Return all under-replication records, each with True if its ledger is being repaired now.
    Raises the errors of `read_cluster`."""
    await read_cluster(store)
    under_replication = UnderReplicationRecords(store, clock)
    found = []
    async for ledger in under_replication.list():
        record = await _record(under_replication, ledger)
        if record is not None:
            found.append((record, await under_replication.locked(ledger)))
    return found


async def _record(
    under_replication: UnderReplicationRecords, ledger: LedgerId
) -> UnderReplicationRecord | None:
    """Return the ledger's record. For an unreadable record, return one whose `failure` says so."""
    try:
        return await under_replication.get(ledger)
    except InvalidRecord as error:
        return UnderReplicationRecord(ledger, UnderReplication(0).failed(str(error), 0), version=-1)


async def survey_ledger(
    store: MetadataStore, open_peer: OpenPeer, clock: Clock, ledger: LedgerId
) -> LedgerView:
    """Return a ledger's metadata, its under-replication record, and the numbers of entries that its
    members should hold and do hold.

    Raises LedgerNotFound and the errors of `read_cluster`.
    """
    cluster = await read_cluster(store)
    await store.sync(paths.ledger(ledger))
    stored = await store.get(paths.ledger(ledger))
    if stored is None:
        raise LedgerNotFound(ledger)
    metadata = decode_ledger(stored.value)
    spans: list[tuple[int, int | None, tuple[Member, ...]]] = [
        (first, last, part.members) for first, last, part in sealed(metadata)
    ]
    if metadata.state is not LedgerState.CLOSED:
        tail = metadata.last_segment
        spans.append((tail.first_entry, None, tail.members))
    held = await _held(metadata, cluster, open_peer)
    copies = []
    for first, last, members in spans:
        for seat, member in enumerate(members):
            expected = None
            if last is not None:
                expected = sum(map(len, striped(metadata, seat, first, last)))
            runs, why = held[member]
            end = last if last is not None else 1 << 62
            has = (
                None
                if runs is None
                else sum(max(0, min(run.stop, end + 1) - max(run.start, first)) for run in runs)
            )
            state = cluster.state(member)
            copies.append(CopyRow(first, last, seat, member, state, expected, has, why))
    record = await _record(UnderReplicationRecords(store, clock), ledger)
    return LedgerView(metadata, record, tuple(copies))


async def _held(
    metadata: LedgerMetadata, cluster: Cluster, open_peer: OpenPeer
) -> dict[Member, tuple[list[range] | None, str]]:
    """Return for each member the runs of entries that it stores, or None and the reason why they
    are unknown."""
    members = {member for part in metadata.segments for member in part.members}
    addresses: dict[Member, BookieAddress] = {}
    for registration in cluster.listed.values():
        for member in members:  # a bookie may also serve its former incarnations
            if member.bookie == registration.bookie:
                addresses[member] = registration.address

    async def ask(member: Member) -> tuple[list[range] | None, str]:
        address = addresses.get(member)
        if address is None:
            return None, "not listed"
        peer = open_peer(member, address)
        runs: list[range] = []
        at = 0
        try:
            while True:
                async with asyncio.timeout(ASK_S):
                    page = await peer.list_entries(metadata.ledger, at)
                if page.code is BookieCode.NO_SUCH_LEDGER:
                    return [], ""
                if page.code is not BookieCode.OK:
                    return None, page.code.name
                runs += [range(run.first, run.first + run.count) for run in page.runs]
                if not page.more or not page.runs:
                    return runs, ""
                at = runs[-1].stop
        except (BookieUnavailable, StreamClosed) as error:
            return None, str(error)
        except TimeoutError:
            return None, BookieCode.TIMEOUT.name
        finally:
            await peer.close()

    async with asyncio.TaskGroup() as group:
        asking = {member: group.create_task(ask(member)) for member in members}
    return {member: task.result() for member, task in asking.items()}


async def _disks(
    registrations: Iterable[BookieRegistration], open_peer: OpenPeer
) -> dict[Member, tuple[int, int]]:
    """Return the total and free bytes of the bookies that answer."""

    async def ask(registration: BookieRegistration) -> tuple[int, int] | None:
        peer = open_peer(registration.member, registration.address)
        try:
            async with asyncio.timeout(ASK_S):
                info = await peer.info()
        except (BookieUnavailable, StreamClosed, TimeoutError):
            return None
        finally:
            await peer.close()
        return info.disk_total_bytes, info.disk_free_bytes

    async with asyncio.TaskGroup() as group:
        asking = {each.member: group.create_task(ask(each)) for each in registrations}
    found = {member: task.result() for member, task in asking.items()}
    return {member: disk for member, disk in found.items() if disk is not None}


async def _values(store: MetadataStore, folder: str) -> list[bytes]:
    found = []
    for name in await store.children(folder):
        stored = await store.get(f"{folder}/{name}")
        if stored is not None:
            found.append(stored.value)
    return found
