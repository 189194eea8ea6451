"""Bugs in repair and garbage collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mutants.plant import Mutant, enter
from world.scenarios import SCENARIOS

from magnetar.bookie.errors import CollectionAborted
from magnetar.metadata import paths
from magnetar.metadata.ledger_tree import ledger_ids
from magnetar.metadata.model import LedgerState

if TYPE_CHECKING:
    from mutants.plant import Fired

COLLECTOR = "magnetar.bookie.collector:Collector."
RECORDS = "magnetar.bookie.repair.under_replication_records:UnderReplicationRecords."
REPLICATOR = "magnetar.bookie.repair.replicator:Replicator."


# -- collecting ------------------------------------------------------------------------------------


def _lists_metadata_first(right: Any, fired: Fired) -> Any:
    async def _stored(self: Any) -> Any:
        self.listed_first = [each async for each in ledger_ids(self._metadata, paths.LEDGERS)]
        self.list_stored = right
        return await right(self)

    return _stored


def _compares_with_the_past(right: Any, fired: Fired) -> Any:
    async def _compare(self: Any, _: Any) -> Any:
        stored = await self.list_stored(self)
        listed = set(self.listed_first)
        gone = [each for each in stored if each not in listed]
        if gone:
            fired()
        return gone, [each for each in stored if each in listed]

    return _compare


def _does_not_look_again(right: Any, fired: Fired) -> Any:
    async def _maybe_delete(self: Any, ledger: int) -> bool:
        fired()
        self._admission.delete(ledger, for_good=True)
        self.counts.ledgers_deleted += 1
        return True

    return _maybe_delete


enter(
    Mutant(
        name="metadata is listed before the stored ledgers",
        breaks="§6.5: a ledger created in between would be deleted (the second check of each"
        " candidate, which would prevent that, is left out as well)",
        wrong={
            COLLECTOR + "_stored": _lists_metadata_first,
            COLLECTOR + "_compare": _compares_with_the_past,
            COLLECTOR + "_maybe_delete": _does_not_look_again,
        },
        caught_by=frozenset({"I15"}),
        scene=SCENARIOS["T25"],
        seeds=20,
    )
)

enter(
    Mutant(
        name="ledgers missing in a listing are deleted without a second check",
        breaks="§6.5: each candidate's record is read again, after a sync",
        wrong={COLLECTOR + "_maybe_delete": _does_not_look_again},
        caught_by=frozenset({"I15"}),
        scene=SCENARIOS["T25"],
        seeds=20,
    )
)


def _whatever_was_handed_out(right: Any, fired: Fired) -> Any:
    async def _handed_out(self: Any, gone: list[int], end: int) -> list[int]:
        if gone and gone[-1] >= end:
            fired()
        return gone

    return _handed_out


enter(
    Mutant(
        name="a metadata store that never issued a ledger's id is trusted",
        breaks="§6.5: the metadata is an old image; the round is aborted",
        wrong={COLLECTOR + "_handed_out": _whatever_was_handed_out},
        caught_by=frozenset({"I15"}),
        scene=SCENARIOS["wrong store"],
        seeds=20,
    )
)


def _any_cluster(right: Any, fired: Fired) -> Any:
    async def _check_metadata(self: Any) -> int:
        try:
            return int(await right(self))
        except CollectionAborted:
            fired()
            return 1 << 40

    return _check_metadata


enter(
    Mutant(
        name="metadata of another cluster is trusted",
        breaks="§6.5: wrong chroot or instance id; the round is aborted",
        wrong={COLLECTOR + "_check_metadata": _any_cluster},
        caught_by=frozenset({"I15"}),
        scene=SCENARIOS["wrong store"],
        seeds=20,
    )
)


def _without_tombstone(right: Any, fired: Fired) -> Any:
    def delete(self: Any, ledger: int, *, for_good: bool) -> Any:
        if for_good:
            fired()
        return right(self, ledger, for_good=False)

    return delete


enter(
    Mutant(
        name="a deleted ledger leaves no tombstone",
        breaks="D11: a live writer would create the ledger again",
        wrong={"magnetar.bookie.admission:Admission.delete": _without_tombstone},
        caught_by=frozenset({"T24"}),
        scene=SCENARIOS["T24"],
        seeds=20,
    )
)


# -- repairing -------------------------------------------------------------------------------------


def _whatever_it_says_now(right: Any, fired: Fired) -> Any:
    async def clear(self: Any, record: Any) -> bool:
        path = paths.under_replicated(record.ledger)
        stored = await self._store.get(path)
        if stored is not None:
            if stored.version != record.version:
                fired()
            await self._store.delete(path, expected=stored.version)
        return True

    return clear


enter(
    Mutant(
        name="a record is removed without its version",
        breaks="§5.2, T31: ranges added during the repair would be lost",
        wrong={RECORDS + "clear": _whatever_it_says_now},
        caught_by=frozenset({"T31"}),
        scene=SCENARIOS["T31"],
        seeds=30,
    )
)


def _over_whatever_it_says(right: Any, fired: Fired) -> Any:
    async def replace(self: Any, record: Any, faults: Any) -> Any:
        now = await self.get(record.ledger)
        if now is None:
            return None
        if now.version != record.version:
            fired()
        return await right(self, now, faults)

    return replace


enter(
    Mutant(
        name="bad copies that were written again are removed from a record that has grown",
        breaks="T31: ranges added during the repair would be lost",
        wrong={RECORDS + "replace": _over_whatever_it_says},
        caught_by=frozenset({"T31"}),
        scene=SCENARIOS["T31"],
        seeds=30,
    )
)


def _names_first(right: Any, fired: Fired) -> Any:
    async def _copy(
        self: Any, metadata: Any, seat: int, last: int, target: Any, progress: Any
    ) -> None:
        segment = metadata.segment_of(progress.following)
        fired()
        await self._services.records.replace_member(
            metadata.ledger, segment.first_entry, segment.members[seat], target, wanted=lambda: True
        )
        await right(self, metadata, seat, last, target, progress)

    return _copy


enter(
    Mutant(
        name="metadata names a new member before it has the copies",
        breaks="§5.3, T27: durable copies first, then the compare-and-set",
        wrong={REPLICATOR + "_copy": _names_first},
        caught_by=frozenset({"I4"}),
        scene=SCENARIOS["T27"],
        seeds=20,
    )
)


# -- leaving ---------------------------------------------------------------------------------------


def _closed_ones_alone(right: Any, fired: Fired) -> Any:
    async def _blockers_of(self: Any, batch: Any) -> Any:
        closed = [
            (ledger, metadata)
            for ledger, metadata in batch
            if metadata is None or metadata.state is LedgerState.CLOSED
        ]
        if len(closed) < len(batch):
            fired()
        return await right(self, closed)

    return _blockers_of


enter(
    Mutant(
        name="a bookie is removed although writers use it",
        breaks="T32: open ledgers block the removal, and the report names them",
        wrong={"magnetar.bookie.repair.decommission:_Leaving._blockers_of": _closed_ones_alone},
        caught_by=frozenset({"T32"}),
        scene=SCENARIOS["T32"],
        seeds=10,
    )
)
