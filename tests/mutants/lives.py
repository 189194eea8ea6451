"""Bugs in trims, in the deletion and re-creation of topics, in acknowledgements, and in
deduplication."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mutants.plant import Mutant, enter
from world.scenarios import SCENARIOS

if TYPE_CHECKING:
    from mutants.plant import Fired

LIFE = SCENARIOS["life"]


# -- trims -----------------------------------------------------------------------------------------


def _by_the_fastest(right: Any, fired: Fired) -> Any:
    def slowest_mark(self: Any) -> Any:
        slowest = right.fget(self)
        fastest = max((each.durable_mark for each in self._cursors.values()), default=None)
        if slowest != fastest:
            fired()
        return fastest

    return property(slowest_mark)


enter(
    Mutant(
        name="a topic is trimmed by its fastest subscription",
        breaks="TRIM: every durable subscription has acknowledged a trimmed ledger",
        wrong={"magnetar.broker.cursor.cursors:Cursors.slowest_mark": _by_the_fastest},
        caught_by=frozenset({"TRIM"}),
        scene=LIFE,
        seeds=10,
    )
)


def _always_fresh(right: Any, fired: Fired) -> Any:
    def _is_fresh(self: Any) -> bool:
        if not right(self):
            fired()
        return True

    return _is_fresh


enter(
    Mutant(
        name="a topic is trimmed by stale policies",
        breaks="TRIM: without fresh policies nothing is dropped",
        wrong={"magnetar.broker.topic.retention:Trimmer._is_fresh": _always_fresh},
        caught_by=frozenset({"TRIM"}),
        scene=LIFE,
        seeds=30,
    )
)


# -- deletion and new topics -----------------------------------------------------------------------


def _unlisted_is_deleted(right: Any, fired: Fired) -> Any:
    def may_be_recorded(self: Any, ledger: Any) -> bool:
        if right(self, ledger):
            fired()
        return False

    return may_be_recorded


enter(
    Mutant(
        name="a ledger that may be listed is deleted",
        breaks="LIVE: a change whose reply was lost may have listed it",
        wrong={
            "magnetar.broker.log.owned_record:OwnedRecord.may_be_recorded": _unlisted_is_deleted
        },
        caught_by=frozenset({"LIVE"}),
        scene=LIFE,
        seeds=60,
    )
)


def _by_age_alone(right: Any, fired: Fired) -> Any:
    def judge(metadata: Any, origin: Any, record: Any, **times: Any) -> Any:
        if record is not None and origin is not None and record.epoch == origin.epoch:
            fired()
            record = replace(record, epoch=record.epoch + 1)
        return right(metadata, origin, record, **times)

    return judge


enter(
    Mutant(
        name="the sweeper takes a ledger that its creator is about to list",
        breaks="LIVE: a live owner lists the ledger after its creation",
        wrong={"magnetar.broker.log.sweep:judge": _by_age_alone},
        caught_by=frozenset({"LIVE", "I14", "I18", "bug", "I1"}),
        scene=LIFE,
        seeds=1_000,  # about one run in 200 sweeps between creation and listing
    )
)


def _never_an_orphan(right: Any, fired: Fired) -> Any:
    def judge(metadata: Any, origin: Any, record: Any, **times: Any) -> Any:
        from magnetar.broker.log.orphans import Verdict

        verdict = right(metadata, origin, record, **times)
        if verdict is Verdict.ORPHAN:
            fired()
            return Verdict.MAY_BE_LISTED
        return verdict

    return judge


enter(
    Mutant(
        name="the sweeper keeps orphaned ledgers",
        breaks="LEAK: ledgers that a dead owner left are deleted",
        wrong={"magnetar.broker.log.sweep:judge": _never_an_orphan},
        caught_by=frozenset({"LEAK"}),
        scene=LIFE,
        seeds=10,
    )
)


# -- acknowledgements ------------------------------------------------------------------------------


def _answered_at_once(right: Any, fired: Fired) -> Any:
    def note(self: Any, cursor: Any, receipt: Any) -> None:
        if receipt is not None and self._ended is None:
            fired()
            right(self, cursor, None)
            receipt(None)
        else:
            right(self, cursor, receipt)

    return note


enter(
    Mutant(
        name="an acknowledgement is answered before it is journaled",
        breaks="ACK: an answered acknowledgement survives the owner",
        wrong={"magnetar.broker.cursor.journal:CursorJournal.note": _answered_at_once},
        caught_by=frozenset({"ACK"}),
        scene=LIFE,
        seeds=30,
    )
)


def _without_snapshots(right: Any, fired: Fired) -> Any:
    async def begin_ledger(self: Any) -> None:
        live, self._live = self._live, dict(list(self._live.items())[:1])
        if len(live) > 1:
            fired()
        try:
            await right(self)
        finally:
            self._live = live

    return begin_ledger


enter(
    Mutant(
        name="a new cursor ledger lacks the snapshots of all but one",
        breaks="ACK: a switch of cursor ledgers keeps every subscription's state",
        wrong={"magnetar.broker.cursor.journal:CursorJournal._begin_ledger": _without_snapshots},
        caught_by=frozenset({"ACK", "bug"}),
        scene=LIFE,
        seeds=30,
    )
)


# -- duplicates ------------------------------------------------------------------------------------


def _only_what_is_journaled(right: Any, fired: Fired) -> Any:
    async def _replay(self: Any, sequences: Any) -> None:
        fired()

    return _replay


enter(
    Mutant(
        name="a new owner reads only the journaled sequence ids",
        breaks="DEDUP: a new owner also knows ids that became durable after the last snapshot",
        wrong={
            "magnetar.broker.topic.deduplication:Deduplication._replay": _only_what_is_journaled
        },
        caught_by=frozenset({"DEDUP"}),
        scene=LIFE,
        seeds=30,
    )
)
