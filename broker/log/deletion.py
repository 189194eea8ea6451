"""Deletes the ledgers that a topic no longer uses, in two phases.

Theory of operation. The broker first lists a ledger in the topic's record as being deleted. The
same compare-and-set takes the ledger out of use. Then the broker deletes the ledger's metadata, and
the bookies collect their copies. Last, the broker removes the ledger from the list. A crash at any
step leaves the ledger in the list, and the next owner finishes the deletion. Deleting a deleted
ledger does nothing.

Deletions run in a task of their own, so appends and new ledgers do not wait for them. The task
exists only while ledgers are listed.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.broker.errors import LogError
from magnetar.metadata.errors import InvalidRecord, MetadataError
from magnetar.runtime.log import get_logger
from magnetar.runtime.on_demand import OnDemandTask
from magnetar.runtime.supervise import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.broker.log.owned_record import OwnedRecord
    from magnetar.metadata.model import LedgerId
    from magnetar.runtime.on_demand import Spawn

log = get_logger(__name__)

RETRY_S_FIRST: Final = 1.0
RETRY_S_MAX: Final = 600.0
"""Attempts have no limit: after an outage of the metadata store, the space is freed without an
operator. An attempt costs one failed call, and the delay grows to ten minutes."""

LEDGERS_PER_PASS: Final = 100
"""Ledgers deleted between two changes of the topic's record. A crash repeats at most this many
deletions."""

LEDGERS_AT_CLOSE: Final = 8
"""The maximum number of ledgers deleted when the log closes. The next owner waits for the close, so
the other ledgers are left to it. The usual list has a cursor ledger and an empty data ledger."""


class Deletion:
    """Deletes the ledgers that one topic's record lists as being deleted."""

    __slots__ = ("_ledgers", "_on_progress", "_owned_record", "_refused", "_task")

    def __init__(
        self, owned_record: OwnedRecord, ledgers: LedgerStore, on_progress: Callable[[], None]
    ) -> None:
        """`on_progress` is called after deleted ledgers were removed from the record."""
        self._owned_record = owned_record
        self._on_progress = on_progress
        self._ledgers = ledgers
        # Ledgers with unreadable metadata, which cannot be deleted. Usually empty.
        self._refused: frozenset[LedgerId] = frozenset()
        self._task = OnDemandTask("deletions", self._delete_all, of=owned_record.name)

    def start(self, spawn: Spawn) -> None:
        """Delete the listed ledgers, and those that will be listed, in a task that `spawn`
        starts."""
        self._task.start(spawn)
        self._owned_record.on_listed = self._task.wake
        if self._left:
            self._task.wake()

    def cancel(self) -> None:
        """Stop: the next owner finishes the deletions."""
        self._task.cancel()

    @property
    def is_idle(self) -> bool:
        return self._task.is_idle

    async def finish(self) -> None:
        """Try once to delete the first LEDGERS_AT_CLOSE ledgers. A closing log calls this."""
        await self._delete_some(LEDGERS_AT_CLOSE)

    @property
    def _left(self) -> list[LedgerId]:
        listed = self._owned_record.record.deleting
        return [ledger for ledger in listed if ledger not in self._refused]

    async def _delete_all(self) -> None:
        delays = self._delays()
        while self._left and self._owned_record.lost is None:
            if await self._delete_some(LEDGERS_PER_PASS):
                delays = self._delays()
                self._on_progress()
            else:
                await asyncio.sleep(next(delays))

    async def _delete_some(self, ledgers_max: int) -> bool:
        """Delete the first listed ledgers. Returns False after a failure that may be temporary."""
        deleted: list[LedgerId] = []
        failure: Exception | None = None
        for ledger in self._left[:ledgers_max]:
            try:
                await self._ledgers.delete(ledger)
            except InvalidRecord as error:  # delete the ledgers after it anyway
                self._refused |= {ledger}
                why = str(error)
                log.warning("cannot delete a ledger", topic=self._name, ledger=ledger, error=why)
            except (LedgerError, MetadataError) as error:
                failure = error
                break
            else:
                deleted.append(ledger)
        try:
            if deleted:
                await self._owned_record.forget(deleted)
        except LogError as error:  # the ledgers stay listed, and the deletion is tried again
            failure = error
        if failure is not None:
            log.warning("deleting ledgers failed", topic=self._name, error=str(failure))
        return failure is None

    def _delays(self) -> Iterator[float]:
        # Each topic has its own delays, so that not all retry at once after an outage.
        record = self._owned_record
        chance = random.Random(f"{record.name} {record.epoch} deletion")
        yield from Backoff(RETRY_S_FIRST, RETRY_S_MAX, chance).delays()

    @property
    def _name(self) -> str:
        return str(self._owned_record.name)
