"""The bad copies that readers note become repair records, also after an outage of the metadata
store."""

from __future__ import annotations

import asyncio

from support import ManualClock

from magnetar.bookie.ledger.bad_copies import BadCopies
from magnetar.bookie.repair.reporting import REPORT_S, report_bad_copies
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import BookieId, EntryId, LedgerId, Member
from magnetar.metadata.under_replication import BadCopy

A, B = (Member(BookieId(name), f"{number:032x}") for number, name in enumerate("ab"))
LEDGER = LedgerId(5)


async def test_notes_become_records_once_the_store_is_reachable() -> None:
    store, notes = MemoryStore(), BadCopies()
    records = UnderReplicationRecords(store, ManualClock())
    async with asyncio.TaskGroup() as group:
        running = group.create_task(report_bad_copies(notes, records))
        store.suspend()
        for entry in (3, 4, 9):
            notes.on_bad_copy(LEDGER, EntryId(entry), A)
        notes.on_bad_copy(LEDGER, EntryId(4), B)
        await asyncio.sleep(5 * REPORT_S)
        store.reconnect()
        await asyncio.sleep(3 * REPORT_S)
        running.cancel()
    record = await records.get(LEDGER)
    assert record is not None
    assert record.faults.bad == (
        BadCopy(A, EntryId(3), EntryId(4)),
        BadCopy(A, EntryId(9), EntryId(9)),
        BadCopy(B, EntryId(4), EntryId(4)),
    )
    assert len(notes) == 0
