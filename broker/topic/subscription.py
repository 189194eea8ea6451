"""A subscription of a topic: a cursor, its consumers, and the machine that decides between them.

Theory of operation. Whatever happens (permits, acknowledgements, a longer log, a read that ended)
is told to the dispatcher in one synchronous step, and what it answers is carried out in the same
step: entries go to the sessions, a read is started (`Reading`: the one thing that waits, and never
more than one).

Consumers come and go by `attach` and `detach`. The type is that of the consumers that are there;
the dispatcher is kept while nobody is, so that a client that reconnects finds its redelivery
counts, and made anew when the type changes or the cursor was moved.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.dispatch.dispatcher import Deliver
from magnetar.broker.dispatch.exclusive import Exclusive
from magnetar.broker.dispatch.explain import Reason, Why
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.errors import (
    ConsumerBusy,
    ConsumersConnected,
    InvalidAck,
    LogUnavailable,
    NotAllowed,
    SubscriptionFenced,
)
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.topic.consumer import ConsumerHandle
from magnetar.broker.topic.contract import CloseReason, LastMessage, SubscriptionType
from magnetar.broker.topic.meter import Meter
from magnetar.broker.topic.read_loop import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.broker.cursor.cursor import Cursor
    from magnetar.broker.cursor.cursors import Cursors
    from magnetar.broker.dispatch.dispatcher import Acks, Action, Dispatcher
    from magnetar.broker.dispatch.permits import Consumer, Limits
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.log import Log
    from magnetar.broker.topic.contract import ConsumerEvents, SubscribeRequest
    from magnetar.broker.topic.read_loop import Spawn

    Done = Callable[[BrokerError | None], None]
    MakeDispatcher = Callable[[Acks, Callable[[], Position], Limits], Dispatcher]

FLUSH_TIMEOUT_S: Final = 5.0
"""How long the close of a consumer waits until what it acknowledged is durable."""

RETURN_S: Final = 60.0
"""How long a non-durable subscription waits for its reader after a seek, which disconnects it. A
client reconnects within a second, or has given up after 30 s."""

DISPATCHERS: Final[Mapping[SubscriptionType, MakeDispatcher]] = {
    SubscriptionType.EXCLUSIVE: Exclusive,
    SubscriptionType.SHARED: Shared,
}


class SubscriptionState(Enum):
    OPEN = "open"
    SEEKING = "seeking"
    DELETING = "deleting"
    CLOSED = "closed"


class _AckView:
    """The cursor as a dispatcher asks it (`Acks`). Beyond what it acknowledged here, and what may
    have been when it was loaded, there is no need to look: that is where a tailing consumer is."""

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
    """Made by a topic, which owns it. `abandoned` is called when a non-durable one has lost its
    last consumer."""

    def __init__(
        self,
        topic: str,
        cursor: Cursor,
        cursors: Cursors,
        topic_log: Log,
        *,
        limits: Limits,
        spawn: Spawn,
        abandoned: Callable[[Subscription], None],
    ) -> None:
        self.cursor = cursor
        self.state = SubscriptionState.OPEN
        self.consumers: dict[Consumer, ConsumerHandle] = {}  # in the order in which they came
        self._topic = topic
        self._cursors = cursors
        self._acks = _AckView(cursor, topic_log.confirmed)
        self._log = topic_log
        self._limits = limits
        self._abandoned = abandoned
        self._type = SubscriptionType.EXCLUSIVE
        self._dispatcher: Dispatcher | None = None  # None: nobody has connected yet
        self._reading = Reading(
            topic_log,
            f"{topic} {cursor.name}",
            bytes_max=limits.read_bytes,
            spawn=spawn,
            tell=self._tell,
        )
        self._asker: ConsumerHandle | None = None  # of the deletion under way; None: no consumer
        self._return_timer: asyncio.TimerHandle | None = None
        self._meter = Meter(asyncio.get_running_loop().time())
        self._redelivered = Meter(asyncio.get_running_loop().time())
        self._unwatch = topic_log.watch(self.advance, read_position=self._tail)

    @property
    def name(self) -> str:
        return self.cursor.name

    @property
    def type(self) -> SubscriptionType | None:
        """None: no consumer is connected, so it may become any."""
        return self._type if self.consumers else None

    # ---- consumers -------------------------------------------------------------------------------

    def conflict(self, request: SubscribeRequest) -> list[ConsumerHandle]:
        """Who must be dead for this consumer to come in; []: it may come in now.

        Raises SubscriptionFenced, NotAllowed, ConsumerBusy.
        """
        self._require_open()
        if request.durable != self.cursor.durable:
            kind = "durable" if self.cursor.durable else "not durable"
            raise NotAllowed(f"subscription {self.name!r}", f"it exists already and is {kind}")
        if not self.consumers:
            return []
        if request.type is not self._type:
            raise ConsumerBusy(self.name, f"consumers use it as {self._type.title}")
        exclusive = self._type is SubscriptionType.EXCLUSIVE
        return list(self.consumers.values()) if exclusive else []

    def attach(
        self, request: SubscribeRequest, events: ConsumerEvents, *, connected_since: str
    ) -> ConsumerHandle:
        """A consumer comes in; `conflict` said that it may."""
        assert not self.conflict(request)
        dispatcher = self._dispatcher
        if dispatcher is None or self._type is not request.type:
            self._reading.stop()
            self._type = request.type
            make = DISPATCHERS[request.type]
            dispatcher = make(self._acks, lambda: self._log.confirmed, self._limits)
            self._dispatcher = dispatcher
        now = asyncio.get_running_loop().time()
        handle = ConsumerHandle(
            self, request, events, self._limits, connected_since=connected_since, now=now
        )
        self.consumers[handle.machine] = handle
        self._carry_out(dispatcher.add_consumer(handle.machine))
        if self._type is SubscriptionType.EXCLUSIVE:
            events.active_changed(True)
        return handle

    def detach(self, handle: ConsumerHandle) -> None:
        """A consumer is gone, for whatever reason."""
        del self.consumers[handle.machine]
        handle.attached = False
        if self._dispatcher is not None:
            self._carry_out(self._dispatcher.remove_consumer(handle.machine))
        last = not self.consumers and not self.cursor.durable
        if last and self.state is SubscriptionState.OPEN:
            self._abandoned(self)

    def evict_all(self, reason: CloseReason) -> None:
        """Close every consumer, telling its client."""
        for handle in list(self.consumers.values()):
            if handle is not self._asker:
                handle.evict(reason)

    # ---- events ----------------------------------------------------------------------------------

    def advance(self) -> None:
        """The log has grown, or a connection has room."""
        if self._dispatcher is not None and self.consumers:
            self._carry_out(self._dispatcher.advance())

    def on_flow(self, handle: ConsumerHandle, permits: int) -> None:
        if self._dispatcher is not None:  # None: it is being deleted
            self._carry_out(self._dispatcher.on_flow(handle.machine, permits))

    def on_redeliver(self, handle: ConsumerHandle, positions: Sequence[Position] | None) -> None:
        if self._dispatcher is not None:
            self._carry_out(self._dispatcher.on_redeliver(handle.machine, positions))

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
        if done is not None:
            done = all_of(bool(positions) + len(partial), done)
        if positions:
            self.cursor.acknowledge(positions, done)
            self._note_acked(max(positions))
            self._carry_out(dispatcher.on_acked(handle.machine, positions))
        for position, ack_set in partial:
            self.cursor.acknowledge_batch(position, ack_set, done)
            self._note_acked(position)
            self._carry_out(dispatcher.on_partly_acked(handle.machine, position))

    def acknowledge_cumulative(
        self, position: Position, ack_set: Sequence[int], done: Done | None
    ) -> None:
        """See ConsumerHandle.acknowledge_cumulative."""
        self._require_open()
        if self._type is SubscriptionType.SHARED:
            raise NotAllowed("cumulative acknowledgement", f"{self.name!r} is Shared")
        self._require_possible(position)
        self.cursor.acknowledge_cumulative(position, ack_set, done)
        self._note_acked(position)

    async def flush(self) -> None:
        """Return when everything acknowledged so far is durable. Raises LogError."""
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self.cursor.flush()
        except TimeoutError as error:
            raise LogUnavailable(self._topic, "flushing acknowledgements", error) from error

    # ---- moving and deleting ---------------------------------------------------------------------

    async def seek(self, target: Position) -> None:
        """Move the cursor: the entry at or after `target` is the next to be delivered.

        All consumers are closed first, so that nothing from before the move reaches them after it;
        they come back by themselves. Raises SubscriptionFenced, LogError.
        """
        self._begin_seek()
        try:
            await self.cursor.reset(target)
        finally:
            self._end_seek()

    async def seek_to_time(self, publish_time_ms: int) -> None:
        """The same, to the first entry published at that time or later: by binary search, so it is
        approximate where publish times are out of order. Raises ReadFailed, too."""
        self._begin_seek()
        try:
            await self.cursor.reset(
                await self._log.search(lambda it: it.view.publish_time_ms >= publish_time_ms)
            )
        finally:
            self._end_seek()

    async def unsubscribe(self, handle: ConsumerHandle | None, *, force: bool) -> None:
        """Delete the subscription and its cursor; `handle` is the consumer that asks for it.

        It is told nothing before the outcome, also when the topic goes meanwhile: told to come
        back, its client would make the subscription anew beside the deletion that it asked for.
        Raises ConsumersConnected if there are others, unless `force`; SubscriptionFenced, LogError.
        """
        self._require_open()
        others = [it for it in self.consumers.values() if it is not handle]
        if others and not force:
            raise ConsumersConnected(self.name, len(self.consumers))
        self.state = SubscriptionState.DELETING
        self._asker = handle
        self._drop_dispatcher()
        for other in others:
            other.evict(CloseReason.UNSUBSCRIBED)
        try:
            if self.cursor.durable:
                await self._cursors.delete(self.name)
        except BaseException:
            self._asker = None
            if self.state is SubscriptionState.DELETING:
                self.state = SubscriptionState.OPEN
            self.evict_all(CloseReason.UNLOADED)  # it comes back with new permits
            raise
        self._asker = None
        if handle is not None and handle.attached:
            self.detach(handle)  # its client knows
        if self.state is SubscriptionState.DELETING:
            self.close(CloseReason.UNSUBSCRIBED)
            self._abandoned(self)

    def close(self, reason: CloseReason) -> None:
        """The topic goes, or the subscription is deleted. Nothing happens afterwards; whoever asked
        for a deletion under way still gets the answer."""
        if self.state is SubscriptionState.CLOSED:
            return
        self.state = SubscriptionState.CLOSED
        self._drop_dispatcher()
        self.evict_all(reason)
        self._unwatch()
        if self._return_timer is not None:
            self._return_timer.cancel()

    # ---- asking ----------------------------------------------------------------------------------

    async def last_message(self) -> LastMessage:
        """The end of the log as it is now. Raises ReadFailed."""
        position, mark_delete = self._log.confirmed, self.cursor.mark_delete
        if position < self._log.first:
            return LastMessage(EARLIEST, -1, mark_delete)
        entries = await self._log.read(position, entries_max=1, bytes_max=1)
        view = entries[0].view
        batch_index = view.num_messages - 1 if view.is_batch else -1
        return LastMessage(entries[0].position, batch_index, mark_delete)

    async def peek(self, number: int) -> StoredEntry | None:
        """The unacknowledged entry with this number, counted from 1; None: there are fewer.

        Takes `number` steps without waiting: the caller bounds it. Raises ReadFailed.
        """
        chain, position = self._log.chain, self.cursor.mark_delete
        for _ in range(number):
            position = self.cursor.first_unacked(chain.next_position(position))
            if position > self._log.confirmed:
                return None
        entries = await self._log.read(position, entries_max=1, bytes_max=1)
        return entries[0] if entries else None

    @property
    def read_position(self) -> Position | None:
        """Where the dispatcher reads next; None: no consumer has connected yet."""
        return None if self._dispatcher is None else self._dispatcher.read_position

    @property
    def delivered(self) -> Meter:
        """What was delivered to all consumers, redeliveries included."""
        return self._meter

    @property
    def redelivered(self) -> Meter:
        """The messages of `delivered` that were delivered before."""
        return self._redelivered

    @property
    def unacked(self) -> int:
        """Messages that consumers have and have not acknowledged."""
        return sum(machine.unacked for machine in self.consumers)

    def explain(self) -> list[Reason]:
        """Why nothing is being dispatched."""
        match self.state:
            case SubscriptionState.SEEKING:
                reasons = [Reason(Why.SEEKING, "the subscription is being moved")]
            case SubscriptionState.DELETING:
                reasons = [Reason(Why.DELETING, "the subscription is being deleted")]
            case SubscriptionState.CLOSED:
                return [Reason(Why.CLOSED, "the topic is not served here any more")]
            case SubscriptionState.OPEN:
                reasons = []
        if self._reading.failure is not None:
            reasons.append(Reason(Why.READ_FAILED, f"tried again: {self._reading.failure}"))
        if self._dispatcher is None:
            return [*reasons, Reason(Why.NO_CONSUMERS, "no consumer has connected yet")]
        return reasons + self._dispatcher.explain()

    async def describe(self) -> dict[str, Any]:
        """Pulsar's SubscriptionStats, and the backlog in messages."""
        backlog = await self.cursor.backlog()
        now = asyncio.get_running_loop().time()
        return {
            **self._meter.describe("Out", now),
            "msgRateRedeliver": self._redelivered.rates(now).messages,
            "type": "None" if self.type is None else self.type.title,
            "isDurable": self.cursor.durable,
            "msgBacklog": backlog.entries,
            "msgBacklogMessages": backlog.messages,
            "unackedMessages": self.unacked,
            "markDeletePosition": str(self.cursor.mark_delete),
            "readPosition": None if self.read_position is None else str(self.read_position),
            "waitingFor": [str(reason) for reason in self.explain()],
            "subscriptionProperties": dict(self.cursor.properties),
            "consumers": [handle.stats() for handle in self.consumers.values()],
        }

    # ---- carrying out ----------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                self._deliver(action)
            else:
                self._reading.want(action)

    def _tell(self, answer: Callable[[Dispatcher], list[Action]]) -> None:
        """What was read, or that it could not be."""
        self._carry_out(answer(self._machine()))

    def _deliver(self, action: Deliver) -> None:
        now = asyncio.get_running_loop().time()
        size = self.consumers[action.consumer].deliver(action, now)
        self._meter.count(action.messages, size, now)
        if action.marks:
            again = sum(1 for mark in action.marks.values() if mark.redelivery_count)
            self._redelivered.count(again, 0, now)

    def _machine(self) -> Dispatcher:
        assert self._dispatcher is not None
        return self._dispatcher

    def _drop_dispatcher(self) -> None:
        """Nothing is given out any more; the next consumer gets a new one."""
        self._reading.stop()
        self._dispatcher = None

    def _note_acked(self, position: Position) -> None:
        acks = self._acks
        if position > acks.highest_acked:
            # What is not in the log is not acknowledged by that, either.
            acks.highest_acked = min(position, self._log.confirmed)

    def _tail(self) -> Position:
        """Where it will read next, for the cache. Without consumers: nowhere near the end."""
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

    def _begin_seek(self) -> None:
        """Nobody is left who could acknowledge: while the cursor is moved, that would be lost."""
        self._require_open()
        self.state = SubscriptionState.SEEKING
        self._drop_dispatcher()
        self.evict_all(CloseReason.SEEK)

    def _end_seek(self) -> None:
        if self.state is not SubscriptionState.SEEKING:
            return  # closed meanwhile
        self.state = SubscriptionState.OPEN
        if not self.cursor.durable and not self.consumers:
            if self._return_timer is not None:
                self._return_timer.cancel()
            loop = asyncio.get_running_loop()
            self._return_timer = loop.call_later(RETURN_S, self._give_up)

    def _give_up(self) -> None:
        if not self.consumers and self.state is SubscriptionState.OPEN:
            self._abandoned(self)


def all_of(count: int, done: Done) -> Done | None:
    """Called `count` times, it calls `done` once: with the first error, if there was one."""
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
