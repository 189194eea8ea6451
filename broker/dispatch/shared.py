"""Dispatch to the consumers of a Shared subscription: each entry to one consumer, in turns.

Theory of operation. From its read until its acknowledgement an entry is in exactly one place:

    held      read, and not delivered yet; the dispatcher reads nothing more meanwhile
    pending   delivered to one consumer, which has not acknowledged it
    replay    to be delivered (again), after its consumer left or returned it; lowest first
    in flight the dispatcher reads it again; before, it was in replay or delayed
    parked    a chunk that waits for the owner of its message (chunks.py), because the owner is not
              available; the chunk goes to replay when the owner is available
    delayed   its delivery time has not come; `Delays` keeps it

A turn gives one consumer up to `turn_messages`. `Rotation` decides which consumer is next. The
dispatcher reads entries of the replay set first, then delayed entries that have become due, then
new ones. An acknowledged entry leaves `pending` and `delayed` at once. In the other places, the
dispatcher skips it before a read or a delivery. When the last consumer leaves, its pending entries
and the held entries go to replay, for the next consumer.

All chunks of a message go to one consumer (chunks.py).

The dispatcher counts a redelivery when a consumer leaves with an entry pending, or returns it. The
cursor keeps the counts.

Invariants (see `check`):
    1. An entry is in at most one of the six places, and pending at most one consumer.
    2. An entry that was never delivered is at or after `read_position`, or held, in replay, in
       flight, parked or delayed.
    3. While a read is outstanding, no entry is held. Without a consumer, no entry is held.
    4. Only unacknowledged entries have a redelivery count.
    5. Every number of unacknowledged messages is the sum over the pending entries.
    6. Chunks are parked only for connected consumers, and at most PARKED_MAX.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.acks import unacked_messages
from magnetar.broker.dispatch.chunks import ChunkRoutes
from magnetar.broker.dispatch.dispatcher import Deliver, EntryDetail, Read, Replay, after
from magnetar.broker.dispatch.explain import Reason, Why
from magnetar.broker.dispatch.permits import explain_all, holders, unacked_by_subscription
from magnetar.broker.dispatch.positions import ReplaySet
from magnetar.broker.dispatch.rotation import Rotation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.dispatch.dispatcher import Action, Environment
    from magnetar.broker.dispatch.permits import Consumer
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position

PARKED_MAX: Final = 10_000
"""The limit of parked chunks. At the limit the dispatcher holds the chunks that it has read, and
reads nothing more. 10,000 chunks are up to 50 GB of messages that consumers have begun."""


PART_PAUSE_S: Final = 0.001
"""The pause in seconds after `ReplaySet.take` has left out DROPPED_MAX acknowledged positions."""


class Shared:
    """A `Dispatcher`."""

    cumulative_acks: Final = False

    def __init__(self, environment: Environment) -> None:
        self._acks = environment.acks
        self._confirmed = environment.confirmed
        self._limits = environment.limits
        self.read_position = after(self._acks.mark_delete)
        self._consumers = Rotation()
        self._held: list[StoredEntry] = []
        self._has_chunks = False  # True: some of the held entries are chunks
        self._chunks = ChunkRoutes()
        self._parked: dict[Consumer, list[Position]] = {}  # no empty list
        self._replay = ReplaySet()
        self._reading: Read | Replay | None = None  # None: no read is outstanding
        self._redeliveries = environment.redeliveries
        self._delays = environment.delays
        self._wake_s: float | None = None  # the answer of `next_timer`
        # True from the time when the unacknowledged messages reach the subscription's limit until
        # they have fallen to half of it.
        self._full = False

    @property
    def unacked(self) -> int:
        """The number of delivered and unacknowledged messages."""
        return sum(consumer.unacked for consumer in self._consumers)

    def add_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        self._consumers.add(consumer)
        return []

    def remove_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        self._consumers.remove(consumer)
        self._chunks.on_left(consumer)
        for position in self._parked.pop(consumer, ()):
            self._replay.add(position)
        self._return_all(consumer)
        self._release()
        return self.advance(now)

    def _return_all(self, consumer: Consumer) -> None:
        """Return all entries of the consumer. This takes a third of the time that single returns
        take."""
        consumer.on_unacked(-consumer.unacked)
        for ledger, entries in consumer.pending.drain().items():
            self._redeliveries.count_again(ledger, entries)
            self._replay.add_all(ledger, entries)

    def on_leaving(self, consumer: Consumer, now: float) -> list[Action]:
        return self.advance(now)

    def on_flow(self, consumer: Consumer, permits: int, now: float) -> list[Action]:
        consumer.permits += permits
        return self.advance(now)

    def on_redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, now: float
    ) -> list[Action]:
        if self._chunks:  # parked positions may get another owner
            for position in self._parked.pop(consumer, ()):
                self._replay.add(position)
        if positions is None:
            self._chunks.on_all_returned(consumer)
            self._return_all(consumer)
            return self.advance(now)
        if self._chunks:
            mine = [position for position in positions if consumer.pending.get(position)]
            positions = self._chunks.with_whole_messages(mine)
        for position in positions:
            messages = consumer.pending.pop(position)
            if messages:
                consumer.on_unacked(-messages)
                self._redeliveries.count_again(position.ledger, (position.entry,))
                self._replay.add(position)
        return self.advance(now)

    def on_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        pending, done = consumer.pending, 0
        elsewhere: list[Position] = []
        for position in positions:
            messages = pending.pop(position)
            if messages:
                done += messages
            else:
                elsewhere.append(position)
            if self._chunks:
                self._chunks.on_gone(position)
        # These may be pending at other consumers, be in replay, or never have been delivered.
        if elsewhere:
            for owner, position in holders(self._consumers, elsewhere):
                owner.on_unacked(-owner.pending.pop(position))
        consumer.on_unacked(-done)
        consumer.acked += done
        return self.advance(now)

    def on_partly_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        acks = self._acks
        partly = [position for position in positions if not acks.is_acked(position)]
        for owner, position in holders(chain((consumer,), self._consumers), partly):
            consumer.acked += owner.on_partly_acked(position, acks.batch_ack_set(position))
        return self.on_acked(consumer, [at for at in positions if acks.is_acked(at)], now)

    def on_acked_through(self, position: Position, now: float) -> list[Action]:
        for consumer in self._consumers:
            gone = consumer.pending.pop_through(position)
            consumer.on_unacked(-sum(sum(entries.values()) for entries in gone.values()))
        self._replay.drop_through(position)
        for owner in list(self._parked):
            later = [parked for parked in self._parked.pop(owner) if parked > position]
            if later:
                self._parked[owner] = later
        self._chunks.on_gone_through(position)
        return self.advance(now)

    def on_entries(self, entries: list[StoredEntry], now: float) -> list[Action]:
        reading, self._reading = self._reading, None
        assert isinstance(reading, Read)
        if entries:
            assert entries[0].position >= reading.first
            self.read_position = after(entries[-1].position)
            self._hold(entries, now)
        else:
            self.read_position = max(self.read_position, after(reading.through))
        return self.advance(now)

    def on_replayed(
        self, entries: list[StoredEntry], through: Position, now: float
    ) -> list[Action]:
        reading, self._reading = self._reading, None
        assert isinstance(reading, Replay)
        wanted = set(reading.positions)
        found = [entry for entry in entries if entry.position in wanted]
        wanted.difference_update([entry.position for entry in found])
        for position in wanted:
            if position > through:
                self._replay.add(position)
            else:
                self._chunks.on_gone(position)  # it does not exist any more
        self._hold(found, now)
        return self.advance(now)

    def on_read_failed(self, now: float) -> list[Action]:
        reading, self._reading = self._reading, None
        assert reading is not None
        if isinstance(reading, Replay):
            for position in reading.positions:
                self._replay.add(position)
        return self.advance(now)

    def advance(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self._parked:
            self._unpark()
        if self._held:
            actions += self._give_with_chunks() if self._has_chunks else self._give()
        if not self._held and self._reading is None:
            actions += self._read(now)
        self._wake_s = self._delays.wake_s(now) if self._delays.index and self._waits else None
        if self._replay and self._is_idle:  # `take` left out DROPPED_MAX positions: continue later
            self._wake_s = now + PART_PAUSE_S
        return actions

    def next_timer(self) -> float | None:
        return self._wake_s

    def on_timer(self, now: float) -> list[Action]:
        return self.advance(now)

    def describe(self) -> dict[str, object]:
        """The statistics of the subscription, under Pulsar's names."""
        in_flight = len(self._reading.positions) if isinstance(self._reading, Replay) else 0
        return {"msgInReplay": len(self._replay) + in_flight}

    def explain(self, now: float) -> list[Reason]:
        if not self._consumers:
            none = Reason(Why.NO_CONSUMERS, "no consumer is connected")
            return [none, *self._delays.explain(now)]
        reasons = explain_all(self._consumers)
        if self._reading is not None:
            what = "new entries" if isinstance(self._reading, Read) else "entries to redeliver"
            reasons.append(Reason(Why.READING, f"the broker is reading {what}"))
        if self._parked:
            count = sum(map(len, self._parked.values()))
            detail = f"{count} chunks wait for the consumers that have the rest of their messages"
            reasons.append(Reason(Why.CHUNKS, detail, facts={"chunks": count}))
        if self._is_full():
            reasons.append(unacked_by_subscription(self.unacked, self._limits))
        waiting = self._held or self._replay or self._reading is not None
        if not waiting and self._acks.first_unacked(self.read_position) > self._confirmed():
            pending = sum(len(consumer.pending) for consumer in self._consumers)
            detail = (
                f"every entry up to {self._confirmed()} is delivered or acknowledged; "
                f"{pending} entries are pending acknowledgement"
            )
            reasons.append(Reason(Why.NOTHING_TO_READ, detail, facts={"pending": pending}))
        return reasons + self._delays.explain(now)

    def check(self) -> None:
        self._consumers.check()
        places = [entry.position for entry in self._held]
        assert places == sorted(places)
        assert not places or self._consumers
        assert not (places and self._reading is not None)
        places += self._replay
        if isinstance(self._reading, Replay):
            places += self._reading.positions
        for consumer in self._consumers:
            consumer.check()
            places += consumer.pending
        for consumer, parked in self._parked.items():
            assert parked
            assert consumer in list(self._consumers), "6: parked for a consumer that is gone"
            places += parked
        assert sum(map(len, self._parked.values())) <= PARKED_MAX, "6"
        self._chunks.check(self._acks)
        assert len(places) == len(set(places)), "an entry is in two places"
        assert not any(position in self._delays.index for position in places), "held and delayed"
        assert all(position < self.read_position for position in places)
        if isinstance(self._reading, Read):
            assert self._reading.first == self.read_position
        for position in self._redeliveries:
            assert not self._acks.is_acked(position)

    # ---- delivering ------------------------------------------------------------------------------

    def _give(self) -> list[Action]:
        """Take turns until no entry is held or no consumer is available. One `Deliver` for each
        consumer."""
        held, acks = self._held, self._acks
        if held[0].position <= acks.highest_acked:
            held = [entry for entry in held if not acks.is_acked(entry.position)]
        deliveries: dict[Consumer, Deliver] = {}
        start = 0
        while start < len(held):
            consumer = self._consumers.next_available()
            if consumer is None:
                break
            delivery = deliveries.get(consumer)
            if delivery is None:
                delivery = deliveries[consumer] = Deliver(consumer, [], {}, 0)
            start = self._turn(held, start, delivery)
        self._held = held[start:]
        return list(deliveries.values())

    def _give_with_chunks(self) -> list[Action]:
        """Like `_give`, where some of the held entries are chunks."""
        acks = self._acks
        held = [entry for entry in self._held if not acks.is_acked(entry.position)]
        deliveries: dict[Consumer, Deliver] = {}
        at = 0
        while at < len(held):
            end = at
            while end < len(held) and held[end].view.chunk is None:
                end += 1
            consumer: Consumer | None
            if end == at:
                if self._defer(held[at]):
                    at += 1
                    continue
                chunk = held[at].view.chunk
                assert chunk is not None
                owner = self._chunks.owner(chunk)
                consumer = self._consumers.next_available() if owner is None else owner
                if consumer is None or not consumer.available:
                    break
                self._chunks.on_given(chunk, held[at].position, consumer)
                end = at + 1
            else:
                consumer = self._consumers.next_available()
                if consumer is None:
                    break
            delivery = deliveries.setdefault(consumer, Deliver(consumer, [], {}, 0))
            at += self._turn(held[at:end], 0, delivery)
        self._held = held[at:]
        return list(deliveries.values())

    def _defer(self, entry: StoredEntry) -> bool:
        """Put the chunk aside if it cannot be delivered yet. Returns True when the chunk is put
        aside. False: the chunk can be delivered, or it stays held because PARKED_MAX is reached."""
        chunk, position = entry.view.chunk, entry.position
        assert chunk is not None
        owner = self._chunks.owner(chunk)
        if owner is not None and (owner in self._parked or not owner.available):
            if sum(map(len, self._parked.values())) >= PARKED_MAX:
                return False
            self._parked.setdefault(owner, []).append(position)
        elif self._chunks.must_wait(chunk, position, self._acks):
            self._replay.add(position)  # waits for the positions that it must not overtake
        else:
            return False
        self._chunks.on_deferred(chunk, position)
        return True

    def _unpark(self) -> None:
        for consumer in [it for it in self._parked if it.available]:
            for position in self._parked.pop(consumer):
                self._replay.add(position)

    def _hold(self, entries: list[StoredEntry], now: float) -> None:
        """Hold the entries that are due. The other entries go into the index of delayed entries."""
        self._held = entries = self._delays.hold_back(entries, self._acks, now)
        self._has_chunks = any(entry.view.chunk is not None for entry in entries)
        self._release()

    def _turn(self, held: list[StoredEntry], start: int, delivery: Deliver) -> int:
        """Give one consumer the entries of its turn, at least one. Returns the index where the next
        turn begins."""
        consumer, turn_messages = delivery.consumer, self._limits.turn_messages
        budget = min(turn_messages, consumer.message_room)
        plain = not self._redeliveries and held[start].position > self._acks.highest_acked
        given, end, ledger_now = 0, start, -1
        by_entry: dict[int, int] = {}
        ack_set: tuple[int, ...] = ()
        while end < len(held) and given < budget:
            entry = held[end]
            if plain:
                messages = entry.view.num_messages
            else:
                messages, ack_set = unacked_messages(entry, self._acks)
            if given and given + messages > turn_messages:
                break
            if not plain:
                self._add_detail(delivery, entry.position, ack_set)
            ledger, number = entry.position
            if ledger != ledger_now:
                ledger_now, by_entry = ledger, consumer.pending.of_ledger(ledger)
            by_entry[number] = messages
            delivery.entries.append(entry)
            given += messages
            end += 1
        delivery.messages += given
        consumer.on_given(end - start, given)
        consumer.on_unacked(given)
        return end

    def _add_detail(self, delivery: Deliver, position: Position, ack_set: tuple[int, ...]) -> None:
        """Add the detail of the entry that is appended to the delivery next."""
        count = self._redeliveries.get(position)
        if count or ack_set:
            delivery.details[len(delivery.entries)] = EntryDetail(count, ack_set)

    def _release(self) -> None:
        """Hold no entry while there is no consumer: it would stay in memory."""
        if not self._consumers and self._held:
            for entry in self._held:
                self._replay.add(entry.position)
            self._held = []

    # ---- reading ---------------------------------------------------------------------------------

    @property
    def _waits(self) -> bool:
        """True when the dispatcher would deliver a delayed entry if it were due."""
        return self._is_idle and not self._is_full()

    @property
    def _is_idle(self) -> bool:
        """True when a consumer is available, and the dispatcher reads nothing for it."""
        return not self._held and self._reading is None and self._entry_room() > 0

    def _read(self, now: float) -> list[Action]:
        entries_max = self._entry_room()
        if entries_max == 0:
            return []
        if self._replay:
            positions = self._replay.take(entries_max, self._acks)
            if positions:
                self._reading = Replay(positions)
                return [self._reading]
        if self._is_full():
            return []
        due = self._delays.take_due(entries_max, now, read_position=self.read_position)
        if due:
            self._reading = Replay(due)
            return [self._reading]
        if self._delays.is_full or self._delays.pauses(now):
            return []
        first, confirmed = self._delays.first_new(self.read_position, self._acks), self._confirmed()
        self.read_position = first
        if first > confirmed:
            return []
        if self._delays.index:  # most of the new entries may be delayed, too
            entries_max = self._limits.read_entries
        self._reading = Read(first, entries_max, confirmed, 0)
        return [self._reading]

    def _entry_room(self) -> int:
        """The number of entries to read for the available consumers. 0: none is available."""
        room, limit = 0, self._limits.read_entries
        for consumer in self._consumers:
            if room < limit and consumer.available:
                room += consumer.entry_room()
        return min(room, limit)

    def _is_full(self) -> bool:
        limit = self._limits.unacked_per_subscription
        self._full = self.unacked > limit // 2 if self._full else self.unacked >= limit
        return self._full
