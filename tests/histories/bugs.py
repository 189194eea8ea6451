"""Planted bugs: wrong dispatchers that the histories must find."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from histories.model import Kind

from magnetar.broker.dispatch.delayed import Delays
from magnetar.broker.dispatch.draining import DrainingHashes
from magnetar.broker.dispatch.failover import Failover
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.keyed_replay import KeyedReplay
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.dispatch.withheld import Withheld

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from magnetar.broker.dispatch.dispatcher import Dispatcher, Environment

# ---- draining hashes -----------------------------------------------------------------------------


class SkipsTheSendTimeGate(KeyShared):
    """Delivers entries that it read again without checking whether their slot drains by now."""

    def on_replayed(self, *args: Any) -> Any:
        draining, self._draining = self._draining, _Permissive(self._draining)
        try:
            return super().on_replayed(*args)
        finally:
            _copy(self._draining, draining)
            self._draining = draining


def _copy(source: DrainingHashes, target: DrainingHashes) -> None:
    for name in DrainingHashes.__slots__:
        setattr(target, name, getattr(source, name))


class _Permissive(DrainingHashes):
    def __init__(self, real: DrainingHashes) -> None:
        _copy(real, self)

    def blocks(self, slot: int, consumer: Any) -> bool:
        return False


class _Blind(KeyedReplay):
    """A table that shares the state of another table but finds no slot."""

    def __init__(self, real: KeyedReplay) -> None:
        super().__init__()
        self._by_slot, self._queues, self._real = real._by_slot, real._queues, real

    def __contains__(self, slot: object) -> bool:
        return False

    def add(self, position: Any, slot: int) -> bool:
        return self._real.add(position, slot)

    def __len__(self) -> int:
        return len(self._real)


class ForgetsGateOne(KeyShared):
    """New entries overtake waiting entries."""

    def on_entries(self, *args: Any) -> Any:
        replay = self._replay
        self._replay = _Blind(replay)
        try:
            return super().on_entries(*args)
        finally:
            self._replay = replay


class ForgetsTheReplayGate(KeyShared):
    """Reads entries again that may not be delivered yet."""

    def _passes_replay_gate(self, *args: Any, **named: Any) -> bool:
        return True


class ForgetsTheReturned(KeyShared):
    """Does not notice entries that were returned during the second read."""

    def on_replayed(self, *args: Any) -> Any:
        self._returned = set()
        return super().on_replayed(*args)


class CountsAReferenceTwice(KeyShared):
    def _astray(self, *args: Any) -> Any:
        return {slot: 2 * count for slot, count in super()._astray(*args).items()}


class UnblocksEarly(KeyShared):
    def _astray(self, *args: Any) -> Any:
        return dict.fromkeys(super()._astray(*args), 1)


class LosesTheLastAck(KeyShared):
    """A drained slot stays blocked."""

    def next_timer(self) -> None:
        return None


class RelaxesForOne(KeyShared):
    """One consumer that allows delivery out of order decides for all consumers."""

    def _decide_order(self, now: float) -> None:
        super()._decide_order(now)
        if any(it.key_shared and it.key_shared.allow_out_of_order for it in self._consumers):
            self._draining.clear()
            self._unsettled.clear()
            self.policy = replace(self.policy, allow_out_of_order=True)


class ForgetsWhatWasRelaxed(KeyShared):
    """Entries that several consumers hold from the time without order block no later entry."""

    def _decide_order(self, now: float) -> None:
        draining, self._draining = self._draining, DrainingHashes()
        try:
            super()._decide_order(now)
        finally:
            self._draining = draining


class ForgetsADepartedConsumer(KeyShared):
    """Returns only the first part of the entries of a departed consumer."""

    def _return_some(self) -> None:
        super()._return_some()
        self._departed.clear()


class LetsADepartedConsumerBe(KeyShared):
    """Does not wait for the entries that are still to be returned."""

    def _on_moved(self, moved: Any, now: float) -> None:
        super()._on_moved([it for it in moved if it.source not in self._departed], now)


class LetsWhatIsReturnedBe(KeyShared):
    """New entries overtake those of a consumer that asked for all of its entries again."""

    def _slots_of(self, consumer: Any) -> set[int]:
        return set()


class ForgetsTheWaitingOnExpiry(KeyShared):
    def on_acked_through(self, position: Any, now: float) -> Any:
        self._queue_in_parts = lambda slots, now: None  # type: ignore[method-assign]
        try:
            return super().on_acked_through(position, now)
        finally:
            del self._queue_in_parts


class LeavesOutOnlyTheFirstPart(KeyShared):
    """Stops when it has met many acknowledged entries."""

    def advance(self, now: float) -> Any:
        actions = super().advance(now)
        if self._has_more and not actions:
            self._wake_s = None
        return actions


class ForgetsToRegister(KeyShared):
    def _astray(self, *args: Any) -> Any:
        return {}


class ForgetsTheWaitingOnMove(KeyShared):
    def _on_moved(self, moved: Any, now: float) -> None:
        self._queue_in_parts = lambda slots, now: None  # type: ignore[method-assign]
        super()._on_moved(moved, now)
        del self._queue_in_parts


class QueuesOnlyTheFirstPart(KeyShared):
    def _queue_some(self) -> None:
        super()._queue_some()
        self._unqueued.clear()


class KeepsThePins(KeyShared):
    def _refresh_pins(self) -> None:
        pass


class LosesWhatALeaverHad(KeyShared):
    def remove_consumer(self, consumer: Any, now: float) -> Any:
        for position in list(consumer.pending)[-1:]:
            self._forget(position, consumer, now)
        return super().remove_consumer(consumer, now)


# ---- ordered negative acknowledgements -----------------------------------------------------------


class ForgetsTheWithheldWhenDispatching(KeyShared):
    def _dispatch(self, *args: Any) -> Any:
        withheld, self._withheld = self._withheld, Withheld()
        try:
            return super()._dispatch(*args)
        finally:
            self._withheld = withheld


class ForgetsTheWithheldOnDisconnect(KeyShared):
    def remove_consumer(self, consumer: Any, now: float) -> Any:
        slots = set(self._withheld.slots())
        self._withheld.clear()
        self._queue(slots)
        return super().remove_consumer(consumer, now)


class ReleasesAtTheRedelivery(KeyShared):
    def on_redeliver(self, consumer: Any, positions: Any, now: float) -> Any:
        for position in positions or ():
            self._withheld.on_acked(position)
        return super().on_redeliver(consumer, positions, now)


class ForgetsToQueueAfterTheAck(KeyShared):
    def on_acked(self, consumer: Any, positions: Any, now: float) -> Any:
        for position in positions:
            self._withheld.on_acked(position)
        return super().on_acked(consumer, positions, now)


# ---- permits, redelivery counts, delays, cumulative acknowledgements ----------------------------


class GivesPermitsBackOnANack(Shared):
    def on_redeliver(self, consumer: Any, positions: Any, now: float) -> Any:
        before = consumer.unacked
        actions = super().on_redeliver(consumer, positions, now)
        consumer.permits += max(before - consumer.unacked, 0)
        return actions


class LosesTheRedeliveryCount(Shared):
    """Delivers the entries of a consumer that left as if for the first time."""

    def remove_consumer(self, consumer: Any, now: float) -> Any:
        redeliveries, self._redeliveries = self._redeliveries, _Uncounted()
        try:
            return super().remove_consumer(consumer, now)
        finally:
            self._redeliveries = redeliveries


class _Uncounted:
    def count_again(self, ledger: int, entries: Any) -> None: ...

    def get(self, position: Any) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())


class AcceptsCumulativeAcks(Shared):
    cumulative_acks = True  # type: ignore[misc]


class DeliversDelayedEntriesEarly(Shared):
    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._delays.__class__ = _Early


class _Early(Delays):
    __slots__ = ()  # an object can become one of this class

    def _until_ms(self, now: float) -> int:
        return super()._until_ms(now) + 1_500


class ForgetsDelayedEntries(Shared):
    def next_timer(self) -> None:
        return None


# ---- one active consumer -------------------------------------------------------------------------


class SwitchesWithoutRewind(Failover):
    def _switch(self, now: float) -> Any:
        self._rewind = lambda: None  # type: ignore[method-assign]
        try:
            return super()._switch(now)
        finally:
            del self._rewind


class DeliversDuringTheDrain(Failover):
    def _receiver(self) -> Any:
        return self._active


class DropsHeldEntries(Failover):
    def _stop(self) -> None:
        self._rewinds += 1
        self._held = []


BUGS: Final[Mapping[Callable[[Environment], Dispatcher], Kind]] = {
    SkipsTheSendTimeGate: Kind.KEY_SHARED,
    ForgetsGateOne: Kind.KEY_SHARED,
    ForgetsTheReplayGate: Kind.KEY_SHARED,
    ForgetsTheReturned: Kind.KEY_SHARED,
    CountsAReferenceTwice: Kind.KEY_SHARED,
    UnblocksEarly: Kind.KEY_SHARED,
    LosesTheLastAck: Kind.KEY_SHARED,
    ForgetsToRegister: Kind.KEY_SHARED,
    RelaxesForOne: Kind.KEY_SHARED,
    ForgetsWhatWasRelaxed: Kind.KEY_SHARED,
    ForgetsADepartedConsumer: Kind.KEY_SHARED,
    LetsADepartedConsumerBe: Kind.KEY_SHARED,
    LetsWhatIsReturnedBe: Kind.KEY_SHARED,
    ForgetsTheWaitingOnExpiry: Kind.KEY_SHARED,
    LeavesOutOnlyTheFirstPart: Kind.KEY_SHARED,
    ForgetsTheWaitingOnMove: Kind.KEY_SHARED,
    QueuesOnlyTheFirstPart: Kind.KEY_SHARED,
    KeepsThePins: Kind.KEY_SHARED,
    LosesWhatALeaverHad: Kind.KEY_SHARED,
    ForgetsTheWithheldWhenDispatching: Kind.ORDERED,
    ForgetsTheWithheldOnDisconnect: Kind.ORDERED,
    ReleasesAtTheRedelivery: Kind.ORDERED,
    ForgetsToQueueAfterTheAck: Kind.ORDERED,
    GivesPermitsBackOnANack: Kind.SHARED,
    LosesTheRedeliveryCount: Kind.SHARED,
    AcceptsCumulativeAcks: Kind.SHARED,
    DeliversDelayedEntriesEarly: Kind.SHARED,
    ForgetsDelayedEntries: Kind.SHARED,
    SwitchesWithoutRewind: Kind.FAILOVER,
    DeliversDuringTheDrain: Kind.FAILOVER,
    DropsHeldEntries: Kind.FAILOVER,
}
"""Each bug with the subscription type whose histories must find it."""
