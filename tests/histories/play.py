"""Random histories: events drawn by a seed, then willing consumers that take everything."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from histories.model import Kind, Model

from magnetar.broker.dispatch.dispatcher import ConsumerRefused
from magnetar.protos.entry import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakes.dispatch_rig import Member

    from magnetar.broker.dispatch.dispatcher import Dispatcher, Environment
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position

KEYS = [f"key-{number}" for number in range(7)]
CHUNKS = 3
EVENTS = {
    "append": 30,
    "read": 22,
    "flow": 16,
    "ack": 8,
    "ack a message": 5,
    "ack cumulatively": 4,
    "return some": 4,
    "return all": 2,
    "negative ack": 14,
    "join": 9,
    "leave": 2,
    "crash": 1.5,
    "announce": 2,
    "connection": 3,
    "expire": 1,
    "seek": 0.3,
    "time": 5,
}
"""With their weights."""


class Player:
    """Plays one history."""

    def __init__(
        self, kind: Kind, seed: int, make: Callable[[Environment], Dispatcher] | None = None
    ) -> None:
        self.rng = random.Random(f"{kind.value} {seed}")
        self.it = Model(kind, self.rng, make)
        self.kind = kind
        self.delays = not kind.single_active and self.rng.random() < 0.4
        self.chunks = not kind.single_active and not self.delays and self.rng.random() < 0.3
        self.begun: list[tuple[str, str, int]] = []  # chunked messages: key, uuid, next chunk

    def play(self, events: int = 110) -> Model:
        names, weights = list(EVENTS), list(EVENTS.values())
        for event in self.rng.choices(names, weights, k=events):
            self.step(event)
        self.finish()
        self.it.met["blocked attempts"] += getattr(self.it.machine, "blocked_attempts", 0)
        return self.it

    def step(self, event: str) -> None:
        it, rng = self.it, self.rng
        if it.outstanding is not None and rng.random() < 0.4:
            self._read()
        member = rng.choice(it.members) if it.members else None
        match event:
            case "append":
                self._append()
            case "read" if it.outstanding is not None:
                self._read()
            case "join" if len(it.members) < 4:
                self._join()
            case "expire" if it.log and not self.chunks:  # a part of a message would stay
                it.met["expiries"] += 1
                it.skip_through(rng.choice(it.log[: 1 + len(it.log) // 2]).position)
            case "seek" if it.log:
                it.seek(rng.choice(it.log).position)
            case "time":
                self._let_time_pass()
        if member is not None and member in it.members:
            self._step_of(event, member)

    def finish(self) -> None:
        """Willing consumers take and acknowledge everything."""
        it = self.it
        for member in [each for each in it.members if each.machine.leaving]:
            it.leave(member)
        if not it.members:
            it.join(policy=it.draw_policy(self.rng))
        for member in it.members:
            it.set_writable(member, writable=True)
        for _ in range(300):
            it.settle()
            it.wait(1)
            if all(entry.position in it.acks.acked for entry in it.log):
                return
            for member in list(it.members):
                if member.machine.permits < 10:
                    it.flow(member, 20)
                it.settle()
                self._take_all(member)
        waiting = [entry.position for entry in it.log if entry.position not in it.acks.acked]
        raise AssertionError(f"stuck: {waiting[:5]}; {it.machine.explain(it.now)}")

    # ---- events ----------------------------------------------------------------------------------

    def _append(self) -> None:
        it, rng = self.it, self.rng
        if self.chunks and rng.random() < 0.3:
            if not self.begun or rng.random() < 0.4:
                self.begun.append((rng.choice(KEYS), f"u{len(it.log)}-{it.now}", 0))
            key, uuid, index = self.begun.pop(rng.randrange(len(self.begun)))
            it.append(key=key, chunk=Chunk(uuid, index, CHUNKS, 30))
            if index < CHUNKS - 1:
                self.begun.append((key, uuid, index + 1))
            return
        delay_ms = rng.randint(0, 60) * 100 if self.delays and rng.random() < 0.4 else None
        it.met["delayed entries"] += delay_ms is not None
        it.append(
            rng.randint(1, 4),
            batch=rng.random() < 0.2,
            new_ledger=rng.random() < 0.1,
            key=rng.choice(KEYS),
            delay_ms=delay_ms,
        )

    def _read(self) -> None:
        self.it.answer_read(entries_max=self.rng.randint(1, 5), fail=self.rng.random() < 0.1)

    def _join(self) -> None:
        it, rng = self.it, self.rng
        it.met["joins"] += 1
        it.met["joins under load"] += bool(it.owner)
        try:
            policy = it.draw_policy(rng)
            it.join(priority=rng.choice((0, 0, 1)), name=f"c{rng.randrange(4)}", policy=policy)
        except ConsumerRefused:
            assert self.kind is Kind.EXCLUSIVE
            assert len(it.members) == 1
        else:
            assert self.kind is not Kind.EXCLUSIVE or len(it.members) == 1

    def _let_time_pass(self) -> None:
        it, rng = self.it, self.rng
        if self.delays:
            it.settle()
            it.wait(rng.random() ** 2 * 8)
        else:
            it.sleep(rng.random() * 2)

    def _step_of(self, event: str, member: Member) -> None:
        """One action of a consumer."""
        it, rng = self.it, self.rng
        mine = self._held_by(member)
        match event:
            case "flow":
                it.flow(member, rng.randint(1, 9))
            case "ack" if messages := self._messages(mine):
                some = rng.sample(messages, rng.randint(1, len(messages)))
                it.ack(member, *[position for message in some for position in message])
            case "ack a message" if single := [at for at in mine if not self._uuid(at)]:
                entry = self._entry(rng.choice(single))
                it.ack_index(member, entry, rng.randrange(entry.view.num_messages))
            case "ack cumulatively" if self.kind.single_active and member.inbox:
                it.ack_cumulative(rng.choice(member.inbox))
            case "return some" if mine:
                it.redeliver(member, rng.sample(mine, rng.randint(1, len(mine))))
            case "return all":
                it.redeliver(member)
            case "negative ack" if mine and self.kind is Kind.ORDERED:
                self._negative_ack(member, mine)
            case "leave" | "crash":
                it.met["leaves"] += 1
                it.leave(member)
            case "announce" if not member.machine.leaving:
                it.announce_leave(member)
            case "connection":
                it.set_writable(member, not member.writable)

    def _negative_ack(self, member: Member, mine: list[Position]) -> None:
        """Negatively acknowledge an entry and return some later entries of its key, or request an
        entry that was negatively acknowledged before."""
        it, rng = self.it, self.rng
        before = [at for at in mine if at in it.nacked]
        if before and rng.random() < 0.4:
            it.redeliver(member, [rng.choice(before)])
            return
        it.met["negative acks"] += 1
        nacked = rng.choice(mine)
        key = self._entry(nacked).view.partition_key
        later = [at for at in mine if at > nacked and self._entry(at).view.partition_key == key]
        it.negative_ack(member, [nacked], rng.sample(later, rng.randint(0, len(later))))

    # ---- the client's knowledge
    # ---------------------------------------------------------------------

    def _held_by(self, member: Member) -> list[Position]:
        """The entries that the consumer has and may acknowledge."""
        it = self.it
        if it.shared:
            return [position for position, owner in it.owner.items() if owner is member]
        return [at for at in dict.fromkeys(member.inbox) if at not in it.acks.acked]

    def _entry(self, position: Position) -> StoredEntry:
        return next(entry for entry in self.it.log if entry.position == position)

    def _uuid(self, position: Position) -> str:
        """The uuid of the chunked message; "": the entry is no chunk."""
        chunk = self._entry(position).view.chunk
        return "" if chunk is None else chunk.uuid

    def _messages(self, mine: list[Position]) -> list[list[Position]]:
        """The entries by message, without incomplete chunked messages: clients acknowledge all
        chunks of a message, or none."""
        messages: dict[str, list[Position]] = {}
        for position in mine:
            messages.setdefault(self._uuid(position) or f"{position}", []).append(position)
        return [
            each for each in messages.values() if not self._uuid(each[0]) or len(each) == CHUNKS
        ]

    def _take_all(self, member: Member) -> None:
        mine = self._held_by(member)
        if mine and self.kind.single_active:
            self.it.ack_cumulative(max(mine))
        elif mine:
            self.it.ack(member, *mine)
