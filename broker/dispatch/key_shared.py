"""Dispatch to the consumers of a Key_Shared subscription: the entries of a key to one consumer, in
order.

Theory of operation. The hash of the key of an entry is its *slot*. A selector (ring.py, halving.py,
sticky_ranges.py) says which consumer has the slot. From its read until its acknowledgement an entry
is in exactly one place:

    pending    delivered to one consumer, which has not acknowledged it. If the consumer leaves, or
               the entry *expires* (the broker acknowledges every entry up to a position), the entry
               stays pending until the dispatcher takes it off the consumer, in parts
    waiting    read before, and its consumer cannot take it now, or it must be delivered again
    in flight  the dispatcher reads it again; before, it was waiting, delayed or due
    delayed    its delivery time has not come; `Delays` keeps it
    due        it was delayed and became due, but its read failed or did not reach it

The dispatcher holds no entry in memory. It reads on past the entries that wait, up to the limit of
the look-ahead, so one slow consumer does not stop the others.

When a slot moves to another consumer while entries of it are pending, it drains (draining.py). An
entry passes these gates:

    1. New entries wait while older entries of their slot wait.
    2. A waiting entry is read again only if its consumer has the slot, has room, and no other
       consumer drains the slot.
    3. At its delivery the entry is checked again, because consumers may have joined, left or
       returned entries during the read. The check and the addition to the pending entries are one
       step, so no event comes between them.

An entry that does not pass holds back the later entries of its slot in the same read.

All chunks of a message go to one consumer: they have one key. A slot with a message whose last
chunk is still to come is *pinned*: it stays at its consumer, and moves after the last chunk.
Otherwise the consumer would acknowledge no chunk before it has the last one, and the last one would
wait for these acknowledgements.

With `ordered_nacks` (a policy of the consumers), an entry that is later than a negatively
acknowledged one of its slot waits as well, at gates 2 and 3 (withheld.py).

`allow_out_of_order` is a policy of each consumer. While all connected consumers have it, no slot
drains and gate 1 is open, except for chunks: a chunk waits for the earlier chunks of its message.
When a consumer without it joins, a slot may have pending entries at several consumers. Then every
slot with pending entries drains, at all consumers that have such entries, unless it is pinned.

A consumer that leaves may have 50,000 pending entries. The dispatcher returns them in parts, so
that other keys continue. The next part follows PART_PAUSE_S later, and waits for no
acknowledgement. Until the last entry is returned, the consumer is *departed*, and its slots drain
at it. A pinned slot does not drain. If it has pending entries at a departed consumer, it is *late*:
no consumer gets an entry of the slot as long as a consumer is departed. While entries may be
delivered out of order, no slot drains. In this case a slot is late if its next entry is a chunk,
and a departed consumer has earlier chunks of the same message.

A consumer may also ask for the redelivery of all its entries. The dispatcher then moves the entries
to a departed consumer, and returns them in the same way. The consumer stays, without entries.

The dispatcher also queues slots with waiting entries in parts, because up to 65,535 of them may
move, end their draining or have expired entries at once. Each part removes the expired entries of
its slots. The dispatcher leaves out acknowledged waiting entries in parts, too.

200,000 pending entries may expire at once. The dispatcher takes them off some consumers in each
part. An expired entry that is still pending lets its slot drain a little longer. The dispatcher
must not return or withhold an expired entry. So it takes all of them off when a consumer leaves,
asks for a redelivery or sends a negative acknowledgement.

Invariants (see `check`):
    1. An entry is in at most one of the five places, and pending at most one consumer.
    2. An entry that was never delivered is at or after `read_position`, or waiting, in flight,
       delayed or due.
    3. Ordered: the pending entries of a slot are at one consumer, unless it drains at several, or a
       chunked message pinned it when the consumers began to keep the order.
    4. Ordered: if a consumer that does not have a slot has pending entries of it, the slot drains,
       and its references are these entries. Exception: a pinned slot of invariant 3.
    5. A waiting slot is queued for its consumer, unless it drains at another one, is late, is about
       to be unblocked or queued, has no consumer, or is withheld.
    6. Every number of unacknowledged messages is the sum over the pending entries.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, cast

from magnetar.broker.dispatch.acks import unacked_messages
from magnetar.broker.dispatch.assignment import require_same, selector_of
from magnetar.broker.dispatch.chunks import ChunkRoutes
from magnetar.broker.dispatch.dispatcher import Deliver, EntryDetail, Read, Replay, after
from magnetar.broker.dispatch.draining import DrainingHashes
from magnetar.broker.dispatch.explain import Reason, Why
from magnetar.broker.dispatch.key_shared_policy import KeySharedMode, KeySharedPolicy
from magnetar.broker.dispatch.keyed_replay import KeyedReplay
from magnetar.broker.dispatch.permits import Consumer, explain_all, holders, unacked_by_subscription
from magnetar.broker.dispatch.positions import PositionMap, ReplaySet
from magnetar.broker.dispatch.ring import Ring
from magnetar.broker.dispatch.sticky_hash import SLOTS, hash_of, sticky_key
from magnetar.broker.dispatch.withheld import Withheld
from magnetar.broker.log.position import EARLIEST

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from magnetar.broker.dispatch.dispatcher import Action, Environment
    from magnetar.broker.dispatch.key_shared_policy import HashRange
    from magnetar.broker.dispatch.selector import Moved, Selector
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position
    from magnetar.protos.entry import Chunk

_UNKNOWN: Final = 0  # the slot of a delayed entry before its read; no slot has this number

PART_PAUSE_S: Final = 0.001
"""The pause in seconds between two parts of a long step: the return of the entries of a departed
consumer, the queueing of slots, taking off expired entries, or leaving out acknowledged ones.
Meanwhile the event loop does other work."""

EXPLAINED_MAX: Final = 10
"""The maximum number of draining hashes, and of withheld hashes, that `explain` names. `explain`
only counts the others."""


class KeyShared:
    """A `Dispatcher`."""

    cumulative_acks: Final = False

    def __init__(self, environment: Environment) -> None:
        self._subscription = environment.subscription
        self._acks = environment.acks
        self._confirmed = environment.confirmed
        self._limits = environment.limits
        self._redeliveries = environment.redeliveries
        self._settings = environment.key_shared
        self.read_position = after(self._acks.mark_delete)
        self.policy = KeySharedPolicy()  # the policy of the connected consumers
        self._consumers: list[Consumer] = []
        self._selector: Selector = Ring()
        self.slots = PositionMap()  # the slots of the pending entries
        self._per_slot: dict[int, int] = {}  # the number of pending entries; never 0
        self._replay = KeyedReplay()  # the waiting entries
        self._draining = DrainingHashes()
        # Consumers whose entries are being returned: they have left, or `_return_all` made them.
        self._departed: list[Consumer] = []
        self._unqueued: set[int] = set()  # slots that may have to be queued, in parts
        # Consumers that may have pending entries at or before `_expired`, which is acknowledged.
        self._expiring: list[Consumer] = []
        self._expired = EARLIEST
        self._part_at = 0.0  # the time of the next part; valid while `_has_parts`
        self._unsettled: set[int] = set()  # pinned when the order began: maybe at several consumers
        # Slots that wait until no consumer is departed: unsettled slots, and the slot of a message
        # that has chunks at a departed consumer.
        self._late: set[int] = set()
        self._unblocked: set[int] = set()  # drained slots with waiting entries, until the timer
        self._unblock_at = 0.0  # valid while `_unblocked` is not empty
        self._reading: Read | Replay | None = None  # None: no read is outstanding
        # The positions in flight and their slots, ascending.
        self._in_flight: dict[Position, int] = {}
        self._delays = environment.delays
        self._due = ReplaySet()
        self._wake_s: float | None = None  # when delayed entries become due
        self._returned: set[int] = set()  # slots that got waiting entries during the `Replay`
        self._has_more = False  # `_next_replay` has not seen all that is queued
        self._turn = 0  # the index of the consumer whose waiting entries are read first
        self._chunks = ChunkRoutes()
        # uuid -> slot, of messages whose last chunk is not delivered yet
        self._unfinished: dict[str, int] = {}
        self._pins: dict[int, Consumer] = {}  # the slots of these messages, with their consumers
        self._withheld = Withheld()
        # True from the time when the unacknowledged messages reach the subscription's limit until
        # they have fallen to half of it.
        self._full = False

    @property
    def unacked(self) -> int:
        """The number of delivered and unacknowledged messages."""
        return sum(consumer.unacked for consumer in self._consumers)

    @property
    def keeps_order_on_nack(self) -> bool:
        """True when the caller may call `on_negative_acks`."""
        return self.policy.ordered_nacks and not self.policy.allow_out_of_order

    @property
    def waiting(self) -> int:
        """The number of entries that were read and wait for their consumer."""
        return len(self._replay) + len(self._in_flight)

    @property
    def blocked_attempts(self) -> int:
        """The number of delivery attempts so far that had to wait for a draining slot."""
        return self._draining.blocked_attempts

    # ---- consumers -------------------------------------------------------------------------------

    def can_serve(self, policy: KeySharedPolicy | None) -> bool:
        """Returns False when no consumer is connected and the next consumer has another mode. The
        subscription then needs a new dispatcher, because the waiting entries in this one have the
        slots of the former mode."""
        return bool(self._consumers) or (policy or KeySharedPolicy()).mode is self.policy.mode

    def add_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        policy = (consumer.key_shared or KeySharedPolicy()).of_all
        selector = self._selector
        if not self._consumers:
            selector = selector_of(policy, self._settings, self._subscription)
        else:
            require_same(policy, self.policy, self._subscription)
        moved = selector.add(consumer)
        self._selector = selector
        self.policy = replace(policy, allow_out_of_order=self.policy.allow_out_of_order)
        self._consumers.append(consumer)
        self._on_moved(moved, now)
        self._decide_order(now)  # if the order begins, all slots drain, not only the moved ones
        return self.advance(now)  # the look-ahead may be larger

    def remove_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        self._expire_all(now)
        self._consumers.remove(consumer)
        moved = self._selector.remove(consumer)
        self._departed.append(consumer)
        self._chunks.on_left(consumer)
        self._replay.on_left(consumer)
        if self._consumers:
            self._decide_order(now)
        else:
            self._withheld.clear()
        self._refresh_pins()
        self._find_late()
        self._on_moved(moved, now)
        if len(consumer.pending) <= self._settings.part_entries:
            self._return_some()  # otherwise this step has been long enough
        self._part_at = now + PART_PAUSE_S
        return self.advance(now)

    def on_leaving(self, consumer: Consumer, now: float) -> list[Action]:
        """The slots of the consumer wait until it is gone."""
        return self.advance(now)

    def on_flow(self, consumer: Consumer, permits: int, now: float) -> list[Action]:
        consumer.permits += permits
        return self.advance(now)

    # ---- returned and acknowledged ---------------------------------------------------------------

    def on_redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, now: float
    ) -> list[Action]:
        self._expire_all(now)
        if positions is None:
            self._chunks.on_all_returned(consumer)
            self._refresh_pins()
            self._return_all(consumer, now)
            return self.advance(now)
        for position in self._with_chunks(consumer, positions):
            slot = self._forget(position, consumer, now)
            if slot:
                self._redeliveries.count_again(position.ledger, (position.entry,))
                self._wait(position, slot)
        self._refresh_pins()
        return self.advance(now)

    def _with_chunks(self, consumer: Consumer, positions: Sequence[Position]) -> Sequence[Position]:
        """The entries that a consumer returns: with a chunk, all chunks of its message."""
        if not self._chunks:
            return positions
        mine = [position for position in positions if consumer.pending.get(position)]
        return self._chunks.with_whole_messages(mine)

    def takes_negative_acks(self, consumer: Consumer, positions: Sequence[Position]) -> bool:
        """Returns True when `on_negative_acks` would stay within `withheld_max`."""
        fresh = {
            at
            for at in positions
            if consumer.pending.get(at) and at > self._expired and at not in self._withheld
        }
        return len(self._withheld) + len(fresh) <= self._settings.withheld_max

    def on_negative_acks(
        self,
        consumer: Consumer,
        positions: Sequence[Position],
        returned: Sequence[Position],
        now: float,
    ) -> list[Action]:
        """The consumer will ask for the entries at `positions` again. It has later entries of their
        keys, and gives back the ones that its application has not seen (`returned`). Call it only
        with `ordered_nacks`, and if `takes_negative_acks` is True."""
        assert self.policy.ordered_nacks
        self._expire_all(now)
        for position in positions:
            slot = self.slots.get(position)
            if slot and consumer.pending.get(position):
                self._withheld.add(position, slot)
        assert len(self._withheld) <= self._settings.withheld_max, "not asked before"
        for position in self._with_chunks(consumer, returned):
            slot = self._forget(position, consumer, now)
            if slot:
                self._wait(position, slot)
        self._refresh_pins()
        return self.advance(now)

    def on_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        before = consumer.unacked
        elsewhere: list[Position] = []
        for position in positions:
            if not self._forget(position, consumer, now) and self.slots.get(position):
                elsewhere.append(position)
            if self._chunks:
                self._chunks.on_gone(position)
        consumer.acked += before - consumer.unacked
        if elsewhere:
            for owner, position in holders(self._holders(), elsewhere):
                self._forget(position, owner, now)
        if self._withheld:
            self._queue({self._withheld.on_acked(position) for position in positions})
        self._refresh_pins()
        return self.advance(now)

    def on_partly_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        acks = self._acks
        partly = [at for at in positions if not acks.is_acked(at) and self.slots.get(at)]
        for owner, position in holders(chain((consumer,), self._holders()), partly):
            consumer.acked += owner.on_partly_acked(position, acks.batch_ack_set(position))
        return self.on_acked(consumer, [at for at in positions if acks.is_acked(at)], now)

    def on_skipped(self, positions: Sequence[Position], now: float) -> None:
        """The broker has acknowledged these entries, because they are lost. The outstanding read,
        which found them lost, fails next."""
        pending = [position for position in positions if self.slots.get(position)]
        for consumer, position in holders(self._holders(), pending):
            self._forget(position, consumer, now)
        for position in positions:
            self._chunks.on_gone(position)
        if self._withheld:
            self._queue({self._withheld.on_acked(position) for position in positions})
        self._refresh_pins()

    def on_acked_through(self, position: Position, now: float) -> list[Action]:
        self._expired = max(self._expired, position)
        self._expiring = list(self._holders())
        self._expire_some(now)
        self._queue_in_parts(self._replay.expire(position), now)
        self._chunks.on_gone_through(position)
        if self._withheld:
            self._queue_in_parts(self._withheld.on_acked_through(position), now)
        self._refresh_pins()
        return self.advance(now)

    # ---- reads -----------------------------------------------------------------------------------

    def on_entries(self, entries: list[StoredEntry], now: float) -> list[Action]:
        reading, self._reading = self._reading, None
        assert isinstance(reading, Read)
        if not entries:
            self.read_position = max(self.read_position, after(reading.through))
            return self.advance(now)
        assert entries[0].position >= reading.first
        self.read_position = after(entries[-1].position)
        entries = self._delays.hold_back(entries, self._acks, now)
        slots = [self._slot_of(entry) for entry in entries]
        blocked: Container[int] = () if self.policy.allow_out_of_order else self._replay
        return self._dispatch(entries, slots, blocked) + self.advance(now)

    def on_replayed(
        self, entries: list[StoredEntry], through: Position, now: float
    ) -> list[Action]:
        reading, self._reading = self._reading, None
        assert isinstance(reading, Replay)
        in_flight, self._in_flight = self._in_flight, {}
        blocked: Container[int] = self._returned
        self._returned = set()
        if _UNKNOWN in in_flight.values() and not self.policy.allow_out_of_order:
            blocked = self._replay  # gate 1, as for new entries
        found = [entry for entry in entries if entry.position in in_flight]
        slots = [in_flight.pop(entry.position) or self._slot_of(entry) for entry in found]
        actions = self._dispatch(found, slots, blocked)
        for position, slot in in_flight.items():
            if position > through:
                self._again(position, slot)
            else:
                self._chunks.on_gone(position)  # it does not exist any more
                self._queue((self._withheld.on_acked(position),))
        self._refresh_pins()
        return actions + self.advance(now)

    def on_read_failed(self, now: float) -> list[Action]:
        reading, self._reading = self._reading, None
        assert reading is not None
        in_flight, self._in_flight = self._in_flight, {}
        self._returned = set()
        for position, slot in in_flight.items():
            self._again(position, slot)
        return self.advance(now)

    def advance(self, now: float) -> list[Action]:
        self._wake_s = None
        if self._reading is None and self._consumers:
            self._reading = self._next_replay() or self._next_due(now) or self._next_read(now)
            if self._reading is not None:
                return [self._reading]
            if self._has_more:
                self._wake_s = now + PART_PAUSE_S
            elif self._delays.index and self._new_room() > 0:
                self._wake_s = self._delays.wake_s(now)
        return []

    # ---- time ------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        times = [self._unblock_at] if self._unblocked else []
        if self._has_parts:
            times.append(self._part_at)
        if self._wake_s is not None:
            times.append(self._wake_s)
        return min(times, default=None)

    def on_timer(self, now: float) -> list[Action]:
        if self._unblocked and now >= self._unblock_at:
            ready, self._unblocked = self._unblocked, set()
            self._queue_in_parts(ready, now)
        if self._has_parts and now >= self._part_at:
            if self._expiring:
                self._expire_some(now)
            elif self._unqueued:
                self._queue_some()
            else:
                self._return_some()
            self._part_at = now + PART_PAUSE_S
        return self.advance(now)

    # ---- asking ----------------------------------------------------------------------------------

    def explain(self, now: float) -> list[Reason]:
        if not self._consumers:
            none = Reason(Why.NO_CONSUMERS, "no consumer is connected")
            return [none, *self._explain_departed(now), *self._delays.explain(now)]
        reasons = explain_all(self._consumers)
        if self._reading is not None:
            what = "new entries" if isinstance(self._reading, Read) else "waiting entries"
            reasons.append(Reason(Why.READING, f"the broker is reading {what}"))
        reasons += self._explain_departed(now) + self._explain_waiting(now)
        if self._is_full():
            reasons.append(unacked_by_subscription(self.unacked, self._limits))
        if self._look_ahead_room() <= 0:
            detail = (
                f"{len(self._replay)} entries wait for their consumers; "
                f"the broker reads on below {self._look_ahead_max()}"
            )
            facts = {"waiting": len(self._replay), "limit": self._look_ahead_max()}
            reasons.append(Reason(Why.LOOK_AHEAD, detail, facts=facts))
        nothing = self._acks.first_unacked(self.read_position) > self._confirmed()
        if nothing and self._reading is None:
            pending = sum(len(consumer.pending) for consumer in self._consumers)
            detail = (
                f"every entry up to {self._confirmed()} is delivered, waiting or acknowledged; "
                f"{pending} entries are pending acknowledgement"
            )
            reasons.append(Reason(Why.NOTHING_TO_READ, detail, facts={"pending": pending}))
        return reasons + self._delays.explain(now)

    def ranges(self, consumer: Consumer) -> list[HashRange]:
        """The slots that the consumer has."""
        return self._selector.ranges(consumer)

    def slot_of_key(self, key: bytes) -> int:
        return self._selector.slot_of(hash_of(key))

    def holder(self, slot: int) -> tuple[Consumer | None, Consumer | None]:
        """The consumer that gets new entries of the slot, and the consumer that drains it. None: no
        consumer. The second value is also None if several consumers drain the slot."""
        draining = self._draining.get(slot)
        return self._target(slot), None if draining is None else draining.consumer

    def describe(self, consumers: Mapping[Consumer, Mapping[str, object]]) -> dict[str, object]:
        """The statistics of the subscription, under Pulsar's names. `consumers`: see
        `describe_consumers`."""
        sums = {
            name: sum(cast("int", stats[name]) for stats in consumers.values())
            for name in (
                "drainingHashesCount",
                "drainingHashesClearedTotal",
                "drainingHashesUnackedMessages",
            )
        }
        return {
            "keySharedMode": self.policy.mode.name,
            "allowOutOfOrderDelivery": self.policy.allow_out_of_order,
            "msgInReplay": self.waiting,
            **sums,
        }

    def describe_consumers(self) -> Iterator[tuple[Consumer, dict[str, object]]]:
        """The statistics of each consumer, under the names of Pulsar's ConsumerStats. The caller
        may handle other events between two consumers: each consumer may have 50,000 pending
        entries."""
        draining = self._draining.by_consumer()
        at_several = draining.get(None, {})
        for consumer in tuple(self._consumers):
            if consumer in self._consumers:  # otherwise the consumer has left in between
                spans, mine = self._selector.ranges(consumer), draining.get(consumer, {})
                yield (
                    consumer,
                    {
                        **self._describe_draining(consumer, mine, at_several),
                        "keyHashRangeArrays": [[span.first, span.last] for span in spans],
                    },
                )

    def _describe_draining(
        self, consumer: Consumer, mine: Mapping[int, int], at_several: Mapping[int, int]
    ) -> dict[str, object]:
        """The statistics of the slots that the consumer drains. The blocked attempts by slot are in
        `mine` for slots that it drains alone, in `at_several` for slots that several drain."""
        attempts = {**mine, **at_several}
        messages = Counter[int]()
        if attempts:
            slots = self.slots.ledgers()
            for ledger, entries in consumer.pending.ledgers().items():
                slot_of = slots[ledger]
                for entry, count in entries.items():
                    if (slot := slot_of[entry]) in attempts:
                        messages[slot] += count
        found = sorted(slot for slot in attempts if slot in mine or slot in messages)
        return {
            "drainingHashesCount": len(found),
            "drainingHashesClearedTotal": self._draining.cleared(consumer),
            "drainingHashesUnackedMessages": messages.total(),
            "drainingHashes": [
                {"hash": slot, "unackMsgs": messages[slot], "blockedAttempts": attempts[slot]}
                for slot in found
            ],
        }

    def check(self) -> None:
        self._selector.check()
        self._replay.check()
        self._withheld.check()
        assert len(self._withheld) <= self._settings.withheld_max
        self._draining.check()
        slots = Counter(at for it in self.slots.ledgers().values() for at in it.values())
        assert slots == Counter(self._per_slot), "the pending entries by slot"
        self._chunks.check(self._acks)
        places = [*self._replay, *self._in_flight, *self._due]
        assert (not self._in_flight) == (not isinstance(self._reading, Replay))
        ordered = not self.policy.allow_out_of_order
        holders: dict[int, Consumer] = {}
        astray: Counter[tuple[int, Consumer]] = Counter()
        several = set(self._draining.of(None)) | self._unsettled
        assert not set(self._consumers) & set(self._departed)
        for consumer in self._holders():
            consumer.check()
            places += consumer.pending
            for position in consumer.pending:
                slot = self.slots.get(position)
                assert slot, "a pending entry without a slot"
                if ordered:
                    assert holders.setdefault(slot, consumer) is consumer or slot in several, "3"
                if self._target(slot) is not consumer:
                    astray[slot, consumer] += 1
        assert len(self.slots) == sum(len(it.pending) for it in self._holders())
        if ordered:
            for (slot, consumer), count in astray.items():
                if slot in several:
                    continue
                draining = self._draining.get(slot)
                assert draining is not None, "4: it does not drain"
                assert draining.consumer is consumer, "4: it drains elsewhere"
                assert draining.references == count, "4: the references"
            for slot in self._draining:
                assert holders.get(slot) is not None, "4: it drains without pending entries"
            for slot, at_several in self._draining.of(None).items():
                assert at_several.references == self._per_slot[slot], "4: at several"
            assert self._unsettled <= self._pins.keys(), "3: pinned no more"
        else:
            assert not self._draining
            assert not self._unsettled
        assert self._departed or not self._late, "a slot stays late without end"
        for slot in self._replay.slots():
            target = self._target(slot)
            lowest = self._replay.lowest(slot)
            waits = self._must_wait(slot) or self._withheld.withholds(slot, lowest)
            if target is None or slot in self._unblocked or slot in self._unqueued:
                continue
            if not waits:
                assert self._replay.is_queued(slot, target), "5"
        assert len(places) == len(set(places)), "an entry is in two places"
        assert not any(position in self._delays.index for position in places), "1: delayed, too"
        assert all(position < self.read_position for position in places)
        if isinstance(self._reading, Read):
            assert self._reading.first == self.read_position
        for position in self._redeliveries:
            assert not self._acks.is_acked(position)

    # ---- delivering ------------------------------------------------------------------------------

    def _dispatch(
        self, entries: list[StoredEntry], slots: list[int], blocked: Container[int]
    ) -> list[Action]:
        """Deliver the entries that pass the gates, and let the others wait. `blocked`: slots that
        must wait."""
        acks, draining, withheld = self._acks, self._draining, self._withheld
        per_slot, late = self._per_slot, self._late
        plain = (
            not self._redeliveries and bool(entries) and entries[0].position > acks.highest_acked
        )
        deliveries: dict[Consumer, Deliver] = {}
        rooms: dict[Consumer, int] = {}
        held: set[int] = set()
        drains = bool(draining)  # in this loop, only the end of a chunked message begins a drain
        ack_set: tuple[int, ...] = ()
        for entry, slot in zip(entries, slots, strict=True):
            position = entry.position
            if plain:
                messages = entry.view.num_messages
            else:
                messages, ack_set = unacked_messages(entry, acks)
                if messages == 0:
                    self._chunks.on_gone(position)
                    continue
            consumer = self._target(slot)
            waits = slot in held or slot in blocked or slot in late
            if drains and draining.blocks(slot, consumer):
                waits = True
            if withheld and withheld.withholds(slot, position):
                waits = True
            chunk = entry.view.chunk
            if chunk is not None and not waits:
                waits = self._overtakes(chunk, position, slot)
            if not waits:
                room = self._room(consumer, rooms)
                waits = room <= 0
            if waits or consumer is None:
                held.add(slot)
                self._wait(position, slot)
                if chunk is not None:
                    self._chunks.on_deferred(chunk, position)
                continue
            rooms[consumer] = room - messages
            delivery = deliveries.get(consumer)
            if delivery is None:
                delivery = deliveries[consumer] = Deliver(consumer, [], {}, 0)
            if not plain:
                count = self._redeliveries.get(position)
                if count or ack_set:
                    delivery.details[len(delivery.entries)] = EntryDetail(count, ack_set)
            delivery.entries.append(entry)
            delivery.messages += messages
            consumer.pending.set(position, messages)
            self.slots.set(position, slot)
            per_slot[slot] = per_slot.get(slot, 0) + 1
            if chunk is not None:
                self._on_chunk(chunk, position, slot, consumer)
                drains = bool(draining)
        for consumer, delivery in deliveries.items():
            consumer.on_given(len(delivery.entries), delivery.messages)
            consumer.on_unacked(delivery.messages)
        return list(deliveries.values())

    @staticmethod
    def _room(consumer: Consumer | None, rooms: Mapping[Consumer, int]) -> int:
        """The number of messages that the consumer may still get."""
        if consumer is None:
            return 0
        room = rooms.get(consumer)
        if room is None:
            room = consumer.message_room if consumer.available else 0
        return room

    def _wait(self, position: Position, slot: int) -> None:
        if self._replay.add(position, slot):
            self._queue((slot,))
        if isinstance(self._reading, Replay):
            self._returned.add(slot)

    def _again(self, position: Position, slot: int) -> None:
        """The entry was in flight and was not read: it waits again, or is due again."""
        if slot == _UNKNOWN:
            self._due.add(position)
        else:
            self._wait(position, slot)

    def _slot_of(self, entry: StoredEntry) -> int:
        key = sticky_key(entry.view, spread_keyless=self._settings.spread_keyless)
        return self._selector.slot_of(hash_of(key))

    def _queue(self, slots: Iterable[int]) -> None:
        """Queue those of these slots that have waiting entries and need not wait, for their
        consumers."""
        for slot in slots:
            target = self._target(slot)
            if target is not None and slot in self._replay and not self._must_wait(slot):
                self._replay.queue(slot, target)

    def _queue_in_parts(self, slots: Iterable[int], now: float) -> None:
        """Like `_queue`, for any number of slots. If no earlier slots are left to queue, queue
        `part_entries` of them now. Later parts queue the others."""
        is_first = not self._unqueued
        self._unqueued.update(slots)
        if is_first:
            self._queue_some()
            if self._unqueued:
                self._part_at = now + PART_PAUSE_S

    def _queue_some(self) -> None:
        """Queue the next part of the slots, without their expired entries."""
        count = min(len(self._unqueued), self._settings.part_entries)
        slots = [self._unqueued.pop() for _ in range(count)]
        self._replay.drop_expired(slots)
        self._queue(slots)

    def _forget(self, position: Position, consumer: Consumer, now: float) -> int:
        """The entry is not pending at the consumer any more. Returns its slot; 0: it was not
        pending there."""
        messages = consumer.pending.pop(position)
        if not messages:
            return 0
        consumer.on_unacked(-messages)
        slot = self.slots.pop(position)
        self._take_off({slot: 1})
        draining = self._draining
        if draining.references and draining.on_gone(slot, consumer):
            self._unblock((slot,), now)
        return slot

    def _expire_some(self, now: float) -> None:
        """Take the expired entries off the next consumers, until those visited had `part_entries`
        pending entries together."""
        left = self._settings.part_entries
        while self._expiring and left > 0:
            consumer = self._expiring.pop()
            left -= 1 + len(consumer.pending)
            self._expire(consumer, now)
        if self._expiring:
            self._part_at = now + PART_PAUSE_S

    def _expire_all(self, now: float) -> None:
        while self._expiring:
            self._expire(self._expiring.pop(), now)

    def _expire(self, consumer: Consumer, now: float) -> None:
        """Take the expired entries off the consumer."""
        slots: list[int] = []
        for ledger, entries in consumer.pending.pop_through(self._expired).items():
            consumer.on_unacked(-sum(entries.values()))
            slots += self.slots.pop_entries(ledger, entries)
        if not self.slots and not self._draining:  # counting 50,000 entries would take 6 ms
            self._per_slot.clear()
            return
        counts = Counter(slots)
        self._take_off(counts)
        self._unblock(self._draining.on_gone_all(counts, consumer), now)

    def _take_off(self, counts: Mapping[int, int]) -> None:
        """These entries, counted by slot, are not pending any more."""
        per_slot = self._per_slot
        for slot, count in counts.items():
            left = per_slot.pop(slot) - count
            if left:
                per_slot[slot] = left

    def _unblock(self, slots: Iterable[int], now: float) -> None:
        """These slots do not drain any more: queue those with waiting entries soon."""
        ready = [slot for slot in slots if slot in self._replay]
        if ready and not self._unblocked:
            self._unblock_at = now + self._settings.unblocking_interval_s
        self._unblocked.update(ready)

    @property
    def _has_parts(self) -> bool:
        """True when a part of a long step (see PART_PAUSE_S) is left."""
        return bool(self._expiring or self._unqueued or self._departed)

    # ---- departed consumers ----------------------------------------------------------------------

    def _holders(self) -> Iterator[Consumer]:
        """The consumers that may have pending entries."""
        return chain(self._consumers, self._departed)

    def on_dropped(self) -> None:
        """Another dispatcher takes over: count the redeliveries of the entries that are not
        returned yet."""
        self._expire_all(self._part_at)
        for consumer in self._departed:
            for ledger, entries in consumer.pending.ledgers().items():
                self._redeliveries.count_again(ledger, entries)

    def _return_all(self, consumer: Consumer, now: float) -> None:
        """Return the pending entries of a connected consumer, as if it had left and joined again.
        The consumer gets its slots back when they have drained."""
        if not consumer.pending:
            return
        former = Consumer(consumer.name, consumer.priority, consumer.writable, consumer.limits)
        former.pending, consumer.pending = consumer.pending, former.pending
        former.on_unacked(consumer.unacked)
        consumer.on_unacked(-consumer.unacked)
        self._departed.append(former)
        self._draining.hand_over(consumer, former)
        if not self.policy.allow_out_of_order:
            slots = self._slots_of(former).difference(self._draining.references)
            counts = {slot: self._per_slot[slot] for slot in slots}
            self._draining.register(former, self._astray(counts))
        self._find_late()
        if len(former.pending) <= self._settings.part_entries:
            self._return_some()  # otherwise this step has been long enough
        self._part_at = now + PART_PAUSE_S

    def _return_some(self) -> None:
        """Return the next part of the entries of departed consumers."""
        left, ready = self._settings.part_entries, set[int]()
        while self._departed and left:
            consumer = self._departed[0]
            for ledger in islice(consumer.pending.ledgers(), 1):
                entries = list(islice(consumer.pending.ledgers()[ledger], left))
                self._redeliveries.count_again(ledger, entries)
                consumer.on_unacked(-sum(consumer.pending.pop_entries(ledger, entries)))
                slots = self.slots.pop_entries(ledger, entries)
                ready |= self._replay.add_all(ledger, zip(entries, slots, strict=True))
                counts = Counter(slots)
                self._take_off(counts)
                self._draining.on_gone_all(counts, consumer)
                left -= len(entries)
            if not consumer.pending:
                drained = self._draining.on_left(consumer)
                assert not drained, "a slot drains without pending entries"
                del self._departed[0]
        if not self._departed:
            ready |= self._late
            self._late.clear()
        self._returned |= ready
        self._queue(ready)

    # ---- slots -----------------------------------------------------------------------------------

    def _decide_order(self, now: float) -> None:
        """Allow delivery out of order while every consumer allows it; otherwise keep the order."""
        relaxed = all(
            it.key_shared is not None and it.key_shared.allow_out_of_order for it in self._consumers
        )
        if relaxed == self.policy.allow_out_of_order:
            return
        self.policy = replace(self.policy, allow_out_of_order=relaxed)
        if relaxed:
            self._draining.clear()
            self._unblocked.clear()
            self._unsettled.clear()
            self._late.clear()
            self._queue_in_parts(self._replay.slots(), now)
        else:
            late, self._late = self._late, set()
            self._unsettled = {slot for slot in self._pins if slot in self._per_slot}
            self._draining.register(None, self._astray(self._per_slot))
            self._find_late()
            self._queue(late)  # those without pending entries do not drain

    def _find_late(self) -> None:
        """Mark as late the unsettled slots that have pending entries at departed consumers."""
        if not self._unsettled:
            return
        for consumer in self._departed:
            self._late |= self._unsettled & self._slots_of(consumer)

    def _slots_of(self, consumer: Consumer) -> set[int]:
        """The slots of the entries that are pending at the consumer."""
        found, slots = set[int](), self.slots.ledgers()
        for ledger, entries in consumer.pending.ledgers().items():
            found.update(map(slots[ledger].__getitem__, entries))
        return found

    def _target(self, slot: int) -> Consumer | None:
        """The consumer that gets the entries of the slot."""
        if self._pins and slot in self._pins:
            return self._pins[slot]
        return self._selector.select(slot)

    def _drains(self, slot: int) -> bool:
        """Returns True when the slot drains at another consumer than the one that has it."""
        draining = self._draining.get(slot) if self._draining else None
        if draining is None:
            return False
        return draining.consumer is None or draining.consumer is not self._target(slot)

    def _must_wait(self, slot: int) -> bool:
        """Returns True when the slot must wait for its pending entries at another consumer."""
        return slot in self._late or self._drains(slot)

    def _on_moved(self, moved: list[Moved], now: float) -> None:
        """These slots have other consumers now. The call takes one pass over the slots with pending
        entries, for any number of consumers that lose slots."""
        numbers = {it: n for n, it in enumerate(dict.fromkeys(it.source for it in moved), 1)}
        by_slot = array("H", bytes(2 * SLOTS))  # the number of the former consumer; 0: not moved
        for first, last, source in moved:
            by_slot[first : last + 1] = array("H", [numbers[source]]) * (last + 1 - first)
        losers = [it for it in numbers if it is not None and it.pending]
        if losers and not self.policy.allow_out_of_order:
            counts: list[dict[int, int]] = [{} for _ in range(len(numbers) + 1)]
            for slot, count in self._per_slot.items():
                if by_slot[slot]:
                    counts[by_slot[slot]][slot] = count
            for source in losers:
                self._draining.register(source, self._astray(counts[numbers[source]]))
        if self._replay:
            self._queue_in_parts(filter(by_slot.__getitem__, self._replay.slots()), now)

    def _astray(self, counts: Mapping[int, int]) -> Mapping[int, int]:
        """Return `counts`, the numbers of pending entries of slots that move, without the pinned
        slots, which do not move. Another consumer may drain some of the slots already."""
        if not self._pins:
            return counts
        return {slot: count for slot, count in counts.items() if slot not in self._pins}

    # ---- chunks ----------------------------------------------------------------------------------

    def _overtakes(self, chunk: Chunk, position: Position, slot: int) -> bool:
        """Returns True when an earlier chunk of the message is to be delivered again: it waits in
        this slot, or is pending at a departed consumer. In the second case the slot becomes late.
        A chunk with another slot does not count, because its producer gave it another key."""
        first = self._chunks.first_waiting(chunk.uuid, self._acks)
        if first is None or first >= position:
            return False
        if self.slots.get(first) == slot and any(it.pending.get(first) for it in self._departed):
            self._late.add(slot)
            return True
        return slot in self._replay and self._replay.lowest(slot) <= first

    def _on_chunk(self, chunk: Chunk, position: Position, slot: int, consumer: Consumer) -> None:
        if self._chunks.owner(chunk) not in (None, consumer):
            return  # its producer gave the chunks of one message different keys
        self._chunks.on_given(chunk, position, consumer)
        if chunk.index < chunk.count - 1:
            self._unfinished.setdefault(chunk.uuid, slot)
            self._pins[self._unfinished[chunk.uuid]] = consumer
        else:
            self._refresh_pins()

    def _refresh_pins(self) -> None:
        """Unpin the slots whose chunked messages are complete or gone."""
        if not self._unfinished:
            return
        for uuid in [it for it in self._unfinished if self._chunks.begun(it) is None]:
            del self._unfinished[uuid]
        pinned = set(self._unfinished.values())
        for slot in [it for it in self._pins if it not in pinned]:
            consumer = self._pins.pop(slot)
            moved = self._selector.select(slot) is not consumer
            at_several = slot in self._unsettled
            self._unsettled.discard(slot)
            self._late.discard(slot)  # the slot drains from now on
            ordered = not self.policy.allow_out_of_order
            if slot in self._per_slot and ordered and (moved or at_several):
                counts = {slot: self._per_slot[slot]}
                self._draining.register(None if at_several else consumer, counts)
            self._queue((slot,))

    # ---- reading ---------------------------------------------------------------------------------

    def _next_replay(self) -> Replay | None:
        """A read of the waiting entries that can be delivered now. Each call begins with the next
        consumer. None: there is no such entry."""
        self._has_more = False
        if not self._replay:
            return None
        limit, count = self._limits.read_entries, len(self._consumers)
        self._turn = (self._turn + 1) % count
        taken: dict[Position, int] = {}
        dropped_max = self._settings.part_entries
        for number in range(count):
            consumer = self._consumers[(self._turn + number) % count]
            if not self._replay.has_queued(consumer) or not consumer.available:
                continue
            room = min(consumer.entry_room(), limit - len(taken))
            if room <= 0:
                break
            gate = partial(self._passes_replay_gate, consumer=consumer)
            found, dropped = self._replay.take(consumer, room, self._acks, gate, dropped_max)
            taken.update(found)
            dropped_max -= dropped
        self._has_more = dropped_max == 0
        if not taken:
            return None
        positions = sorted(taken)
        self._in_flight = {position: taken[position] for position in positions}
        self._returned = set()
        return Replay(positions)

    def _passes_replay_gate(self, slot: int, consumer: Consumer) -> bool:
        """Gate 2, without the room of the consumer."""
        if slot in self._late or self._target(slot) is not consumer:
            return False
        if self._withheld and self._withheld.withholds(slot, self._replay.lowest(slot)):
            return False
        return not (self._draining and self._draining.blocks(slot, consumer))

    def _next_due(self, now: float) -> Replay | None:
        """A read of delayed entries that have become due. Their slots are known after the read.
        None: there is no such entry, or the dispatcher may read none now."""
        if not self._due and not self._delays.index:
            return None
        room = self._new_room()
        positions = self._due.take(room, self._acks) if room > 0 else []
        if not positions and room > 0:
            positions = self._delays.take_due(room, now, read_position=self.read_position)
        if not positions:
            return None
        self._in_flight = dict.fromkeys(positions, _UNKNOWN)
        self._returned = set()
        return Replay(positions)

    def _next_read(self, now: float) -> Read | None:
        entries_max = self._new_room()
        if entries_max <= 0 or self._delays.is_full or self._delays.pauses(now):
            return None
        self.read_position = self._delays.first_new(self.read_position, self._acks)
        confirmed = self._confirmed()
        if self.read_position > confirmed:
            return None
        if self._delays.index:  # most of the new entries may be delayed, too
            entries_max = min(self._limits.read_entries, self._look_ahead_room())
        return Read(self.read_position, entries_max, confirmed, 0)

    def _new_room(self) -> int:
        """The number of new or due entries to read next."""
        room = min(self._entry_room(), self._look_ahead_room())
        return room if room > 0 and not self._is_full() else 0

    def _entry_room(self) -> int:
        """The number of entries to read for the available consumers. 0: none is available."""
        room, limit = 0, self._limits.read_entries
        for consumer in self._consumers:
            if room < limit and consumer.available:
                room += consumer.entry_room()
        return min(room, limit)

    def _look_ahead_max(self) -> int:
        settings = self._settings
        each = settings.look_ahead_per_consumer * len(self._consumers)
        return min(each, settings.look_ahead_per_subscription)

    def _look_ahead_room(self) -> int:
        return self._look_ahead_max() - len(self._replay)

    def _is_full(self) -> bool:
        limit = self._limits.unacked_per_subscription
        self._full = self.unacked > limit // 2 if self._full else self.unacked >= limit
        return self._full

    # ---- reasons ---------------------------------------------------------------------------------

    def _explain_waiting(self, now: float) -> list[Reason]:
        """The reasons why waiting entries are not delivered, except their consumers' permits."""
        reasons: list[Reason] = []
        blocking = [slot for slot in self._draining if slot in self._replay and self._drains(slot)]
        reasons += [self._explain_draining(slot) for slot in sorted(blocking)[:EXPLAINED_MAX]]
        if len(blocking) > EXPLAINED_MAX:
            more = len(blocking) - EXPLAINED_MAX
            detail = f"{more} more hashes drain and have waiting entries"
            reasons.append(Reason(Why.DRAINING, detail, facts={"hashes": more}))
        reasons += self._explain_held_back()
        for hashes, what, at in self._soon():
            if hashes:
                detail = f"{len(hashes)} hashes have {what}; the broker delivers them soon"
                facts = {"hashes": len(hashes)}
                reasons.append(Reason(Why.UNBLOCKING, detail, "", facts, max(0.0, at - now)))
        # Hot: 50,000 slots may wait. The other modes assign all slots.
        slots = self._replay.slots() if self.policy.mode is KeySharedMode.STICKY else ()
        unassigned = [slot for slot in slots if self._target(slot) is None]
        if unassigned:
            count = sum(map(self._replay.waiting, unassigned))
            detail = f"{count} entries wait for a consumer with their hash, such as {unassigned[0]}"
            facts = {"entries": count, "hash": unassigned[0]}
            reasons.append(Reason(Why.UNASSIGNED, detail, facts=facts))
        return reasons

    def _explain_held_back(self) -> list[Reason]:
        """The hashes whose waiting entries follow a negatively acknowledged one."""
        held_back = [
            slot
            for slot in self._withheld.slots()
            if slot in self._replay and self._withheld.withholds(slot, self._replay.lowest(slot))
        ]
        reasons = [self._explain_withheld(slot) for slot in sorted(held_back)[:EXPLAINED_MAX]]
        if len(held_back) > EXPLAINED_MAX:
            more = len(held_back) - EXPLAINED_MAX
            detail = (
                f"{more} more hashes wait until a negatively acknowledged entry is acknowledged"
            )
            reasons.append(Reason(Why.WITHHELD, detail, facts={"hashes": more}))
        return reasons

    def _soon(self) -> tuple[tuple[set[int], str, float], ...]:
        """Slots that a timer queues, the event that happened to them, and the time of the timer."""
        return (
            (self._unblocked, "drained", self._unblock_at),
            (self._unqueued, "moved, drained or had expired entries", self._part_at),
        )

    def _explain_departed(self, now: float) -> list[Reason]:
        if not self._departed:
            return []
        count = sum(len(it.pending) for it in self._departed)
        detail = (
            f"{count} entries of consumers that have left, or that asked for all of theirs again,"
            " are being returned, to be redelivered"
        )
        facts = {"entries": count, "consumers": len(self._departed)}
        return [Reason(Why.RETURNING, detail, "", facts, max(0.0, self._part_at - now))]

    def _explain_draining(self, slot: int) -> Reason:
        draining = self._draining.get(slot)
        assert draining is not None
        target, waiting = self._target(slot), self._replay.waiting(slot)
        owner = draining.consumer
        detail = (
            f"hash {slot} drains: {draining.references} entries are pending at "
            f"{'several consumers' if owner is None else f'consumer {owner.name!r}'}; "
            f"{waiting} entries wait for {'a consumer' if target is None else repr(target.name)}"
        )
        facts: dict[str, object] = {
            "hash": slot,
            "pending": draining.references,
            "pendingAt": None if owner is None else owner.name,
            "waiting": waiting,
            "blockedAttempts": draining.blocked_attempts,
        }
        return Reason(Why.DRAINING, detail, facts=facts)

    def _explain_withheld(self, slot: int) -> Reason:
        waiting, earliest = self._replay.waiting(slot), self._withheld.earliest(slot)
        detail = (
            f"{waiting} entries of hash {slot} wait until the negatively acknowledged entry"
            f" {earliest} is acknowledged"
        )
        facts = {"hash": slot, "waiting": waiting, "earliest": str(earliest)}
        return Reason(Why.WITHHELD, detail, facts=facts)

    def explain_slot(self, slot: int, now: float) -> list[Reason]:
        """The reasons why the next entry of a slot would not be delivered at once. []: it would."""
        if not self._consumers:
            return [Reason(Why.NO_CONSUMERS, "no consumer is connected")]
        reasons: list[Reason] = []
        if self._drains(slot):
            reasons.append(self._explain_draining(slot))
        if slot in self._late:
            reasons += self._explain_departed(now)
        if self._withheld.has(slot):
            reasons.append(self._explain_withheld(slot))
        for hashes, what, at in self._soon():
            if slot in hashes:
                detail = f"hash {slot} has {what}; the broker delivers it soon"
                next_s = max(0.0, at - now)
                reasons.append(Reason(Why.UNBLOCKING, detail, "", {"hash": slot}, next_s))
        target = self._target(slot)
        if target is None:
            detail = f"no consumer has hash {slot}; {self._replay.waiting(slot)} entries wait"
            facts = {"hash": slot, "entries": self._replay.waiting(slot)}
            reasons.append(Reason(Why.UNASSIGNED, detail, facts=facts))
        else:
            reasons += target.explain()
        if self._is_full():
            reasons.append(unacked_by_subscription(self.unacked, self._limits))
        return reasons

    def pending_in(self, slot: int) -> int:
        """The number of pending entries of the slot."""
        return self._per_slot.get(slot, 0)

    def waiting_in(self, slot: int) -> int:
        """The number of entries of the slot that were read and wait for their consumer."""
        in_flight = sum(1 for it in self._in_flight.values() if it == slot)
        return self._replay.waiting(slot) + in_flight
