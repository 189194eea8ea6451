"""Bugs of bookies: admission, group commit, answers, identity."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mutants.plant import Mutant, enter
from mutants.scenes import CLUSTER, DARK, NARROW, ROLLBACK
from world.scenarios import SCENARIOS

from magnetar.bookie.admission import Intake
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.identity import Start
from magnetar.protos.envelope import (
    BookieCode,
    decode_envelope,
    decode_hello,
    encode_hello_reply,
)

if TYPE_CHECKING:
    from mutants.plant import Fired

LOST = frozenset({"I1", "I7", "I9", "I18"})
SERVICE = "magnetar.bookie.service:BookieService."
ADMISSION = "magnetar.bookie.admission:Admission."
COMMIT = "magnetar.bookie.storage.commit:GroupCommit."


def _at_once(right: Any, fired: Fired) -> Any:
    def when_durable(self: Any, done: Any) -> None:
        fired()
        self._wake.set()
        done()

    return when_durable


enter(
    Mutant(
        name="adds are answered before the sync",
        breaks="§6.1: an acked entry is on disk",
        wrong={COMMIT + "when_durable": _at_once},
        caught_by=frozenset({"I1"}),
        scene=NARROW,
        seeds=20,
    )
)


def _answers_unsynced(right: Any, fired: Fired) -> Any:
    async def _fence(self: Any, ledger: int, master_key: int) -> BookieCode:
        code = self._admission.fence(ledger, master_key)
        if code is BookieCode.OK:
            self.counts.fences += 1
            if not self._admission.state(ledger).fence_durable:
                fired()
        return BookieCode(code)

    return _fence


enter(
    Mutant(
        name="fences are answered before the sync",
        breaks="D5: a fence is durable before any answer to it, also before a negative answer",
        wrong={SERVICE + "_fence": _answers_unsynced},
        caught_by=LOST | {"I11"},
        scene=DARK,
        seeds=300,
    )
)


def _in_memory_only(right: Any, fired: Fired) -> Any:
    def fence(self: Any, ledger: int, master_key: int) -> Any:
        write, self._write = self._write, lambda puts: fired()
        try:
            return right(self, ledger, master_key)
        finally:
            self._write = write

    return fence


enter(
    Mutant(
        name="fences are kept in memory",
        breaks="D7: a fence outlives the process",
        wrong={ADMISSION + "fence": _in_memory_only},
        caught_by=LOST | {"I11"},
        scene=DARK,
        seeds=100,
    )
)


def _only_known_ledgers(right: Any, fired: Fired) -> Any:
    async def _fence(self: Any, ledger: int, master_key: int) -> BookieCode:
        if self._admission.state(ledger).record is None:
            fired()
            return BookieCode.OK
        return BookieCode(await right(self, ledger, master_key))

    return _fence


enter(
    Mutant(
        name="an unknown ledger is not fenced",
        breaks="D6: the first adds of the ledger may still be under way",
        wrong={SERVICE + "_fence": _only_known_ledgers},
        caught_by=LOST | {"I11", "bug"},
        scene=NARROW,
        seeds=200,
    )
)


def _fence_ignored(right: Any, fired: Fired) -> Any:
    def refusal(*about: Any) -> Any:
        code = right(*about)
        if code is BookieCode.FENCED:
            fired()
            return None
        return code

    return refusal


enter(
    Mutant(
        name="a fenced ledger takes adds",
        breaks="§4.4: after the fence a bookie stores no add of the old writer",
        wrong={"magnetar.bookie.admission:refusal": _fence_ignored},
        caught_by=LOST | {"I11"},
        scene=NARROW,
        seeds=50,
    )
)


def _failures_are_absence(right: Any, fired: Fired) -> Any:
    def _unknown(error: Exception) -> BookieCode:
        if isinstance(error, StorageFailed):
            fired()
            return BookieCode.NO_SUCH_ENTRY
        return BookieCode(right(error))

    return _unknown


enter(
    Mutant(
        name="a read error is answered as no such entry",
        breaks="D9: a disk error is not a negative answer",
        wrong={"magnetar.bookie.service:_unknown": _failures_are_absence},
        caught_by=LOST | {"I10", "I11"},
        scene=CLUSTER,
        seeds=100,
    )
)


def _goes_on(right: Any, fired: Fired) -> Any:
    def _sync(self: Any, *arguments: Any) -> Any:
        try:
            return right(self, *arguments)
        except StorageFailed:
            fired()
            return False, 0.0

    return _sync


enter(
    Mutant(
        name="a failed sync is ignored",
        breaks="T22: after a failed sync, the content of the disk is unknown",
        wrong={COMMIT + "_sync": _goes_on},
        caught_by=LOST | {"I11"},
        scene=CLUSTER,
        seeds=100,
    )
)


def _any_bookie_is_meant(right: Any, fired: Fired) -> Any:
    def _refusal(self: Any, incarnation: str) -> Any:
        if incarnation != self.identity.incarnation:
            fired()
        return right(self, self.identity.incarnation)

    return _refusal


def _greets_as_asked(right: Any, fired: Fired) -> Any:
    async def _greet(self: Any, stream: Any) -> bool:
        hello = decode_hello(await stream.receive())
        await stream.send(
            [encode_hello_reply(BookieCode.OK, hello.incarnation, self.identity.boot_epoch)]
        )
        return True

    return _greet


enter(
    Mutant(
        name="the incarnation is not checked",
        breaks="§4.6: a bookie that lost its disk says nothing about its earlier entries",
        wrong={SERVICE + "_refusal": _any_bookie_is_meant, SERVICE + "_greet": _greets_as_asked},
        caught_by=LOST | {"I10", "I11", "R2"},
        scene=CLUSTER,
        seeds=200,
    )
)


def _any_epoch(right: Any, fired: Fired) -> Any:
    def plan_start(directory: Any, found: Any, cookie: Any, wanted: Any) -> Start:
        start: Start = right(directory, found, cookie, wanted)
        if start.rolled_back is None:
            return start
        fired()
        identity = replace(
            found.identity, boot_epoch=cookie.boot_epoch + 1, start=wanted.fresh_start
        )
        return Start(identity)

    return plan_start


enter(
    Mutant(
        name="the boot epoch is not checked",
        breaks="T9: a disk that was rolled back would deny entries that it had",
        wrong={"world.boot:plan_start": _any_epoch},
        caught_by=LOST | {"I10", "I11", "I4"},
        scene=ROLLBACK,
        seeds=100,
    )
)


def _says_no(right: Any, fired: Fired) -> Any:
    def code(self: Any, incarnation: str) -> BookieCode:
        answer = right(self, incarnation)
        if answer is BookieCode.DAMAGED_STORE:
            fired()
            answer = BookieCode.NO_SUCH_ENTRY
        return BookieCode(answer)

    return code


enter(
    Mutant(
        name="a former incarnation says no",
        breaks="§4.6: in a damaged store a missing entry is unknown",
        wrong={"magnetar.bookie.damaged_store:FormerStores.code": _says_no},
        caught_by=LOST | {"I10", "R2"},
        scene=ROLLBACK,
        seeds=100,
    )
)


# -- conflicts, and full disks ---------------------------------------------------------------------


def _the_last_one_stays(right: Any, fired: Fired) -> Any:
    def _compare(self: Any, add: Any, state: Any) -> Any:
        code = right(self, add, state)
        if code is BookieCode.CONFLICT:
            fired()
            return None
        return code

    return _compare


enter(
    Mutant(
        name="other bytes replace a stored entry",
        breaks="T39: different bytes for a stored id are refused",
        wrong={ADMISSION + "_compare": _the_last_one_stays},
        caught_by=frozenset({"T39", "I3", "I8"}),
        scene=SCENARIOS["T39"],
        seeds=5,
    )
)


def _takes_another_for_it(right: Any, fired: Fired) -> Any:
    def decode_envelope_of(ledger: int, entry: int, envelope: Any) -> Any:
        decoded = decode_envelope(envelope)
        if (decoded.ledger, decoded.entry) != (ledger, entry):
            fired()
        return decoded

    return decode_envelope_of


enter(
    Mutant(
        name="an entry stored in the place of another one counts as that one",
        breaks="T37: a misplaced entry is damage, and repair replaces it",
        wrong={"magnetar.bookie.admission:decode_envelope_of": _takes_another_for_it},
        caught_by=frozenset({"I16"}),
        scene=SCENARIOS["T47"],
        seeds=60,
    )
)


def _takes_everything(right: Any, fired: Fired) -> Any:
    def refusal(add: Any, state: Any, intake: Any) -> Any:
        code = right(add, state, intake)
        if code is BookieCode.READ_ONLY:
            fired()
            return right(add, state, Intake.ALL)
        return code

    return refusal


enter(
    Mutant(
        name="a bookie whose disk is nearly full takes all adds",
        breaks="T21: the rest of the disk is reserved for fences, repairs and deletions",
        wrong={"magnetar.bookie.admission:refusal": _takes_everything},
        caught_by=frozenset({"T21"}),
        scene=SCENARIOS["T21"],
        seeds=20,
    )
)


def _refuses_repairs_too(right: Any, fired: Fired) -> Any:
    def refusal(add: Any, state: Any, intake: Any) -> Any:
        if intake is Intake.REPAIRS and add.flags:
            fired()
            intake = Intake.NONE
        return right(add, state, intake)

    return refusal


enter(
    Mutant(
        name="a bookie whose disk is nearly full takes no write-backs",
        breaks="T21: ledgers can be recovered when all disks are nearly full",
        wrong={"magnetar.bookie.admission:refusal": _refuses_repairs_too},
        caught_by=frozenset({"I18"}),
        scene=SCENARIOS["T21"],
        seeds=50,
    )
)


def _no_room_needed(right: Any, fired: Fired) -> Any:
    async def wait_room(self: Any) -> None:
        if self.pending_bytes >= self._pending_bytes_max:
            fired()

    return wait_room


enter(
    Mutant(
        name="a bookie takes frames without end",
        breaks="I17: the bytes written but not yet on disk are bounded",
        wrong={COMMIT + "wait_room": _no_room_needed},
        caught_by=frozenset({"I17"}),
        scene=SCENARIOS["T33"],
        seeds=20,
    )
)
