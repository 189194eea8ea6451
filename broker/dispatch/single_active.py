"""The common part of Exclusive and Failover: one active consumer gets the entries in order.

Theory of operation. The dispatcher reads entries from `read_position` on and delivers them to the
active consumer as far as its permits allow. It holds the rest, and reads nothing more while it
holds entries.

The dispatcher does not track delivered entries. A redelivery and a change of the active consumer
rewind to the first entry after the mark-delete position. Entries that are acknowledged individually
are left out. A request to redeliver single positions redelivers all unacknowledged entries, as in
Pulsar. A request of a consumer that is not active redelivers nothing.

Invariants (see `check`):
    1. Held entries ascend and are before `read_position`.
    2. While a read is outstanding, no entry is held.
    3. Without a consumer that may receive, no entry is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.acks import unacked_messages
from magnetar.broker.dispatch.dispatcher import Deliver, EntryDetail, Read, after
from magnetar.broker.dispatch.explain import Reason, Why

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.dispatch.dispatcher import Action, Environment
    from magnetar.broker.dispatch.permits import Consumer
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position


class SingleActive:
    """A `Dispatcher` without the choice of the active consumer."""

    cumulative_acks: Final = True

    def __init__(self, environment: Environment) -> None:
        self._subscription = environment.subscription
        self._acks = environment.acks
        self._confirmed = environment.confirmed
        self._limits = environment.limits
        self.read_position = after(self._acks.mark_delete)
        self._active: Consumer | None = None  # None: no consumer is connected
        self._held: list[StoredEntry] = []
        self._reading: Read | None = None  # None: no read is outstanding
        self._rewinds = 0  # calls of `_rewind` and `_stop`; each voids the outstanding read

    @property
    def delivered_end(self) -> Position:
        """The position before which all entries are delivered to the active consumer or
        acknowledged."""
        return self._held[0].position if self._held else self.read_position

    def _receiver(self) -> Consumer | None:
        """The consumer that may get entries now. None: no consumer may."""
        return self._active

    def on_leaving(self, consumer: Consumer, now: float) -> list[Action]:
        if consumer is self._active:
            self._stop()
        return self.advance(now)

    def on_flow(self, consumer: Consumer, permits: int, now: float) -> list[Action]:
        consumer.permits += permits
        return self.advance(now)

    def on_redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, now: float
    ) -> list[Action]:
        if consumer is self._active:
            self._rewind()
        return self.advance(now)

    def on_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        consumer.acked += round(len(positions) * consumer.messages_per_entry)
        return []

    def on_partly_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        return []

    def on_acked_through(self, position: Position, now: float) -> list[Action]:
        return []

    def on_entries(self, entries: list[StoredEntry], now: float) -> list[Action]:
        reading, self._reading = self._reading, None
        assert reading is not None
        if reading.rewinds == self._rewinds and self._receiver() is not None:
            if entries:
                assert entries[0].position >= reading.first
                self.read_position = after(entries[-1].position)
                self._held = entries
            else:
                self.read_position = max(self.read_position, after(reading.through))
        return self.advance(now)

    def on_replayed(
        self, entries: list[StoredEntry], through: Position, now: float
    ) -> list[Action]:
        raise AssertionError("a dispatcher of a single active consumer asks for no replay")

    def on_read_failed(self, now: float) -> list[Action]:
        assert self._reading is not None
        self._reading = None
        return self.advance(now)

    def advance(self, now: float) -> list[Action]:
        consumer = self._receiver()
        if consumer is None or not consumer.available:
            return []
        actions: list[Action] = []
        if self._held:
            actions += self._give(consumer)
        if not self._held and self._reading is None and consumer.permits > 0:
            actions += self._read(consumer)
        return actions

    def next_timer(self) -> float | None:
        return None

    def on_timer(self, now: float) -> list[Action]:
        raise AssertionError("the dispatcher asked for no timer")

    def explain(self, now: float) -> list[Reason]:
        if self._active is None:
            return [Reason(Why.NO_CONSUMERS, "no consumer is connected")]
        reasons = self._active.explain()
        if self._reading is not None:
            detail = f"the broker is reading entries from {self._reading.first} on"
            return [*reasons, Reason(Why.READING, detail)]
        if not self._held and self._acks.first_unacked(self.read_position) > self._confirmed():
            detail = f"every entry up to {self._confirmed()} is delivered or acknowledged"
            reasons.append(Reason(Why.NOTHING_TO_READ, detail))
        return reasons

    def check(self) -> None:
        positions = [entry.position for entry in self._held]
        assert positions == sorted(set(positions))
        assert not positions or positions[-1] < self.read_position
        assert not (self._held and self._reading is not None)
        assert self._receiver() is not None or not self._held
        if self._active is not None:
            assert not self._active.pending

    def _stop(self) -> None:
        """Drop the entries that are read and not delivered. Reading continues right after the
        delivered ones."""
        self._rewinds += 1
        if self._held:
            self.read_position = self._held[0].position
            self._held = []

    def _rewind(self) -> None:
        self._rewinds += 1
        self._held = []
        self.read_position = after(self._acks.mark_delete)

    def _read(self, consumer: Consumer) -> list[Action]:
        first, confirmed = self._acks.first_unacked(self.read_position), self._confirmed()
        if first > confirmed:
            return []
        self.read_position = first
        entries_max = min(self._limits.read_entries, consumer.entry_room())
        self._reading = Read(first, entries_max, confirmed, self._rewinds)
        return [self._reading]

    def _give(self, consumer: Consumer) -> list[Action]:
        """Deliver held entries as far as the permits allow. The last entry may exceed them."""
        held, permits = self._held, consumer.permits
        if held[0].position <= self._acks.highest_acked:
            return self._give_unacked(consumer)
        messages = 0
        for end, entry in enumerate(held):
            if messages >= permits:
                self._held = held[end:]
                held = held[:end]
                break
            messages += entry.view.num_messages
        else:
            self._held = []
        consumer.on_given(len(held), messages)
        return [Deliver(consumer, held, {}, messages)]

    def _give_unacked(self, consumer: Consumer) -> list[Action]:
        """Like `_give`, where some of the held entries may be acknowledged."""
        given: list[StoredEntry] = []
        details: dict[int, EntryDetail] = {}
        messages = end = 0
        for entry in self._held:
            if messages >= consumer.permits:
                break
            end += 1
            unacked, ack_set = unacked_messages(entry, self._acks)
            if unacked:
                if ack_set:
                    details[len(given)] = EntryDetail(0, ack_set)
                given.append(entry)
                messages += unacked
        self._held = self._held[end:]
        if not given:
            return []
        consumer.on_given(len(given), messages)
        return [Deliver(consumer, given, details, messages)]
