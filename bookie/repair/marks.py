"""Marks: which ledgers are to be repaired, kept in the metadata store.

Anybody may mark (an auditor, a reader that met a damaged copy, a bookie's scrub); marking is a
compare-and-set merge, so that marks never take anything from one another. A mark is removed in the
version that was read when the repair began, or not at all: then somebody has added to it meanwhile.
Whoever repairs holds the ledger's lock, an ephemeral node. The lock only saves double work; what
keeps a repair from harming anything is the compare-and-set on the ledger's own metadata.
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
"""For one change, lost races and a store that is away for a moment included."""

UNLOCK_S: Final = 2.0
"""Whoever is cancelled waits no longer until it has let go of a lock: it ends, and its session with
it."""


@dataclass(frozen=True, slots=True)
class Mark:
    ledger: LedgerId
    what: UnderReplication
    version: int


class Marks:
    """Every call raises what the metadata store raises, and InvalidRecord for a mark that cannot be
    read; all of them may be repeated."""

    def __init__(self, store: MetadataStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def mark_lost(self, ledger: LedgerId, members: Iterable[Member]) -> bool:
        """These members are to be replaced in the ledger. False: that was marked already."""
        return await self._merge(ledger, lost=frozenset(members))

    async def mark_bad(self, ledger: LedgerId, member: Member, first: int, last: int) -> bool:
        """The member lacks sound copies of the entries `first` to `last`, as far as it should have
        any. False: that was marked already."""
        return await self.mark_copies(ledger, [BadCopy(member, EntryId(first), EntryId(last))])

    async def mark_copies(self, ledger: LedgerId, copies: Iterable[BadCopy]) -> bool:
        """Several of these at once."""
        return await self._merge(ledger, bad=joined(copies))

    async def mark_narrow(self, ledger: LedgerId) -> bool:
        """The ledger was made with fewer copies than wanted. False: that was marked already."""
        return await self._merge(ledger, narrow=True)

    async def get(self, ledger: LedgerId) -> Mark | None:
        """None: the ledger is not marked."""
        stored = await self._store.get(paths.under_replicated(ledger))
        if stored is None:
            return None
        return Mark(ledger, decode_under_replication(stored.value), stored.version)

    async def list(self) -> AsyncIterator[LedgerId]:
        """The marked ledgers, ascending; see `ledger_ids`."""
        async for ledger in ledger_ids(self._store, paths.UNDER_REPLICATED):
            yield ledger

    async def replace(self, mark: Mark, what: UnderReplication) -> Mark | None:
        """Put another value there. None: it has changed since `mark` was read, or is gone."""
        if what == mark.what:
            return mark
        value = encode_under_replication(what)
        try:
            version = await self._store.put(
                paths.under_replicated(mark.ledger), value, expected=mark.version
            )
        except BadVersion:
            return None
        return Mark(mark.ledger, what, version)

    async def clear(self, mark: Mark) -> bool:
        """Remove the mark. False: it has changed since it was read, and stays."""
        path = paths.under_replicated(mark.ledger)
        try:
            await self._store.delete(path, expected=mark.version)
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
        """Hold the ledger's lock while inside. None: somebody else has it; else what says whether
        it is held still, as far as can be told.

        On leaving it is let go of, for however long the store is away: one that stayed would keep
        everybody from the ledger for as long as this process lives.
        """
        session = self._store.session_id
        ours: bool | None = None  # None: nobody knows
        cancelled = False
        try:
            ours = await self.lock(ledger, owner)
            yield (lambda: self._lasts(session)) if ours else None
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            if ours is not False:
                # Nothing that fails here may take the place of a cancellation that is under way.
                with suppress(MetadataError, TimeoutError):
                    async with asyncio.timeout(UNLOCK_S if cancelled else None):
                        await self.unlock(ledger, owner, known=ours is not None)

    def _lasts(self, session: int) -> bool:
        connected = self._store.session_state is SessionState.CONNECTED
        return connected and self._store.session_id == session

    async def lock(self, ledger: LedgerId, owner: str) -> bool:
        """False: somebody has it. It is gone with this process's metadata session at the latest.

        A lock that this owner left behind, because a reply was lost, is taken up again: an owner
        asks for no lock that it has.
        """
        try:
            await self._store.create_ephemeral(paths.repair_lock(ledger), owner.encode())
        except NodeExists:
            return await self._own_lock(ledger, owner) is not None
        return True

    async def unlock(self, ledger: LedgerId, owner: str, *, known: bool = True) -> None:
        """Let go of a lock of this owner and session; others' are left alone. Tries again while the
        store is away or does not answer, until this one is closed. Not `known`: the reply to its
        taking was lost."""
        while True:
            try:
                if not known:
                    # The server behind the next connection may not have seen it yet.
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
        """Its version. None: it is not this owner's, of this session."""
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
        added = UnderReplication(self._clock.now_ms(), lost, bad, narrow)
        changed = False

        def change(value: bytes | None) -> bytes | Verdict:
            nonlocal changed
            before = None if value is None else decode_under_replication(value)
            after = added if before is None else before.merged(added)
            if after == before:
                return KEEP
            changed = True
            return encode_under_replication(after)

        path = paths.under_replicated(ledger)
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        await update(self._store, path, change, deadline=deadline)
        if not changed:  # a stale read may show a mark that was removed meanwhile
            await self._store.sync(path)
            await update(self._store, path, change, deadline=deadline)
        return changed

    async def _prune(self, path: str) -> None:
        """Remove the folders that a mark has left empty, so that looking for marks stays cheap."""
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
