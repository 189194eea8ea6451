"""The topic's record while this broker owns the topic, and what guards its changes.

Taking a topic over bumps the epoch in its record. Each later change is a compare-and-set that
checks this epoch, so the changes of a stale owner fail. The *incarnation* is drawn when a topic is
created, and checked beside the epoch: a topic that was deleted and created again may have the same
epoch. Finding another owner's epoch, another incarnation, or a record that is being deleted ends
the ownership for good (LogFenced). A change under our own epoch by another process (for example an
administrator's properties) does not: our change is made again on top of it.

One write of the record is in flight at a time. The changes that are asked for meanwhile are made
together by the next write, in FIFO order: at once they would race each other, and each lost race
costs a whole record."""

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
"""Time limit of one change: as long as a session may be away by default. Callers decide whether to
continue."""


def _always() -> bool:
    return True


CHANGES_MAX: Final = 50
"""Changes made by one write. A change costs up to 0.3 ms in one step of the loop, with 1,000
subscriptions."""

VERSIONS_PASSED_MAX: Final = 1_000
"""To pass this many versions takes some seconds. If the deleted record was changed more often, a
stale owner could still do harm, but only after the new record was changed as often."""


class _Change:
    """One change that a caller waits for."""

    __slots__ = ("error", "is_done", "make")

    def __init__(self, make: Callable[[TopicRecord], TopicRecord]) -> None:
        self.make = make
        self.is_done = False
        self.error: Exception | None = None  # None: it is not done, or it was made


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
        """Use `take`. `record` is `taken`, decoded."""
        self.name = name
        self._store = store
        self._version = taken.version
        # Decoding takes 8 ms for a record of 1,000 ledgers: values that are known are not decoded.
        self._value = taken.value  # the encoded value of `record`
        self.record = (
            record  # the stored record, as far as this owner knows; only this owner may change it
        )
        self.epoch = self.record.epoch
        self.incarnation = self.record.incarnation
        self.lost: LogFenced | None = None  # None: as far as this broker knows, it owns the topic
        self._successor: TopicRecord | None = None  # None: no other owner's record was seen
        self._watchers: list[Callable[[], None]] = []
        self._turn: asyncio.Lock | None = None  # held during a write; None: no change waits
        self._waiting: list[_Change] = []  # changes that wait for their turn
        self.on_listed: Callable[[], None] = _ignore  # ledgers are listed as being deleted

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
        """Bump the epoch. A topic that has no record gets one if `create`, with this `incarnation`
        and an epoch above `epoch_min`. A record without an incarnation gets this one: it was
        written by an earlier version of Magnetar. A record that is created ends above `version_min`
        (see `_pass_version`). `holds` tells whether this broker still owns the
        topic's bundle: otherwise the next owner would be fenced.

        Raises NotOwner, LogUnavailable, LogDamaged, TopicFull, TopicDeleted (it is being deleted),
        TopicNotFound (only if not `create`).
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
        """Change the record. `change` may be asked again and must know its own work.

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
        """Make the first of those that wait. They keep waiting if this is cancelled."""
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
        """Raises what fails all of them."""
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
        """Raises LogFenced."""
        if record.deleted:
            self._successor = record
            raise self.lose("it was deleted")
        if (record.epoch, record.incarnation) != (self.epoch, self.incarnation):
            self._successor = record
            if record.incarnation != self.incarnation:
                raise self.lose("it was deleted and created again")
            raise self.lose(f"epoch {record.epoch} has begun, ours was {self.epoch}")

    def _changed(self, record: TopicRecord, change: _Change) -> TopicRecord:
        """The record with one more change, unless the change refuses: then its caller is told."""
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
        """Make sure that the topic is still ours, at some moment after this call. Raises LogFenced,
        LogUnavailable, LogDamaged."""
        try:
            await self._store.sync(topic_path(self.name))
        except MetadataError as error:
            raise LogUnavailable(str(self.name), "reading its record", error) from error
        await self.change(lambda record: record)

    def lose(self, why: str) -> LogFenced:
        """The topic is no longer ours. Returns the error to raise."""
        if self.lost is None:
            self.lost = LogFenced(str(self.name), why)
            for watcher in tuple(self._watchers):
                watcher()
        return self.lost

    def may_be_recorded(self, ledger: LedgerId) -> bool:
        """Whether the record may list this ledger: a change of ours whose reply was lost may have
        been made just before the topic was taken over, and then the ledger is the new owner's."""
        record = self._successor
        if record is None:
            return True
        listed = {part.ledger for part in record.ledgers}
        return ledger in listed or ledger in (*record.cursor_ledgers, *record.delayed_ledgers)

    def watch(self, callback: Callable[[], None]) -> None:
        """Called once when the ownership is lost."""
        self._watchers.append(callback)

    async def forget(self, deleted: Collection[LedgerId]) -> None:
        """Take deleted ledgers from the list. Raises what `change` raises."""
        await self.change(lambda record: _without_deleted(record, deleted))


def topic_path(name: TopicName) -> str:
    return paths.topic(name.tenant, name.namespace, name.domain, name.topic)


def dropping(record: TopicRecord, ledgers: Collection[LedgerId]) -> TopicRecord:
    """The record with these ledgers waiting for their deletion; they are in no list of it any
    more."""
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
    """One write without a read before it. None: there is a record, or the outcome is unknown."""
    try:
        async with asyncio.timeout(METADATA_TIMEOUT_S):
            return Versioned(value, await store.put(topic_path(name), value, expected=ABSENT))
    except (MetadataError, TimeoutError):
        return None  # `_update` reads the record, and reports what is wrong


async def _pass_version(
    name: TopicName, store: MetadataStore, taken: Versioned, version_min: int
) -> Versioned:
    """Write the new record until its version is above that of a deleted topic of the same name.
    Versions begin at 0 again when a record is created again: a stale owner that has read the
    deleted topic's record, and was stopped before its write, would otherwise write over the new
    record. If it does so before this ends, the new record is restored: nothing depends on it
    yet."""
    if taken.version > version_min:
        return taken
    ours = decode_topic(taken.value)

    def write(stored: bytes | None) -> bytes:
        found = ours if stored is None else decode_topic(stored)
        if found.incarnation == ours.incarnation and found.epoch != ours.epoch:
            raise LogFenced(str(name), f"epoch {found.epoch} has begun, ours was {ours.epoch}")
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
        why = f"its record would have {error.size} bytes of {error.limit}"
        raise TopicFull(str(name), why) from error
    except MetadataError as error:
        raise LogUnavailable(str(name), "changing its record", error) from error
