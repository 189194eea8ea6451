"""The dispatcher protocol: the interface between a subscription and its dispatching machine.

Theory of operation. The subscription (the shell) reports events to the dispatcher: a consumer
joined, a consumer granted permits, entries were read. Each event method changes the state of the
machine and returns actions. The shell executes the actions in the order of the list, before the
next event.

A dispatcher does no I/O:

- It asks for entries with `Read` or `Replay`. At most one of these requests is outstanding.
- It hands entries out with `Deliver`.
- It reads the acknowledgements of the cursor through `Acks`, and the position of the last entry of
  the log through `Environment.confirmed`.
- Events carry `now`, the time of the event loop in seconds. After each event the shell asks
  `next_timer()`, and calls `on_timer` at that time.

A dispatcher may refuse a consumer: `add_consumer` raises `ConsumerRefused` before it changes
anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from magnetar.broker.dispatch.active import FAILOVER_DEFAULTS, FailoverRules
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.dispatch.acks import Acks, Redeliveries
    from magnetar.broker.dispatch.delayed import Delays
    from magnetar.broker.dispatch.explain import Reason
    from magnetar.broker.dispatch.permits import Consumer, Limits
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.entry import StoredEntry


@dataclass(slots=True)
class EntryDetail:
    """The facts that a delivery adds to an entry. The class is not frozen, for speed: a redelivery
    makes thousands of objects."""

    redelivery_count: int
    ack_set: tuple[int, ...]  # the unacknowledged messages, as bits of 64-bit words; (): all


@dataclass(slots=True)
class Deliver:
    """Send these entries to the consumer. A dispatcher that tracks pending entries has added them
    to `consumer.pending` already."""

    consumer: Consumer
    entries: list[StoredEntry]
    details: dict[int, EntryDetail]  # keyed by index in `entries`; absent: EntryDetail(0, ())
    # The number of unacknowledged messages of `entries`. The dispatcher has debited these permits.
    messages: int


@dataclass(frozen=True, slots=True)
class Read:
    """Read entries from `first` on. The shell answers with `on_entries` or `on_read_failed`."""

    first: Position
    entries_max: int
    through: Position  # the last entry of the log at the time of the request
    rewinds: int  # the dispatcher's count of rewinds at the time of the request


@dataclass(frozen=True, slots=True)
class Replay:
    """Read these positions, in ascending order. The shell answers with `on_replayed` or
    `on_read_failed`."""

    positions: list[Position]


@dataclass(frozen=True, slots=True)
class Activate:
    """Tell the client whether its consumer is the active consumer of an EXCLUSIVE or FAILOVER
    subscription."""

    consumer: Consumer
    active: bool


Action = Deliver | Read | Replay | Activate


class ConsumerRefused(Exception):
    """A dispatcher does not accept a consumer. The dispatcher has not changed.

    `incumbents` are the connected consumers that block the new one. The shell probes their
    connections, evicts those that do not answer, and tries again. The client gets `error` if one of
    them answers, or if there are no incumbents.
    """

    def __init__(self, error: BrokerError, incumbents: Sequence[Consumer] = ()) -> None:
        super().__init__(str(error))
        self.error = error
        self.incumbents = tuple(incumbents)


@dataclass(frozen=True, slots=True)
class Environment:
    """The subscription and the services of a dispatcher."""

    subscription: str  # the name, for errors
    acks: Acks
    confirmed: Callable[[], Position]  # the position of the last entry of the log
    limits: Limits
    redeliveries: Redeliveries
    delays: Delays
    topic: str = ""  # the full name; for a partition, the name of the partition
    partition: int | None = None  # None: the topic is no partition
    failover: FailoverRules = FAILOVER_DEFAULTS
    key_shared: KeySharedSettings = field(default_factory=KeySharedSettings)


class Dispatcher(Protocol):
    """The decisions of one subscription type. `now` never decreases from one event to the next."""

    @property
    def read_position(self) -> Position:
        """The position where reading continues."""

    @property
    def cumulative_acks(self) -> bool:
        """True when consumers may acknowledge cumulatively."""

    def add_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        """A consumer joins. It has no permits yet. Raises ConsumerRefused before any change."""

    def remove_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        """A consumer left. Its unacknowledged entries go to other consumers or to its successor."""

    def on_leaving(self, consumer: Consumer, now: float) -> list[Action]:
        """The consumer will leave: `consumer.leaving` is True from now on. The consumer gets no
        more entries, and acknowledges its pending ones."""

    def on_flow(self, consumer: Consumer, permits: int, now: float) -> list[Action]:
        """The consumer grants permits for this many more messages."""

    def on_redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, now: float
    ) -> list[Action]:
        """The consumer asks for redelivery of these entries. None: all its unacknowledged
        entries."""

    def on_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        """The consumer acknowledged these whole entries. The cursor has recorded the
        acknowledgement."""

    def on_partly_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        """The consumer acknowledged some messages of each of these batches, perhaps the last
        unacknowledged ones. The cursor has recorded the acknowledgements."""

    def on_acked_through(self, position: Position, now: float) -> list[Action]:
        """Every entry before `position` is acknowledged, and some or all messages of the entry at
        `position`. The cursor has recorded the acknowledgement.

        The cause is a cumulative acknowledgement, or the broker skipped entries. A cumulative
        acknowledgement occurs only if `cumulative_acks` is True. A skip can occur with any
        dispatcher, and acknowledges all messages at `position`."""

    def on_entries(self, entries: list[StoredEntry], now: float) -> list[Action]:
        """The entries of the outstanding `Read`. []: there was no entry to read."""

    def on_replayed(
        self, entries: list[StoredEntry], through: Position, now: float
    ) -> list[Action]:
        """The entries of the outstanding `Replay`: every existing entry of its positions up to
        `through`. The shell did not read the later positions."""

    def on_read_failed(self, now: float) -> list[Action]:
        """The outstanding read failed. The dispatcher asks again if it still wants the entries."""

    def advance(self, now: float) -> list[Action]:
        """The log has grown, or a connection is writable again."""

    def next_timer(self) -> float | None:
        """The time of the next call of `on_timer`, by the same clock as `now`. None: the dispatcher
        needs no timer."""

    def on_timer(self, now: float) -> list[Action]:
        """The time of `next_timer` has come: `now` is this time or later. Not called if
        `next_timer` is None."""

    def explain(self, now: float) -> list[Reason]:
        """The reasons why the dispatcher delivers nothing now. Not empty if the dispatcher delivers
        nothing."""

    def check(self) -> None:
        """Assert the invariants in the docstring of the dispatcher's module."""


def after(position: Position) -> Position:
    """The position right after `position`. If no entry is there, the log finds the next one."""
    return Position(position.ledger, position.entry + 1)
