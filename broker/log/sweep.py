"""Finds orphaned ledgers and deletes them (orphans.py has the rule).

A sweep reads the metadata of all ledgers, a page at a time, at a bounded rate. For each ledger it
reads first the ledger's metadata, then the record of its topic. To keep a ledger, the sweep may use
a record that it read earlier. Before it calls a ledger an orphan, it reads the record again, after
a sync with the metadata store: an old copy of the record may not list the ledger yet.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.broker.log.orphans import Verdict, judge, origin_of
from magnetar.broker.log.owned_record import topic_path
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_topic
from magnetar.metadata.errors import InvalidRecord, MetadataError
from magnetar.metadata.ledger_tree import ledger_ids
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.broker.log.orphans import Origin
    from magnetar.metadata.model import LedgerId, TopicRecord
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.names import TopicName
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

LEDGERS_PER_PAGE: Final = 1_000
"""The number of ledgers of a page. A page takes only some seconds, so an administrator's request
gets its answer in time."""

PAUSE_S: Final = 0.002
"""The pause after each ledger: a sweep examines at most 500 ledgers a second. Their reads are a
small part of what the metadata store can serve."""

RECORDS_MAX: Final = 100
"""The maximum number of topics' records that are kept during a page: at most 100 MB, usually
100 KB."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A ledger that belongs to no topic."""

    ledger: LedgerId
    origin: Origin
    created_ms: int


@dataclass(frozen=True, slots=True)
class Page:
    """The findings of one page of a sweep."""

    examined: int
    kept: Counter[Verdict]
    orphans: list[Orphan]
    deleted: int
    unreadable: int  # ledgers whose metadata, or whose topic's record, cannot be read
    next_after: int | None  # the next page begins after this ledger; None: this page is the last


class OrphanSweep:
    def __init__(
        self,
        store: MetadataStore,
        ledgers: LedgerStore,
        clock: Clock,
        *,
        grace_s: float,
        ids: Callable[[int], AsyncIterator[LedgerId]] | None = None,
    ) -> None:
        """`ids` yields the ledgers after an id; None: all ledgers of the metadata store."""
        self._store = store
        self._ledgers = ledgers
        self._clock = clock
        self._grace_ms = round(grace_s * 1_000)
        self._ids = ids or (lambda after: ledger_ids(store, paths.LEDGERS, after=after))

    async def page(self, after: int, *, delete: bool) -> Page:
        """Examine the next page of ledgers after this id. `delete`: delete the orphans in it.
        Raises MetadataError, LedgerError."""
        records: OrderedDict[TopicName, TopicRecord] = OrderedDict()
        kept: Counter[Verdict] = Counter()
        orphans: list[Orphan] = []
        examined = deleted = unreadable = 0
        next_after: int | None = None
        async for ledger in self._ids(after):
            if examined == LEDGERS_PER_PAGE:
                break
            examined += 1
            next_after = ledger
            try:
                found = await self._examine(ledger, records, kept)
            except InvalidRecord as error:
                log.warning("cannot judge a ledger", ledger=ledger, error=str(error))
                unreadable += 1
                found = None
            if found is not None:
                orphans.append(found)
                if delete:
                    await self._ledgers.delete(ledger)
                    deleted += 1
                    _log_deletion(found)
            await asyncio.sleep(PAUSE_S)
        else:
            next_after = None
        return Page(examined, kept, orphans, deleted, unreadable, next_after)

    async def delete_all(self) -> int:
        """Sweep over all ledgers. Returns the number of deleted orphans. Raises MetadataError,
        LedgerError."""
        deleted, after = 0, -1
        while True:
            page = await self.page(after, delete=True)
            deleted += page.deleted
            if page.next_after is None:
                return deleted
            after = page.next_after

    async def run(self, period_s: float, *, is_chosen: Callable[[], bool]) -> None:
        """After each period, sweep once if `is_chosen` returns True. Runs until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            if not is_chosen():
                continue
            try:
                deleted = await self.delete_all()
            except (MetadataError, LedgerError) as error:
                log.warning("sweep for orphaned ledgers failed", error=str(error))
            else:
                log.info("swept for orphaned ledgers", deleted=deleted)

    async def _examine(
        self,
        ledger: LedgerId,
        records: OrderedDict[TopicName, TopicRecord],
        kept: Counter[Verdict],
    ) -> Orphan | None:
        metadata = await self._ledgers.metadata(ledger)
        if metadata is None:  # deleted meanwhile
            return None
        origin = origin_of(metadata.custom)
        now_ms, grace_ms = self._clock.now_ms(), self._grace_ms
        known = None if origin is None else records.get(origin.topic)
        verdict = judge(metadata, origin, known, now_ms=now_ms, grace_ms=grace_ms)
        if verdict in (Verdict.ORPHAN, Verdict.MAY_BE_LISTED):
            assert origin is not None
            record = await self._record_of(origin.topic)
            verdict = judge(metadata, origin, record, now_ms=now_ms, grace_ms=grace_ms)
            if verdict is Verdict.ORPHAN:
                return Orphan(ledger, origin, metadata.created_ms)
            if record is not None:
                records[origin.topic] = record
                if len(records) > RECORDS_MAX:
                    records.popitem(last=False)
        kept[verdict] += 1
        return None

    async def _record_of(self, topic: TopicName) -> TopicRecord | None:
        path = topic_path(topic)
        await self._store.sync(path)
        found = await self._store.get(path)
        return None if found is None else decode_topic(found.value)


def _log_deletion(found: Orphan) -> None:
    origin = found.origin
    log.warning(
        "orphaned ledger deleted",
        ledger=found.ledger,
        topic=str(origin.topic),
        kind=origin.kind,
        epoch=origin.epoch,
    )
