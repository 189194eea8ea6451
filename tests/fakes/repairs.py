"""Repair processes that restore copies on the bookies in memory of `ledger_bookies`."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.repair.auditor import Auditor
from magnetar.bookie.repair.config import RepairConfig
from magnetar.bookie.repair.replicator import SAMPLE_MAX, Replicator
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_ledger, encode_bookie_cookie, encode_bookie_drain
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import NO_LEDGER, BookieCookie, BookieId, LedgerMetadata
from magnetar.metadata.store import ABSENT
from magnetar.metadata.under_replication import BookieDrain
from magnetar.protos.envelope import decode_envelope
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.ledger_bookies import BookieCluster, FakeBookie

    from magnetar.bookie.ledger.ledgers import Ledgers
    from magnetar.metadata.model import LedgerId, Member

E = LedgerConfig(ensemble_size=3, write_quorum=3, ack_quorum=2)


@asynccontextmanager
async def replicating(
    nodes: BookieCluster,
    config: RepairConfig | None = None,
    *,
    seed: int = 7,
    wanted: LedgerConfig = E,
    sample_max: int = SAMPLE_MAX,
) -> AsyncIterator[Replicator]:
    """A process that runs a replicator inside the context."""
    store = MemoryStore(nodes.tree)
    records = UnderReplicationRecords(store, SystemClock())
    async with nodes.process(wanted, seed=seed, store=store) as ledgers:
        replicator = Replicator(
            store,
            records,
            ledgers.services,
            config or RepairConfig(),
            SystemClock(),
            Random(seed),
            name=f"replicator-{seed}",
            recover=ledgers.recover,
            sample_max=sample_max,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(replicator.run())
            yield replicator
            running.cancel()
    await store.close()


@asynccontextmanager
async def auditing(
    nodes: BookieCluster,
    config: RepairConfig | None = None,
    *,
    seed: int = 9,
    wanted: LedgerConfig = E,
) -> AsyncIterator[Auditor]:
    """A process that runs an auditor inside the context."""
    store = MemoryStore(nodes.tree)
    async with nodes.process(wanted, seed=seed, store=store) as ledgers:
        auditor = Auditor(
            store,
            UnderReplicationRecords(store, SystemClock()),
            ledgers.services,
            config or RepairConfig(),
            SystemClock(),
            name=f"auditor-{seed}",
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(auditor.run())
            yield auditor
            running.cancel()
    await store.close()


async def written(ledgers: Ledgers, entries: int, *, size: int = 20) -> LedgerMetadata:
    """A closed ledger."""
    appender = await ledgers.create(newer_than=NO_LEDGER, custom={})
    for entry in range(entries):
        appender.append_nowait([[payload_of(entry, size)]])
        await appender.wait_room()
    return await appender.close()


def payload_of(entry: int, size: int = 20) -> bytes:
    return b"entry %d " % entry + b"x" * (size - len(b"entry %d " % entry))


async def metadata_of(nodes: BookieCluster, ledger: LedgerId) -> LedgerMetadata:
    stored = await nodes.store.get(paths.ledger(ledger))
    assert stored is not None
    return decode_ledger(stored.value)


async def bake_cookies(nodes: BookieCluster, *, boot_epoch: int = 1) -> None:
    """Record all present bookies in the cluster's metadata."""
    for bookie in nodes.bookies:
        cookie = BookieCookie(bookie.member.bookie, bookie.member.incarnation, boot_epoch, "c")
        path = paths.bookie_cookie(bookie.member.bookie)
        stored = await nodes.store.get(path)
        await nodes.store.put(
            path,
            encode_bookie_cookie(cookie),
            expected=ABSENT if stored is None else stored.version,
        )


async def drain(nodes: BookieCluster, bookie: BookieId, *, decommission: bool) -> None:
    record = BookieDrain(bookie, 1, decommission=decommission)
    await nodes.store.put(
        paths.bookie_draining(bookie), encode_bookie_drain(record), expected=ABSENT
    )


async def lose(nodes: BookieCluster, bookie: FakeBookie) -> None:
    """Kill the bookie and remove it from the list."""
    bookie.kill()
    await nodes.unregister(bookie)


def held(nodes: BookieCluster, metadata: LedgerMetadata, member: Member) -> list[int]:
    """The entries that a member has. Verifies each of them."""
    bookie = nodes.bookie(member)
    stored = bookie.ledgers.get(metadata.ledger)
    if stored is None:
        return []
    for entry, envelope in stored.entries.items():
        decoded = decode_envelope(envelope)
        assert (decoded.ledger, decoded.entry) == (metadata.ledger, entry)
    return sorted(stored.entries)
