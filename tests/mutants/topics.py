"""Bugs in logs of ledgers, in reads of ranges, in waits, and in rewrites of records."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from mutants.plant import Mutant, enter
from world.scenarios import SCENARIOS

from magnetar.broker.log.owned_record import _update
from magnetar.metadata.codec import decode_topic, encode_topic
from magnetar.metadata.store import KEEP
from magnetar.protos.envelope import (
    BookieCode,
    EnvelopeDamaged,
    decode_envelope,
    decode_read_answers,
)

if TYPE_CHECKING:
    from mutants.plant import Fired

APPENDER = "magnetar.bookie.ledger.appender:LedgerAppender."


# -- a topic's log ---------------------------------------------------------------------------------


def _records_by_and_by(right: Any, fired: Fired) -> Any:
    async def record(self: Any, change: Any) -> None:
        fired()
        await asyncio.wait(
            {asyncio.get_running_loop().create_task(right(self, change))}, timeout=0.001
        )

    return record


enter(
    Mutant(
        name="a ledger is written before the topic lists it",
        breaks="I14: the next owner of the topic would not find it",
        wrong={"magnetar.broker.log.rolling:Rolling.record": _records_by_and_by},
        caught_by=frozenset({"I14"}),
        scene=SCENARIOS["T43"],
        seeds=10,
    )
)


def _in_any_epoch(right: Any, fired: Fired) -> Any:
    async def change(self: Any, change: Any) -> None:
        def apply(stored: bytes | None) -> Any:
            assert stored is not None
            record = decode_topic(stored)
            if record.epoch != self.epoch:
                fired()
            changed = change(record)
            return KEEP if changed == record else encode_topic(changed)

        found = await _update(self.name, self._store, apply)
        assert found is not None
        self.record = decode_topic(found.value)

    return change


enter(
    Mutant(
        name="a former owner changes the topic's record",
        breaks="I14, T43: another owner's epoch ends an OwnedRecord",
        wrong={"magnetar.broker.log.owned_record:OwnedRecord.change": _in_any_epoch},
        caught_by=frozenset({"I14", "I1"}),
        scene=SCENARIOS["T43"],
        seeds=20,
    )
)


def _behind_the_queue(right: Any, fired: Fired) -> Any:
    def put_back(self: Any) -> int:
        count: int = right(self)
        sent = [run for run in self._runs if count and run.confirmed == 0][:1]
        if sent and len(self._runs) > 1:
            fired()
            self._runs.remove(sent[0])
            self._runs.append(sent[0])
            self._queue = type(self._queue)(self._runs)
        return count

    return put_back


enter(
    Mutant(
        name="entries that a failed ledger did not confirm go to the end of the queue",
        breaks="I14: messages keep their order across ledgers",
        wrong={"magnetar.broker.log.outstanding:Outstanding.put_back": _behind_the_queue},
        caught_by=frozenset({"I14", "bug"}),
        scene=SCENARIOS["T43"],
        seeds=100,
    )
)


# -- reading, waiting, rewriting -------------------------------------------------------------------


def _whatever_it_is(right: Any, fired: Fired) -> Any:
    def decode_run(frame: Any, *, ledger: int, first: int) -> Any:
        found: list[bytes] = []
        for answer in decode_read_answers(frame):
            if answer.code is not BookieCode.OK:
                return found, answer.code
            try:
                envelope = decode_envelope(answer.envelope)
            except EnvelopeDamaged:
                return found, BookieCode.CORRUPT
            if (envelope.ledger, envelope.entry) != (ledger, first + len(found)):
                fired()
            found.append(answer.envelope)
        return found, BookieCode.OK

    return decode_run


enter(
    Mutant(
        name="the ids of a read entry are not compared",
        breaks="T37: the envelope of another entry may be sound, too",
        wrong={"magnetar.bookie.ledger.reader:decode_run": _whatever_it_is},
        caught_by=frozenset({"I3"}),
        scene=SCENARIOS["T37"],
        seeds=20,
    )
)


def _skips_holes(right: Any, fired: Fired) -> Any:
    def _run_from(first: int, found: Any) -> Any:
        entries = sorted(found)
        if entries != list(range(first, first + len(entries))):
            fired()
        return entries

    return _run_from


enter(
    Mutant(
        name="a hole among stripes is skipped",
        breaks="T47: a range is read without gaps",
        wrong={"magnetar.bookie.ledger.handle:_run_from": _skips_holes},
        caught_by=frozenset({"T47"}),
        scene=SCENARIOS["T47"],
        seeds=60,
    )
)


def _always_room(right: Any, fired: Fired) -> Any:
    def _has_room(self: Any) -> bool:
        if not right(self):
            fired()
        return True

    return _has_room


enter(
    Mutant(
        name="no publish waits for room",
        breaks="I17: the memory for bytes in flight is bounded",
        wrong={APPENDER + "_has_room": _always_room},
        caught_by=frozenset({"I17"}),
        scene=SCENARIOS["T33"],
        seeds=5,
    )
)


def _only_for_room(right: Any, fired: Fired) -> Any:
    def _maybe_wake(self: Any) -> None:
        if self._has_room() and self._writer.writing:
            right(self)
        elif not self._writer.writing:
            fired()

    return _maybe_wake


enter(
    Mutant(
        name="the end of a ledger wakes no task",
        breaks="T46: a task that waits for room learns that the ledger ended",
        wrong={APPENDER + "_maybe_wake": _only_for_room},
        caught_by=frozenset({"I18"}),
        scene=SCENARIOS["T46"],
        seeds=5,
    )
)


def _stays(right: Any, fired: Fired) -> Any:
    def detach(self: Any, ledger: int) -> None:
        fired()

    return detach


enter(
    Mutant(
        name="an ended ledger stays attached to its streams",
        breaks="T46: an ended ledger leaves nothing in memory",
        wrong={"magnetar.bookie.ledger.add_stream:AddStream.detach": _stays},
        caught_by=frozenset({"T46", "bug"}),
        scene=SCENARIOS["T46"],
        seeds=5,
    )
)


def _only_what_it_knows(right: Any, fired: Fired) -> Any:
    def _unknown(message: Any) -> bytes:
        unknown = right(message)
        if unknown:
            fired()
        return b""

    return _unknown


enter(
    Mutant(
        name="a rewrite drops unknown fields",
        breaks="T49: fields that a later version wrote are kept",
        wrong={"magnetar.metadata.codec:_unknown": _only_what_it_knows},
        caught_by=frozenset({"T49"}),
        scene=SCENARIOS["T49"],
        seeds=5,
    )
)


def _any_format(right: Any, fired: Fired) -> Any:
    def _parse(message: Any, kind: str, data: bytes) -> Any:
        message.ParseFromString(data)
        if message.format != 1:
            fired()
        return message

    return _parse


enter(
    Mutant(
        name="a record of a later format is read as one of this version",
        breaks="T49: records of an unknown format are not changed",
        wrong={"magnetar.metadata.codec:_parse": _any_format},
        caught_by=frozenset({"T49"}),
        scene=SCENARIOS["T49"],
        seeds=5,
    )
)
