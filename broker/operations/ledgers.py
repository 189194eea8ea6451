"""Administration of orphaned ledgers, which belong to no topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.operations.model import OrphanedLedger, OrphanPage

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker


async def orphans(broker: Broker, *, after: int, delete: bool) -> OrphanPage:
    """Return the orphaned ledgers in one page of the ledgers after `after`. `delete`: also delete
    them. Raises MetadataError, LedgerError."""
    page = await broker.orphans.page(after, delete=delete)
    return OrphanPage(
        examined=page.examined,
        unreadable=page.unreadable,
        deleted=page.deleted,
        kept={verdict.value: count for verdict, count in page.kept.items()},
        orphans=[
            OrphanedLedger(
                ledger_id=orphan.ledger,
                topic=str(orphan.origin.topic),
                kind=orphan.origin.kind,
                created_at=orphan.created_ms,
            )
            for orphan in page.orphans
        ],
        next_after=page.next_after,
    )
