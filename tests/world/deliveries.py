"""Rules that one subscription keeps under all faults of its brokers, bookies and consumers.

The brokers report each decision at the moment when they make it: an acknowledgement or a return
before the broker handles it, a delivery when the broker sends it. A `Reign` holds the facts of one
owner's time. The oracles:

    ACK     a message whose acknowledgement was answered is not redelivered
    ACTIVE  of Exclusive and Failover, one consumer is active, and no other consumer gets entries
    COUNT   a redelivery count grows by one with each return, and only then
    CUMUL   consumers of Shared and Key_Shared may not acknowledge cumulatively
    DELAY   no entry is delivered more than a tick before its delivery time
    HASH    the unacknowledged entries of a hash are at one consumer at a time
    LOST    in the end, each message with a receipt was acknowledged by a consumer, or skipped by an
            operator
    NACK    no entry overtakes a negatively acknowledged entry of its key (`ordered_nacks`)
    ORDER   first deliveries are in order: of a key, or of a single-active type
    PERMIT  a consumer gets no entry without permits
    STUCK   after the end of the faults, willing consumers get all entries
    TWICE   of Shared and Key_Shared, an entry is at one consumer at a time

HASH and ORDER hold unless all connected consumers allow delivery out of order.

After a seek, the entries that it moved back over may be redelivered; the entries that it moved
forward over may never be delivered. An owner does not know which acknowledgements a later owner has
answered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from magnetar.broker.cursor.acks import ack_set_bits
from magnetar.broker.dispatch.dispatcher import after
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.sticky_hash import hash_of, ring_slot
from magnetar.broker.log.entry import parse_payload
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.topic.contract import SubscriptionType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from world.cluster import World
    from world.consumers import ConsumerSession

    from magnetar.broker.dispatch.dispatcher import Dispatcher, EntryDetail
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.topic.subscription import Subscription
    from magnetar.broker.topic.topic import PersistentTopic
    from magnetar.metadata.model import LedgerId
    from magnetar.protos.entry import EntryView

NAME = "s"
SINGLE_ACTIVE = (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER)


@dataclass
class Deliveries:
    """The deliveries of all owners."""

    world: World
    kind: SubscriptionType
    ordered_nacks: bool = False
    relaxed_share: float = 0  # the share of consumers that allow delivery out of order
    receipts: dict[Position, int] = field(default_factory=dict)  # message counts by entry
    sent: dict[Position, set[int]] = field(default_factory=dict)  # acknowledged by a consumer
    marks: list[Position] = field(default_factory=list)  # acknowledged cumulatively
    answered: dict[Position, dict[int, int]] = field(default_factory=dict)  # with the owner's epoch
    answered_mark: tuple[Position, int] = (EARLIEST, 0)
    skipped: Position = EARLIEST  # an operator asked to skip everything up to this position
    seeks: int = 0
    last_epoch: int = 0  # the highest epoch of an owner that has delivered

    @property
    def single_active(self) -> bool:
        return self.kind in SINGLE_ACTIVE

    def hold(self, truth: bool, oracle: str, why: str, *facts: object) -> None:
        self.world.oracle.hold(truth, oracle, partial(why.format, *facts))

    def met(self, what: str, times: int = 1) -> None:
        self.world.trace.bitten[what] += times

    # -- acknowledgements --------------------------------------------------------------------------

    def on_sent(self, position: Position, indexes: Iterable[int]) -> None:
        """A consumer acknowledges these messages of an entry."""
        self.sent.setdefault(position, set()).update(indexes)

    def on_answered(
        self, epoch: int, seeks: int, position: Position, indexes: Iterable[int]
    ) -> None:
        """The acknowledgement is durable. `seeks`: the number of seeks that had begun before it."""
        if seeks == self.seeks:
            answered = self.answered.setdefault(position, {})
            for index in indexes:
                answered.setdefault(index, epoch)

    def on_mark_answered(self, epoch: int, seeks: int, mark: Position) -> None:
        if seeks == self.seeks and mark > self.answered_mark[0]:
            self.answered_mark = mark, epoch

    def on_seek(self, target: Position) -> None:
        """A client or an administrator asks for a seek or skip. The outcome is not known."""
        self.seeks += 1
        self.on_skip(Position(target.ledger, target.entry - 1))
        for position in [each for each in self.answered if each >= target]:
            del self.answered[position]
        if self.answered_mark[0] >= target:
            mark = Position(target.ledger, target.entry - 1)
            self.answered_mark = mark, self.answered_mark[1]

    def on_skip(self, through: Position) -> None:
        self.skipped = max(self.skipped, through)

    # -- the end -----------------------------------------------------------------------------------

    def judge(self) -> None:
        """LOST: all messages are acknowledged. Check that consumers have acknowledged them."""
        mark = max(self.marks, default=EARLIEST)
        for position, messages in self.receipts.items():
            if position <= mark or position <= self.skipped:
                continue
            missing = set(range(messages)) - self.sent.get(position, set())
            self.hold(
                not missing, "LOST", "no consumer received messages {} of {}", missing, position
            )


@dataclass
class Reign:
    """One owner's time. Its sessions report to it."""

    deliveries: Deliveries
    topic: PersistentTopic
    over: bool = False
    sessions: list[ConsumerSession] = field(default_factory=list)
    pending: dict[Position, ConsumerSession] = field(default_factory=dict)
    returns: Counter[Position] = field(default_factory=Counter)
    base: dict[Position, int] = field(default_factory=dict)  # counts at the first delivery
    first: set[Position] = field(default_factory=set)  # delivered entries
    nacked: set[Position] = field(default_factory=set)
    of: Dispatcher | None = None  # the dispatcher to which the four fields above belong
    views: dict[Position, EntryView] = field(default_factory=dict)
    by_key: dict[str | None, list[Position]] = field(default_factory=dict)
    indexed: dict[LedgerId, int] = field(default_factory=dict)  # how many entries `by_key` has
    blocked: int = 0  # blocked attempts of earlier dispatchers

    @property
    def epoch(self) -> int:
        return self.topic.log.owned_record.epoch

    @property
    def subscription(self) -> Subscription:
        return self.topic.subscriptions[NAME]

    def attached(self) -> Iterator[ConsumerSession]:
        return (session for session in self.sessions if session.attached)

    # -- requests of consumers, reported before the broker handles them
    # ---------------------------------

    def on_return(self, session: ConsumerSession, positions: Iterable[Position] | None) -> None:
        if self.deliveries.single_active:
            session.next = EARLIEST
            return
        mine = [each for each, owner in self.pending.items() if owner is session]
        for position in mine if positions is None else positions:
            if self.pending.get(position) is session:
                del self.pending[position]
                self.returns[position] += 1

    def on_negative_ack(
        self,
        session: ConsumerSession,
        positions: Sequence[Position],
        returned: Sequence[Position],
    ) -> None:
        """A negative ack with `ordered_nacks`. The returned entries were not processed, and their
        counts do not grow."""
        mine = [position for position in positions if self.pending.get(position) is session]
        self.nacked.update(mine)
        self.deliveries.met("negative ack in order", len(mine))
        for position in returned:
            if self.pending.get(position) is session:
                del self.pending[position]

    def on_detached(self) -> None:
        """A consumer has left. When the last consumer leaves, the broker forgets the negatively
        acknowledged entries."""
        if not any(each.handle is not None for each in self.attached()):
            self.nacked.clear()

    def on_end(self) -> None:
        self.over = True
        machine = self.of
        if isinstance(machine, KeyShared):
            self.blocked += machine.blocked_attempts
        self.deliveries.met("delivery blocked by a draining hash", self.blocked)

    # -- deliveries --------------------------------------------------------------------------------

    def on_delivery(
        self,
        session: ConsumerSession,
        entries: Sequence[StoredEntry],
        details: Mapping[int, EntryDetail],
    ) -> None:
        deliveries = self.deliveries
        if self.epoch > deliveries.last_epoch:
            if deliveries.last_epoch:
                deliveries.met("failover of a subscription")
            deliveries.last_epoch = self.epoch
        self._follow_dispatcher()
        together = {entry.position for entry in entries}
        keyed = deliveries.kind is SubscriptionType.KEY_SHARED
        relaxed = self._is_relaxed(session)
        if keyed:
            self._index()
        for place, entry in enumerate(entries):
            detail = details.get(place)
            bits = (1 << entry.messages) - 1
            if detail is not None and detail.ack_set:
                bits &= ack_set_bits(detail.ack_set)
            deliveries.hold(session.permits > 0, "PERMIT", "{} without permits", entry.position)
            session.permits -= bits.bit_count()
            self._judge_acked(entry.position, bits)
            if deliveries.single_active:
                self._judge_active(session, entry.position)
            else:
                self._judge_shared(session, entry, 0 if detail is None else detail.redelivery_count)
                if keyed and relaxed:
                    disorder = any(self._disorder(session, entry, together))
                    deliveries.met("delivered out of order", disorder)
                elif keyed:
                    self._judge_key(session, entry, together)
                self.pending[entry.position] = session
            if entry.position in self.first:
                deliveries.met("entry replayed")
            self.first.add(entry.position)

    def _follow_dispatcher(self) -> None:
        """After a seek the subscription has a new dispatcher."""
        machine = self.subscription.dispatcher
        if machine is not self.of:
            if isinstance(self.of, KeyShared):
                self.blocked += self.of.blocked_attempts
            self.of = machine
            for each in (self.pending, self.returns, self.base, self.first, self.nacked):
                each.clear()

    def _judge_acked(self, position: Position, bits: int) -> None:
        deliveries = self.deliveries
        mark, epoch = deliveries.answered_mark
        known = position <= mark and epoch <= self.epoch
        deliveries.hold(
            not known, "ACK", "{} is redelivered, the ack of {} is durable", position, mark
        )
        for index, epoch in deliveries.answered.get(position, {}).items():
            known = epoch <= self.epoch and bool(bits >> index & 1)
            deliveries.hold(
                not known,
                "ACK",
                "message {} of {} is delivered after a durable ack",
                index,
                position,
            )

    def _judge_active(self, session: ConsumerSession, position: Position) -> None:
        hold = self.deliveries.hold
        active = [each for each in self.attached() if each.active]
        hold(
            active == [session],
            "ACTIVE",
            "{} is delivered to {}, {} are active",
            position,
            session,
            active,
        )
        hold(
            position >= session.next, "ORDER", "{} is delivered, next is {}", position, session.next
        )
        cursor = self.subscription.cursor
        due = cursor.first_unacked(max(session.next, after(cursor.mark_delete)))
        hold(due >= position, "ORDER", "{} is delivered, and {} was not", position, due)
        session.next = after(position)

    def _judge_shared(self, session: ConsumerSession, entry: StoredEntry, count: int) -> None:
        position, hold = entry.position, self.deliveries.hold
        owner = self.pending.get(position)
        if owner is not None:
            hold(
                not owner.attached,
                "TWICE",
                "{} is held by {} and delivered to {}",
                position,
                owner,
                session,
            )
            self.returns[position] += 1
        base = self.base.setdefault(position, count - self.returns[position])
        hold(
            base >= 0 and count == base + self.returns[position],
            "COUNT",
            "{} was returned {} times, its count is {} and was {}",
            position,
            self.returns[position],
            count,
            base,
        )
        due_ms, tick_ms = (
            entry.view.deliver_at_ms,
            self.topic.policies.effective.delayed_delivery.tick_ms,
        )
        early = due_ms is not None and due_ms > self.topic.now_ms() + tick_ms
        hold(not early, "DELAY", "{} is due at {}, it is {}", position, due_ms, self.topic.now_ms())
        self.deliveries.met("delayed entry delivered", due_ms is not None)

    # -- keys --------------------------------------------------------------------------------------

    def _is_relaxed(self, session: ConsumerSession) -> bool:
        """Return whether all connected consumers, and the one of `session`, allow disorder."""
        others = (each for each in self.attached() if each.handle is not None)
        return all(each.consumer.allows_disorder for each in (session, *others))

    def _judge_key(
        self, session: ConsumerSession, entry: StoredEntry, together: set[Position]
    ) -> None:
        for oracle, why in self._disorder(session, entry, together):
            self.deliveries.hold(False, oracle, "{}", why)
        beside = any(each.consumer.allows_disorder for each in self.attached())
        self.deliveries.met("delivered in order beside a relaxed consumer", beside)

    def _disorder(
        self, session: ConsumerSession, entry: StoredEntry, together: set[Position]
    ) -> Iterator[tuple[str, str]]:
        """The oracle that this delivery violates, and its message."""
        position, key = entry.position, entry.view.partition_key
        is_acked = self.subscription.cursor.is_acked
        slot = _slot(key)
        for other, owner in self.pending.items():
            elsewhere = owner is not session and owner.attached
            if elsewhere and _slot(self._view(other).partition_key) == slot and not is_acked(other):
                yield (
                    "HASH",
                    f"{position} of {key} is delivered to {session}, {owner} holds {other}",
                )
        delayed = entry.view.deliver_at_ms is not None
        for other in self.by_key.get(key, ()):
            if other >= position or not self.topic.log.chain.is_entry(other) or is_acked(other):
                continue
            if other in self.nacked:
                yield "NACK", f"{position} of {key} overtakes {other}"
            if delayed or position in self.first or self._view(other).deliver_at_ms is not None:
                continue
            here = self.pending.get(other) is session and session.attached
            if not here and not (other in together and other in self.first):
                yield "ORDER", f"{position} of {key} is delivered, and {other} waits"

    def _index(self) -> None:
        """Note the entries of the log by key."""
        lives = self.deliveries.world.oracle.lives
        for record in self.topic.log.chain.records:
            payloads = lives[record.ledger].payloads
            for entry in range(self.indexed.get(record.ledger, 0), len(payloads)):
                self._view(Position(record.ledger, entry))
            self.indexed[record.ledger] = len(payloads)

    def _view(self, position: Position) -> EntryView:
        found = self.views.get(position)
        if found is None:
            life = self.deliveries.world.oracle.life(position.ledger)
            payload = life.payloads[position.entry]
            found = self.views[position] = parse_payload(position, memoryview(payload)).view
            self.by_key.setdefault(found.partition_key, []).append(position)
        return found


def _slot(key: str | None) -> int:
    assert key is not None
    return ring_slot(hash_of(key))
