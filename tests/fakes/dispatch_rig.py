"""A dispatcher with a test log, a cursor made of sets, and consumers that record deliveries.

It executes the actions of the dispatcher. After every event it asserts the rules of every
dispatcher:
    - an acknowledged entry is not delivered; in a shared type, an entry that is pending at one
    consumer is not delivered to another;
    - a consumer without permits gets no entry; only the last entry of a delivery may hold more
    messages than the permits allow;
    - at most one read is outstanding;
    - a dispatcher that delivers nothing has a reason;
    - a refused consumer changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

from magnetar.broker.dispatch.active import FAILOVER_DEFAULTS
from magnetar.broker.dispatch.delayed import DelayPolicy, Delays
from magnetar.broker.dispatch.dispatcher import (
    Activate,
    ConsumerRefused,
    Deliver,
    Environment,
    Read,
    Replay,
)
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.failover import Failover
from magnetar.broker.dispatch.key_shared import PART_PAUSE_S
from magnetar.broker.dispatch.permits import Consumer, Limits
from magnetar.broker.dispatch.positions import PositionMap
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.entry import StoredEntry
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.dispatch.active import FailoverRules
    from magnetar.broker.dispatch.dispatcher import Action, Dispatcher, EntryDetail
    from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
    from magnetar.protos.entry import Chunk


@dataclass(slots=True)
class View:
    num_messages: int
    is_batch: bool
    chunk: Chunk | None = None
    partition_key: str | None = None
    ordering_key: bytes | None = None
    partition_key_b64: bool = False
    producer_name: str = "p"
    sequence_id: int = 0
    deliver_at_ms: int | None = None


@dataclass(slots=True)
class PlainAcks:
    """A simple cursor: sets, and a scan for every query."""

    log: list[StoredEntry]
    acked: set[Position] = field(default_factory=set)
    partial: dict[Position, set[int]] = field(default_factory=dict)  # unacknowledged indexes
    redeliveries: PositionMap = field(default_factory=PositionMap)

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
        self.redeliveries.pop(position)

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
    """A consumer, and its client."""

    name: str
    machine: Consumer = field(init=False)
    writable: bool = True
    inbox: list[Position] = field(default_factory=list)  # delivered entries, in order
    counts: list[int] = field(default_factory=list)  # the redelivery counts of the entries
    # The states that the client was told, in order.
    active: list[bool] = field(default_factory=list)


class DispatcherRig:
    """`make` is the constructor of the dispatcher."""

    def __init__(
        self,
        make: Callable[[Environment], Dispatcher],
        *,
        shared: bool,
        limits: Limits | None = None,
        partition: int | None = None,
        failover: FailoverRules = FAILOVER_DEFAULTS,
        key_shared: KeySharedSettings | None = None,
        delay: DelayPolicy | None = None,
        delayed_max: int = 1_000,
    ) -> None:
        """`delayed_max`: of the index of delayed entries."""
        self.keyed = key_shared is not None
        self.limits = limits or Limits(
            unacked_per_consumer=12, unacked_per_subscription=20, turn_messages=4, read_entries=5
        )
        self.shared = shared
        self.log: list[StoredEntry] = []
        self.acks = PlainAcks(self.log)
        self.members: list[Member] = []
        self.owner: dict[Position, Member] = {}  # the owners of the pending entries (shared)
        self.given_back: Counter[Position] = Counter()
        self.outstanding: Read | Replay | None = None
        self.joined = 0
        self.now = 1_000.0  # advances with every event; the wall clock shows the same time
        self.delay = delay or DelayPolicy()
        self.delayed_max = delayed_max
        self.delays = Delays(self.delay, self.wall_ms, entries_max=delayed_max)
        self._make = make
        self.environment = Environment(
            "s",
            self.acks,
            self.confirmed,
            self.limits,
            self.acks.redeliveries,
            self.delays,
            topic="t",
            partition=partition,
            failover=failover,
            key_shared=key_shared or KeySharedSettings(),
        )
        self.machine = make(self.environment)

    @staticmethod
    def wall_ms(now: float) -> int:
        return int(now * 1_000)

    def confirmed(self) -> Position:
        return self.log[-1].position if self.log else Position(0, -1)

    # ---- events ----------------------------------------------------------------------------------

    def append(
        self,
        messages: int = 1,
        *,
        batch: bool = False,
        new_ledger: bool = False,
        chunk: Chunk | None = None,
        key: str | None = None,
        delay_ms: int | None = None,
    ) -> None:
        last = self.confirmed()
        ledger = last.ledger + 3 if new_ledger and self.log else last.ledger
        entry = last.entry + 1 if ledger == last.ledger else 0
        deliver_at_ms = None if delay_ms is None else self.wall_ms(self.now) + delay_ms
        # Everything that a dispatcher reads.
        view: Any = View(
            messages if batch else 1,
            batch,
            chunk,
            key,
            sequence_id=entry,
            deliver_at_ms=deliver_at_ms,
        )
        self.log.append(StoredEntry(Position(ledger, entry), 0, 0, view))
        self.carry_out(self.machine.advance(self.tick()))

    def sleep(self, seconds: float) -> None:
        """Time passes. The timer of the dispatcher is called when it is due."""
        until = self.now + seconds
        while (due := self.machine.next_timer()) is not None and due <= until:
            self.now = max(self.now, due)
            self.carry_out(self.machine.on_timer(self.now))
            after = self.machine.next_timer()
            assert after is None or after > self.now, "the timer is due again at once"
        self.now = until

    def tick(self) -> float:
        """The time of the next event."""
        self.now += 0.001
        return self.now

    def wait(self, seconds: float) -> None:
        """Time passes. The timer fires as often as the dispatcher asks for it."""
        until = self.now + seconds
        while (due := self.machine.next_timer()) is not None and due <= until:
            self.now = max(self.now, due)
            self.carry_out(self.machine.on_timer(self.now))
            self.settle()
        self.now = max(self.now, until)

    def join(
        self, *, priority: int = 0, name: str = "", policy: KeySharedPolicy | None = None
    ) -> Member:
        self.joined += 1
        member = Member(name or f"c{self.joined}")
        member.machine = Consumer(
            member.name,
            priority,
            lambda: member.writable,
            self.limits,
            join_number=self.joined,
            key_shared=policy,
        )
        before = self.state()
        try:
            actions = self.machine.add_consumer(member.machine, self.tick())
        except ConsumerRefused:
            assert self.state() == before, "a refused consumer changed the dispatcher"
            raise
        self.members.append(member)
        self.carry_out(actions)
        return member

    def state(self) -> object:
        """The observable state of the dispatcher."""
        machine = self.machine
        return machine.read_position, machine.next_timer(), machine.explain(self.now)

    def leave(self, member: Member) -> None:
        self.members.remove(member)
        for position in [it for it, owner in self.owner.items() if owner is member]:
            self._give_back(position)
        self.carry_out(self.machine.remove_consumer(member.machine, self.tick()))

    def announce_leave(self, member: Member) -> None:
        member.machine.leaving = True
        self.carry_out(self.machine.on_leaving(member.machine, self.tick()))

    def flow(self, member: Member, permits: int) -> None:
        self.carry_out(self.machine.on_flow(member.machine, permits, self.tick()))

    def set_writable(self, member: Member, writable: bool) -> None:
        member.writable = writable
        if writable:
            self.carry_out(self.machine.advance(self.tick()))

    def ack(self, member: Member, *positions: Position) -> None:
        for position in positions:
            self.acks.acknowledge(position)
            self.owner.pop(position, None)
            self.given_back.pop(position, None)
        self.delays.on_acked(positions)
        self.carry_out(self.machine.on_acked(member.machine, positions, self.tick()))

    def ack_cumulative(self, position: Position) -> None:
        assert self.machine.cumulative_acks
        for entry in self.log:
            if entry.position <= position:
                self.acks.acknowledge(entry.position)
        self.carry_out(self.machine.on_acked_through(position, self.tick()))

    def skip_through(self, position: Position) -> None:
        """The broker acknowledges every entry up to this one."""
        for entry in self.log:
            if entry.position <= position:
                self.acks.acknowledge(entry.position)
                self.owner.pop(entry.position, None)
                self.given_back.pop(entry.position, None)
        self.delays.on_acked_through(position)
        self.carry_out(self.machine.on_acked_through(position, self.tick()))

    def ack_index(self, member: Member, entry: StoredEntry, index: int) -> None:
        self.acks.acknowledge_index(entry, index)
        if self.acks.is_acked(entry.position):
            self.owner.pop(entry.position, None)
            self.given_back.pop(entry.position, None)
            self.delays.on_acked([entry.position])
        self.carry_out(self.machine.on_partly_acked(member.machine, [entry.position], self.tick()))

    def redeliver(self, member: Member, positions: Sequence[Position] | None = None) -> None:
        for position in self._with_chunks(member, positions):
            self._give_back(position)
        self.carry_out(self.machine.on_redeliver(member.machine, positions, self.tick()))

    def negative_ack(
        self, member: Member, positions: Sequence[Position], returned: Sequence[Position]
    ) -> None:
        """A negative acknowledgement on a Key_Shared subscription with `ordered_nacks`. Returned
        entries do not count as redelivered."""
        for position in self._with_chunks(member, returned):
            del self.owner[position]
        machine: Any = self.machine
        self.carry_out(machine.on_negative_acks(member.machine, positions, returned, self.tick()))

    def _with_chunks(self, member: Member, positions: Sequence[Position] | None) -> list[Position]:
        """The entries that the member holds, of the given ones (None: of all), and the other chunks
        of their messages."""
        mine = [it for it, owner in self.owner.items() if owner is member]
        wanted = mine if positions is None else [it for it in positions if it in mine]
        uuids = {self._uuid(it) for it in wanted} - {""}
        return [it for it in mine if it in wanted or self._uuid(it) in uuids]

    def _uuid(self, position: Position) -> str:
        """The uuid of the chunked message; "": the entry is no chunk."""
        for entry in self.log:
            if entry.position == position and entry.view.chunk is not None:
                return entry.view.chunk.uuid
        return ""

    def seek(self, target: Position) -> None:
        """Move the cursor to `target`, as the subscription does: everything before `target` is
        acknowledged, the consumers that may hold entries leave, and a new dispatcher takes the
        others over."""
        self.outstanding = None
        self.owner.clear()
        self.given_back.clear()
        self.acks.acked.clear()
        self.acks.partial.clear()
        for position in list(self.acks.redeliveries):
            self.acks.redeliveries.pop(position)
        for entry in self.log:
            if entry.position < target:
                self.acks.acknowledge(entry.position)
        self.members = [it for it in self.members if it.active and not it.active[-1]]
        former, self.machine = self.machine, self._make(self.environment)
        if isinstance(former, Failover) and isinstance(self.machine, Failover):
            present = [member.machine for member in self.members]
            self.carry_out(self.machine.resume(former, present, self.tick()))

    def answer_read(self, *, entries_max: int = 1_000, fail: bool = False) -> None:
        """The outstanding read ends. `entries_max` cuts it short, as the byte limit does."""
        read, self.outstanding = self.outstanding, None
        assert read is not None
        if fail:
            self.carry_out(self.machine.on_read_failed(self.tick()))
        elif isinstance(read, Read):
            there = [entry for entry in self.log if entry.position >= read.first]
            found = there[: min(read.entries_max, entries_max)]
            self.carry_out(self.machine.on_entries(found, self.tick()))
        else:
            assert read.positions == sorted(set(read.positions))
            tried = read.positions[:entries_max]
            there = [entry for entry in self.log if tried[0] <= entry.position <= tried[-1]]
            self.carry_out(self.machine.on_replayed(there, tried[-1], self.tick()))

    def fire_timer(self) -> None:
        """Advance the clock to the time that the dispatcher asked for."""
        due = self.machine.next_timer()
        assert due is not None
        self.now = max(self.now, due)
        self.carry_out(self.machine.on_timer(self.now))

    def settle(self) -> None:
        """Answer reads until none is outstanding."""
        for _ in range(10_000):
            if self.outstanding is None:
                return
            self.answer_read()
        raise AssertionError("the reads do not end")

    # ---- actions ---------------------------------------------------------------------------------

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Deliver():
                    self._deliver(action)
                case Read() | Replay():
                    assert self.outstanding is None, "a second read while one is outstanding"
                    self.outstanding = action
                case Activate():
                    self._member(action.consumer).active.append(action.active)
                case _:
                    assert_never(action)
        self.machine.check()
        self._check_rest()

    def _deliver(self, action: Deliver) -> None:
        member = self._member(action.consumer)
        assert action.entries
        assert member.writable
        assert not member.machine.leaving
        lefts = [self.acks.left_of(entry) for entry in action.entries]
        assert all(lefts), "an acknowledged entry was delivered"
        assert action.messages == sum(lefts)
        if self.shared and self.delay.enabled:
            until = self.wall_ms(self.now) + (0 if self.delay.strict else self.delay.tick_ms)
            times = [entry.view.deliver_at_ms or 0 for entry in action.entries]
            assert max(times) <= until, "delivered too early"
        before = member.machine.permits + action.messages
        assert before - sum(lefts[:-1]) > 0, "more than one entry beyond the permits"
        for index, entry in enumerate(action.entries):
            detail = action.details.get(index)
            self._check_detail(entry, detail)
            if self.shared:
                assert entry.position not in self.owner, "delivered while pending at a consumer"
                self.owner[entry.position] = member
            member.inbox.append(entry.position)
            member.counts.append(detail.redelivery_count if detail else 0)

    def _member(self, machine: Consumer) -> Member:
        return next(it for it in self.members if it.machine is machine)

    def _check_detail(self, entry: StoredEntry, detail: EntryDetail | None) -> None:
        count = detail.redelivery_count if detail else 0
        ack_set = detail.ack_set if detail else ()
        assert count == (self.given_back[entry.position] if self.shared else 0)
        assert ack_set == (self.acks.batch_ack_set(entry.position) or ())

    def _give_back(self, position: Position) -> None:
        del self.owner[position]
        self.given_back[position] += 1

    def _check_rest(self) -> None:
        """If a consumer is available, a read is outstanding or every entry is delivered."""
        reasons = self.machine.explain(self.now)
        assert reasons
        if self.shared:
            for member in self.members:
                mine = [it for it, owner in self.owner.items() if owner is member]
                entries = {entry.position: entry for entry in self.log}
                pending = member.machine.pending
                expired = sum(pending.get(it) for it in pending if self.acks.is_acked(it))
                held = sum(self.acks.left_of(entries[it]) for it in mine)
                assert member.machine.unacked == held + expired
                if expired:  # Key_Shared takes expired entries off in parts; the next part is due
                    assert self.keyed
                    due = self.machine.next_timer()
                    assert due is not None
                    assert due <= self.now + PART_PAUSE_S
        able = [it for it in self.members if it.machine.available]
        if not able:
            return
        general = {reason.why for reason in reasons if not reason.consumer}
        assert general, f"delivers nothing without a reason: {reasons}"
        assert (Why.READING in general) == (self.outstanding is not None)
        if self.keyed:
            return  # an available consumer may have no entries: those that wait have other keys
        if Why.CHUNKS in general:
            return  # the entries wait for a consumer that is not available
        if self.outstanding is None and Why.UNACKED_BY_SUBSCRIPTION not in general and self.shared:
            waiting = [it.position for it in self.log if it.position not in self.acks.acked]
            delayed = {position for position, _ in self.delays.index}
            assert (Why.DELAYED in general) == bool(delayed)
            left = set(waiting) - set(self.owner)
            if len(delayed) >= self.delayed_max or self.delays.pauses(self._last_tick):
                left = {it for it in left if it < self.machine.read_position} | delayed
            assert left == delayed, f"entries wait while a consumer is available: {reasons}"
            assert all(due > self._past_ms for _, due in self.delays.index), "delivered too late"
            assert (self.machine.next_timer() is not None) == bool(delayed)

    @property
    def _last_tick(self) -> float:
        """The latest time at which the timer of the delayed entries can have fired. A dispatcher
        that has paused its reads because of fixed delays does not read before the next firing."""
        return self.now - self.wall_ms(self.now) % self.delay.tick_ms / 1_000

    @property
    def _past_ms(self) -> int:
        """Check that all entries due at that time are delivered, if a consumer was available and
        timers fired."""
        return self.wall_ms(self.now) - (self.delay.tick_ms if self.delay.strict else 0) - 5
