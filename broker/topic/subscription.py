"""A subscription of a topic: a cursor, its consumers, and the dispatcher that assigns the entries.

Theory of operation. The subscription is the shell of its dispatcher. It reports each event
(permits, acknowledgements, new entries in the log, the end of a read) to the dispatcher. It
executes the returned actions in the same synchronous step: it passes entries to the sessions, and
starts reads (`ReadLoop`, at most one read at a time). It keeps one timer, for the time that the
dispatcher's `next_timer` returns.

Consumers join with `attach` and leave with `detach`. The subscription has the type of its connected
consumers. It keeps the dispatcher while no consumer is connected. It makes a new dispatcher when
the type or the Key_Shared mode changes, and after a seek. The redelivery counts belong to the
cursor and outlive the dispatcher.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, assert_never

from magnetar.broker.cursor.acks import ack_set_bits
from magnetar.broker.cursor.journal import Waiting
from magnetar.broker.dispatch.acks import unacked_in
from magnetar.broker.dispatch.active import FAILOVER_DEFAULTS
from magnetar.broker.dispatch.delayed import DelayPolicy, Delays
from magnetar.broker.dispatch.dispatcher import Activate, Deliver, Environment, Read, Replay, after
from magnetar.broker.dispatch.exclusive import Exclusive
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.failover import Failover
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.errors import (
    BrokerError,
    ConsumerBusy,
    ConsumersConnected,
    InvalidAck,
    LogUnavailable,
    NotAllowed,
    SubscriptionFenced,
    TopicClosing,
)
from magnetar.broker.guard import Guard
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import EARLIEST, Position, run_of_positions
from magnetar.broker.topic.ack_sets import AckSets
from magnetar.broker.topic.activity import Activity
from magnetar.broker.topic.consumer import ConsumerHandle
from magnetar.broker.topic.contract import CloseReason, LastMessage, SubscriptionType
from magnetar.broker.topic.dispatch_rate import DispatchRate
from magnetar.broker.topic.explanation import Snapshot, SubscriptionState, explain
from magnetar.broker.topic.meter import CLIENTS_PER_TURN, Meter
from magnetar.broker.topic.oldest import OldestUnacked
from magnetar.broker.topic.read_loop import ReadLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from magnetar.broker.cursor.cursor import Cursor
    from magnetar.broker.cursor.cursors import Cursors
    from magnetar.broker.dispatch.active import FailoverRules
    from magnetar.broker.dispatch.dispatcher import Action, ConsumerRefused, Dispatcher
    from magnetar.broker.dispatch.explain import Reason
    from magnetar.broker.dispatch.permits import Consumer, Limits
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.losses import LostRange
    from magnetar.broker.topic.contract import ConsumerEvents, SubscribeRequest
    from magnetar.broker.topic.disconnector import Disconnector
    from magnetar.broker.topic.read_loop import Spawn
    from magnetar.runtime.turns import Turns

    Done = Callable[[BrokerError | None], None]
    MakeDispatcher = Callable[[Environment], Dispatcher]

FLUSH_TIMEOUT_S: Final = 5.0
"""The maximum time for which a closing consumer waits until its acknowledgements are durable."""

RETURN_S: Final = 60.0
"""The time for which a non-durable subscription without a consumer stays after a seek. The seek
disconnects the reader, whose client reconnects within a second, or gives up after 30 s."""

DISPATCHERS: Final[Mapping[SubscriptionType, MakeDispatcher]] = {
    SubscriptionType.EXCLUSIVE: Exclusive,
    SubscriptionType.SHARED: Shared,
    SubscriptionType.FAILOVER: Failover,
    SubscriptionType.KEY_SHARED: KeyShared,
}


class _AckView:
    """The view of the cursor that a dispatcher has (`Acks`).

    No entry after `highest_acked` is acknowledged, so a dispatcher need not look up later entries.
    When the topic is opened, `highest_acked` is the last entry of the log. An acknowledgement of a
    later entry raises it.
    """

    __slots__ = ("_cursor", "batch_ack_set", "first_unacked", "highest_acked", "is_acked")

    def __init__(self, cursor: Cursor, confirmed: Position) -> None:
        self._cursor = cursor
        self.highest_acked = confirmed
        self.is_acked = cursor.is_acked
        self.batch_ack_set = cursor.batch_ack_set
        self.first_unacked = cursor.first_unacked

    @property
    def mark_delete(self) -> Position:
        return self._cursor.mark_delete


class Subscription:
    """One subscription of a persistent topic. It calls `abandoned` when it is deleted. A
    non-durable subscription also calls `abandoned` when its last consumer has left; after a seek,
    only if no consumer has returned for RETURN_S."""

    __slots__ = (
        "_abandoned",
        "_ack_sets",
        "_acks",
        "_activity",
        "_asker",
        "_cursors",
        "_disconnector",
        "_dispatcher",
        "_dispatchers",
        "_expired",
        "_failover",
        "_guard",
        "_joined",
        "_key_shared",
        "_leaving",
        "_limits",
        "_log",
        "_loop",
        "_mark",
        "_mark_moved_ms",
        "_meter",
        "_now_ms",
        "_partition",
        "_read_loop",
        "_redelivered",
        "_return_timer",
        "_spawn",
        "_timer",
        "_topic",
        "_type",
        "_unwatch",
        "_used_s",
        "consumers",
        "cursor",
        "delays",
        "expired",
        "last_expire_ms",
        "oldest",
        "rate",
        "state",
    )

    def __init__(
        self,
        topic: str,
        cursor: Cursor,
        cursors: Cursors,
        topic_log: Log,
        *,
        limits: Limits,
        rate: DispatchRate | None = None,
        spawn: Spawn,
        disconnector: Disconnector,
        abandoned: Callable[[Subscription], None],
        dispatchers: Mapping[SubscriptionType, MakeDispatcher] = DISPATCHERS,
        guard: Guard | None = None,
        partition: int | None = None,
        failover: FailoverRules = FAILOVER_DEFAULTS,
        key_shared: KeySharedSettings | None = None,
        delays: Delays | None = None,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        """`guard`: the guard of the topic; None: exceptions of timers are not caught. `partition`:
        the number of this partition; None: the topic is not a partition. `delays` None: every entry
        is due at once. `now_ms`: the wall clock."""
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self.cursor = cursor
        self.state = SubscriptionState.OPEN
        self.consumers: dict[Consumer, ConsumerHandle] = {}  # in the order of joining
        self._topic = topic
        self._cursors = cursors
        self._acks = _AckView(cursor, topic_log.confirmed)
        self._ack_sets = AckSets(cursor.name, cursor)
        self._log = topic_log
        self._limits = replace(limits)  # its own: see `on_policies`
        self._guard = guard or Guard(topic)
        self.delays = delays or Delays(DelayPolicy(enabled=False), lambda _: 0)
        self._abandoned = abandoned
        self._spawn = spawn
        self._disconnector = disconnector
        self._dispatchers = dispatchers
        self._partition = partition
        self._failover = failover
        self._key_shared = key_shared or KeySharedSettings()
        self._joined = 0  # the number of consumers so far; the join number of the next consumer
        self._type = SubscriptionType.EXCLUSIVE  # the type of the dispatcher
        # None: no consumer has connected since the topic was opened, or since a seek.
        self._dispatcher: Dispatcher | None = None
        # The time when the timer is due, and its handle. None: the dispatcher needs no timer. The
        # handle may lack the time: uvloop returns such a handle for a timer that is due within half
        # a millisecond.
        self._timer: tuple[float, asyncio.Handle] | None = None
        self.rate = DispatchRate("subscription")
        self._read_loop = ReadLoop(
            topic_log,
            topic,
            cursor.name,
            bytes_max=limits.read_bytes,
            rates=[self.rate] if rate is None else [rate, self.rate],
            spawn=spawn,
            on_read=self._ack_sets.on_read,
            tell=self._tell,
            skip=self._skip,
        )
        self._leaving: dict[ConsumerHandle, asyncio.Event] = {}  # event set: the consumer may close
        # The consumer that asked for the deletion; None: no consumer did.
        self._asker: ConsumerHandle | None = None
        self._return_timer: asyncio.TimerHandle | None = None
        self._meter = Meter(now)
        self._redelivered = Meter(now)
        self.oldest = OldestUnacked(cursor, topic_log)
        self.expired = 0  # entries that the broker expired here
        self.last_expire_ms = 0  # 0: never
        self._expired = Meter(now)
        self._now_ms = now_ms
        self._activity = Activity()  # the activity of the consumers that have left
        self._mark = cursor.mark_delete
        self._mark_moved_ms = 0  # 0: the mark has not moved on this broker
        # The time when the last consumer left, the topic was opened, or `note_use` was called.
        self._used_s = now
        self._unwatch = topic_log.watch(self.advance, read_position=self._tail)

    @property
    def name(self) -> str:
        return self.cursor.name

    @property
    def type(self) -> SubscriptionType | None:
        """The type of the connected consumers. None: no consumer is connected. The next consumer
        then determines the type."""
        return self._type if self.consumers else None

    # ---- consumers -------------------------------------------------------------------------------

    def attach(
        self, request: SubscribeRequest, events: ConsumerEvents, *, connected_since: str
    ) -> ConsumerHandle:
        """A consumer joins. A new type or Key_Shared mode gives the subscription a new dispatcher.

        Raises SubscriptionFenced, NotAllowed, ConsumerBusy or ConsumerRefused. The subscription is
        then unchanged.
        """
        self._require_open()
        assert request.durable == self.cursor.durable
        dispatcher = self._dispatcher_for(request)
        now = self._loop.time()
        handle = ConsumerHandle(
            self,
            request,
            events,
            self._limits,
            join_number=self._joined,
            connected_since=connected_since,
            now=now,
            now_ms=self._now_ms,
        )
        actions = dispatcher.add_consumer(handle.machine, now)
        self._joined += 1
        if dispatcher is not self._dispatcher:
            self._drop_dispatcher()
            self._dispatcher = dispatcher
            self._type = request.type
        self.consumers[handle.machine] = handle
        self._carry_out(actions, now)
        return handle

    def on_policies(self, limits: Limits) -> None:
        """The limits or rates of the topic may have changed. The subscription takes its limits
        here, and at once blocks or unblocks its consumers by them."""
        self._limits.unacked_per_consumer = limits.unacked_per_consumer
        self._limits.unacked_per_subscription = limits.unacked_per_subscription
        for machine in self.consumers:
            machine.on_unacked(0)
        self.advance()

    async def evict_dead(self, refused: ConsumerRefused) -> None:
        """Evict the incumbents of the refusal, the consumers that block the new one, if their
        clients do not answer a probe. Raises the error of the refusal if a client answers, or if
        there is no incumbent."""
        if not refused.incumbents:
            raise refused.error
        for machine in refused.incumbents:
            handle = self.consumers.get(machine)
            if handle is None:
                continue  # the consumer left during an earlier probe
            if await handle.events.probe():
                raise refused.error
            handle.evict(CloseReason.REPLACED)

    def detach(self, handle: ConsumerHandle) -> None:
        """A consumer leaves."""
        del self.consumers[handle.machine]
        handle.attached = False
        self._activity = self._activity.latest(handle.activity)
        if (drained := self._leaving.pop(handle, None)) is not None:
            drained.set()
        self._used_s = self._loop.time()
        if self._dispatcher is not None:
            now = self._loop.time()
            self._carry_out(self._dispatcher.remove_consumer(handle.machine, now), now)
        if not self.consumers:
            self.consumers.clear()  # frees the table of the empty dict
            self._read_loop.drop_ahead()
        last = not self.consumers and not self.cursor.durable
        if last and self.state is SubscriptionState.OPEN:
            self._abandoned(self)

    async def drain(self, handle: ConsumerHandle) -> None:
        """See ConsumerHandle.drain. A seek closes the consumer, which ends the wait."""
        self._require_open()
        drained = self._leaving.setdefault(handle, asyncio.Event())
        if not handle.machine.leaving:
            handle.machine.leaving = True
            now = self._loop.time()
            self._carry_out(self._machine().on_leaving(handle.machine, now), now)
        await drained.wait()

    def _is_drained(self, handle: ConsumerHandle) -> bool:
        """Returns True when the consumer has acknowledged all its entries."""
        if handle.active:  # a single-active type, which counts no pending entries
            first = self.cursor.first_unacked(after(self.cursor.mark_delete))
            return first >= self._machine().read_position
        return not handle.machine.pending

    def evict_all(self, reason: CloseReason) -> None:
        """Close every consumer and tell its client the reason. A consumer that asks for the
        deletion stays open."""
        for handle in list(self.consumers.values()):
            if handle is not self._asker:
                handle.evict(reason)

    # ---- events ----------------------------------------------------------------------------------

    def advance(self) -> None:
        """The log has grown, or a connection is writable again."""
        if self._dispatcher is not None and self.consumers:
            now = self._loop.time()
            self._carry_out(self._dispatcher.advance(now), now)

    def on_flow(self, handle: ConsumerHandle, permits: int) -> None:
        """See ConsumerHandle.flow."""
        if self._dispatcher is None:  # a seek or a deletion is in progress
            handle.machine.permits += permits
            return
        now = self._loop.time()
        self._carry_out(self._dispatcher.on_flow(handle.machine, permits, now), now)
        if self._log.terminated is not None and self._has_ended and handle.begin_end():
            handle.tell_end(still=True)  # it has joined after the subscription reached the end

    def on_redeliver(self, handle: ConsumerHandle, positions: Sequence[Position] | None) -> None:
        """See ConsumerHandle.redeliver."""
        if self._dispatcher is not None:
            now = self._loop.time()
            self._carry_out(self._dispatcher.on_redeliver(handle.machine, positions, now), now)

    def negative_ack(
        self, handle: ConsumerHandle, positions: Sequence[Position], returned: Sequence[Position]
    ) -> None:
        """See ConsumerHandle.negative_ack."""
        self._require_open()
        machine = self._dispatcher
        if not isinstance(machine, KeyShared) or not machine.keeps_order_on_nack:
            why = f"subscription {self.name!r} does not keep the order of keys after it"
            raise NotAllowed("an ordered negative acknowledgement", why)
        if not machine.takes_negative_acks(handle.machine, positions):
            handle.evict(CloseReason.NEGATIVE_ACKS)
            return
        now = self._loop.time()
        self._carry_out(machine.on_negative_acks(handle.machine, positions, returned, now), now)

    def acknowledge(
        self,
        handle: ConsumerHandle,
        positions: Sequence[Position],
        partial: Sequence[tuple[Position, Sequence[int]]],
        done: Done | None,
    ) -> None:
        """See ConsumerHandle.acknowledge."""
        self._require_open()
        dispatcher = self._machine()
        if positions:
            self._require_possible(min(positions))
        for position, _ in partial:
            self._require_possible(position)
        if partial:
            partial = self._ack_sets.checked(partial)
        if done is not None:
            done = all_of(bool(positions) + len(partial), done)
        now = self._loop.time()
        if positions:
            self.cursor.acknowledge(positions, done)
            self._note_acked(max(positions))
            self.delays.on_acked(positions)
            self._carry_out(dispatcher.on_acked(handle.machine, positions, now), now)
        for position, ack_set in partial:
            self.cursor.acknowledge_batch(position, ack_set, done)
            self._note_acked(position)
        if partial:
            batches = [position for position, _ in partial]
            self.delays.on_acked([at for at in batches if self.cursor.is_acked(at)])
            self._carry_out(dispatcher.on_partly_acked(handle.machine, batches, now), now)
        if self._log.terminated is not None:
            self.tell_end()

    def acknowledge_cumulative(
        self, position: Position, ack_set: Sequence[int], done: Done | None
    ) -> None:
        """See ConsumerHandle.acknowledge_cumulative."""
        self._require_open()
        dispatcher = self._machine()
        if not dispatcher.cumulative_acks:
            what = "cumulative acknowledgement"
            raise NotAllowed(what, f"subscription {self.name!r} is {self._type.title}")
        self._require_possible(position)
        if ack_set:
            [(_, ack_set)] = self._ack_sets.checked([(position, ack_set)])
        mark = self.cursor.mark_delete
        self.cursor.acknowledge_cumulative(position, ack_set, done)
        self._note_acked(position)
        for machine, handle in self.consumers.items():
            if handle.active is not False and self.cursor.mark_delete > mark:
                acked = self._log.chain.entries(after=mark, through=self.cursor.mark_delete)
                machine.acked += round(acked * machine.messages_per_entry)
        now = self._loop.time()
        through = min(position, self._log.confirmed)  # later entries are not acknowledged
        self.delays.on_acked_through(self.cursor.mark_delete)
        self._carry_out(dispatcher.on_acked_through(through, now), now)
        if self._log.terminated is not None:
            self.tell_end()

    def tell_end(self) -> None:
        """Tell the client of each consumer once that it has reached the end of a terminated topic,
        CLIENTS_PER_TURN in one turn of the event loop. Does nothing while the subscription has a
        backlog. A consumer that joins later is told when it grants permits."""
        if self._has_ended:
            untold = [handle for handle in self.consumers.values() if handle.begin_end()]
            self._disconnector.start(untold, lambda it: it.tell_end(still=self._has_ended))

    @property
    def _has_ended(self) -> bool:
        """True when all messages of the log so far are acknowledged."""
        return self.cursor.backlog_entries == 0

    async def flush(self) -> None:
        """Wait until all acknowledgements so far are durable. Raises LogError."""
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self.cursor.flush()
        except TimeoutError as error:
            raise LogUnavailable(self._topic, "flushing acknowledgements", error) from error

    # ---- moving and deleting ---------------------------------------------------------------------

    async def seek(
        self, target: Position, *, batch_index: int = 0, ack_set: Sequence[int] = ()
    ) -> None:
        """Move the cursor: the entry at or after `target` is delivered next. If the entry at
        `target` is a batch, its first `batch_index` messages are not delivered. With `ack_set`,
        only the messages of the set are delivered.

        The subscription first closes the consumers that may have entries: with a single-active type
        the active consumer and those that were active before, otherwise all consumers. Their
        clients reconnect. This way, no entry that was sent before the seek reaches a consumer after
        the seek. Raises SubscriptionFenced and LogError, and with `batch_index` or `ack_set` also
        ReadFailed and TopicFull. After TopicFull, the cursor has not moved.
        """

        async def find() -> tuple[Position, int]:
            if batch_index > 0 or ack_set:
                return await self._in_batch(target, batch_index, ack_set)
            return target, 0

        await self._in_task(self._seek(self._begin_seek(), find))

    async def seek_to_time(self, publish_time_ms: int) -> None:
        """Move the cursor, as `seek` does, to the first entry that was published at this time or
        later. The result is approximate where publish times do not ascend. Raises ReadFailed,
        too."""

        async def find() -> tuple[Position, int]:
            return await self._log.search(lambda it: it.view.publish_time_ms >= publish_time_ms), 0

        await self._in_task(self._seek(self._begin_seek(), find))

    async def _seek(
        self, former: Dispatcher | None, find: Callable[[], Awaitable[tuple[Position, int]]]
    ) -> None:
        """`find` returns the new place: the entry, and the bits of its messages to deliver."""
        try:
            await self._disconnect_holders()
            await self.cursor.reset(*await find())
        finally:
            self._end_seek(former)

    async def skip(self, count: int) -> int:
        """Acknowledge the first `count` unacknowledged entries. The acknowledgements are durable on
        return. Returns the number of acknowledged entries. Raises SubscriptionFenced, LogError."""
        assert count > 0, count
        return await self.skip_through(self.cursor.nth_unacked(count) or self._log.confirmed)

    async def skip_all(self) -> int:
        """Acknowledge every entry of the log, as `skip` does."""
        return await self.skip_through(self._log.confirmed)

    async def expire_before(self, cutoff_ms: int, *, now_ms: int) -> int:
        """Acknowledge the entries that were appended before `cutoff_ms`, as `skip` does. Does
        nothing if the first unacknowledged entry was appended later. Raises ReadFailed, too."""
        self._require_open()
        through = await self.oldest.last_before(cutoff_ms)
        return 0 if through is None else await self.expire_through(through, now_ms=now_ms)

    async def expire_through(self, position: Position, *, now_ms: int) -> int:
        """Acknowledge every entry up to this one, as `skip` does, and count them as expired."""
        expired = await self.skip_through(position)
        if expired:
            self.expired += expired
            self.last_expire_ms = now_ms
            self._expired.count(expired, 0, self._loop.time())
        return expired

    async def skip_through(self, position: Position) -> int:
        """Acknowledge every entry up to this one, as `skip` does."""
        self._require_open()
        through = min(position, self._log.confirmed)
        before = self.cursor.backlog_entries
        written = Waiting()
        self.cursor.acknowledge_cumulative(through, done=written)
        self._note_acked(through)
        self.delays.on_acked_through(through)
        skipped = before - self.cursor.backlog_entries
        if self._dispatcher is not None:
            now = self._loop.time()
            self._carry_out(self._dispatcher.on_acked_through(through, now), now)
        if self._log.terminated is not None:
            self.tell_end()
        await written.wait()
        return skipped

    async def unsubscribe(self, handle: ConsumerHandle | None, *, force: bool) -> None:
        """Delete the subscription and its cursor. `handle`: the consumer whose client asks for the
        deletion; None: no client asks.

        This consumer stays open until the outcome is known, even when the topic closes meanwhile.
        Otherwise its client would reconnect, and create the subscription again during the deletion.
        Raises SubscriptionFenced and LogError. Without `force`, raises ConsumersConnected if there
        are other consumers.
        """
        self._require_open()
        others = [it for it in self.consumers.values() if it is not handle]
        if others and not force:
            raise ConsumersConnected(self.name, len(self.consumers))
        self.state = SubscriptionState.DELETING
        self._asker = handle
        self._drop_dispatcher()
        await self._in_task(self._delete(handle, others))

    async def _delete(self, handle: ConsumerHandle | None, others: list[ConsumerHandle]) -> None:
        await self._disconnector.run(others, lambda it: it.evict(CloseReason.UNSUBSCRIBED))
        await self._delete_cursor(handle)

    async def _in_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work of a request in a task of the topic, and wait for its end. A client that
        disconnects would otherwise cancel it half-way. The outcome would be unknown, or consumers
        would stay that the work has to close. Raises the work's BrokerError, and TopicClosing if
        the task ended without an outcome."""
        outcome: asyncio.Future[BrokerError | None] = self._loop.create_future()

        async def run() -> None:
            try:
                await work
            except BrokerError as error:
                outcome.set_result(error)
            else:
                outcome.set_result(None)

        def end(_: object) -> None:
            work.close()  # the task may have ended before its first step
            if not outcome.done():
                outcome.cancel()

        self._spawn(run()).add_done_callback(end)
        await asyncio.wait({outcome})
        if outcome.cancelled():
            raise TopicClosing(self._topic)
        if (error := outcome.result()) is not None:
            raise error

    async def _delete_cursor(self, handle: ConsumerHandle | None) -> None:
        try:
            if self.cursor.durable:
                await self._cursors.delete(self.name)
        except BaseException:
            self._asker = None
            if self.state is SubscriptionState.DELETING:
                self.state = SubscriptionState.OPEN
            self.evict_all(CloseReason.UNLOADED)  # the client reconnects and grants new permits
            raise
        self._asker = None
        if handle is not None and handle.attached:
            self.detach(handle)  # not evicted: its client gets the answer to its request
        if self.state is SubscriptionState.DELETING:
            self.close(CloseReason.UNSUBSCRIBED)
            self._abandoned(self)

    def close(self, reason: CloseReason) -> None:
        """Close permanently: the topic closes, or the subscription is deleted. A caller that waits
        in `unsubscribe` still gets the outcome."""
        self.end()
        self.evict_all(reason)

    def end(self) -> list[ConsumerHandle]:
        """Stop serving. From now on, no consumer can attach. Returns the consumers that the caller
        must evict: all except one that asks for the deletion."""
        if self.state is not SubscriptionState.CLOSED:
            self.state = SubscriptionState.CLOSED
            self._drop_dispatcher()
            self._unwatch()
            if self._return_timer is not None:
                self._return_timer.cancel()
        return [handle for handle in self.consumers.values() if handle is not self._asker]

    # ---- asking ----------------------------------------------------------------------------------

    async def last_message(self) -> LastMessage:
        """The last message of the log. Raises ReadFailed."""
        position, mark_delete = self._log.confirmed, self.cursor.mark_delete
        partition = self._log.name.partition
        partition = -1 if partition is None else partition
        if position < self._log.first:
            return LastMessage(EARLIEST, -1, mark_delete, partition)
        entries = await self._log.read(position, entries_max=1, bytes_max=1)
        view = entries[0].view
        batch_index = view.num_messages - 1 if view.is_batch else -1
        return LastMessage(entries[0].position, batch_index, mark_delete, partition)

    async def backlog_entries(self) -> int:
        """The number of unacknowledged entries."""
        return (await self.cursor.backlog()).entries

    async def peek(self, number: int) -> StoredEntry | None:
        """The unacknowledged entry with this number, counted from 1; None: there are fewer.

        Raises ReadFailed.
        """
        position = self.cursor.nth_unacked(number)
        if position is None:
            return None
        entries = await self._log.read(position, entries_max=1, bytes_max=1)
        return entries[0] if entries else None

    async def read_entry(self, position: Position) -> StoredEntry | None:
        """The entry at this position. None: it does not exist. Raises ReadFailed."""
        entries = await self._log.read(position, entries_max=1, bytes_max=1)
        return entries[0] if entries and entries[0].position == position else None

    @property
    def dispatcher(self) -> Dispatcher | None:
        """None: no consumer has connected since the topic was opened, or since a seek."""
        return self._dispatcher

    def delivered_to_active(self) -> tuple[str, Position, Position] | None:
        """The name of the active consumer, and two positions. The unacknowledged entries of this
        consumer are between these positions, both excluded. None: the type is not single-active, or
        no consumer is active."""
        machine = self._dispatcher
        if isinstance(machine, Exclusive | Failover) and self.active_name:
            return self.active_name, self.cursor.mark_delete, machine.delivered_end
        return None

    @property
    def read_position(self) -> Position | None:
        """The position of the dispatcher's next read. None: no consumer has connected since the
        topic was opened, or since a seek."""
        return None if self._dispatcher is None else self._dispatcher.read_position

    @property
    def delivered(self) -> Meter:
        """The messages that the subscription has delivered, redeliveries included."""
        return self._meter

    @property
    def redelivered(self) -> Meter:
        """The messages that were delivered with a redelivery count."""
        return self._redelivered

    def expired_rate(self, now: float) -> float:
        """The number of expired entries per second."""
        return self._expired.rates(now).messages

    @property
    def idle_s(self) -> float:
        """The time in seconds without a consumer and without `note_use` on this broker. 0: a
        consumer is connected."""
        return 0.0 if self.consumers else self._loop.time() - self._used_s

    def note_use(self) -> None:
        """A client uses the subscription without a consumer: a streaming query that holds it."""
        self._used_s = self._loop.time()

    @property
    def unacked(self) -> int:
        """The number of messages that the consumers have received and not acknowledged. 0 with a
        single-active type, which does not count them."""
        return sum(machine.unacked for machine in self.consumers)

    @property
    def active_name(self) -> str:
        """The name of the active consumer. "": no consumer is active, or the type has no active
        consumer."""
        return next((handle.name for handle in self.consumers.values() if handle.active), "")

    def explain(self) -> list[Reason]:
        """The reasons why the subscription delivers nothing now."""
        return explain(self.snapshot())

    def snapshot(self) -> Snapshot:
        """The facts that `explain` needs, except the facts about the broker."""
        reads, machine = self._read_loop, self._dispatcher
        rate, unconfirmed = reads.exhausted, self._log.pending_appends
        reasons = None if machine is None else tuple(machine.explain(self._loop.time()))
        if reasons is None or any(it.why is Why.NOTHING_TO_READ for it in reasons):
            rate = None  # no delivery waits for the rate
        return Snapshot(
            self.state,
            reasons,
            read_failure="" if reads.failure is None else reads.explain(),
            retry_in_s=reads.retry_in_s,
            rate="" if rate is None else str(rate),
            rate_wait_s=reads.rate_wait_s,
            unconfirmed=unconfirmed,
            log_trouble=self._log.trouble if unconfirmed else "",
        )

    async def describe(self, turns: Turns) -> dict[str, Any]:
        """The statistics in the form of Pulsar's SubscriptionStats, and the backlog in messages.
        Raises ReadFailed."""
        backlog = await self.cursor.backlog()
        oldest = await self.oldest.find()
        keyed = await self._keyed_stats()
        consumers = await turns.each(
            self.consumers.values(),
            lambda handle: {**handle.stats(), **keyed.get(handle.machine, {})},
            slice_items=CLIENTS_PER_TURN,
        )
        now = self._loop.time()
        holes, holes_size = self.cursor.holes()
        reasons = self.explain()
        activity = reduce(
            Activity.latest, (it.activity for it in self.consumers.values()), self._activity
        )
        return {
            **self._meter.describe("Out", now),
            "msgRateRedeliver": self._redelivered.rates(now).messages,
            "msgRateExpired": self._expired.rates(now).messages,
            "totalMsgExpired": self.expired,
            "lastExpireTimestamp": self.last_expire_ms,
            "type": "None" if self.type is None else self.type.title,
            "isDurable": self.cursor.durable,
            "msgBacklog": backlog.entries,
            "msgBacklogMessages": backlog.messages,
            "backlogSize": self.cursor.backlog_bytes,
            "earliestMsgPublishTimeInBacklog": oldest.published_ms if oldest is not None else 0,
            "activeConsumerName": self.active_name,
            "unackedMessages": self.unacked,
            "msgDelayed": len(self.delays.index),
            "delayedMessageIndexSizeInBytes": self.delays.index.memory_bytes,
            "markDeletePosition": str(self.cursor.mark_delete),
            "readPosition": None if self.read_position is None else str(self.read_position),
            "waitingFor": [str(reason) for reason in reasons],
            "subscriptionProperties": dict(self.cursor.properties),
            **self._shared_stats(keyed),
            **activity.describe(),
            "lastMarkDeleteAdvancedTimestamp": self._mark_moved_ms,
            "messageAckRate": sum(each["messageAckRate"] for each in consumers),
            "chunkedMessageRate": sum(each["chunkedMessageRate"] for each in consumers),
            "msgBacklogNoDelayed": max(backlog.entries - len(self.delays.index), 0),
            "blockedSubscriptionOnUnackedMsgs": any(
                reason.why is Why.UNACKED_BY_SUBSCRIPTION for reason in reasons
            ),
            "nonContiguousDeletedMessagesRanges": holes,
            "nonContiguousDeletedMessagesRangesSerializedSize": holes_size,
            "consumers": consumers,
        }

    async def _keyed_stats(self) -> dict[Consumer, dict[str, object]]:
        """The Key_Shared statistics of each consumer; {}: the type is not Key_Shared. Describes one
        consumer in each iteration of the loop."""
        machine, found = self._dispatcher, {}
        if isinstance(machine, KeyShared):
            for consumer, stats in machine.describe_consumers():
                found[consumer] = stats
                await asyncio.sleep(0)
        return {consumer: stats for consumer, stats in found.items() if consumer in self.consumers}

    def _shared_stats(self, keyed: Mapping[Consumer, Mapping[str, object]]) -> dict[str, Any]:
        """The statistics of a Shared or Key_Shared dispatcher. `keyed`: see `_keyed_stats`."""
        machine = self._dispatcher
        if self.consumers and isinstance(machine, KeyShared):
            return machine.describe(keyed)
        return machine.describe() if self.consumers and isinstance(machine, Shared) else {}

    # ---- the shell of the dispatcher -------------------------------------------------------------

    def _dispatcher_for(self, request: SubscribeRequest) -> Dispatcher:
        """The present dispatcher, or a new one if the present one does not serve this type and
        Key_Shared mode. Raises ConsumerBusy if the connected consumers have another type."""
        kind, machine = request.type, self._dispatcher
        if self.consumers and kind is not self._type:
            raise ConsumerBusy(self.name, f"its consumers use type {self._type.title}")
        if machine is None or kind is not self._type:
            return self._dispatchers[kind](self._environment())
        if isinstance(machine, KeyShared) and not machine.can_serve(request.key_shared):
            return self._dispatchers[kind](self._environment())
        return machine

    def _environment(self) -> Environment:
        return Environment(
            self.name,
            self._acks,
            self._confirmed,
            self._limits,
            self.cursor.redeliveries,
            self.delays,
            topic=self._topic,
            partition=self._partition,
            failover=self._failover,
            key_shared=self._key_shared,
        )

    def _confirmed(self) -> Position:
        return self._log.confirmed

    def _carry_out(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case Deliver():
                    self._deliver(action, now)
                case Read() | Replay():
                    self._read_loop.want(action)
                case Activate():
                    handle = self.consumers[action.consumer]
                    handle.active = action.active
                    handle.events.active_changed(action.active)
                case _:
                    assert_never(action)
        if self._leaving:
            for handle, drained in self._leaving.items():
                if self._is_drained(handle):
                    drained.set()
        self._set_timer()

    def _deliver(self, action: Deliver, now: float) -> None:
        size = sum([len(entry.view.data) for entry in action.entries])
        redelivered = 0
        if action.details:
            redelivered = _redelivered_messages(action)
        handle = self.consumers[action.consumer]
        handle.deliver(action, size=size, redelivered=redelivered, now=now)
        self._meter.count(action.messages, size, now)
        if redelivered:
            self._redelivered.count(redelivered, 0, now)

    def _tell(self, answer: Callable[[Dispatcher, float], list[Action]]) -> None:
        """The read loop reports the end of a read: `answer` passes the result to the dispatcher."""
        now = self._loop.time()
        self._carry_out(answer(self._machine(), now), now)
        if not self.consumers:  # the last consumer has left during the read
            self._read_loop.drop_ahead()

    def _skip(self, lost: LostRange) -> None:
        """Acknowledge lost entries, which no consumer can get."""
        positions = run_of_positions(lost.ledger, lost.first, lost.last)
        self.cursor.acknowledge(positions)
        self._note_acked(positions[-1])
        self.delays.on_acked(positions)
        if isinstance(self._dispatcher, KeyShared):
            self._dispatcher.on_skipped(positions, self._loop.time())
        if self._log.terminated is not None:
            self.tell_end()

    def _set_timer(self) -> None:
        """Set the timer to the time of the dispatcher's `next_timer`. None: cancel the timer."""
        due_s = None if self._dispatcher is None else self._dispatcher.next_timer()
        if self._timer is None:
            if due_s is None:
                return
        elif due_s == self._timer[0]:
            return
        else:
            self._timer[1].cancel()
        self._timer = None if due_s is None else (due_s, self._call_at(due_s))

    def _call_at(self, due_s: float) -> asyncio.Handle:
        return self._loop.call_at(due_s, self._guard.call, "timer", self._on_timer)

    def _on_timer(self) -> None:
        timer, self._timer = self._timer, None
        assert timer is not None
        # The loop may call a timer too early, by up to the resolution of its clock.
        now = max(self._loop.time(), timer[0])
        self._carry_out(self._machine().on_timer(now), now)

    def _machine(self) -> Dispatcher:
        assert self._dispatcher is not None
        return self._dispatcher

    def _drop_dispatcher(self) -> None:
        """Stop dispatching. The next consumer gets a new dispatcher."""
        self._read_loop.stop()
        if isinstance(self._dispatcher, KeyShared):
            self._dispatcher.on_dropped()
        self._dispatcher = None
        self._set_timer()

    def _note_acked(self, position: Position) -> None:
        acks, mark = self._acks, self.cursor.mark_delete
        if mark != self._mark:
            self._mark, self._mark_moved_ms = mark, self._now_ms()
        if position > acks.highest_acked:
            # The cursor ignores acknowledgements beyond the end of the log.
            acks.highest_acked = min(position, self._log.confirmed)

    def _tail(self) -> Position:
        """The position of the next read, for the cache. If no consumer is connected, EARLIEST: the
        cache then keeps no entries for the subscription."""
        if self._dispatcher is None or not self.consumers:
            return EARLIEST
        return self._dispatcher.read_position

    # ---- state -----------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self.state is not SubscriptionState.OPEN:
            raise SubscriptionFenced(self.name, f"is {self.state.value}")

    def _require_possible(self, position: Position) -> None:
        if position.ledger < 0:
            raise InvalidAck(self.name, position)

    async def _in_batch(
        self, target: Position, batch_index: int, ack_set: Sequence[int]
    ) -> tuple[Position, int]:
        """Return where a seek into a batch begins: the entry, and the bits of its messages to
        deliver (0: all). Raises ReadFailed."""
        if not self._log.chain.is_entry(target):
            return target, 0
        entries = await self._log.read(target, entries_max=1, bytes_max=1)
        if not entries or entries[0].position != target or not entries[0].view.is_batch:
            return target, 0
        every = (1 << entries[0].messages) - 1
        if ack_set:
            left = every & ack_set_bits(ack_set[: (entries[0].messages + 63) >> 6])
        else:
            left = every >> batch_index << batch_index if batch_index < entries[0].messages else 0
        if left == 0:
            return self._log.chain.next_position(target), 0
        return target, left if left != every else 0

    def _begin_seek(self) -> Dispatcher | None:
        """Stop dispatching. Returns the dispatcher so far."""
        self._require_open()
        self.state = SubscriptionState.SEEKING
        former = self._dispatcher
        self._drop_dispatcher()
        return former

    async def _disconnect_holders(self) -> None:
        """Close the consumers that may have entries: the seek would drop their acknowledgements
        that arrive meanwhile. The standby consumers of a single-active type stay, except those that
        have got entries: they were active before."""
        holders = [
            it for it in self.consumers.values() if it.active is not False or it.meter.messages
        ]
        await self._disconnector.run(holders, lambda it: it.evict(CloseReason.SEEK))

    def _end_seek(self, former: Dispatcher | None) -> None:
        if self.state is not SubscriptionState.SEEKING:
            return  # the subscription was closed during the seek
        self.state = SubscriptionState.OPEN
        self.delays.on_acked_through(self.cursor.mark_delete)
        if self.consumers:
            self._rejoin(former)
        if self._log.terminated is not None:
            self.tell_end()  # the consumers that stood by during the seek
        if not self.cursor.durable and not self.consumers:
            if self._return_timer is not None:
                self._return_timer.cancel()
            self._return_timer = self._loop.call_later(
                RETURN_S, self._guard.call, "timer", self._give_up
            )

    def _rejoin(self, former: Dispatcher | None) -> None:
        """Make a new dispatcher for the standby consumers, which the seek did not close."""
        assert isinstance(former, Failover)
        now = self._loop.time()
        dispatcher = self._dispatcher = Failover(self._environment())
        self._carry_out(dispatcher.resume(former, self.consumers, now), now)

    def _give_up(self) -> None:
        if not self.consumers and self.state is SubscriptionState.OPEN:
            self._abandoned(self)


def _redelivered_messages(action: Deliver) -> int:
    """Return the number of unacknowledged messages in the entries that have a redelivery count."""
    return sum(
        unacked_in(detail.ack_set) if detail.ack_set else action.entries[index].view.num_messages
        for index, detail in action.details.items()
        if detail.redelivery_count > 0
    )


def all_of(count: int, done: Done) -> Done | None:
    """Return a callback for `count` operations, each of which calls it once. The last call passes
    the first error to `done`, or None if there was none. If `count` is 0, `all_of` calls `done` at
    once and returns None."""
    if count == 0:
        done(None)
        return None
    left = count
    failure: BrokerError | None = None

    def one_of(error: BrokerError | None) -> None:
        nonlocal left, failure
        left -= 1
        failure = failure or error
        if left == 0:
            done(failure)

    return done if count == 1 else one_of
