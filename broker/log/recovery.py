"""Recovers the ledgers of a topic for its new owner: closes the last one and finds the log's end.

The new owner has already raised the epoch, so the previous owner can add no ledger. Recovering the
last ledger fences its writer, so the previous owner can add no entry. From then on the ledgers do
not change until this broker appends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from magnetar.bookie.ledger.errors import LedgerError, LedgerNotFound
from magnetar.broker.errors import LogDamaged, LogUnavailable
from magnetar.broker.log.entry import parse_payload
from magnetar.broker.log.position import Position
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import EntryId
from magnetar.protos.errors import EntryError

if TYPE_CHECKING:
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.broker.log.owned_record import OwnedRecord
    from magnetar.metadata.model import LedgerId, LedgerMetadata, TopicLedger
    from magnetar.runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    ledgers: tuple[TopicLedger, ...]  # closed, with entries
    next_index: int
    timestamp_ms: int  # the broker's time of the last entry; 0: there is no entry


async def recover_log(owned: OwnedRecord, ledgers: LedgerStore, clock: Clock) -> RecoveredLog:
    """Close the open ledger and read the last entry. Writes only to close a ledger. Raises
    LogFenced, LogUnavailable, LogDamaged."""
    found: list[TopicLedger] = []
    dropped = owned.record.dropped
    next_index = 0 if dropped is None else dropped.next_index
    for record in owned.record.ledgers:
        next_index = record.first_index
        if record.closed_ms == 0:
            metadata = await recover_ledger(owned, ledgers, record.ledger)
            assert metadata.last_entry is not None
            assert metadata.length is not None
            record = replace(
                record,
                entries=metadata.last_entry + 1,
                length=metadata.length,
                closed_ms=max(clock.now_ms(), 1),
            )
        if record.entries > 0:
            found.append(record)
    timestamp_ms = 0
    if found:
        last = await _last_entry(owned, ledgers, found[-1])
        next_index, timestamp_ms = last.index + 1, last.broker_timestamp_ms
    return RecoveredLog(tuple(found), next_index, timestamp_ms)


async def recover_ledger(
    owned: OwnedRecord, ledgers: LedgerStore, ledger: LedgerId
) -> LedgerMetadata:
    """Fence and close one ledger of the topic. Raises LogFenced, LogUnavailable, LogDamaged."""
    try:
        return await ledgers.recover(ledger)
    except LedgerNotFound:
        raise await _missing(owned, ledger) from None
    except (LedgerError, MetadataError) as error:
        raise LogUnavailable(str(owned.name), f"recovering ledger {ledger}", error) from error


async def _missing(owned: OwnedRecord, ledger: LedgerId) -> LogDamaged:
    """Return the error for a ledger that does not exist. Raises LogFenced if another broker owns
    the topic now, because that broker may have dropped the ledger. Also raises LogUnavailable,
    LogDamaged."""
    await owned.verify()
    return LogDamaged(str(owned.name), ledger, "it does not exist")


async def _last_entry(owned: OwnedRecord, ledgers: LedgerStore, last: TopicLedger) -> StoredEntry:
    """Read the last entry of the last ledger. The next entry's index and time follow from it."""
    position = Position(last.ledger, last.entries - 1)
    try:
        metadata = await ledgers.metadata(last.ledger)
        if metadata is None:
            raise await _missing(owned, last.ledger)
        if metadata.last_entry != position.entry:
            why = (
                f"it ends at entry {metadata.last_entry}, the topic's record says {position.entry}"
            )
            raise LogDamaged(str(owned.name), last.ledger, why)
        entry = EntryId(position.entry)
        (part,) = await ledgers.reader(metadata).read(entry, entry, bytes_max=1)
        return parse_payload(position, part.payload)
    except EntryError as error:
        raise LogDamaged(str(owned.name), last.ledger, str(error)) from error
    except (LedgerError, MetadataError) as error:
        raise LogUnavailable(str(owned.name), f"reading entry {position}", error) from error
