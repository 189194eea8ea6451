"""The topic's record while this broker owns the topic, and the checks that guard its changes.

To take a topic over, a broker bumps the epoch in its record. Each later change is a compare-and-set
that checks this epoch, so the changes of a stale owner fail. The *incarnation* is drawn when a
topic is created. Each change also checks the incarnation: a topic that was deleted and created
again may have the same epoch.

The ownership ends permanently (LogFenced) when the broker finds another owner's epoch, another
incarnation, or a record that is deleted. It does not end when another process changes the record
under our own epoch (for example an administrator's properties): the broker makes its change again
on top of that change.

One write of the record is in flight at a time. The next write makes all changes that were requested
meanwhile, in FIFO order. Concurrent writes would race each other, and each lost race costs one
write of the whole record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import (
    BrokerError,
    LogDamaged,
    LogFenced,
    LogUnavailable,
    NotOwner,
    TopicDeleted,
    TopicFull,
    TopicNotFound,
)
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_topic, encode_topic
from magnetar.metadata.errors import InvalidRecord, MetadataError, ValueTooLarge
from magnetar.metadata.model import NO_LEDGER, TopicRecord
from magnetar.metadata.store import ABSENT, KEEP, Verdict, Versioned, update

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from magnetar.metadata.model import LedgerId
    from magnetar.metadata.store import Change, MetadataStore
    from magnetar.protos.names import TopicName

METADATA_TIMEOUT_S: Final = 10.0
"""Time limit of one change: the default timeout of a ZooKeeper session. After it the caller decides
whether to try again."""


def _always() -> bool:
    return True


CHANGES_MAX: Final = 50
"""The maximum number of changes made by one write. With 1,000 subscriptions, each change blocks the
event loop for up to 0.3 ms."""

VERSIONS_PASSED_MAX: Final = 1_000
"""The maximum number of versions that a new record passes, which takes some seconds. If the deleted
record was changed more often, a stale owner's write could still succeed, but only after the new
record was changed as often."""


class _Change:
    """One change of the record, for which a caller waits."""

    __slots__ = ("error", "is_done", "make")

    def __init__(self, make: Callable[[TopicRecord], TopicRecord]) -> None:
        self.make = make
        self.is_done = False
        self.error: Exception | None = None  # None: the change is not done, or was made


class OwnedRecord:
    __slots__ = (
        "_store",
        "_successor",
        "_turn",
        "_value",
        "_version",
        "_waiting",
        "_watchers",
        "epoch",
        "incarnation",
        "lost",
        "name",
        "on_listed",
        "record",
    )

    def __init__(
        self, name: TopicName, store: MetadataStore, taken: Versioned, record: TopicRecord
    ) -> None:
        """Call `take` instead. `record` is `taken`, decoded."""
        self.name = name
        self._store = store
        self._version = taken.version
        # Decoding takes 8 ms for a record of 1,000 ledgers: values that are known are not decoded.
        self._value = taken.value  # the encoded value of `record`
        self.record = record  # the stored record as this owner last saw it
        self.epoch = self.record.epoch
        self.incarnation = self.record.incarnation
        self.lost: LogFenced | None = None  # None: as far as this broker knows, it owns the topic
        self._successor: TopicRecord | None = None  # None: no other owner's record was seen
        self._watchers: list[Callable[[], None]] = []
        self._turn: asyncio.Lock | None = None  # held during a write; None: no change waits
        self._waiting: list[_Change] = []  # changes that wait for their turn
        self.on_listed: Callable[[], None] = _ignore  # more ledgers are listed as being deleted

    @classmethod
    async def take(
        cls,
        name: TopicName,
        store: MetadataStore,
        *,
        incarnation: str,
        create: bool = True,
        epoch_min: int = 0,
        version_min: int = -1,
        holds: Callable[[], bool] = _always,
    ) -> OwnedRecord:
        """Take the topic over: bump the epoch in its record.

        A topic without a record gets one if `create`, with this `incarnation` and an epoch above
        `epoch_min`. A record without an incarnation gets this one: an earlier version of Magnetar
        wrote that record. With `create`, the record's version is above `version_min` on return (see
        `_pass_version`). `holds` returns False when this broker no longer owns the topic's bundle:
        then the epoch stays, because a bump would fence the next owner.

        Raises NotOwner (`holds` returned False), LogFenced (another broker took the topic
        meanwhile), LogUnavailable, LogDamaged, TopicFull, TopicDeleted (the topic is being
        deleted), TopicNotFound (only if not `create`).
        """

        bumped: tuple[bytes, TopicRecord] | None = None

        def bump(stored: bytes | None) -> bytes:
            nonlocal bumped
            if not holds():
                raise NotOwner(str(name))
            # If the reply to a bump was lost, the epoch is bumped again: only the last bump counts.
            if stored is None and not create:
                raise TopicNotFound(str(name))
            record = TopicRecord(epoch_min) if stored is None else decode_topic(stored)
            if record.deleted:
                raise TopicDeleted(str(name))
            drawn = record.incarnation or incarnation
            record = replace(record, epoch=record.epoch + 1, incarnation=drawn)
            bumped = encode_topic(record), record
            return bumped[0]

        taken = None
        if create:  # usually the caller has found no record
            taken = await _try_create(name, store, bump(None))
        if taken is None:
            taken = await _update(name, store, bump)
            assert taken is not None
        if create:
            taken = await _pass_version(name, store, taken, min(version_min, VERSIONS_PASSED_MAX))
        assert bumped is not None
        ours = bumped[0] == taken.value
        return cls(name, store, taken, bumped[1] if ours else decode_topic(taken.value))

    async def change(self, change: Callable[[TopicRecord], TopicRecord]) -> None:
        """Change the record. `change` may be called again with a record that it has changed
        already; it must then return an equal record.

        Raises LogFenced when the topic is no longer ours, LogUnavailable (the change may or may not
        have been made; making it again is safe), LogDamaged, TopicFull (it was not made).
        """
        if self.lost is not None:
            raise self.lost
        ours = _Change(change)
        self._waiting.append(ours)
        if self._turn is None:  # it takes 350 bytes, and most topics are idle
            self._turn = asyncio.Lock()
        try:
            async with self._turn:
                if not ours.is_done:  # otherwise it is the first change that waits
                    await self._write(self._waiting[:CHANGES_MAX])
        finally:
            if not ours.is_done:  # the caller was cancelled
                self._waiting.remove(ours)
            if not self._waiting:  # a task that waits for the turn has nothing to write
                self._turn = None
        if ours.error is not None:
            raise ours.error

    async def _write(self, changes: Sequence[_Change]) -> None:
        """Make `changes`, the first of the changes that wait. If this is cancelled, they still
        wait."""
        try:
            await self._make(changes)
        except TopicFull as error:
            if len(changes) > 1:  # find out which of them does not fit
                await self._write(changes[:1])
                return
            changes[0].error = error
        except BrokerError as error:
            for each in changes:
                each.error = error
        for each in changes:
            each.is_done = True
        self._waiting = [each for each in self._waiting if not each.is_done]

    async def _make(self, changes: Sequence[_Change]) -> None:
        """Make all of `changes` in one write. Raises an error that applies to all of them."""
        if self.lost is not None:
            raise self.lost
        written: tuple[bytes, TopicRecord] | None = None  # None: there was nothing to change

        def apply(stored: bytes | None) -> bytes | Verdict:
            nonlocal written
            before = TopicRecord(0, deleted=True) if stored is None else self._decoded(stored)
            self._require_ours(before)
            record = before
            for each in changes:
                record = self._changed(record, each)
            if record == before:
                return KEEP
            written = encode_topic(record), record
            return written[0]

        known = Versioned(self._value, self._version)
        found = await _update(self.name, self._store, apply, known)
        assert found is not None
        if found.version > self._version:
            deleting = self.record.deleting
            if written is not None and written[0] == found.value:
                self.record = written[1]
            else:
                self.record = self._decoded(found.value)
            self._version, self._value = found.version, found.value
            if set(self.record.deleting) - set(deleting):
                self.on_listed()

    def _require_ours(self, record: TopicRecord) -> None:
        """Raise LogFenced if `record` is deleted or belongs to another owner."""
        if record.deleted:
            self._successor = record
            raise self.lose("it was deleted")
        if (record.epoch, record.incarnation) != (self.epoch, self.incarnation):
            self._successor = record
            if record.incarnation != self.incarnation:
                raise self.lose("it was deleted and created again")
            raise self.lose(
                f"another broker owns it at epoch {record.epoch}, ours was {self.epoch}"
            )

    def _changed(self, record: TopicRecord, change: _Change) -> TopicRecord:
        """The record with one more change. If the change raises an error, its caller gets the
        error, and the record stays as it was."""
        change.error = None
        try:
            if record.deleted:  # an earlier change deleted it
                raise LogFenced(str(self.name), "it is being deleted")
            return change.make(record)
        except BrokerError as error:
            change.error = error
            return record

    def _decoded(self, value: bytes) -> TopicRecord:
        return self.record if value == self._value else decode_topic(value)

    async def verify(self) -> None:
        """Check that this broker owns the topic at some moment after the call began. Raises
        LogFenced, LogUnavailable, LogDamaged."""
        try:
            await self._store.sync(topic_path(self.name))
        except MetadataError as error:
            raise LogUnavailable(str(self.name), "reading its record", error) from error
        await self.change(lambda record: record)

    def lose(self, why: str) -> LogFenced:
        """End the ownership: the topic is no longer ours. Returns the error to raise."""
        if self.lost is None:
            self.lost = LogFenced(str(self.name), why)
            for watcher in tuple(self._watchers):
                watcher()
        return self.lost

    def may_be_recorded(self, ledger: LedgerId) -> bool:
        """Return whether the record may list this ledger. A change of ours whose reply was lost may
        have been made just before another broker took the topic over. The ledger then belongs to
        the new owner."""
        record = self._successor
        if record is None:
            return True
        listed = {part.ledger for part in record.ledgers}
        return ledger in listed or ledger in (*record.cursor_ledgers, *record.delayed_ledgers)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the ownership is lost."""
        self._watchers.append(callback)

    async def forget(self, deleted: Collection[LedgerId]) -> None:
        """Remove deleted ledgers from the list of ledgers that are being deleted. Raises the same
        errors as `change`."""
        await self.change(lambda record: _without_deleted(record, deleted))


def topic_path(name: TopicName) -> str:
    return paths.topic(name.tenant, name.namespace, name.domain, name.topic)


def dropping(record: TopicRecord, ledgers: Collection[LedgerId]) -> TopicRecord:
    """The record that lists these ledgers as being deleted. The caller has removed them from all
    other lists of the record."""
    listed = set(record.deleting)
    more = tuple(ledger for ledger in ledgers if ledger not in listed)
    return replace(record, deleting=record.deleting + more)


def _without_deleted(record: TopicRecord, deleted: Collection[LedgerId]) -> TopicRecord:
    gone = set(deleted)
    left = tuple(ledger for ledger in record.deleting if ledger not in gone)
    return replace(record, deleting=left)


def _ignore() -> None:
    """Do nothing: the deletion is not started yet, and reads the list when it starts."""


async def _try_create(name: TopicName, store: MetadataStore, value: bytes) -> Versioned | None:
    """Create the record in one write, without a read before. None: the topic has a record, or the
    outcome is unknown."""
    try:
        async with asyncio.timeout(METADATA_TIMEOUT_S):
            return Versioned(value, await store.put(topic_path(name), value, expected=ABSENT))
    except (MetadataError, TimeoutError):
        return None  # `_update` reads the record, and raises the error


async def _pass_version(
    name: TopicName, store: MetadataStore, taken: Versioned, version_min: int
) -> Versioned:
    """Write the new record until its version is above that of the deleted topic's record.

    Versions begin at 0 again when a record is created again. A stale owner may have read the
    deleted topic's record and not written it yet. Without the higher version, its write could
    replace the new record. If the stale owner writes before this function ends, the function writes
    the new record again: nothing depends on the record yet."""
    if taken.version > version_min:
        return taken
    ours = decode_topic(taken.value)

    def write(stored: bytes | None) -> bytes:
        found = ours if stored is None else decode_topic(stored)
        if found.incarnation == ours.incarnation and found.epoch != ours.epoch:
            why = f"another broker owns it at epoch {found.epoch}, ours was {ours.epoch}"
            raise LogFenced(str(name), why)
        return taken.value

    last = taken
    while last.version <= version_min:
        written = await _update(name, store, write)
        assert written is not None
        last = written
    return last


async def _update(
    name: TopicName, store: MetadataStore, change: Change, known: Versioned | None = None
) -> Versioned | None:
    deadline = asyncio.get_running_loop().time() + METADATA_TIMEOUT_S
    try:
        return await update(store, topic_path(name), change, deadline=deadline, known=known)
    except InvalidRecord as error:
        raise LogDamaged(str(name), NO_LEDGER, str(error)) from error
    except ValueTooLarge as error:  # trying again would not help
        why = f"its record would have {error.size} bytes; the limit is {error.limit}"
        raise TopicFull(str(name), why) from error
    except MetadataError as error:
        raise LogUnavailable(str(name), "changing its record", error) from error
