"""Dispatch to the active consumer of a Failover subscription. The other consumers stand by.

Theory of operation. `Candidates` chooses the active consumer (active.py). The choice may change
when a consumer joins, leaves, or announces that it will leave. Then:

    the active consumer left     the next consumer becomes active at once
    it is still connected        it drains: it gets no more entries, and may acknowledge its own.
                                 The next consumer becomes active when the draining one has
                                 acknowledged everything, when it asks for redelivery, or after
                                 `delay_s` (LEAVING_S if it has announced that it will leave).

The next active consumer starts at the first unacknowledged entry. So a drain that ends because
everything is acknowledged redelivers nothing. After `delay_s`, the next consumer gets entries that
the former consumer may still process. The subscription accepts acknowledgements of the former
consumer at any time.

When a consumer joins, the subscription tells it whether it is active, and later tells it each
change. A draining consumer is told at the end of the drain.

Invariants (see `check`):
    1. There is an active consumer as long as a consumer is connected.
    2. Unless it drains, the active consumer is the chosen one.
    3. During a drain no entry is held; see also single_active.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.active import Candidates
from magnetar.broker.dispatch.dispatcher import Activate, after
from magnetar.broker.dispatch.explain import Reason, Why
from magnetar.broker.dispatch.single_active import SingleActive

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from magnetar.broker.dispatch.dispatcher import Action, Environment
    from magnetar.broker.dispatch.permits import Consumer
    from magnetar.broker.log.position import Position


LEAVING_S: Final = 60.0
"""The time for a leaving active consumer to acknowledge its entries. It is longer than the default
operation timeout (30 s), after which the client closes the consumer."""


class Failover(SingleActive):
    """A `Dispatcher`."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        rules = environment.failover
        self._delay_s = rules.delay_s
        self._candidates = Candidates(
            environment.topic, environment.partition, rules.non_partitioned
        )
        self._drained_at: float | None = None  # the end of the drain; None: no consumer drains

    def resume(self, former: Failover, present: Container[Consumer], now: float) -> list[Action]:
        """Take over the consumers of a former dispatcher, except those that are not `present`. One
        call takes over all of them, because there may be 50,000. The subscription has already told
        these consumers that they are not active. One of them becomes active."""
        self._candidates = former._candidates
        for consumer in [it for it in self._candidates if it not in present]:
            self._candidates.remove(consumer)
        return self._activate(now) if self._candidates else []

    def _receiver(self) -> Consumer | None:
        return self._active if self._drained_at is None else None

    def add_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        self._candidates.add(consumer)
        if self._active is None:
            return self._activate(now)
        return [Activate(consumer, False), *self._choose(now)]

    def remove_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        self._candidates.remove(consumer)
        if consumer is not self._active:
            return self._choose(now)
        self._active = self._drained_at = None
        self._rewind()
        return self._activate(now) if self._candidates else []

    def on_leaving(self, consumer: Consumer, now: float) -> list[Action]:
        self._candidates.on_leaving(consumer)
        if consumer is self._active and self._drained_at is None:
            self._stop()
        return self._choose(now)

    def on_redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, now: float
    ) -> list[Action]:
        if consumer is self._active and self._drained_at is not None:
            return self._switch(now)  # the draining consumer has returned its entries
        return super().on_redeliver(consumer, positions, now)

    def on_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        return super().on_acked(consumer, positions, now) + self._maybe_switch(now)

    def on_partly_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        return self._maybe_switch(now)

    def on_acked_through(self, position: Position, now: float) -> list[Action]:
        return self._maybe_switch(now)

    def next_timer(self) -> float | None:
        return self._drained_at

    def on_timer(self, now: float) -> list[Action]:
        return self._maybe_switch(now)

    def explain(self, now: float) -> list[Reason]:
        active = self._active
        reasons: list[Reason] = []
        if active is not None and self._drained_at is not None:
            detail = (
                f"consumer {self._candidates.chosen().name!r} becomes active when "
                f"{active.name!r} has acknowledged the entries before {self.read_position}, "
                f"or in {max(0.0, self._drained_at - now):.1f} s"
            )
            next_s = max(0.0, self._drained_at - now)
            reasons.append(Reason(Why.DRAINING, detail, next_s=next_s))
        elif active is not None and len(self._candidates) > 1 and not active.available:
            detail = f"{active.name!r} is active; consumers on standby: {len(self._candidates) - 1}"
            facts = {"standby": len(self._candidates) - 1, "active": active.name}
            reasons.append(Reason(Why.STANDBY, detail, facts=facts))
        return [*reasons, *super().explain(now)]

    def check(self) -> None:
        super().check()
        consumers = list(self._candidates)
        assert (self._active is None) == (not consumers), "1"
        if self._active is not None:
            assert self._active in consumers, "1"
            drains = self._active is not self._candidates.chosen()
            assert drains == (self._drained_at is not None), "2"
        else:
            assert self._drained_at is None
        assert not any(consumer.pending for consumer in consumers)

    # ---- the active consumer ---------------------------------------------------------------------

    def _choose(self, now: float) -> list[Action]:
        """The consumers have changed: begin or end a drain if the choice has changed, too."""
        if not self._candidates:
            return []
        if self._candidates.chosen() is self._active:
            if self._drained_at is None:
                return []
            self._drained_at = None
            return self.advance(now)
        if self._drained_at is None:
            leaves = self._active is not None and self._active.leaving
            self._drained_at = now + (LEAVING_S if leaves else self._delay_s)
            self._stop()
        return self._maybe_switch(now)

    def _maybe_switch(self, now: float) -> list[Action]:
        """End a drain that is complete or whose time is over."""
        if self._drained_at is None:
            return []
        oldest = self._acks.first_unacked(after(self._acks.mark_delete))
        if now < self._drained_at and oldest < self.read_position:
            return []
        return self._switch(now)

    def _switch(self, now: float) -> list[Action]:
        former, self._drained_at = self._active, None
        assert former is not None
        self._rewind()
        return [Activate(former, False), *self._activate(now)]

    def _activate(self, now: float) -> list[Action]:
        self._active = self._candidates.chosen()
        return [Activate(self._active, True), *self.advance(now)]
