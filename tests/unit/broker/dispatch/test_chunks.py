"""All chunks of a message go to one consumer, in order. Only the whole message moves to another
consumer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from fakes.dispatch_rig import DispatcherRig, PlainAcks

from magnetar.broker.dispatch import chunks
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.permits import Consumer, Limits
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.log.position import Position
from magnetar.protos.entry import Chunk

if TYPE_CHECKING:
    from fakes.dispatch_rig import Member

LARGE = Limits(unacked_per_consumer=1_000, unacked_per_subscription=10_000, read_entries=100)

SMALL = Limits(
    unacked_per_consumer=1_000, unacked_per_subscription=10_000, turn_messages=4, read_entries=5
)


def world(limits: Limits | None = LARGE) -> DispatcherRig:
    return DispatcherRig(Shared, shared=True, limits=limits)


def append(it: DispatcherRig, uuid: str, index: int, count: int) -> None:
    it.append(chunk=Chunk(uuid, index, count, 10 * count))


def got(it: DispatcherRig, member: Member) -> list[tuple[str, int]]:
    entries = {entry.position: entry.view.chunk for entry in it.log}
    found = [entries[position] for position in member.inbox]
    return [("", -1) if chunk is None else (chunk.uuid, chunk.index) for chunk in found]


def chunk_ids(uuid: str, count: int) -> list[tuple[str, int]]:
    return [(uuid, index) for index in range(count)]


def test_each_of_several_interleaved_messages_goes_to_one_consumer() -> None:
    it = world()
    members = [it.join(), it.join(), it.join()]
    for member in members:
        it.flow(member, 100)
    for index in range(30):
        for uuid in ("a", "b", "c"):
            append(it, uuid, index, 30)
        it.append()
        it.settle()
    seen = {}
    for member in members:
        for uuid in {uuid for uuid, _ in got(it, member)} - {""}:
            assert uuid not in seen
            seen[uuid] = [index for name, index in got(it, member) if name == uuid]
    assert seen == {uuid: list(range(30)) for uuid in ("a", "b", "c")}
    assert all(("", -1) in got(it, member) for member in members), "single messages rotate"


def test_chunks_wait_for_their_consumer_and_other_messages_are_delivered() -> None:
    it = world()
    first, second = it.join(), it.join()
    it.flow(first, 1)
    append(it, "a", 0, 3)
    it.settle()
    it.flow(second, 100)
    append(it, "a", 1, 3)
    it.append()
    append(it, "a", 2, 3)
    it.append()
    it.settle()
    assert got(it, first) == [("a", 0)]
    assert got(it, second) == [("", -1)] * 2
    assert Why.CHUNKS in {reason.why for reason in it.machine.explain(it.now)}
    it.flow(first, 1)
    it.settle()
    assert got(it, first) == chunk_ids("a", 2)
    it.flow(first, 1)
    it.settle()
    assert got(it, first) == chunk_ids("a", 3)


def test_whole_messages_of_a_leaving_consumer_are_redelivered_from_the_first_chunk() -> None:
    it = world()
    first = it.join()
    it.flow(first, 100)
    for index in range(3):
        append(it, "a", index, 5)
    it.settle()
    second, third = it.join(), it.join()
    it.flow(second, 100)
    it.flow(third, 100)
    it.append()  # a read is outstanding when the consumer leaves
    append(it, "a", 3, 5)
    it.leave(first)
    append(it, "a", 4, 5)
    it.settle()
    [owner] = [member for member in (second, third) if ("a", 0) in got(it, member)]
    assert [each for each in got(it, owner) if each[0]] == chunk_ids("a", 5)


def test_parked_chunks_move_with_their_message_when_the_consumer_leaves() -> None:
    it = world()
    first, second = it.join(), it.join()
    it.flow(first, 1)
    append(it, "a", 0, 2)
    it.settle()
    it.flow(second, 100)
    append(it, "a", 1, 2)
    it.settle()
    assert got(it, second) == []
    it.leave(first)
    it.settle()
    assert got(it, second) == chunk_ids("a", 2)


def test_redelivery_of_one_chunk_redelivers_the_whole_message() -> None:
    it = world()
    first = it.join()
    it.flow(first, 100)
    for index in range(3):
        append(it, "a", index, 3)
    it.append()
    it.settle()
    it.redeliver(first, [Position(0, 2)])  # some clients return only the last chunk
    it.settle()
    assert got(it, first)[4:] == chunk_ids("a", 3)


def test_acknowledged_message_is_forgotten() -> None:
    it = world()
    member = it.join()
    it.flow(member, 10_000)
    for number in range(20):
        for index in range(3):
            append(it, f"m{number}", index, 3)
        it.settle()
        it.ack(member, *[Position(0, 3 * number + index) for index in range(3)])
    assert isinstance(it.machine, Shared)
    assert not it.machine._chunks


def test_unfinished_messages_are_bounded() -> None:
    it = world(Limits(unacked_per_consumer=9_000, unacked_per_subscription=90_000))
    member = it.join()
    it.flow(member, 10_000)
    for number in range(chunks.MESSAGES_MAX + 5):
        append(it, f"m{number}", 0, 2)
    it.settle()
    assert isinstance(it.machine, Shared)
    assert len(it.machine._chunks._messages) == chunks.MESSAGES_MAX
    append(it, "m0", 1, 2)  # the message is forgotten: any consumer may get its chunks
    it.settle()
    assert got(it, member)[-1] == ("m0", 1)


def test_expired_messages_take_no_room_from_an_unfinished_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "MESSAGES_MAX", 3)
    it = world()
    first = it.join()
    it.flow(first, 5)
    append(it, "m", 0, 2)
    for uuid in ("x", "y"):
        append(it, uuid, 0, 2)
        append(it, uuid, 1, 2)
    it.settle()
    second = it.join()
    it.flow(second, 100)
    it.skip_through(it.log[-1].position)
    append(it, "z", 0, 2)
    it.settle()
    assert got(it, second) == [("z", 0)]
    append(it, "m", 1, 2)
    it.settle()
    it.flow(first, 1)
    it.settle()
    assert got(it, first)[-1] == ("m", 1)


def test_expired_chunks_do_not_wait_for_their_consumer() -> None:
    it = world()
    first = it.join()
    it.flow(first, 1)
    append(it, "m", 0, 3)
    it.settle()
    second = it.join()
    it.flow(second, 100)
    append(it, "m", 1, 3)
    append(it, "m", 2, 3)
    it.settle()

    def parked() -> list[int]:
        reasons = it.machine.explain(it.now)
        return [int(str(it.facts["chunks"])) for it in reasons if it.why is Why.CHUNKS]

    assert parked() == [2]
    it.skip_through(it.log[1].position)
    assert parked() == [1]
    it.skip_through(it.log[2].position)
    assert parked() == []


class Clients:
    """The messages that clients build from the chunks that they get."""

    def __init__(self, it: DispatcherRig) -> None:
        self.it = it
        self.read: dict[Member, int] = {}
        self.next: dict[tuple[Member, str], int] = {}  # the chunk that must follow

    def take(self) -> None:
        entries = {entry.position: entry.view.chunk for entry in self.it.log}
        for member in self.it.members:
            for position in member.inbox[self.read.get(member, 0) :]:
                chunk = entries[position]
                if chunk is not None:
                    expected = self.next.get((member, chunk.uuid), 0)
                    assert chunk.index in (0, expected), f"{chunk} instead of {expected}"
                    self.next[member, chunk.uuid] = chunk.index + 1
            self.read[member] = len(member.inbox)

    def drop(self, member: Member, uuid: str | None = None) -> None:
        """Return the chunks of this message that the client has; None: of every message."""
        for key in [key for key in self.next if key[0] is member]:
            if uuid in (None, key[1]):
                del self.next[key]

    def whole(self, member: Member) -> list[Position]:
        """The entries that the client can acknowledge: single ones, and those of whole messages."""
        entries = {entry.position: entry.view.chunk for entry in self.it.log}
        found = []
        for position, owner in self.it.owner.items():
            chunk = entries[position]
            if owner is member and (
                chunk is None or self.next.get((member, chunk.uuid)) == chunk.count
            ):
                found.append(position)
        return found


@pytest.mark.parametrize("block", range(10))
def test_random_histories_keep_the_chunks_of_messages_together(block: int) -> None:
    kinds = ["chunk"] * 6 + ["flow", "read"] * 3
    kinds += ["single", "roll", "join", "leave", "short", "fail", "ack", "redeliver", "some"]
    kinds += ["full", "room"]
    for seed in range(block * 30, block * 30 + 30):
        chance = random.Random(seed)
        it = world(SMALL)
        clients = Clients(it)
        open_messages: dict[int, tuple[str, int, int]] = {}
        for number in range(120):
            kind, a = chance.choice(kinds), chance.randrange(10)
            member = chance.choice(it.members) if it.members else None
            if kind == "chunk":
                slot = a % 3
                uuid, index, count = open_messages.pop(slot, (f"m{number}", 0, 2 + a % 3))
                append(it, uuid, index, count)
                if index + 1 < count:
                    open_messages[slot] = uuid, index + 1, count
            elif kind == "single":
                it.append()
            elif kind == "roll":
                it.append(new_ledger=True)
            elif kind == "join" and len(it.members) < 4:
                it.join(priority=a % 2)
            elif kind in ("read", "short", "fail"):
                if it.outstanding:
                    most = 1 + a % 3 if kind == "short" else 1_000
                    it.answer_read(entries_max=most, fail=kind == "fail")
            elif member is not None:
                mine = sorted(p for p, owner in it.owner.items() if owner is member)
                if kind == "leave" and a < 4:
                    it.leave(member)
                elif kind == "flow":
                    it.flow(member, 1 + a)
                elif kind in ("full", "room"):
                    it.set_writable(member, kind == "room")
                elif kind == "ack":
                    it.ack(member, *clients.whole(member))
                elif kind == "redeliver":
                    clients.drop(member)
                    it.redeliver(member)
                elif kind == "some" and mine:
                    clients.drop(member, it._uuid(mine[a % len(mine)]))
                    it.redeliver(member, [mine[a % len(mine)]])
            clients.take()
        finish(it, clients, open_messages)


def finish(
    it: DispatcherRig, clients: Clients, open_messages: dict[int, tuple[str, int, int]]
) -> None:
    """The phase without faults: every whole message is delivered and acknowledged."""
    if not it.members:
        it.join()
    for member in it.members:
        it.set_writable(member, True)
    for _ in range(100):
        it.settle()
        clients.take()
        left = [entry for entry in it.log if entry.position not in it.acks.acked]
        if all(entry.view.chunk is not None for entry in left):
            uuids = {entry.view.chunk.uuid for entry in left if entry.view.chunk is not None}
            if len(uuids) <= len(open_messages):
                return
        for member in list(it.members):
            it.flow(member, 10)
            it.settle()
            clients.take()
            it.ack(member, *clients.whole(member))
    explained = [str(reason) for reason in it.machine.explain(it.now)]
    raise AssertionError(f"a message was never delivered whole: {explained}")


class Counted(Position):
    """Counts comparisons."""

    compared = 0

    def __lt__(self, other: tuple[int, ...]) -> bool:
        Counted.compared += 1
        return tuple.__lt__(self, other)


def test_a_message_of_many_chunks_is_redelivered_without_a_look_at_all_of_them() -> None:
    """A producer may call 50,000 entries the chunks of one message."""
    number, routes, acks = 1_000, chunks.ChunkRoutes(), PlainAcks([])
    one, two = (Consumer(name, 0, lambda: True, LARGE) for name in ("one", "two"))
    positions = [Counted(1, entry) for entry in range(number)]
    for index, position in enumerate(positions):
        routes.on_given(Chunk("u", index, number + 1, number), position, one)
    routes.on_left(one)
    Counted.compared = 0
    for index, position in enumerate(positions):
        chunk = Chunk("u", index, number + 1, number)
        assert not routes.must_wait(chunk, position, acks)
        assert index == number - 1 or routes.must_wait(chunk, positions[-1], acks)
        routes.on_given(chunk, position, two)
    routes.check(acks)
    assert Counted.compared < 50 * number


@pytest.mark.parametrize("order", ["all acknowledged late", "the last acknowledged first"])
def test_a_message_that_was_given_back_and_acknowledged_is_forgotten(order: str) -> None:
    routes, acks = chunks.ChunkRoutes(), PlainAcks([])
    members = [Consumer(name, 0, lambda: True, LARGE) for name in ("a", "b")]
    positions = [Position(1, entry) for entry in range(3)]
    parts = [Chunk("u", index, 3, 30) for index in range(3)]
    for part, position in zip(parts, positions, strict=True):
        routes.on_given(part, position, members[0])
    if order == "the last acknowledged first":
        routes.on_gone(positions.pop())
        routes.with_whole_messages(positions[:1])
        for part, position in zip(parts, positions, strict=False):
            routes.on_given(part, position, members[1])
        assert routes.begun("u") is None
    else:
        routes.with_whole_messages(positions[:1])
    for position in positions:
        routes.check(acks)
        routes.on_gone(position)
    assert not routes
