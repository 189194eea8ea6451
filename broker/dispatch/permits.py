"""The flow control of a consumer: permits, unacknowledged messages, back-pressure of its
connection."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.acks import unacked_in
from magnetar.broker.dispatch.explain import Reason, Why
from magnetar.broker.dispatch.positions import PositionMap
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy


CONSUMERS_EXPLAINED_MAX: Final = 1_000
"""The maximum number of consumers whose reasons `explain_all` names, at 2.5 us each. The call only
counts the other consumers."""

UNLIMITED: Final = 1 << 62
"""A limit of unacknowledged messages that no consumer reaches."""


@dataclass(slots=True)
class Limits:
    """The limits of one subscription. The limits of unacknowledged messages follow the policies of
    the topic while it is open. The values here are Pulsar's defaults."""

    # Delivered and unacknowledged messages of one consumer of a Shared or Key_Shared subscription.
    # At the limit the consumer gets no more messages until it has only half as many. A pending
    # entry takes about 100 bytes: 5 MB.
    unacked_per_consumer: int = 50_000
    # This limit is for all consumers together, 20 MB. At the limit the broker only redelivers.
    unacked_per_subscription: int = 200_000
    # Messages for one consumer of a Shared subscription before the turn of the next consumer.
    turn_messages: int = 20
    # The size of one read. It limits the entries that a subscription holds while no consumer can
    # take them: 5 MB beside the cache. Larger reads save little (measured, Shared: 0.72 us of
    # dispatch per entry with 20, 0.43 with 100, 0.37 with 400), and the event loop runs nothing
    # else during a delivery.
    read_entries: int = 100
    read_bytes: int = 5 * 1024 * 1024

    def __post_init__(self) -> None:
        assert self.turn_messages > 0
        assert self.read_entries > 0
        assert self.unacked_per_consumer > 0
        assert self.unacked_per_subscription > 0


def unacked_by_subscription(unacked: int, limits: Limits) -> Reason:
    """The reason of a subscription at its limit of unacknowledged messages."""
    limit, half = limits.unacked_per_subscription, limits.unacked_per_subscription // 2
    detail = (
        f"{unacked} messages are unacknowledged, the limit of the subscription is {limit};"
        f" the broker reads on at {half}"
    )
    facts = {"unacked": unacked, "limit": limit, "resumesAt": half}
    return Reason(Why.UNACKED_BY_SUBSCRIPTION, detail, facts=facts)


@dataclass(slots=True, eq=False)
class Consumer:
    """One consumer as a dispatcher sees it: its attributes, and its flow control.

    Invariants (see `check`):
        1. `unacked` is the sum of `pending`.
        2. `blocked` becomes True when `unacked` reaches its limit, and False at half of the limit.
    """

    name: str
    priority: int  # a lower number is served first
    writable: Callable[[], bool]  # True: the connection takes bytes; must not call the dispatcher
    limits: Limits
    # The place in the order of subscribing. It is unique in the subscription and never changes; a
    # consumer that reconnects gets a new one.
    join_number: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)  # the metadata of SUBSCRIBE
    key_shared: KeySharedPolicy | None = None  # None: the client sent none
    permits: int = 0  # messages; below 0 after a batch that was larger than the permits
    messages_per_entry: float = 1.0  # running average over the deliveries
    pending: PositionMap = field(default_factory=PositionMap)  # unacknowledged messages, by entry
    unacked: int = 0
    acked: int = 0  # messages that it has acknowledged; with a single active consumer: an estimate
    blocked: bool = False
    leaving: bool = False  # it gets no more entries, and acknowledges those that it has

    @property
    def available(self) -> bool:
        """True when the dispatcher may deliver to the consumer now."""
        return self.permits > 0 and not (self.blocked or self.leaving) and self.writable()

    @property
    def message_room(self) -> int:
        """The number of messages that the consumer may get now, if it is available."""
        return min(self.permits, self.limits.unacked_per_consumer - self.unacked)

    def entry_room(self) -> int:
        """An estimate of the number of entries with `message_room` messages: at least 1."""
        return max(1, int(self.message_room / self.messages_per_entry))

    def on_given(self, entries: int, messages: int) -> None:
        """The dispatcher delivers this many entries, more than 0, with this many messages."""
        self.permits -= messages
        self.messages_per_entry = 0.9 * self.messages_per_entry + 0.1 * messages / entries

    def on_unacked(self, change: int) -> None:
        """The number of unacknowledged messages changes by this much."""
        self.unacked += change
        if self.blocked:
            self.blocked = self.unacked > self.limits.unacked_per_consumer // 2
        else:
            self.blocked = self.unacked >= self.limits.unacked_per_consumer

    def on_partly_acked(self, position: Position, ack_set: tuple[int, ...] | None) -> int:
        """`ack_set` has the unacknowledged messages of a pending entry; None: it is not known.
        Returns the number of newly acknowledged messages."""
        if ack_set is None:
            return 0
        before = self.pending.get(position)
        # An acknowledgement never raises the count, even if its ack set has bits beyond the batch.
        left = min(unacked_in(ack_set), before)
        self.on_unacked(left - before)
        self.pending.set(position, left)
        return before - left

    def explain(self) -> list[Reason]:
        """The reasons why the consumer is not available. []: it is available."""
        reasons: list[Reason] = []
        if self.leaving:
            detail = f"the consumer leaves; it has {self.unacked} messages to acknowledge"
            facts = {"unacked": self.unacked}
            reasons.append(Reason(Why.LEAVING, detail, self.name, facts))
        if self.permits <= 0:
            detail = (
                f"the consumer has {self.permits} permits and {self.unacked} unacknowledged"
                " messages; its client grants more when the application takes messages"
            )
            facts = {"permits": self.permits, "unacked": self.unacked}
            reasons.append(Reason(Why.NO_PERMITS, detail, self.name, facts))
        if self.blocked:
            half = self.limits.unacked_per_consumer // 2
            limit = self.limits.unacked_per_consumer
            detail = (
                f"{self.unacked} messages are unacknowledged, the limit is {limit};"
                f" delivery resumes at {half}"
            )
            facts = {"unacked": self.unacked, "limit": limit, "resumesAt": half}
            reasons.append(Reason(Why.UNACKED_BY_CONSUMER, detail, self.name, facts))
        if not self.writable():
            detail = "the connection has too many unsent bytes: the client reads too slowly"
            reasons.append(Reason(Why.NOT_WRITABLE, detail, self.name))
        return reasons

    def obstacles(self) -> Iterator[Why]:
        """The kinds of the reasons of `explain`."""
        if self.leaving:
            yield Why.LEAVING
        if self.permits <= 0:
            yield Why.NO_PERMITS
        if self.blocked:
            yield Why.UNACKED_BY_CONSUMER
        if not self.writable():
            yield Why.NOT_WRITABLE

    def check(self) -> None:
        """Assert the invariants of the class's docstring."""
        assert self.unacked == self.pending.total()
        assert not self.blocked or self.unacked > self.limits.unacked_per_consumer // 2
        assert self.blocked or self.unacked < self.limits.unacked_per_consumer


def explain_all(consumers: Iterable[Consumer]) -> list[Reason]:
    """The reasons why consumers are not available, for CONSUMERS_EXPLAINED_MAX of them, and for
    each kind of reason the number of other consumers that have it. []: all consumers are
    available."""
    reasons: list[Reason] = []
    more = Counter[Why]()
    for number, consumer in enumerate(consumers):
        if number < CONSUMERS_EXPLAINED_MAX:
            reasons += consumer.explain()
        else:
            for why in consumer.obstacles():
                more[why] += 1
    for why, count in more.items():
        detail = f"{count} more consumers have a reason of this kind"
        reasons.append(Reason(why, detail, facts={"consumers": count}))
    return reasons


def holders(
    consumers: Iterable[Consumer], positions: Iterable[Position]
) -> Iterator[tuple[Consumer, Position]]:
    """Yield each of these entries with the consumer at which it is pending. Leaves out the entries
    that are pending at no consumer. The caller may remove a yielded entry from its consumer.

    The call visits each consumer at most once, for any number of entries: a client may acknowledge
    1,500 entries at once that none of 10,000 consumers has. It ends when all entries are found.
    """
    wanted: dict[int, set[int]] = {}
    for ledger, entry in positions:
        wanted.setdefault(ledger, set()).add(entry)
    if not wanted:
        return
    for consumer in consumers:
        ledgers = consumer.pending.ledgers()
        if ledgers.keys().isdisjoint(wanted):
            continue
        for ledger in ledgers.keys() & wanted.keys():
            found = ledgers[ledger].keys() & wanted[ledger]
            wanted[ledger] -= found
            if not wanted[ledger]:
                del wanted[ledger]
            for entry in found:
                yield consumer, Position(ledger, entry)
        if not wanted:
            return
