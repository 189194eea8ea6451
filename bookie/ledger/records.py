"""The metadata records of ledgers, changed by compare-and-set only.

Each step is a loop that reads again and compares (`magnetar.metadata.store.update`), so a lost
reply, a lost race and a repeated call do no harm: a step recognises that it is done already.

    create       absent                                   -> OPEN     (its creator's token tells
                                                                       whose it is)
    ensemble     OPEN, last segment as the writer knows   -> OPEN
    claim        OPEN or IN_RECOVERY                      -> IN_RECOVERY
    close        OPEN (its writer)                        -> CLOSED
                 IN_RECOVERY (a recoverer)                -> CLOSED
    replace      a member of a sealed segment             -> the state stays
    widen        CLOSED, each bookie holds each entry     -> CLOSED, with one more copy
    delete       anything                                 -> absent

Writers close OPEN ledgers only: one that somebody recovers is theirs no longer.
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
    """Raises what the store raises, besides what each call names. `timeout_s` bounds each call."""

    def __init__(self, store: MetadataStore, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s

    async def get(self, ledger: LedgerId) -> LedgerMetadata | None:
        """None: there is no such ledger, as of now (a read of the past cannot say so)."""
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
        """Ids are never handed out twice: another creator's ledger under this one is a bug."""

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
        """Make `members` hold what comes from `first` on.

        While the outcome is unknown nothing may be confirmed, so it goes on until that is settled,
        or until `wanted()` is false (then OutcomeUnknown). LedgerFenced: somebody else changed the
        ledger. Unavailable, Contended: nothing was changed, nor will it be.
        """
        segment = known.with_ensemble(EntryId(first), members).last_segment
        tried = False

        def change(stored: LedgerMetadata | None) -> LedgerMetadata | Verdict:
            nonlocal tried
            if stored is None:
                raise LedgerFenced(known.ledger, "its metadata was deleted")
            if stored.state is not LedgerState.OPEN:
                raise LedgerFenced(known.ledger, f"it is {stored.state.name}")
            if tried and stored.last_segment == segment:
                return KEEP
            if stored.last_segment != known.last_segment:
                raise LedgerFenced(known.ledger, "somebody else changed its ensemble")
            tried = True
            # Sealed segments are taken from the store: replicas of theirs may have been moved.
            return stored.with_ensemble(EntryId(first), members)

        unknown = fresh = False
        while True:
            try:
                return self._there(await self._update(known.ledger, change), known.ledger)
            except LedgerFenced:
                if fresh or not wanted():
                    raise
                fresh = await self._sync(known.ledger)  # a follower that lags shows our own past
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
        """For a recoverer: from now on the writer can change neither ensemble nor end. Returns what
        is stored: IN_RECOVERY, or CLOSED already. Raises LedgerNotFound."""

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
        """For the writer. Raises LedgerFenced unless it is, or becomes, closed at just this end."""

        def change(stored: LedgerMetadata | None) -> LedgerMetadata | Verdict:
            if stored is None:
                raise LedgerFenced(known.ledger, "its metadata was deleted")
            if stored.state is LedgerState.OPEN:
                return replace(
                    stored, state=LedgerState.CLOSED, last_entry=EntryId(last), length=length
                )
            if (stored.last_entry, stored.length) == (last, length):
                return KEEP
            raise LedgerFenced(known.ledger, f"it is {stored.state.name}")

        return self._there(await self._update(known.ledger, change), known.ledger)

    async def close_recovered(
        self, ledger: LedgerId, merge: Callable[[LedgerMetadata], LedgerMetadata]
    ) -> LedgerMetadata:
        """For a recoverer: `merge` what it found into what is stored, still IN_RECOVERY. Returns
        what is stored then: another recoverer's end counts if it was first (R7). Raises
        LedgerNotFound."""

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
        """For a repair: `new`, which has all that `old` should have of the sealed segment that
        begins at `first`, takes its seat there. None: nothing was changed, because the ledger, the
        segment or the old member is there no longer, `new` sits in it already, or `wanted()` became
        false."""

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
        """For a repair, of a CLOSED ledger whose bookies each hold all of its entries: `added`, a
        bookie for each segment that holds all of that segment, makes one more copy of everything.
        It was made narrow if its copies are fewer than `write_quorum` still. None: nothing was
        changed, because the ledger has changed or is gone, or `wanted()` became false."""
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
        """Done when it is absent, whoever deleted it."""
        await self._update(ledger, lambda _: DELETE)

    async def _sync(self, ledger: LedgerId) -> bool:
        """Whether what is read from now on is not older than now."""
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
