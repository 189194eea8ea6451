"""The metadata records of ledgers, changed by compare-and-set only.

Each step reads, decides and writes, and begins again if another process wrote in the meantime
(`magnetar.metadata.store.update`). A lost reply, a lost race or a repeated call does no harm: a
step notices that it is done already.

    create       absent                                   -> OPEN     (the creator's token shows
                                                                       that a retry is done already)
    ensemble     OPEN, last segment as the writer knows   -> OPEN
    claim        OPEN or IN_RECOVERY                      -> IN_RECOVERY
    close        OPEN (its writer)                        -> CLOSED
                 IN_RECOVERY (a recoverer)                -> CLOSED
    replace      a member of a sealed segment             -> the state stays
    widen        CLOSED, each bookie holds each entry     -> CLOSED, with one more copy
    delete       anything                                 -> absent

A writer closes only OPEN ledgers: a ledger in recovery belongs to its recoverers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from magnetar.bookie.ledger.errors import LedgerFenced, LedgerNotFound
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_ledger, encode_ledger
from magnetar.metadata.errors import Contended, OutcomeUnknown, Unavailable
from magnetar.metadata.model import EntryId, LedgerId, LedgerMetadata, LedgerState
from magnetar.metadata.store import (
    DELETE,
    KEEP,
    UPDATE_PAUSE_S,
    MetadataStore,
    Verdict,
    update,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.metadata.model import Member

    Change = Callable[[LedgerMetadata | None], LedgerMetadata | Verdict]


class LedgerRecords:
    """Each call raises the errors of the metadata store and the errors that its docstring names.
    `timeout_s` limits each read and each change. `claim` may need more than one of them, and
    `change_ensemble` may repeat its change."""

    def __init__(self, store: MetadataStore, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s

    async def get(self, ledger: LedgerId) -> LedgerMetadata | None:
        """Return the ledger's metadata. None: there is no such ledger now. If the first read finds
        none, it may be stale: the call syncs and reads again."""
        path = paths.ledger(ledger)
        try:
            async with asyncio.timeout(self._timeout_s):
                stored = await self._store.get(path)
                if stored is None:
                    await self._store.sync(path)
                    stored = await self._store.get(path)
        except TimeoutError:
            raise Unavailable(f"{path}: no answer within {self._timeout_s:g} s") from None
        return None if stored is None else decode_ledger(stored.value)

    async def create(self, metadata: LedgerMetadata) -> None:
        """Store the metadata of a new ledger. Ids are never reused, so another creator's ledger
        with this id is a bug."""

        def change(stored: LedgerMetadata | None) -> LedgerMetadata | Verdict:
            if stored is None:
                return metadata
            assert stored.creator_token == metadata.creator_token, "a ledger id was used twice"
            return KEEP

        await self._update(metadata.ledger, change)

    async def change_ensemble(
        self,
        known: LedgerMetadata,
        first: int,
        members: Sequence[Member],
        *,
        wanted: Callable[[], bool],
    ) -> LedgerMetadata:
        """Make `members` hold the entries from `first` on.

        Nothing may be confirmed while the outcome is unknown. So this call repeats until the
        outcome is known, or until `wanted()` is false (then OutcomeUnknown). LedgerFenced: another
        process changed the ledger. Unavailable, Contended: nothing was changed, and nothing will
        be.
        """
        segment = known.with_ensemble(EntryId(first), members).last_segment
        tried = False

        def change(stored: LedgerMetadata | None) -> LedgerMetadata | Verdict:
            nonlocal tried
            if stored is None:
                raise LedgerFenced(known.ledger, "its metadata was deleted")
            if stored.state is not LedgerState.OPEN:
                raise LedgerFenced(known.ledger, f"its state is {stored.state.name}")
            if tried and stored.last_segment == segment:
                return KEEP
            if stored.last_segment != known.last_segment:
                raise LedgerFenced(known.ledger, "another process changed its ensemble")
            tried = True
            # Take the sealed segments from the store, because a repair may have moved their
            # replicas.
            return stored.with_ensemble(EntryId(first), members)

        unknown = fresh = False
        while True:
            try:
                return self._there(await self._update(known.ledger, change), known.ledger)
            except LedgerFenced:
                if fresh or not wanted():
                    raise
                # a lagging ZooKeeper follower may show the state before our own change
                fresh = await self._sync(known.ledger)
            except OutcomeUnknown:
                unknown = True
                if not wanted():
                    raise
            except (Unavailable, Contended):
                if not unknown:
                    raise
                if not wanted():
                    raise OutcomeUnknown(paths.ledger(known.ledger)) from None

    async def claim(self, ledger: LedgerId) -> LedgerMetadata:
        """Claim the ledger for a recoverer: from now on the writer can change neither the ensemble
        nor the end. Returns the stored metadata: IN_RECOVERY, or CLOSED already. Raises
        LedgerNotFound."""

        def change(stored: LedgerMetadata | None) -> LedgerMetadata | Verdict:
            if stored is None:
                raise LedgerNotFound(ledger)
            if stored.state is LedgerState.OPEN:
                return replace(stored, state=LedgerState.IN_RECOVERY)
            return KEEP

        try:
            return self._there(await self._update(ledger, change), ledger)
        except LedgerNotFound:
            if await self.get(ledger) is None:
                raise
        return self._there(await self._update(ledger, change), ledger)

    async def close(self, known: LedgerMetadata, last: int, length: int) -> LedgerMetadata:
        """Close the ledger, for its writer. Raises LedgerFenced unless the ledger is, or becomes,
        closed at exactly this end."""

        def change(stored: LedgerMetadata | None) -> LedgerMetadata | Verdict:
            if stored is None:
                raise LedgerFenced(known.ledger, "its metadata was deleted")
            if stored.state is LedgerState.OPEN:
                return replace(
                    stored, state=LedgerState.CLOSED, last_entry=EntryId(last), length=length
                )
            if (stored.last_entry, stored.length) == (last, length):
                return KEEP
            raise LedgerFenced(known.ledger, f"its state is {stored.state.name}")

        return self._there(await self._update(known.ledger, change), known.ledger)

    async def close_recovered(
        self, ledger: LedgerId, merge: Callable[[LedgerMetadata], LedgerMetadata]
    ) -> LedgerMetadata:
        """Close the ledger, for a recoverer: `merge` the result into the stored metadata, which
        must be IN_RECOVERY. Returns the metadata stored afterwards: if another recoverer closed the
        ledger first, its end counts. Raises LedgerNotFound."""

        def change(stored: LedgerMetadata | None) -> LedgerMetadata | Verdict:
            if stored is None:
                raise LedgerNotFound(ledger)
            assert stored.state is not LedgerState.OPEN, "IN_RECOVERY became OPEN"
            return KEEP if stored.state is LedgerState.CLOSED else merge(stored)

        return self._there(await self._update(ledger, change), ledger)

    async def replace_member(
        self,
        ledger: LedgerId,
        first: int,
        old: Member,
        new: Member,
        *,
        wanted: Callable[[], bool],
    ) -> LedgerMetadata | None:
        """Give the seat of `old` to `new`, for a repair, in the sealed segment that begins at
        `first`. `new` must hold every entry that `old` should have there. None: `new` did not get
        the seat. The ledger, the segment or `old` is gone, the bookie of `new` has another seat
        there, or `wanted()` became false."""

        def change(stored: LedgerMetadata | None) -> LedgerMetadata | Verdict:
            if stored is None or not wanted():
                return KEEP
            at = next((n for n, p in enumerate(stored.segments) if p.first_entry == first), None)
            if at is None:
                return KEEP
            segment = stored.segments[at]
            others = [each.bookie for each in segment.members if each != old]
            if old not in segment.members or new.bookie in others:
                return KEEP
            sealed = at < len(stored.segments) - 1 or stored.state is LedgerState.CLOSED
            assert sealed, f"ledger {ledger} is being written from entry {first} on"
            members = tuple(new if each == old else each for each in segment.members)
            moved = replace(segment, members=members)
            return replace(
                stored, segments=(*stored.segments[:at], moved, *stored.segments[at + 1 :])
            )

        stored = await self._update(ledger, change)
        done = stored is not None and any(
            part.first_entry == first and new in part.members and old not in part.members
            for part in stored.segments
        )
        return stored if done else None

    async def widen(
        self,
        known: LedgerMetadata,
        added: Sequence[Member],
        *,
        write_quorum: int,
        wanted: Callable[[], bool],
    ) -> LedgerMetadata | None:
        """Add one more copy, for a repair of a CLOSED ledger whose bookies each hold all of its
        entries. `added` names for each segment a bookie that holds the whole segment. The ledger
        stays marked under-replicated while it has fewer copies than `write_quorum`. None: nothing
        was changed, because another process changed or deleted the ledger, or `wanted()` became
        false."""
        assert known.state is LedgerState.CLOSED, known.state
        assert known.ensemble_size == known.write_quorum, "a striped ledger cannot be widened"
        segments = tuple(
            replace(part, members=(*part.members, member))
            for part, member in zip(known.segments, added, strict=True)
        )
        copies = known.write_quorum + 1
        wide = replace(
            known,
            ensemble_size=copies,
            write_quorum=copies,
            segments=segments,
            under_replicated=copies < write_quorum,
        )

        def change(stored: LedgerMetadata | None) -> LedgerMetadata | Verdict:
            return wide if stored == known and wanted() else KEEP

        stored = await self._update(known.ledger, change)
        return stored if stored == wide else None

    async def delete(self, ledger: LedgerId) -> None:
        """Delete the record. Succeeds when it is absent already."""
        await self._update(ledger, lambda _: DELETE)

    async def _sync(self, ledger: LedgerId) -> bool:
        """Sync. Return whether later reads show the present state or a newer one."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._store.sync(paths.ledger(ledger))
        except (OutcomeUnknown, Unavailable, TimeoutError):
            await asyncio.sleep(UPDATE_PAUSE_S)
            return False
        return True

    async def _update(self, ledger: LedgerId, change: Change) -> LedgerMetadata | None:
        def change_bytes(value: bytes | None) -> bytes | Verdict:
            answer = change(None if value is None else decode_ledger(value))
            return answer if isinstance(answer, Verdict) else encode_ledger(answer)

        deadline = asyncio.get_running_loop().time() + self._timeout_s
        stored = await update(self._store, paths.ledger(ledger), change_bytes, deadline=deadline)
        return None if stored is None else decode_ledger(stored.value)

    @staticmethod
    def _there(metadata: LedgerMetadata | None, ledger: LedgerId) -> LedgerMetadata:
        assert metadata is not None, f"ledger {ledger} was neither kept nor changed"
        return metadata
