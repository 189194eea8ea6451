"""Bugs of those who repair and collect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mutants.plant import Mutant, Trial, enter

from magnetar.metadata import paths
from magnetar.metadata.ledger_tree import ledger_ids

if TYPE_CHECKING:
    from mutants.plant import Fired

COLLECTOR = "magnetar.bookie.collector:Collector."
MARKS = "magnetar.bookie.repair.marks:Marks."
REPLICATOR = "magnetar.bookie.repair.replicator:Replicator."
IN_COLLECTOR = "unit/bookie/test_collector.py"
IN_REPLICATOR = "unit/bookie/repair/test_replicator.py"


def _tried(trial: Trial) -> dict[str, Any]:
    return {"scene": trial, "caught_by": frozenset({trial.name}), "seeds": 1}


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
        name="metadata is listed before what is stored",
        breaks="§6.5: a ledger that began in between would be deleted (the look at each"
        " candidate, which would save it, is left out as well)",
        wrong={
            COLLECTOR + "_stored": _lists_metadata_first,
            COLLECTOR + "_compare": _compares_with_the_past,
            COLLECTOR + "_maybe_delete": _does_not_look_again,
        },
        **_tried(Trial(IN_COLLECTOR, "test_a_ledger_that_begins_during_the_round_stays")),
    )
)

enter(
    Mutant(
        name="what a listing lacks is deleted unseen",
        breaks="§6.5: each candidate is read again, behind a sync",
        wrong={COLLECTOR + "_maybe_delete": _does_not_look_again},
        **_tried(
            Trial(
                IN_COLLECTOR,
                "test_a_listing_that_lacks_ledgers_deletes_none_of_them",
                (("2",),),
            )
        ),
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
        breaks="D11: a writer that lives on would make it anew",
        wrong={"magnetar.bookie.admission:Admission.delete": _without_tombstone},
        **_tried(Trial(IN_COLLECTOR, "test_deleted_ledgers_go_and_leave_tombstones")),
    )
)


# -- repairing -------------------------------------------------------------------------------------


def _whatever_it_says_now(right: Any, fired: Fired) -> Any:
    async def clear(self: Any, mark: Any) -> bool:
        path = paths.under_replicated(mark.ledger)
        stored = await self._store.get(path)
        if stored is not None:
            if stored.version != mark.version:
                fired()
            await self._store.delete(path, expected=stored.version)
        return True

    return clear


enter(
    Mutant(
        name="a mark is removed without its version",
        breaks="§5.2, T31: what was marked during the repair would be forgotten",
        wrong={MARKS + "clear": _whatever_it_says_now},
        **_tried(Trial(IN_REPLICATOR, "test_t31_what_is_marked_during_a_repair_survives_it")),
    )
)


def _names_first(right: Any, fired: Fired) -> Any:
    async def _copy(self: Any, metadata: Any, seat: int, first: int, last: int, target: Any) -> int:
        segment = next(part for part in metadata.segments if part.first_entry == first)
        fired()
        await self._services.records.replace_member(
            metadata.ledger, first, segment.members[seat], target, wanted=lambda: True
        )
        return int(await right(self, metadata, seat, first, last, target))

    return _copy


enter(
    Mutant(
        name="a new member is named before it has the copies",
        breaks="§5.3, T27: durable copies first, then the compare-and-set",
        wrong={REPLICATOR + "_copy": _names_first},
        **_tried(
            Trial(
                IN_REPLICATOR,
                "test_t27_no_member_is_replaced_before_the_copies_are_durable",
                ("refuses",),
            )
        ),
    )
)
