"""Writes the bad copies that readers and writers noted into under-replication records."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NoReturn

from magnetar.metadata.errors import MetadataError
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.bookie.ledger.bad_copies import BadCopies
    from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
    from magnetar.metadata.model import LedgerId
    from magnetar.metadata.under_replication import BadCopy

log = get_logger(__name__)

REPORT_S: Final = 5.0
"""Notes of this interval are recorded together: a member that lost a ledger costs one change, not
one per entry."""


async def report_bad_copies(
    bad_copies: BadCopies, under_replication: UnderReplicationRecords
) -> NoReturn:
    """Run until cancelled. Bad copies that cannot be recorded now are noted again."""
    while True:
        await asyncio.sleep(REPORT_S)
        by_ledger: defaultdict[LedgerId, list[BadCopy]] = defaultdict(list)
        for ledger, copy in bad_copies.drain():
            by_ledger[ledger].append(copy)
        for ledger, copies in by_ledger.items():
            try:
                if await under_replication.add_bad_copies(ledger, copies):
                    log.warning("bad copies recorded", ledger=ledger, ranges=len(copies))
            except MetadataError as error:
                log.warning("bad copies not recorded", ledger=ledger, error=str(error))
                for copy in copies:
                    bad_copies.note(ledger, copy.member, copy.first_entry, copy.last_entry)
