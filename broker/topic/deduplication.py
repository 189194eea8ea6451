"""Deduplication of one topic: switched by policy, restored at the open, journaled periodically.

While the policy is on, the stage (duplicates.py) drops entries that are stored already. The
sequence ids of durable entries are kept in memory, and are journaled beside the cursors. The broker
journals them when `entries_interval` entries or SNAPSHOT_BYTES bytes are durable since the last
time, `interval_s` seconds after the last time, when the log drops ledgers, and at a clean close.
Before a truncation drops ledgers that a new owner would have to read, it waits until the sequence
ids are journaled.

A new owner reads the journaled sequence ids and then the later entries of the log. So the new owner
recognises every message for which the former owner sent a receipt, also when the former owner died
before it journaled the message's sequence id.

Deduplication knows the sequence ids of the entries that are confirmed after it was switched on, and
no earlier ones. Switching it off forgets all sequence ids.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.cursor.journal import Waiting
from magnetar.broker.cursor.sequences import SEQUENCE_ID_MAX
from magnetar.broker.errors import BrokerError, LogUnavailable
from magnetar.broker.log.position import Position
from magnetar.broker.topic.duplicates import DuplicatesStage
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection

    from magnetar.broker.cursor.cursors import Cursors
    from magnetar.broker.cursor.sequences import Sequences
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.outstanding import Appended
    from magnetar.broker.policies.source import PolicySource
    from magnetar.broker.topic.pipeline import Publish
    from magnetar.runtime.clock import Clock

REPLAY_ENTRIES_MAX: Final = 1_000
REPLAY_BYTES_MAX: Final = 4 << 20
"""The maximum bytes of one read of the log, when sequence ids are restored."""

SNAPSHOT_BYTES: Final = 64 << 20
"""The number of published bytes after which the broker journals the sequence ids again. A recovery
then reads little more than these bytes."""

FLUSH_TIMEOUT_S: Final = 30.0
"""The maximum time for which `flush` waits until the journal is written. The journal needs bookies
that accept new ledgers."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeduplicationConfig:
    entries_interval: int = 1_000
    interval_s: float = 120.0
    inactivity_s: float = 6 * 3600.0
    producers_max: int = 10_000


class Deduplication:
    """The deduplication of one topic. Create it with `open`, before the topic accepts publishes."""

    __slots__ = (
        "_bytes",
        "_clock",
        "_config",
        "_cursors",
        "_entries",
        "_log",
        "_noted_at",
        "_policies",
        "_switching",
        "stage",
    )

    def __init__(
        self,
        topic_log: Log,
        cursors: Cursors,
        policies: PolicySource,
        clock: Clock,
        config: DeduplicationConfig,
    ) -> None:
        self.stage = DuplicatesStage()
        self._log = topic_log
        self._cursors = cursors
        self._policies = policies
        self._clock = clock
        self._config = config
        self._entries = 0  # the number of entries since the last call of `snapshot`
        self._bytes = 0
        self._noted_at = asyncio.get_running_loop().time()
        self._switching: asyncio.Lock | None = None  # None: no switch was needed yet

    @classmethod
    async def open(
        cls,
        topic_log: Log,
        cursors: Cursors,
        policies: PolicySource,
        clock: Clock,
        config: DeduplicationConfig,
    ) -> Deduplication:
        """Restore the journaled sequence ids. If there are none, or the policy is off and up to
        date, switch deduplication on or off as `follow` does. Raises LogError."""
        it = cls(topic_log, cursors, policies, clock, config)
        if cursors.sequences is not None and (it.wanted or not policies.is_fresh):
            await it._replay(cursors.sequences)
            it.stage.sequences = cursors.sequences
        else:
            await it.follow()
        return it

    @property
    def wanted(self) -> bool:
        return self._policies.effective.deduplication

    @property
    def enabled(self) -> bool:
        return self.stage.sequences is not None

    @property
    def is_settled(self) -> bool:
        """True when deduplication is on or off as the policy says."""
        return self.wanted == self.enabled == (self._cursors.sequences is not None)

    async def follow(self) -> None:
        """Switch deduplication on or off as the policy says. Does not switch it off while the
        policies are not up to date. Raises LogError."""
        if self._switching is None:
            if self.is_settled:
                return
            self._switching = asyncio.Lock()
        async with self._switching:
            while not self.is_settled:
                if self._is_half_off:
                    await self._disable()
                elif self.wanted:
                    await self._enable()
                elif self._policies.is_fresh:
                    await self._disable()
                else:
                    return

    async def switch(self) -> None:
        """Carry out a change of the policy. A failure is logged: the next visit tries again."""
        try:
            await self.follow()
        except BrokerError as error:
            name = str(self._log.name)
            log.warning("deduplication was not switched", topic=name, error=repr(error))

    def last_sequence_id(self, producer: str) -> int:
        """The highest stored sequence id; -1: deduplication is off, or no sequence id is known."""
        return self.stage.last_sequence_id(producer)

    def on_appended(self, part: Appended, publish: Publish) -> None:
        """These entries are durable. The topic calls this in the log's order, before it sends the
        receipts."""
        if self.stage.sequences is None:
            return
        at = Position(part.ledger, part.first_entry + part.count - 1)
        self.stage.on_appended(publish, part.start, part.stop, at, part.run.timestamp_ms)
        self._entries += part.count
        self._bytes += part.bytes
        if self._entries >= self._config.entries_interval or self._bytes >= SNAPSHOT_BYTES:
            self.snapshot()

    def snapshot(self) -> None:
        """Ask the cursors to journal the sequence ids soon."""
        self._entries = self._bytes = 0
        self._noted_at = asyncio.get_running_loop().time()
        self._cursors.note_sequences()

    async def flush(self) -> None:
        """Wait until the sequence ids of all entries so far are durable. Returns at once while
        deduplication is off. Raises LogError (LogUnavailable after FLUSH_TIMEOUT_S),
        TooManyReceipts."""
        if self._switching is not None:
            async with self._switching:
                if self.enabled and self._cursors.sequences is None:
                    await self._enable()  # the last attempt has failed
        if self._cursors.sequences is None:
            return
        written = Waiting()
        self._cursors.note_sequences(written)
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await written.wait()
        except TimeoutError as error:
            raise LogUnavailable(str(self._log.name), "storing sequence ids", error) from error

    async def visit(self, connected: Collection[str]) -> None:
        """Do the periodic work: journal sequence ids if that is due, and forget the producers that
        are not connected and have stored no entry for `inactivity_s`. Raises LogError."""
        if not self.is_settled:
            await self.follow()
        sequences = self.stage.sequences
        if sequences is None:
            return
        self.stage.forget_idle()
        before_ms = self._clock.now_ms() - int(self._config.inactivity_s * 1_000)
        sequences.forget_inactive(before_ms, connected=connected)
        is_due = asyncio.get_running_loop().time() - self._noted_at >= self._config.interval_s
        if self._entries and is_due:
            self.snapshot()

    @property
    def _is_half_off(self) -> bool:
        """True when the cursors have sequence ids that the stage does not use: at an open with the
        policy off, or after a failed `_disable`. The topic's record may lack these sequence ids."""
        return self._cursors.sequences is not None and not self.enabled

    async def _enable(self) -> None:
        # Entries that are in flight now are noted when the log reports them as durable.
        sequences = self.stage.sequences or self._cursors.new_sequences(self._log.confirmed)
        self.stage.sequences = sequences
        await self._cursors.add_sequences(sequences)
        log.info("deduplication is on", topic=str(self._log.name), producers=sequences.count)

    async def _disable(self) -> None:
        self.stage.clear()
        await self._cursors.drop_sequences()
        log.info("deduplication is off", topic=str(self._log.name))

    async def _replay(self, sequences: Sequences) -> None:
        """Read the entries after the position that `sequences` covers; add their sequence ids.
        These entries count towards the next snapshot. Otherwise, after each owner that dies early,
        the next owner would have more entries to read."""
        chain = self._log.chain
        while True:
            entries = await self._log.read(
                chain.next_position(sequences.through),
                entries_max=REPLAY_ENTRIES_MAX,
                bytes_max=REPLAY_BYTES_MAX,
            )
            if not entries:
                return
            self._entries += len(entries)
            self._bytes += sum(len(entry.data) for entry in entries)
            for entry in entries:
                view = entry.view
                if view.chunk is not None and view.chunk.index + 1 < view.chunk.count:
                    sequences.cover(entry.position)
                    continue
                number = min(view.highest_sequence_id, SEQUENCE_ID_MAX)
                sequences.put(view.producer_name, number, entry.position, entry.broker_timestamp_ms)
