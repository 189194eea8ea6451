"""Under-replication records: the ledgers that need repair, in the metadata store.

Any process may add to a record: an auditor, a reader or writer that noted a bad copy, a bookie's
scrub. Adding is a merge by compare-and-set, so additions never overwrite each other. A record is
removed only in the version that the repair last read or wrote: a later version has new additions.
A repair holds the ledger's lock, an ephemeral node. The lock avoids duplicate work, and keeps a
bookie from deleting copies that the ledger's metadata does not name yet (`bookie/collector.py`).
Each change of that metadata is a compare-and-set, so two repairs never overwrite each other's
changes.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.metadata import paths
from magnetar.metadata.codec import decode_under_replication, encode_under_replication
from magnetar.metadata.errors import (
    BadVersion,
    MetadataError,
    NodeExists,
    NoNode,
    NotEmpty,
    OutcomeUnknown,
    StoreClosed,
    Unavailable,
)
from magnetar.metadata.ledger_tree import ledger_ids
from magnetar.metadata.model import EntryId, LedgerId, Member
from magnetar.metadata.node import parents_of
from magnetar.metadata.store import (
    KEEP,
    UPDATE_PAUSE_S,
    MetadataStore,
    SessionState,
    Verdict,
    update,
)
from magnetar.metadata.under_replication import BadCopy, UnderReplication, joined

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from magnetar.runtime.clock import Clock

TIMEOUT_S: Final = 10.0
"""Time limit of one change, including lost races and a short failure of the store."""

UNLOCK_S: Final = 2.0
"""A cancelled task waits at most this long to release a lock. Its process is ending, and its
session ends too."""


@dataclass(frozen=True, slots=True)
class UnderReplicationRecord:
    ledger: LedgerId
    faults: UnderReplication
    version: int


class UnderReplicationRecords:
    """Every call raises the errors of the metadata store, and InvalidRecord for an unreadable
    record. A call with an unknown outcome may be repeated."""

    def __init__(self, store: MetadataStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def add_lost(self, ledger: LedgerId, members: Iterable[Member]) -> bool:
        """Record that these members must be replaced. False: the record has this already."""
        return await self._merge(ledger, lost=frozenset(members))

    async def add_bad(self, ledger: LedgerId, member: Member, first: int, last: int) -> bool:
        """Record that the member lacks sound copies of entries `first` to `last`. The range
        may include entries whose write set does not contain the member: the repair skips them.
        False: the record has this already."""
        return await self.add_bad_copies(ledger, [BadCopy(member, EntryId(first), EntryId(last))])

    async def add_bad_copies(self, ledger: LedgerId, copies: Iterable[BadCopy]) -> bool:
        """Record several bad copies at once."""
        return await self._merge(ledger, bad=joined(copies))

    async def add_narrow(self, ledger: LedgerId) -> bool:
        """Record that the ledger has too few copies. False: the record has this already."""
        return await self._merge(ledger, narrow=True)

    async def get(self, ledger: LedgerId) -> UnderReplicationRecord | None:
        """Return the ledger's record. None: it has no record."""
        stored = await self._store.get(paths.under_replicated(ledger))
        if stored is None:
            return None
        return UnderReplicationRecord(
            ledger, decode_under_replication(stored.value), stored.version
        )

    async def list(self) -> AsyncIterator[LedgerId]:
        """Yield the ledgers with a record, ascending; see `ledger_ids`."""
        async for ledger in ledger_ids(self._store, paths.UNDER_REPLICATED):
            yield ledger

    async def replace(
        self, record: UnderReplicationRecord, faults: UnderReplication
    ) -> UnderReplicationRecord | None:
        """Store another value. None: the record was changed or removed since it was read."""
        if faults == record.faults:
            return record
        value = encode_under_replication(faults)
        try:
            version = await self._store.put(
                paths.under_replicated(record.ledger), value, expected=record.version
            )
        except BadVersion:
            return None
        return UnderReplicationRecord(record.ledger, faults, version)

    async def clear(self, record: UnderReplicationRecord) -> bool:
        """Remove the record. False: it was changed since it was read, and stays."""
        path = paths.under_replicated(record.ledger)
        try:
            await self._store.delete(path, expected=record.version)
        except NoNode:
            return True
        except BadVersion:
            return False
        await self._prune(path)
        return True

    @asynccontextmanager
    async def holding(
        self, ledger: LedgerId, owner: str
    ) -> AsyncIterator[Callable[[], bool] | None]:
        """Hold the ledger's lock inside the context. None: another process has it. Otherwise yields
        a function that says whether the lock is still held, as far as this process knows.

        The lock is released at the end. If the store is unreachable then, the release is repeated
        until it succeeds; a cancelled task gives up after UNLOCK_S. A lock that stayed would block
        all other repairs of the ledger for the life of this process.
        """
        session = self._store.session_id
        ours: bool | None = None  # None: unknown
        cancelled = False
        try:
            ours = await self.lock(ledger, owner)
            yield (lambda: self._lasts(session)) if ours else None
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            if ours is not False:
                # An error here must not replace a running cancellation.
                with suppress(MetadataError, TimeoutError):
                    async with asyncio.timeout(UNLOCK_S if cancelled else None):
                        await self.unlock(ledger, owner, known=ours is not None)

    def _lasts(self, session: int) -> bool:
        connected = self._store.session_state is SessionState.CONNECTED
        return connected and self._store.session_id == session

    async def lock(self, ledger: LedgerId, owner: str) -> bool:
        """Take the lock. False: another process has it. The lock ends at the latest with this
        process's metadata session.

        If an earlier call took the lock but lost the reply, this call returns True. An owner that
        knows that it has the lock must not ask for it again: the call would return True, and two
        repairs of the same owner would share the lock.
        """
        try:
            await self._store.create_ephemeral(paths.repair_lock(ledger), owner.encode())
        except NodeExists:
            return await self._own_lock(ledger, owner) is not None
        return True

    async def unlock(self, ledger: LedgerId, owner: str, *, known: bool = True) -> None:
        """Release a lock of this owner and session; other locks are left alone. Repeats while the
        store is unreachable or silent, until this store is closed. `known` False: the reply to
        taking the lock was lost."""
        while True:
            try:
                if not known:
                    # The server behind the next connection may not have the lock yet.
                    await self._store.sync(paths.repair_lock(ledger))
                version = await self._own_lock(ledger, owner)
                if version is not None:
                    await self._store.delete(paths.repair_lock(ledger), expected=version)
            except (NoNode, BadVersion, StoreClosed):
                return
            except (OutcomeUnknown, Unavailable):
                await asyncio.sleep(UPDATE_PAUSE_S)
            else:
                return

    async def _own_lock(self, ledger: LedgerId, owner: str) -> int | None:
        """Return the version of this owner's lock in this session. None: the owner has no lock."""
        stored = await self._store.get(paths.repair_lock(ledger))
        if stored is None or stored.value != owner.encode():
            return None
        return stored.version if stored.ephemeral_session == self._store.session_id else None

    async def locked(self, ledger: LedgerId) -> bool:
        return await self._store.get(paths.repair_lock(ledger)) is not None

    async def _merge(
        self,
        ledger: LedgerId,
        *,
        lost: frozenset[Member] = frozenset(),
        bad: tuple[BadCopy, ...] = (),
        narrow: bool = False,
    ) -> bool:
        """Add to the record. False: the record has all of this already. Also False if this call
        added it but the reply was lost."""
        added = UnderReplication(self._clock.now_ms(), lost, bad, narrow)
        changed = False

        def change(value: bytes | None) -> bytes | Verdict:
            nonlocal changed
            before = None if value is None else decode_under_replication(value)
            after = added if before is None else before.merged(added)
            # `update` calls this again after a lost race: only the last call's result counts.
            changed = after != before
            return encode_under_replication(after) if changed else KEEP

        path = paths.under_replicated(ledger)
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        await update(self._store, path, change, deadline=deadline)
        if not changed:  # a stale read may show a record that was removed
            await self._store.sync(path)
            await update(self._store, path, change, deadline=deadline)
        return changed

    async def _prune(self, path: str) -> None:
        """Remove the folders that the record left empty, so that listing records stays cheap."""
        folders = [
            each for each in parents_of(path) if each.startswith(paths.UNDER_REPLICATED + "/")
        ]
        for folder in reversed(folders):
            stored = await self._store.get(folder)
            if stored is None:
                continue
            try:
                await self._store.delete(folder, expected=stored.version)
            except (NotEmpty, BadVersion, NoNode):
                return
