"""Bugs in the search for damage: scrubs, comparisons of copies, and the handling of damage that a
compaction meets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mutants.plant import Mutant, enter
from world.scenarios import SCENARIOS

from magnetar.bookie.contract import EntryPage
from magnetar.protos.envelope import BookieCode

if TYPE_CHECKING:
    from mutants.plant import Fired

SCRUB = "magnetar.bookie.scrub:"
RECLAIMER = "magnetar.bookie.reclaimer:Reclaimer."
ROTTING = SCENARIOS["scrub"]


def _passes_over(right: Any, fired: Fired) -> Any:
    async def _ledger(self: Any, ledger: int) -> None:
        if ledger % 2:
            fired()
        else:
            await right(self, ledger)

    return _ledger


enter(
    Mutant(
        name="a scrub skips every other ledger",
        breaks="§5.5: a scrub reads all stored entries",
        wrong={SCRUB + "Scrub._ledger": _passes_over},
        caught_by=frozenset({"I16", "T11"}),
        scene=ROTTING,
        seeds=20,
    )
)


def _readable_is_sound(right: Any, fired: Fired) -> Any:
    def _sound(*about: Any) -> bool:
        if not right(*about):
            fired()
        return True

    return _sound


enter(
    Mutant(
        name="a scrub calls every readable entry sound",
        breaks="§5.5: a scrub verifies the envelope's checksum and its ids",
        wrong={SCRUB + "_sound": _readable_is_sound},
        caught_by=frozenset({"I16"}),
        scene=ROTTING,
        seeds=20,
    )
)


def _throws_it_away(right: Any, fired: Fired) -> Any:
    async def _found(self: Any, ledger: int, entry: int) -> None:
        fired()
        self._storage.delete_ledger(ledger, None)
        await right(self, ledger, entry)

    return _found


enter(
    Mutant(
        name="a scrub removes a copy that has damage",
        breaks="§5.5: a bad copy stays until repair replaces it",
        wrong={SCRUB + "Scrub._found": _throws_it_away},
        caught_by=frozenset({"I15"}),
        scene=ROTTING,
        seeds=10,
    )
)


def _unreadable_is_absent(right: Any, fired: Fired) -> Any:
    async def list_entries(self: Any, incarnation: str, **about: Any) -> EntryPage:
        page: EntryPage = await right(self, incarnation, **about)
        if page.code is not BookieCode.IO_ERROR:
            return page
        fired()
        return EntryPage(BookieCode.OK)

    return list_entries


enter(
    Mutant(
        name="unlistable entries are reported as missing",
        breaks="§6.4: the comparison must learn that the content is unknown",
        wrong={"magnetar.bookie.service:BookieService.list_entries": _unreadable_is_absent},
        caught_by=frozenset({"I10"}),
        scene=ROTTING,
        seeds=20,
    )
)


def _no_table_is_rotten(right: Any, fired: Fired) -> Any:
    def is_rot(error: Any) -> bool:
        if right(error):
            fired()
        return False

    return is_rot


enter(
    Mutant(
        name="a rotten table is forgotten when the bookie ends",
        breaks="rot.py: the next start calls the store damaged, else the bookie ends at each start",
        wrong={"world.nodes:is_rot": _no_table_is_rotten},
        caught_by=frozenset({"I16", "I18"}),
        scene=ROTTING,
        seeds=20,
    )
)


def _goes_on(right: Any, fired: Fired) -> Any:
    async def _list(self: Any, read: Any) -> Any:
        found = await self._read(read)
        if found is None:
            fired()
        return found

    return _list


enter(
    Mutant(
        name="a scrub continues although it cannot list the ledgers",
        breaks="scrub.py: the records of a rotten table cannot be repaired one at a time",
        wrong={SCRUB + "Scrub._list": _goes_on},
        caught_by=frozenset({"I16"}),
        scene=ROTTING,
        seeds=20,
    )
)


# -- freeing space around damage -----------------------------------------------------------------


def _never_suspended(right: Any, fired: Fired) -> Any:
    def __init__(self: Any, *positional: Any, **named: Any) -> None:
        right(self, *positional, **named)
        if self.suspended:
            fired()
        self.suspended = False

    return __init__


enter(
    Mutant(
        name="space is freed although a compaction has failed",
        breaks="reclaimer.py: first a scrub must find no damage in the store",
        wrong={RECLAIMER + "__init__": _never_suspended},
        caught_by=frozenset({"T11"}),
        scene=ROTTING,
        seeds=100,
    )
)


def _keeps_what_was_replaced(right: Any, fired: Fired) -> Any:
    def resume(self: Any) -> None:
        if self.suspended:
            fired()
        self.suspended = False

    return resume


enter(
    Mutant(
        name="replaced bad values are compacted with the rest",
        breaks="reclaimer.py: the bad value still lies behind the value that a repair wrote",
        wrong={RECLAIMER + "resume": _keeps_what_was_replaced},
        caught_by=frozenset({"T11"}),
        scene=ROTTING,
        seeds=100,
    )
)


# -- comparing -------------------------------------------------------------------------------------


def _finds_nothing_missing(right: Any, fired: Fired) -> Any:
    def missing(expected: Any, held: Any) -> list[range]:
        if right(expected, held):
            fired()
        return []

    return missing


enter(
    Mutant(
        name="a comparison overlooks holes",
        breaks="§5.5: a comparison finds entries missing from the striping that no client reads",
        wrong={"magnetar.bookie.repair.auditor:missing": _finds_nothing_missing},
        caught_by=frozenset({"I16"}),
        scene=SCENARIOS["holes"],
        seeds=20,
    )
)
