"""Census: reads the metadata of every ledger, in batches, at a limited rate."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.metadata import paths
from magnetar.metadata.codec import decode_ledger
from magnetar.metadata.errors import InvalidRecord, MetadataError
from magnetar.metadata.ledger_tree import ledger_ids
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from magnetar.bookie.repair.pace import Pace
    from magnetar.metadata.model import LedgerId, LedgerMetadata
    from magnetar.metadata.store import MetadataStore

log = get_logger(__name__)

READS_AT_ONCE: Final = 32
"""Concurrent reads, which share one round trip to the store."""

Found = tuple["LedgerId", "LedgerMetadata | None"]
"""A ledger and its metadata; None: the metadata cannot be read. Deleted ledgers are left out."""


async def all_ledgers(store: MetadataStore, pace: Pace) -> AsyncIterator[Sequence[Found]]:
    """Yield all ledgers in batches, ascending. `pace` limits the ledgers per second. Raises the
    errors of the metadata store."""
    loop = asyncio.get_running_loop()
    batch: list[LedgerId] = []
    async for ledger in ledger_ids(store, paths.LEDGERS):
        batch.append(ledger)
        if len(batch) == READS_AT_ONCE:
            await asyncio.sleep(pace.delay_s(len(batch), loop.time()))
            yield await read_ledgers(store, batch)
            batch = []
    if batch:
        yield await read_ledgers(store, batch)


async def read_ledgers(store: MetadataStore, ledgers: Iterable[LedgerId]) -> Sequence[Found]:
    """Read all of `ledgers` concurrently, so pass only a few. Raises the errors of the metadata
    store."""
    found: list[Found] = []
    failures: list[MetadataError] = []

    async def read(ledger: LedgerId) -> None:
        try:
            stored = await store.get(paths.ledger(ledger))
            if stored is not None:
                found.append((ledger, decode_ledger(stored.value)))
        except InvalidRecord as error:
            log.error("ledger metadata unreadable", ledger=ledger, error=str(error))
            found.append((ledger, None))
        except MetadataError as error:
            failures.append(error)

    async with asyncio.TaskGroup() as group:
        for ledger in ledgers:
            group.create_task(read(ledger))
    if failures:
        raise failures[0]
    return sorted(found, key=lambda each: each[0])
