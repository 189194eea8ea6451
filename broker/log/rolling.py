"""Creates, closes and records a log's ledgers, also while bookies or the metadata store fail.

`create`, `close` and `record` repeat a failed step with a back-off until it succeeds. If another
broker owns the topic, they raise LogFenced. They do not give up after a number of attempts: entries
wait for the new ledger, and their order is kept only if the log drops none of them.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from magnetar.bookie.ledger.errors import LedgerError, LedgerFenced, LedgerNotFound
from magnetar.broker.errors import LogUnavailable
from magnetar.broker.log.orphans import custom_of
from magnetar.broker.log.owned_record import dropping
from magnetar.metadata.errors import MetadataError
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from magnetar.bookie.ledger.quorum import Quorum
    from magnetar.broker.log.ledgers import Appender, LedgerStore
    from magnetar.broker.log.owned_record import OwnedRecord
    from magnetar.metadata.model import (
        DroppedHead,
        LedgerId,
        LedgerMetadata,
        TopicLedger,
        TopicRecord,
    )

log = get_logger(__name__)

T = TypeVar("T")


class Rolling:
    """`kind`, the topic and its epoch are stored in the metadata of each ledger; orphans.py decides
    by them whether a ledger is an orphan. `quorum` is called for each new ledger."""

    __slots__ = ("_kind", "_ledgers", "_owned_record", "_quorum", "_retry_s", "trouble")

    def __init__(
        self,
        owned_record: OwnedRecord,
        ledgers: LedgerStore,
        *,
        kind: str,
        retry_s_first: float,
        retry_s_max: float,
        quorum: Callable[[], Quorum | None],
    ) -> None:
        self._owned_record = owned_record
        self._ledgers = ledgers
        self._quorum = quorum
        self._kind = kind
        self._retry_s = (retry_s_first, retry_s_max)
        self.trouble = ""  # for error texts: the retried call, and the reason; "": none

    async def create(self, *, newer_than: LedgerId) -> Appender:
        """Create a ledger. Raises LogFenced."""
        delays, owned = self.delays(), self._owned_record
        custom = custom_of(str(owned.name), kind=self._kind, epoch=owned.epoch)
        while True:
            self._raise_if_lost()
            try:
                return self._done(
                    await self._ledgers.create(
                        newer_than=newer_than, custom=custom, quorum=self._quorum()
                    )
                )
            except (LedgerError, MetadataError) as error:
                await self._pause(next(delays), "creating a ledger", error)

    async def close(self, appender: Appender) -> LedgerMetadata:
        """Close the ledger, or recover it if the close fails. Returns the metadata of the closed
        ledger.

        A fenced ledger does not prove that this broker has lost the topic (the replicator recovers
        a ledger whose writer does not replace a lost bookie): the topic's record decides. Raises
        LogFenced, LogDamaged. Raises LogUnavailable if the ledger is fenced and the record cannot
        be read: another broker probably owns the topic, and clients look the topic up again only
        after this log has ended.
        """
        delays = self.delays()
        while True:
            self._raise_if_lost()
            try:
                return self._done(await appender.close())
            except MetadataError as error:
                trouble: Exception = error
            except LedgerError as error:
                trouble = error
                if not isinstance(error, LedgerNotFound):
                    try:
                        await self._owned_record.verify()
                        return self._done(await self._ledgers.recover(appender.ledger))
                    except LogUnavailable as failure:
                        if isinstance(error, LedgerFenced):
                            raise
                        trouble = failure
                    except (LedgerError, MetadataError) as failure:
                        trouble = failure
            if isinstance(trouble, LedgerNotFound):
                raise self._owned_record.lose(str(trouble)) from trouble
            await self._pause(next(delays), f"closing ledger {appender.ledger}", trouble)

    async def record(self, change: Callable[[TopicRecord], TopicRecord]) -> None:
        """Change the topic's record. Raises LogFenced, LogDamaged, TopicFull."""
        delays = self.delays()
        while True:
            try:
                await self._owned_record.change(change)
                self.trouble = ""
                return
            except LogUnavailable as error:
                await self._pause(next(delays), "changing the topic's record", error)

    async def discard(self, appender: Appender) -> None:
        """Delete a ledger that is not in the record. If this fails, the ledger is an orphan."""
        appender.abandon()
        try:
            await self._ledgers.delete(appender.ledger)
        except (LedgerError, MetadataError) as error:
            log.warning("an orphaned ledger remains", ledger=appender.ledger, error=str(error))

    def delays(self) -> Iterator[float]:
        # Every topic draws its own delays, so that not all retry at once after an outage. A
        # generator of random numbers takes 2.5 KB, so it is made at the first failure.
        record = self._owned_record
        chance = random.Random(f"{record.name} {record.epoch} {self._kind}")
        yield from Backoff(*self._retry_s, chance).delays()

    def _raise_if_lost(self) -> None:
        if self._owned_record.lost is not None:
            raise self._owned_record.lost

    def _done(self, result: T) -> T:
        self.trouble = ""
        return result

    async def _pause(self, delay_s: float, doing: str, error: Exception) -> None:
        topic = str(self._owned_record.name)
        self.trouble = f"{doing} failed: {error}"
        why = str(error)
        log.warning("a call failed, retrying", topic=topic, doing=doing, error=why, after_s=delay_s)
        await asyncio.sleep(delay_s)


def with_data_ledgers(
    record: TopicRecord, ledgers: tuple[TopicLedger, ...], head: DroppedHead | None
) -> TopicRecord:
    """Return the record with these data ledgers and this dropped head. Data ledgers that only
    `record` lists become listed as being deleted."""
    kept = {part.ledger for part in ledgers}
    gone = [part.ledger for part in record.ledgers if part.ledger not in kept]
    return dropping(replace(record, ledgers=ledgers, dropped=head), gone)
