"""The topic's record while this broker owns the topic, and the checks that guard its changes.

To take a topic over, a broker increments the epoch in the topic's record. Each later change is a
compare-and-set that checks this epoch, so the changes of a stale owner fail. The record also has an
*incarnation*, a random value from the creation of the topic. Each change checks the incarnation
too: a topic that was deleted and created again may have the same epoch.

The ownership ends permanently (LogFenced) when the broker finds another owner's epoch, another
incarnation, or a deleted record. Another process may change the record without a new epoch, for
example to set an administrator's properties. The broker then keeps the ownership, and applies its
own change to the new record.

One write of the record is in flight at a time. The next write makes the changes that were requested
meanwhile, in FIFO order. Concurrent writes would conflict, and each conflict costs another write of
the whole record."""

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
from magnetar.metadata.codec import decode_tombstone, decode_topic, encode_topic
from magnetar.metadata.errors import InvalidRecord, MetadataError, ValueTooLarge
from magnetar.metadata.model import NO_LEDGER, TopicRecord
from magnetar.metadata.store import ABSENT, KEEP, Verdict, Versioned, update

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from magnetar.metadata.model import LedgerId, TopicTombstone
    from magnetar.metadata.store import Change, MetadataStore
    from magnetar.protos.names import TopicName

METADATA_TIMEOUT_S: Final = 10.0
"""The time limit of one change in seconds, equal to the default timeout of a ZooKeeper session.
After the limit, the caller decides whether to try again."""


def _always() -> bool:
    return True


CHANGES_MAX: Final = 50
"""The maximum number of changes in one write. In a record of 1,000 subscriptions, each change
blocks the event loop for up to 0.3 ms."""

VERSIONS_PASSED_MAX: Final = 1_000
"""The maximum of `version_min` in `OwnedRecord.take`. `take` writes a new record once for each
version up to `version_min`, and 1,000 writes take some seconds. A stale owner's write succeeds only
while the record has the version that the stale owner last read. So if the stale owner of a
deleted topic last read a version above this maximum, it could still overwrite the new topic's
record."""


class _Change:
    """One change of the record, for which a caller waits."""

    __slots__ = ("error", "is_done", "make")

    def __init__(self, make: Callable[[TopicRecord], TopicRecord]) -> None:
        self.make = make
        self.is_done = False
        self.error: Exception | None = None  # None: the change was made, or waits


class _NeverTaken(Exception):
    """PartitionedTopics wrote the record, and no broker has taken the topic yet."""


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
        """Use `take` to create an OwnedRecord. `record` is the decoded value of `taken`."""
        self.name = name
        self._store = store
        self._version = taken.version
        # Decoding a record of 1,000 ledgers takes 8 ms, so an equal value is not decoded again.
        self._value = taken.value  # the encoded value of `record`
        self.record = record  # the stored record as this owner last saw it
        self.epoch = self.record.epoch
        self.incarnation = self.record.incarnation
        self.lost: LogFenced | None = None  # None: as far as this broker knows, it owns the topic
        self._successor: TopicRecord | None = None  # the record that ended the ownership
        self._watchers: list[Callable[[], None]] = []
        self._turn: asyncio.Lock | None = None  # held during a write; None: no change waits
        self._waiting: list[_Change] = []  # changes that wait for their turn
        self.on_listed: Callable[[], None] = _ignore  # called when `deleting` has more ledgers

    @classmethod
    async def take(
        cls,
        name: TopicName,
        store: MetadataStore,
        *,
        incarnation: str,
        create: bool = True,
        epoch_min: int = 0,
        ledger_min: int = 0,
        version_min: int = -1,
        holds: Callable[[], bool] = _always,
    ) -> OwnedRecord:
        """Take the topic over: increment the epoch in the topic's record.

        With `create`, a topic without a record gets a record with this `incarnation` and
        `ledger_min`, and an epoch above `epoch_min`. The record's version on return is then above
        `version_min`, or above VERSIONS_PASSED_MAX if that is lower (see `_pass_version`). A record
        without an incarnation also gets `incarnation`: PartitionedTopics wrote that record for a
        new partition, or an earlier version of Magnetar wrote it. Without `create`, if no broker
        has taken that partition yet, `take` reads the three limits (`epoch_min`, `ledger_min`,
        `version_min`) from the tombstone of an earlier partition of this name. `holds` returns
        False when this broker no longer owns the topic's bundle. Then `take` does not increment the
        epoch, because that would fence the next owner.

        Raises NotOwner (`holds` returned False), LogFenced (another broker took the topic
        meanwhile), LogUnavailable, LogDamaged, TopicFull, TopicDeleted (the topic is being
        deleted), TopicNotFound (only if not `create`).
        """

        bumped: tuple[bytes, TopicRecord] | None = None
        # Whether the three limits are known: from the caller (`create`), or from the tombstone.
        has_limits = create

        def bump(stored: bytes | None) -> bytes:
            nonlocal bumped
            if not holds():
                raise NotOwner(str(name))
            if stored is None and not create:
                raise TopicNotFound(str(name))
            record = TopicRecord(0) if stored is None else decode_topic(stored)
            if record.deleted:
                raise TopicDeleted(str(name))
            if record.epoch == 0 and not has_limits:
                raise _NeverTaken
            drawn = record.incarnation or incarnation
            if record.epoch == 0:
                record = replace(record, epoch=epoch_min, ledger_min=ledger_min)
            record = replace(record, epoch=record.epoch + 1, incarnation=drawn)
            # After a lost reply, `update` calls `bump` again: only the last call's record counts.
            bumped = encode_topic(record), record
            return bumped[0]

        taken = None
        if create:  # usually the caller has found no record
            taken = await _try_create(name, store, bump(None))
        if taken is None:
            try:
                taken = await _update(name, store, bump)
            except _NeverTaken:
                has_limits = True
                tombstone = await _tombstone(name, store)
                if tombstone is not None:
                    epoch_min, ledger_min = tombstone.epoch, tombstone.ledger_min
                    version_min = tombstone.version
                taken = await _update(name, store, bump)
            assert taken is not None
        if has_limits:
            version_min = min(version_min, VERSIONS_PASSED_MAX)
            taken = await _pass_version(name, store, taken, version_min, epoch_min)
        assert bumped is not None
        ours = bumped[0] == taken.value
        return cls(name, store, taken, bumped[1] if ours else decode_topic(taken.value))

    async def change(self, change: Callable[[TopicRecord], TopicRecord]) -> None:
        """Change the record. `change` may be called again with a record that it has changed
        already; it must then return an equal record.

        Raises LogFenced when this broker no longer owns the topic, LogUnavailable (the change may
        have been made; making it again is safe), LogDamaged, TopicFull (the change was not made).
        """
        if self.lost is not None:
            raise self.lost
        ours = _Change(change)
        self._waiting.append(ours)
        if self._turn is None:  # a lock takes 350 bytes, and most topics are idle
            self._turn = asyncio.Lock()
        try:
            async with self._turn:
                if not ours.is_done:  # `ours` is now the first change that waits
                    await self._write(self._waiting[:CHANGES_MAX])
        finally:
            if not ours.is_done:  # the caller was cancelled
                self._waiting.remove(ours)
            if not self._waiting:  # a task that waits for the turn has nothing to write
                self._turn = None
        if ours.error is not None:
            raise ours.error

    async def _write(self, changes: Sequence[_Change]) -> None:
        """Make `changes`, the first of the waiting changes. If the call is cancelled, they still
        wait."""
        try:
            await self._make(changes)
        except TopicFull as error:
            if len(changes) > 1:  # a later change may be the one that does not fit
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
        """Return the record after `change`. If `change` raises an error, keep the error for its
        caller, and return `record` unchanged."""
        change.error = None
        try:
            if record.deleted:  # by an earlier change of the same write
                raise LogFenced(str(self.name), "it is being deleted")
            return change.make(record)
        except BrokerError as error:
            change.error = error
            return record

    def _decoded(self, value: bytes) -> TopicRecord:
        return self.record if value == self._value else decode_topic(value)

    async def verify(self) -> None:
        """Check that this broker still owned the topic at a moment after the call began. Raises
        LogFenced, LogUnavailable, LogDamaged."""
        try:
            await self._store.sync(topic_path(self.name))
        except MetadataError as error:
            raise LogUnavailable(str(self.name), "reading its record", error) from error
        await self.change(lambda record: record)

    def lose(self, why: str) -> LogFenced:
        """End this broker's ownership of the topic. Returns the error to raise."""
        if self.lost is None:
            self.lost = LogFenced(str(self.name), why)
            for watcher in tuple(self._watchers):
                watcher()
        return self.lost

    def may_be_recorded(self, ledger: LedgerId) -> bool:
        """Return whether the stored record may list this ledger. A write of this broker may have
        succeeded although its reply was lost, just before another broker took the topic over. The
        new owner then uses the ledger."""
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
        await self.change(lambda record: forgetting(record, deleted))


def topic_path(name: TopicName) -> str:
    return paths.topic(name.tenant, name.namespace, name.domain, name.topic)


def dropping(record: TopicRecord, ledgers: Collection[LedgerId]) -> TopicRecord:
    """Return `record` with these ledgers listed as being deleted. The caller has removed them from
    all other lists of the record."""
    listed = set(record.deleting)
    more = tuple(ledger for ledger in ledgers if ledger not in listed)
    return replace(record, deleting=record.deleting + more)


def forgetting(record: TopicRecord, deleted: Collection[LedgerId]) -> TopicRecord:
    """Return `record` without these ledgers in the list of ledgers that are being deleted."""
    gone = set(deleted)
    left = tuple(ledger for ledger in record.deleting if ledger not in gone)
    return replace(record, deleting=left)


def _ignore() -> None:
    """Do nothing: the task that deletes ledgers has not started. When it starts, it reads
    `deleting`."""


async def _try_create(name: TopicName, store: MetadataStore, value: bytes) -> Versioned | None:
    """Create the record in one write, without reading first. Returns None when the topic has a
    record or the outcome is unknown."""
    try:
        async with asyncio.timeout(METADATA_TIMEOUT_S):
            return Versioned(value, await store.put(topic_path(name), value, expected=ABSENT))
    except (MetadataError, TimeoutError):
        return None  # `take` then calls `_update`, which may raise the error


async def _tombstone(name: TopicName, store: MetadataStore) -> TopicTombstone | None:
    """Return the tombstone of an earlier topic of this name. The caller has read the new topic's
    record, so the earlier record was removed, and its tombstone was completed before that."""
    try:
        stored = await store.get(paths.deleted_topic(str(name)))
        return None if stored is None else decode_tombstone(stored.value)
    except InvalidRecord as error:
        raise LogDamaged(str(name), NO_LEDGER, str(error)) from error
    except MetadataError as error:
        raise LogUnavailable(str(name), "reading its tombstone", error) from error


async def _pass_version(
    name: TopicName, store: MetadataStore, taken: Versioned, version_min: int, epoch_min: int
) -> Versioned:
    """Write the new record until its version is above that of the deleted topic's record.

    Versions begin at 0 again when a record is created again. A stale owner may have read the
    deleted topic's record and not written it yet. Without the higher version, its write could
    replace the new record. If the stale owner writes before this function ends, this function
    writes the new record again. That loses nothing, because no other code uses the record yet. The
    record that a stale owner writes has another incarnation, and an epoch above 0 and at most
    `epoch_min`. If any other record has replaced the new one, raise LogFenced: another broker has
    taken the topic over, or the topic was deleted and created again."""
    if taken.version > version_min:
        return taken
    ours = decode_topic(taken.value)

    def write(stored: bytes | None) -> bytes:
        if stored is None:  # the next request creates the topic again
            raise LogFenced(str(name), "another broker has deleted its new record")
        found = decode_topic(stored)
        is_other = (found.incarnation, found.epoch) != (ours.incarnation, ours.epoch)
        is_stale = found.incarnation != ours.incarnation and 0 < found.epoch <= epoch_min
        if is_other and not is_stale:
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
