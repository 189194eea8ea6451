"""Dispatch to the one consumer of an Exclusive subscription: in order, from the cursor.

Theory of operation. Entries are read from `read_position` on and given to the consumer as far as
its permits go; what it cannot take yet is held, and nothing more is read meanwhile. Nothing is
remembered of what was given: a redelivery, and a successor after a disconnect, start again behind
what is acknowledged as a whole (mark-delete), and what is acknowledged beyond that is left out.
That is also why a list of single positions to redeliver means "everything" here, as in Pulsar.

Invariants (see `check`):
    1. What is held is ascending and stands before `read_position`.
    2. While a read is outstanding nothing is held.
    3. There is at most one consumer, and nothing is held without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.dispatch.dispatcher import Deliver, Mark, Read, after, unacked_messages
from magnetar.broker.dispatch.explain import Reason, Why

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.dispatch.dispatcher import Acks, Action
    from magnetar.broker.dispatch.permits import Consumer, Limits
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position


class Exclusive:
    """A `Dispatcher`."""

    def __init__(self, acks: Acks, confirmed: Callable[[], Position], limits: Limits) -> None:
        self.read_position = after(acks.mark_delete)
        self._acks = acks
        self._confirmed = confirmed
        self._limits = limits
        self._consumer: Consumer | None = None  # None: nobody is connected
        self._held: list[StoredEntry] = []
        self._reading: Read | None = None  # None: nothing is outstanding
        self._rewinds = 0  # what a read brings that was asked before the last one is void

    def add_consumer(self, consumer: Consumer) -> list[Action]:
        assert self._consumer is None, "an exclusive subscription has one consumer"
        self._consumer = consumer
        return []

    def remove_consumer(self, consumer: Consumer) -> list[Action]:
        assert self._consumer is consumer
        self._consumer = None
        self._rewind()
        return []

    def on_flow(self, consumer: Consumer, permits: int) -> list[Action]:
        consumer.permits += permits
        return self.advance()

    def on_redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None
    ) -> list[Action]:
        self._rewind()
        return self.advance()

    def on_acked(self, consumer: Consumer, positions: Sequence[Position]) -> list[Action]:
        return []

    def on_partly_acked(self, consumer: Consumer, position: Position) -> list[Action]:
        return []

    def on_entries(self, entries: list[StoredEntry]) -> list[Action]:
        reading, self._reading = self._reading, None
        assert reading is not None
        if reading.rewinds == self._rewinds and self._consumer is not None:
            if entries:
                assert entries[0].position >= reading.first
                self.read_position = after(entries[-1].position)
                self._held = entries
            else:
                self.read_position = max(self.read_position, after(reading.through))
        return self.advance()

    def on_replayed(self, entries: list[StoredEntry], through: Position) -> list[Action]:
        raise AssertionError("never asked for")

    def on_read_failed(self) -> list[Action]:
        assert self._reading is not None
        self._reading = None
        return self.advance()

    def advance(self) -> list[Action]:
        consumer = self._consumer
        if consumer is None or not consumer.available:
            return []
        actions: list[Action] = []
        if self._held:
            actions += self._give(consumer)
        if not self._held and self._reading is None and consumer.permits > 0:
            actions += self._read(consumer)
        return actions

    def explain(self) -> list[Reason]:
        if self._consumer is None:
            return [Reason(Why.NO_CONSUMERS, "no consumer is connected")]
        reasons = self._consumer.explain()
        if self._reading is not None:
            detail = f"entries from {self._reading.first} on are being read"
            return [*reasons, Reason(Why.READING, detail)]
        if not self._held and self._acks.first_unacked(self.read_position) > self._confirmed():
            detail = f"everything up to {self._confirmed()} was delivered or is acknowledged"
            reasons.append(Reason(Why.NOTHING_TO_READ, detail))
        return reasons

    def check(self) -> None:
        positions = [entry.position for entry in self._held]
        assert positions == sorted(set(positions))
        assert not positions or positions[-1] < self.read_position
        assert not (self._held and self._reading is not None)
        assert self._consumer is not None or not self._held
        if self._consumer is not None:
            assert not self._consumer.pending

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
        """As much of what is held as the permits allow; the last entry may exceed them."""
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
        """The same, where some of it is acknowledged."""
        given: list[StoredEntry] = []
        marks: dict[int, Mark] = {}
        messages = end = 0
        for entry in self._held:
            if messages >= consumer.permits:
                break
            end += 1
            unacked, ack_set = unacked_messages(entry, self._acks)
            if unacked:
                if ack_set:
                    marks[len(given)] = Mark(0, ack_set)
                given.append(entry)
                messages += unacked
        self._held = self._held[end:]
        if not given:
            return []
        consumer.on_given(len(given), messages)
        return [Deliver(consumer, given, marks, messages)]
