"""A dispatcher compared with a slow, simple model of the dispatcher.

The rig asserts the rules of every dispatcher (fakes/dispatch_rig.py). The model adds the rules of
each type. It receives the events and the actions, never the dispatcher's state:

    permits      a consumer has the permits that it granted minus the messages that it got
    Exclusive,   only the right consumer is told that it is active, and only it gets entries;
    Failover     in order and without gaps since it became active or asked for redelivery Shared
    the consumers may not acknowledge cumulatively Key_Shared   the entries of a key are
    unacknowledged at one consumer at a time; their first
                 deliveries come in order, and none while an earlier one of the key waits; unless
                 all consumers allow delivery out of order
    ordered      as Key_Shared; nothing overtakes a negatively acknowledged entry of its key

Entries with a delivery time are not part of the order of their key.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

from fakes.dispatch_rig import DispatcherRig, Member

from magnetar.broker.dispatch.delayed import DelayPolicy
from magnetar.broker.dispatch.dispatcher import after
from magnetar.broker.dispatch.exclusive import Exclusive
from magnetar.broker.dispatch.failover import Failover
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from magnetar.broker.dispatch.dispatcher import Action, Deliver, Dispatcher, Environment
    from magnetar.broker.log.entry import StoredEntry

BEGIN = Position(-1, -1)
WITHHELD_MAX = 2


class Kind(Enum):
    EXCLUSIVE = "exclusive"
    FAILOVER = "failover"
    SHARED = "shared"
    KEY_SHARED = "key_shared"
    ORDERED = "ordered"  # Key_Shared with ordered negative acknowledgements

    @property
    def single_active(self) -> bool:
        return self in (Kind.EXCLUSIVE, Kind.FAILOVER)

    @property
    def keyed(self) -> bool:
        return self in (Kind.KEY_SHARED, Kind.ORDERED)


DISPATCHERS: dict[Kind, Callable[[Environment], Dispatcher]] = {
    Kind.EXCLUSIVE: Exclusive,
    Kind.FAILOVER: Failover,
    Kind.SHARED: Shared,
    Kind.KEY_SHARED: KeyShared,
    Kind.ORDERED: KeyShared,
}


class Model(DispatcherRig):
    """`make`: the dispatcher's class, right or wrong. `rng` draws its settings."""

    def __init__(
        self, kind: Kind, rng: Random, make: Callable[[Environment], Dispatcher] | None = None
    ) -> None:
        self.kind = kind
        self.met: Counter[str] = Counter()  # events that the history has met
        self.granted: dict[Member, int] = {}  # permits
        self.next = BEGIN  # single-active: earlier entries were delivered, or are acknowledged
        # the active consumer, and the last news that it got
        self.told: tuple[Member, int] | None = None
        self.delivered: set[Position] = set()
        # Entries that were delivered while order was not required.
        self.loose: set[Position] = set()
        self.astray: set[Position] = set()  # loose entries that were not redelivered in order
        self.nacked: set[Position] = set()  # in order, and not acknowledged
        self.of_partition = rng.choice((None, 0, 1, 5)) if kind is Kind.FAILOVER else None
        # The share of the consumers that allow delivery out of order.
        self.relaxed_share = rng.choice((0, 0, 0, 0, 0.5, 0.8, 1)) if kind is Kind.KEY_SHARED else 0
        settings = KeySharedSettings(
            ring_points=rng.choice((0, 1, 3, 10)),
            look_ahead_per_consumer=rng.choice((3, 100)),
            look_ahead_per_subscription=rng.choice((7, 1_000)),
            withheld_max=WITHHELD_MAX,
            part_entries=rng.choice((1, 3, 2_000)),
        )
        super().__init__(
            make or DISPATCHERS[kind],
            shared=not kind.single_active,
            limits=Limits(
                unacked_per_consumer=rng.choice((9, 12)),
                unacked_per_subscription=rng.choice((16, 20)),
                turn_messages=4,
                read_entries=5,
            ),
            partition=self.of_partition,
            key_shared=settings if kind.keyed else None,
            delay=DelayPolicy(strict=rng.random() < 0.5, fixed_look_ahead=rng.choice((0, 0, 2))),
            delayed_max=rng.choice((12, 1_000)),
        )

    def draw_policy(self, rng: Random) -> KeySharedPolicy:
        """Draw the policy of the next consumer."""
        return KeySharedPolicy(
            allow_out_of_order=rng.random() < self.relaxed_share,
            ordered_nacks=self.kind is Kind.ORDERED,
        )

    @property
    def relaxed(self) -> bool:
        """True if entries may be delivered out of order."""
        policies = [member.machine.key_shared for member in self.members]
        return all(policy is not None and policy.allow_out_of_order for policy in policies)

    # ---- events ----------------------------------------------------------------------------------

    def flow(self, member: Member, permits: int) -> None:
        self.granted[member] = self.granted.get(member, 0) + permits
        super().flow(member, permits)

    def redeliver(self, member: Member, positions: Sequence[Position] | None = None) -> None:
        if self.told is not None and self.told[0] is member:
            self.next = BEGIN
        super().redeliver(member, positions)

    def leave(self, member: Member) -> None:
        if self.members == [member]:
            self.nacked.clear()
        super().leave(member)

    def seek(self, target: Position) -> None:
        self.met["seeks"] += 1
        self.next, self.told = BEGIN, None
        self.delivered.clear()
        self.loose.clear()
        self.astray.clear()
        self.nacked.clear()
        self.delays.on_acked_through(target)
        super().seek(target)
        self.delays.on_acked_through(self.acks.mark_delete)

    def negative_ack(
        self, member: Member, positions: Sequence[Position], returned: Sequence[Position]
    ) -> None:
        assert isinstance(self.machine, KeyShared)
        if not self.machine.takes_negative_acks(member.machine, positions):
            self.met["too many negative acks"] += 1
            assert len(self.nacked - self.acks.acked | set(positions)) > WITHHELD_MAX
            self.leave(member)
            return
        self.nacked.update(positions)
        super().negative_ack(member, positions, returned)

    def carry_out(self, actions: list[Action]) -> None:
        super().carry_out(actions)
        for member in self.members:
            granted = self.granted.get(member, 0)
            assert member.machine.permits == granted, "other permits than granted less delivered"
        if self.kind.single_active:
            told = [member for member in self.members if member.active and member.active[-1]]
            if self.kind is Kind.FAILOVER:
                assert len(told) == min(1, len(self.members)), "not one active consumer"
        else:
            assert not self.machine.cumulative_acks, (
                "a cumulative ack would acknowledge other consumers' entries"
            )

    def _deliver(self, action: Deliver) -> None:
        member = self._member(action.consumer)
        self.granted[member] = self.granted.get(member, 0) - action.messages
        self.met["deliveries"] += len(action.entries)
        self.met["redeliveries"] += sum(it.redelivery_count > 0 for it in action.details.values())
        if self.kind.single_active:
            self._judge_active(member, action.entries)
        elif self.kind.keyed and not self.relaxed:
            self.met["deliveries in order beside a relaxed consumer"] += any(
                it.machine.key_shared is not None and it.machine.key_shared.allow_out_of_order
                for it in self.members
            )
            for entry in action.entries:
                self._judge_key(member, entry, action.entries)
        elif self.kind.keyed:
            positions = [entry.position for entry in action.entries]
            self.loose.update(positions)
            self.astray.update(positions)
        super()._deliver(action)

    # ---- one active consumer ---------------------------------------------------------------------

    def wanted(self) -> Member:
        """The consumer that should be active."""
        members = [it for it in self.members if not it.machine.leaving] or self.members
        best = min(member.machine.priority for member in members)
        group = [member for member in members if member.machine.priority == best]
        if self.of_partition is None:
            return group[0]
        group.sort(key=lambda it: (it.name, it.machine.join_number))
        return group[self.of_partition % len(group)]

    def _judge_active(self, member: Member, entries: list[StoredEntry]) -> None:
        assert member.active, "the consumer was not told that it is active"
        assert member.active[-1], "a standby consumer got entries"
        assert member is self.wanted(), "another consumer should be active"
        told = member, len(member.active)
        if told != self.told:
            self.met["switches"] += self.told is not None
            self.told, self.next = told, BEGIN
        for entry in entries:
            position = entry.position
            assert position >= self.next, "not in order"
            between = [it.position for it in self.log if self.next <= it.position < position]
            assert all(self.acks.is_acked(skipped) for skipped in between), "a gap"
            self.next = after(position)

    # ---- keys ------------------------------------------------------------------------------------

    def _judge_key(self, member: Member, entry: StoredEntry, together: list[StoredEntry]) -> None:
        position, key = entry.position, entry.view.partition_key
        self.astray.discard(position)
        is_pinned = self._is_chunked(key)
        for other in self.log:
            at = other.position
            if other.view.partition_key != key or at == position or at in self.acks.acked:
                continue
            owner = self.owner.get(at)
            is_excused = is_pinned and at in self.astray
            alone = is_excused or owner in (None, member)
            assert alone, f"{key}: unacknowledged at two consumers"
            overtakes = at < position and at in self.nacked
            assert not overtakes, f"{key}: {position} overtakes {at}, which must be redelivered"
            if entry.view.deliver_at_ms is not None or other.view.deliver_at_ms is not None:
                continue
            is_first = position not in self.delivered and position not in self.loose
            if at < position and is_first:
                here = owner is member or any(one.position == at for one in together)
                assert is_excused or here, f"{key}: an earlier entry waits"
            if at > position and is_first:
                assert at not in self.delivered, f"{key}: first deliveries out of order"
        self.delivered.add(position)

    def _is_chunked(self, key: str | None) -> bool:
        """True if the key has an unacknowledged chunked message. Its chunks go to one consumer,
        even if other consumers hold messages of the key from the time without order."""
        return any(
            it.view.partition_key == key and it.view.chunk and it.position not in self.acks.acked
            for it in self.log
        )
