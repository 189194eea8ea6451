"""What bounds the flow to a consumer: permits, unacknowledged messages, its connection's room."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from magnetar.broker.dispatch.explain import Reason, Why
from magnetar.broker.dispatch.positions import PositionMap

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a subscription takes on. The numbers of unacknowledged messages are Pulsar's."""

    # Delivered and not acknowledged, per consumer of a Shared subscription. At the limit it gets
    # nothing more until it is down to half. A pending entry costs about 100 bytes: 5 MB.
    unacked_per_consumer: int = 50_000
    # The same for all consumers together; at the limit only redeliveries go on. 20 MB.
    unacked_per_subscription: int = 200_000
    # Handed to one consumer of a Shared subscription before it is the next one's turn.
    turn_messages: int = 20
    # One read. Bounds what a subscription holds for a consumer that does not take it: 5 MB, beside
    # what the cache holds anyway. Larger reads save little (measured, Shared: 0.72 us of dispatch
    # per entry with 20, 0.43 with 100, 0.37 with 400), and handing one out is a step in which
    # nobody else runs.
    read_entries: int = 100
    read_bytes: int = 5 * 1024 * 1024

    def __post_init__(self) -> None:
        assert self.turn_messages > 0
        assert self.read_entries > 0
        assert self.unacked_per_consumer > 0
        assert self.unacked_per_subscription > 0


@dataclass(slots=True, eq=False)
class Consumer:
    """One consumer as a dispatcher sees it.

    Invariants (see `check`):
        1. `unacked` is the sum of `pending`.
        2. `blocked` from reaching the limit of unacknowledged messages until down to half of it.
    """

    name: str
    priority: int  # lower is served first
    writable: Callable[[], bool]  # asks its connection; must not call back
    limits: Limits
    permits: int = 0  # messages it still takes; below 0 after a batch larger than what was left
    messages_per_entry: float = 1.0  # running average of what it was given
    pending: PositionMap = field(default_factory=PositionMap)  # messages not acknowledged, by entry
    unacked: int = 0
    blocked: bool = False

    @property
    def available(self) -> bool:
        """May be given something now."""
        return self.permits > 0 and not self.blocked and self.writable()

    @property
    def message_room(self) -> int:
        """How many messages it may be given now, if it is available at all."""
        return min(self.permits, self.limits.unacked_per_consumer - self.unacked)

    def entry_room(self) -> int:
        """About how many entries these are: at least 1 when there is any room."""
        return max(1, int(self.message_room / self.messages_per_entry))

    def on_given(self, entries: int, messages: int) -> None:
        """It was given these; `entries` is not 0."""
        self.permits -= messages
        self.messages_per_entry = 0.9 * self.messages_per_entry + 0.1 * messages / entries

    def on_unacked(self, change: int) -> None:
        """This many messages became pending, or (below 0) are so no more."""
        self.unacked += change
        if self.blocked:
            self.blocked = self.unacked > self.limits.unacked_per_consumer // 2
        else:
            self.blocked = self.unacked >= self.limits.unacked_per_consumer

    def explain(self) -> list[Reason]:
        """Why it cannot be given anything; [] when it can."""
        reasons: list[Reason] = []
        if self.permits <= 0:
            detail = "has granted no permits beyond what it was given"
            reasons.append(Reason(Why.NO_PERMITS, detail, self.name))
        if self.blocked:
            half = self.limits.unacked_per_consumer // 2
            detail = f"{self.unacked} messages are unacknowledged; goes on at {half}"
            reasons.append(Reason(Why.UNACKED_BY_CONSUMER, detail, self.name))
        if not self.writable():
            detail = "its connection has too many bytes pending"
            reasons.append(Reason(Why.NOT_WRITABLE, detail, self.name))
        return reasons

    def check(self) -> None:
        """Assert the invariants of the docstring."""
        assert self.unacked == self.pending.total()
        assert not self.blocked or self.unacked > self.limits.unacked_per_consumer // 2
        assert self.blocked or self.unacked < self.limits.unacked_per_consumer
