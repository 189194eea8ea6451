"""A dispatcher on a rig: a log, a cursor as plain sets, consumers that keep notes.

It carries out what the machine returns, and asserts after every event what must always be true:
    - no acknowledged entry is delivered, and none twice while somebody has it (shared);
    - nobody gets anything without permits, and beyond them at most the rest of one entry;
    - at most one read is outstanding;
    - a machine at rest can say why.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from magnetar.broker.dispatch.dispatcher import Deliver, Read, Replay
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.permits import Consumer, Limits
from magnetar.broker.log.entry import StoredEntry
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.dispatch.dispatcher import Action, Dispatcher, Mark


@dataclass(slots=True)
class View:
    num_messages: int
    is_batch: bool


@dataclass(slots=True)
class PlainAcks:
    """A cursor as one would write it first: sets, and a scan for every question."""

    log: list[StoredEntry]
    acked: set[Position] = field(default_factory=set)
    partial: dict[Position, set[int]] = field(default_factory=dict)  # indexes left

    @property
    def mark_delete(self) -> Position:
        mark = Position(-1, -1)
        for entry in self.log:
            if entry.position not in self.acked:
                break
            mark = entry.position
        return mark

    @property
    def highest_acked(self) -> Position:
        return max([*self.acked, *self.partial], default=Position(-1, -1))

    def is_acked(self, position: Position) -> bool:
        return position in self.acked

    def batch_ack_set(self, position: Position) -> tuple[int, ...] | None:
        left = self.partial.get(position)
        if left is None:
            return None
        bits = sum(1 << index for index in left)
        return (bits - (1 << 64) if bits >> 63 else bits,)

    def first_unacked(self, position: Position) -> Position:
        for entry in self.log:
            if entry.position >= position and entry.position not in self.acked:
                return entry.position
        last = self.log[-1].position if self.log else Position(0, -1)
        return Position(last.ledger, last.entry + 1)

    def acknowledge(self, position: Position) -> None:
        self.acked.add(position)
        self.partial.pop(position, None)

    def acknowledge_index(self, entry: StoredEntry, index: int) -> None:
        if entry.position in self.acked:
            return
        left = self.partial.setdefault(entry.position, set(range(entry.view.num_messages)))
        left.discard(index)
        if not left:
            self.acknowledge(entry.position)

    def left_of(self, entry: StoredEntry) -> int:
        if entry.position in self.acked:
            return 0
        left = self.partial.get(entry.position)
        return entry.view.num_messages if left is None else len(left)


@dataclass(slots=True, eq=False)
class Member:
    """A consumer, and the other end of its connection."""

    name: str
    machine: Consumer = field(init=False)
    writable: bool = True
    inbox: list[Position] = field(default_factory=list)  # delivered, in order
    counts: list[int] = field(default_factory=list)  # redelivery counts beside them


class DispatcherRig:
    """`dispatcher(acks, confirmed, limits)` is the machine's constructor."""

    def __init__(
        self, dispatcher: Callable[..., Any], *, shared: bool, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits(
            unacked_per_consumer=12, unacked_per_subscription=20, turn_messages=4, read_entries=5
        )
        self.shared = shared
        self.log: list[StoredEntry] = []
        self.acks = PlainAcks(self.log)
        self.members: list[Member] = []
        self.owner: dict[Position, Member] = {}  # who was given what and has not acked it (shared)
        self.given_back: Counter[Position] = Counter()
        self.outstanding: Read | Replay | None = None
        self.joined = 0
        self.machine: Dispatcher = dispatcher(self.acks, self.confirmed, self.limits)

    def confirmed(self) -> Position:
        return self.log[-1].position if self.log else Position(0, -1)

    # ---- events ----------------------------------------------------------------------------------

    def append(self, messages: int = 1, *, batch: bool = False, new_ledger: bool = False) -> None:
        last = self.confirmed()
        ledger = last.ledger + 3 if new_ledger and self.log else last.ledger
        entry = last.entry + 1 if ledger == last.ledger else 0
        view: Any = View(messages if batch else 1, batch)  # all that a dispatcher asks of one
        self.log.append(StoredEntry(Position(ledger, entry), 0, 0, view))
        self.carry_out(self.machine.advance())

    def join(self, *, priority: int = 0, name: str = "") -> Member:
        self.joined += 1
        member = Member(name or f"c{self.joined}")
        member.machine = Consumer(member.name, priority, lambda: member.writable, self.limits)
        self.members.append(member)
        self.carry_out(self.machine.add_consumer(member.machine))
        return member

    def leave(self, member: Member) -> None:
        self.members.remove(member)
        for position in [it for it, owner in self.owner.items() if owner is member]:
            self._give_back(position)
        self.carry_out(self.machine.remove_consumer(member.machine))

    def flow(self, member: Member, permits: int) -> None:
        self.carry_out(self.machine.on_flow(member.machine, permits))

    def set_writable(self, member: Member, writable: bool) -> None:
        member.writable = writable
        if writable:
            self.carry_out(self.machine.advance())

    def ack(self, member: Member, *positions: Position) -> None:
        for position in positions:
            self.acks.acknowledge(position)
            self.owner.pop(position, None)
            self.given_back.pop(position, None)
        self.carry_out(self.machine.on_acked(member.machine, positions))

    def ack_cumulative(self, member: Member, position: Position) -> None:
        through = [entry.position for entry in self.log if entry.position <= position]
        self.ack(member, *through)

    def ack_index(self, member: Member, entry: StoredEntry, index: int) -> None:
        self.acks.acknowledge_index(entry, index)
        if self.acks.is_acked(entry.position):
            self.owner.pop(entry.position, None)
            self.given_back.pop(entry.position, None)
        self.carry_out(self.machine.on_partly_acked(member.machine, entry.position))

    def redeliver(self, member: Member, positions: Sequence[Position] | None = None) -> None:
        mine = [it for it, owner in self.owner.items() if owner is member]
        for position in mine if positions is None else positions:
            if self.owner.get(position) is member:
                self._give_back(position)
        self.carry_out(self.machine.on_redeliver(member.machine, positions))

    def answer_read(self, *, entries_max: int = 1_000, fail: bool = False) -> None:
        """The outstanding read ends; `entries_max` cuts it short, as a limit in bytes does."""
        read, self.outstanding = self.outstanding, None
        assert read is not None
        if fail:
            self.carry_out(self.machine.on_read_failed())
        elif isinstance(read, Read):
            there = [entry for entry in self.log if entry.position >= read.first]
            self.carry_out(self.machine.on_entries(there[: min(read.entries_max, entries_max)]))
        else:
            assert read.positions == sorted(set(read.positions))
            tried = read.positions[:entries_max]
            there = [entry for entry in self.log if tried[0] <= entry.position <= tried[-1]]
            self.carry_out(self.machine.on_replayed(there, tried[-1]))

    def settle(self) -> None:
        """Answer reads until none is outstanding."""
        for _ in range(10_000):
            if self.outstanding is None:
                return
            self.answer_read()
        raise AssertionError("reads without end")

    # ---- what the machine wants ------------------------------------------------------------------

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                self._deliver(action)
            else:
                assert self.outstanding is None, "a second read while one is outstanding"
                self.outstanding = action
        self.machine.check()
        self._check_rest()

    def _deliver(self, action: Deliver) -> None:
        member = next(it for it in self.members if it.machine is action.consumer)
        assert action.entries
        assert member.writable
        lefts = [self.acks.left_of(entry) for entry in action.entries]
        assert all(lefts), "an acknowledged entry was delivered"
        assert action.messages == sum(lefts)
        before = member.machine.permits + action.messages
        assert before - sum(lefts[:-1]) > 0, "more than one entry beyond the permits"
        for index, entry in enumerate(action.entries):
            mark = action.marks.get(index)
            self._check_mark(entry, mark)
            if self.shared:
                assert entry.position not in self.owner, "delivered while somebody has it"
                self.owner[entry.position] = member
            member.inbox.append(entry.position)
            member.counts.append(mark.redelivery_count if mark else 0)

    def _check_mark(self, entry: StoredEntry, mark: Mark | None) -> None:
        count = mark.redelivery_count if mark else 0
        ack_set = mark.ack_set if mark else ()
        assert count == (self.given_back[entry.position] if self.shared else 0)
        assert ack_set == (self.acks.batch_ack_set(entry.position) or ())

    def _give_back(self, position: Position) -> None:
        del self.owner[position]
        self.given_back[position] += 1

    def _check_rest(self) -> None:
        """If somebody can take something, a read is out or there is nothing left for anybody."""
        reasons = self.machine.explain()
        assert reasons
        if self.shared:
            for member in self.members:
                mine = [it for it, owner in self.owner.items() if owner is member]
                entries = {entry.position: entry for entry in self.log}
                assert member.machine.unacked == sum(self.acks.left_of(entries[it]) for it in mine)
        able = [it for it in self.members if it.machine.available]
        if not able:
            return
        general = {reason.why for reason in reasons if not reason.consumer}
        assert general, f"at rest without a reason: {reasons}"
        assert (Why.READING in general) == (self.outstanding is not None)
        if self.outstanding is None and Why.UNACKED_BY_SUBSCRIPTION not in general and self.shared:
            waiting = [it.position for it in self.log if it.position not in self.acks.acked]
            assert set(waiting) == set(self.owner), "entries lie about while somebody is able"
