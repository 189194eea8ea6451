"""From the notes of readers and scrubs to marks: what a process met is told to whoever repairs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NoReturn

from magnetar.metadata.errors import MetadataError
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.bookie.ledger.bad_copies import BadCopies
    from magnetar.bookie.repair.marks import Marks
    from magnetar.metadata.model import LedgerId
    from magnetar.metadata.under_replication import BadCopy

log = get_logger(__name__)

REPORT_S: Final = 5.0
"""Notes of so long are marked together: a member that lost a ledger costs one change, not one for
each entry that was read."""


async def report_bad_copies(bad_copies: BadCopies, marks: Marks) -> NoReturn:
    """Until cancelled. What cannot be marked now is noted again."""
    while True:
        await asyncio.sleep(REPORT_S)
        by_ledger: defaultdict[LedgerId, list[BadCopy]] = defaultdict(list)
        for ledger, copy in bad_copies.drain():
            by_ledger[ledger].append(copy)
        for ledger, copies in by_ledger.items():
            try:
                if await marks.mark_copies(ledger, copies):
                    log.warning("bad copies marked", ledger=ledger, ranges=len(copies))
            except MetadataError as error:
                log.warning("bad copies not marked", ledger=ledger, error=str(error))
                for copy in copies:
                    bad_copies.note(ledger, copy.member, copy.first_entry, copy.last_entry)
