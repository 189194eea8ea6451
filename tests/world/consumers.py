"""Consumers of one subscription: they join, receive, acknowledge, return, leave and crash.

A consumer talks to its broker over a `Line`: two ordered directions with delays, which end
together. The line then loses what is under way, and each end notices at a time of its own. So a
broker may keep a consumer that has left, and the consumer may return before the broker notices.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from world.deliveries import NAME, SINGLE_ACTIVE

from magnetar.broker.cursor.acks import ack_set_bits, ack_set_words
from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
from magnetar.broker.errors import BrokerError, NotAllowed
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.broker.topic.contract import (
    ClientInfo,
    InitialPosition,
    SubscribeRequest,
    SubscriptionType,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from world.deliveries import Deliveries, Reign
    from world.nodes import ClientNode
    from world.serving import Director

    from magnetar.broker.dispatch.dispatcher import EntryDetail
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.contract import CloseReason

T = TypeVar("T")

CLIENT = ClientInfo("127.0.0.1:1", "world")
SUBSCRIBE_S = 3.0
NOTICE_S = 2.0  # the longest time until a broker notices that a consumer has left
UNDER_WAY_MAX = 20  # entries on the line; beyond it, the connection is not writable


class Line:
    """A connection to a broker, which ends with either process."""

    def __init__(self, broker: ClientNode, delay_s: float) -> None:
        self.open = True
        self.broker = broker
        self._starts = broker.starts
        self._world = broker.world
        self._random = broker.world.draw(f"line {broker.name} {broker.world.loop.time()}")
        self._delay_s = delay_s
        self._there_s = self._back_s = 0.0  # when the last messages arrive

    @property
    def alive(self) -> bool:
        same = self.broker.alive and self.broker.starts == self._starts
        return self.open and same

    def to_broker(self, work: Callable[[], object]) -> None:
        self._there_s = self._next(self._there_s)
        self._at(self._there_s, work, for_broker=True)

    def to_client(self, work: Callable[[], object]) -> None:
        self._back_s = self._next(self._back_s)
        self._at(self._back_s, work, for_broker=False)

    def end(self, on_noticed: Callable[[], object]) -> None:
        """End the line. The broker calls `on_noticed` when it notices."""
        if self.open:
            self.open = False
            noticed_s = self._world.loop.time() + self._random.random() * NOTICE_S
            self._at(noticed_s, on_noticed, for_broker=True, ended=True)

    def _next(self, last_s: float) -> float:
        return max(last_s, self._world.loop.time() + self._random.expovariate(1 / self._delay_s))

    def _at(
        self, at_s: float, work: Callable[[], object], *, for_broker: bool, ended: bool = False
    ) -> None:
        def arrive() -> None:
            if not (self.alive or (ended and self.broker.alive)):
                return
            try:
                work()
            except Exception as error:
                self._world.on_failure(self.broker.host, error)

        host = self.broker.host
        context = host._context if for_broker else self._world.loop.world_context
        self._world.loop.call_at(at_s, arrive, context=context)


class ConsumerSession:
    """The broker's end. A `ConsumerEvents`."""

    def __init__(self, consumer: Consumer, reign: Reign, line: Line) -> None:
        self.consumer = consumer
        self.reign = reign
        self.line = line
        self.handle: ConsumerHandle | None = None  # None: the consumer is subscribing
        self.active = False
        self.next = EARLIEST  # single-active types: where its deliveries continue
        self.permits = 0
        self.under_way = 0
        reign.sessions.append(self)

    def __repr__(self) -> str:
        return f"{self.consumer.name} at {self.line.broker.name}"

    @property
    def attached(self) -> bool:
        return self.handle is None or self.handle.attached

    def writable(self) -> bool:
        return self.under_way < UNDER_WAY_MAX

    def deliver(self, entries: Sequence[StoredEntry], details: Mapping[int, EntryDetail]) -> None:
        self.reign.on_delivery(self, entries, details)
        self.under_way += len(entries)
        got = [_Held.of(entry, details.get(place)) for place, entry in enumerate(entries)]
        self.line.to_client(partial(self.consumer.on_entries, self, got))

    def on_taken(self, entries: int) -> None:
        """The frames have left the connection's buffer."""
        full = not self.writable()
        self.under_way -= entries
        if full and self.writable() and self.handle is not None:
            self.handle.on_writable()

    def reached_end(self) -> None:
        raise AssertionError("no topic is terminated")

    def active_changed(self, active: bool) -> None:
        self.active, self.next = active, EARLIEST

    def closed(self, reason: CloseReason) -> None:
        self.active = False
        self.reign.on_detached()
        self.line.to_client(partial(self.consumer.on_closed, self, reason))

    async def probe(self) -> bool:
        await asyncio.sleep(0.01)
        return self.line.alive

    def detach(self) -> None:
        if self.handle is not None:
            self.handle.close_nowait()
            self.reign.on_detached()


@dataclass
class _Held:
    """An entry that a consumer holds and has not finished."""

    position: Position
    key: str | None
    size: int  # messages of the entry
    left: int  # bits of the messages to acknowledge
    redeliver_s: float | None = None  # None: not negatively acknowledged

    @classmethod
    def of(cls, entry: StoredEntry, detail: EntryDetail | None) -> _Held:
        left = (1 << entry.messages) - 1
        if detail is not None and detail.ack_set:
            left &= ack_set_bits(detail.ack_set)
        return cls(entry.position, entry.view.partition_key, entry.messages, left)

    @property
    def indexes(self) -> list[int]:
        return [index for index in range(self.size) if self.left >> index & 1]


class Consumer:
    """`willing`: the consumer acknowledges everything; it returns no message and does not leave."""

    def __init__(self, name: str, director: Director) -> None:
        self.name = name
        self.willing = False
        self.gone = False  # permanently
        # A leaving consumer gets no more entries, and acknowledges those that it has.
        self.leaves = False
        self._director = director
        self._deliveries: Deliveries = director.deliveries
        self._world = director.world
        self._random = director.world.draw(f"consumer {name}")
        self._kind = director.deliveries.kind
        self._session: ConsumerSession | None = None
        self._held: dict[Position, _Held] = {}  # the held entries in the order of arrival
        # keys, until the broker knows them
        self._guards: dict[str | None, tuple[Position, int]] = {}
        self._guarded = 0
        self._queue_max = self._random.choice((2, 5, 20))
        self._taken = 0  # messages for which no permits were granted yet
        self._slow = self._random.choice((0.2, 0.6, 0.9))  # messages that its queue holds
        self._priority = self._random.choice((0, 0, 1))
        self.allows_disorder = self._random.random() < self._deliveries.relaxed_share

    def __str__(self) -> str:
        return f"{self.name} (has {len(self._held)}, took {self._taken} of {self._queue_max})"

    @property
    def connected(self) -> bool:
        session = self._session
        return session is not None and session.line.alive and session.handle is not None

    # -- life --------------------------------------------------------------------------------------

    async def run(self) -> None:
        while not self.gone:
            if not self.connected:
                await self._connect()
            await asyncio.sleep(self._random.expovariate(1 / 0.05))
            if self.connected:
                self._work()

    def crash(self) -> None:
        """End the consumer's process. Another consumer with this name may join."""
        self.gone = True
        self._lose()

    def lose_connection(self) -> None:
        self._lose()

    async def leave(self, *, drain: bool) -> None:
        """Leave as `consumer.close(drain=...)` does."""
        session = self._session
        if session is None or session.handle is None:
            self.crash()  # the SUBSCRIBE may still succeed
            return
        if drain:
            drained: asyncio.Future[None] = self._world.loop.create_future()
            session.line.to_broker(partial(self._ask_drain, session, drained))
            self.leaves = True
            await asyncio.wait({drained}, timeout=10.0)
            if drained.done() and session.line.alive:
                self._deliveries.met("consumer drained before it left")
        self.gone = True
        session.line.to_broker(session.detach)
        if self._session is not session:  # the consumer has joined again meanwhile
            self._lose()

    def _ask_drain(self, session: ConsumerSession, drained: asyncio.Future[None]) -> None:
        async def drain() -> None:
            try:
                if session.handle is not None:
                    await session.handle.drain()
            except OPERATING_ERRORS:
                return
            session.line.to_client(partial(_settle, drained, None))

        session.line.broker.host.spawn(drain())

    def _lose(self) -> None:
        session, self._session = self._session, None
        self._held.clear()
        self._guards.clear()
        self._taken = 0
        if session is not None:
            session.line.end(session.detach)

    async def _connect(self) -> None:
        self._lose()
        reign = self._director.find()
        if reign is None:
            return
        line = Line(reign.broker, self._director.line_delay_s)
        session = self._session = ConsumerSession(self, reign.reign, line)
        answer: asyncio.Future[ConsumerHandle | None] = self._world.loop.create_future()
        line.to_broker(lambda: reign.broker.host.spawn(self._subscribe(session, answer)))
        await asyncio.wait({answer}, timeout=SUBSCRIBE_S)
        if self._session is not session:
            return
        if not answer.done() or answer.result() is None:
            self._lose()
            await asyncio.sleep(self._random.expovariate(1 / 0.2))
            return
        if session.reign.pending:
            self._deliveries.met("joined under load")
        self._grant(self._queue_max)

    async def _subscribe(
        self, session: ConsumerSession, answer: asyncio.Future[ConsumerHandle | None]
    ) -> None:
        policy = KeySharedPolicy(
            allow_out_of_order=self.allows_disorder,
            ordered_nacks=self._deliveries.ordered_nacks,
        )
        request = SubscribeRequest(
            1,
            NAME,
            self._kind,
            CLIENT,
            consumer_name=self.name,
            initial_position=InitialPosition.EARLIEST,
            priority=self._priority,
            key_shared=policy if self._kind is SubscriptionType.KEY_SHARED else None,
        )
        handle: ConsumerHandle | None = None
        try:
            handle = session.handle = await session.reign.topic.subscribe(request, session)
        except OPERATING_ERRORS as error:
            session.reign.sessions.remove(session)
            self._world.trace.tell(self.name, "not subscribed:", error)
        if handle is not None and not session.line.open:
            handle.close_nowait()
        session.line.to_client(partial(_settle, answer, handle))

    # -- deliveries --------------------------------------------------------------------------------

    def on_closed(self, session: ConsumerSession, reason: CloseReason) -> None:
        if self._session is session:
            self._world.trace.note(self.name, "was closed", reason.name)
            self._session = None
            self._held.clear()
            self._guards.clear()
            self._taken = 0

    def on_entries(self, session: ConsumerSession, entries: list[_Held]) -> None:
        session.line.to_broker(partial(session.on_taken, len(entries)))
        if self._session is not session or self.gone:
            return
        self._world.oracle.reads += len(entries)
        late: list[_Held] = []
        for entry in entries:
            guard = self._guards.get(entry.key)
            if guard is not None and entry.position > guard[0]:
                late.append(entry)
            else:
                self._held[entry.position] = entry
        if late:
            self._taken += sum(len(entry.indexes) for entry in late)
            self._ask_negative_ack(session, [], [entry.position for entry in late])

    # -- the application -----------------------------------------------------------------

    def _work(self) -> None:
        session, random = self._session, self._random
        assert session is not None
        now = self._world.loop.time()
        due = [it for it in self._held.values() if it.redeliver_s is not None]
        due = [it for it in due if it.redeliver_s is not None and it.redeliver_s <= now]
        if due:
            self._return(session, [entry.position for entry in due])
        fresh = [it for it in self._held.values() if it.redeliver_s is None]
        if fresh and self._kind in SINGLE_ACTIVE and random.random() < 0.5:
            self._mark(session, fresh[-1 if self.willing else random.randrange(len(fresh))])
        else:
            for entry in fresh:
                if self.willing or self.leaves or random.random() > self._slow:
                    self._finish(session, entry)
        if self._taken >= max(1, self._queue_max // 2) and not self.leaves:
            self._grant(self._taken)

    def _finish(self, session: ConsumerSession, entry: _Held) -> None:
        draw = 0.0 if self.willing else self._random.random()
        if entry.position not in self._held:
            return  # the consumer has returned this entry together with another one
        if draw < 0.6:
            self._acknowledge(session, entry, entry.indexes)
        elif draw < 0.8 and len(entry.indexes) > 1:
            count = self._random.randint(1, len(entry.indexes) - 1)
            self._acknowledge(session, entry, self._random.sample(entry.indexes, count))
        else:
            self._negative_ack(session, entry)

    def _grant(self, permits: int) -> None:
        session = self._session
        assert session is not None
        self._taken = 0

        def flow() -> None:
            if session.handle is not None:
                session.permits += permits
                session.handle.flow(permits)

        session.line.to_broker(flow)

    def _acknowledge(self, session: ConsumerSession, entry: _Held, indexes: Sequence[int]) -> None:
        deliveries, reign, position = self._deliveries, session.reign, entry.position
        deliveries.on_sent(position, indexes)
        for index in indexes:
            entry.left &= ~(1 << index)
        self._taken += len(indexes)
        whole = not entry.left
        if whole:
            del self._held[position]
        else:
            deliveries.met("batch acknowledged in part")

        def ask() -> None:
            seeks = deliveries.seeks

            def done(error: BrokerError | None) -> None:
                if error is None and session.line.broker.alive:
                    deliveries.on_answered(reign.epoch, seeks, position, indexes)

            assert session.handle is not None
            try:
                if whole and entry.size == len(indexes):
                    session.handle.acknowledge([position], (), done)
                else:  # bits that other consumers acknowledged are kept
                    every = (1 << entry.size) - 1
                    words = ack_set_words(every & ~sum(1 << each for each in indexes))
                    session.handle.acknowledge([], [(position, words or (0,))], done)
            except OPERATING_ERRORS as error:
                self._world.trace.tell(self.name, "ack refused:", error)
            if self._kind not in SINGLE_ACTIVE:
                self._must_not_acknowledge_cumulatively(session, position)

        session.line.to_broker(ask)

    def _mark(self, session: ConsumerSession, entry: _Held) -> None:
        """Acknowledge cumulatively."""
        deliveries, reign, position = self._deliveries, session.reign, entry.position
        deliveries.marks.append(position)
        for each in [it for it in self._held.values() if it.position <= position]:
            self._taken += len(each.indexes)
            del self._held[each.position]

        def ask() -> None:
            seeks = deliveries.seeks

            def done(error: BrokerError | None) -> None:
                if error is None and session.line.broker.alive:
                    deliveries.on_mark_answered(reign.epoch, seeks, position)

            assert session.handle is not None
            try:
                session.handle.acknowledge_cumulative(position, (), done)
            except OPERATING_ERRORS as error:
                self._world.trace.tell(self.name, "mark refused:", error)

        session.line.to_broker(ask)

    def _must_not_acknowledge_cumulatively(
        self, session: ConsumerSession, position: Position
    ) -> None:
        """CUMUL: the broker must refuse a cumulative acknowledgement, which is sometimes tried."""
        handle = session.handle
        if handle is None or not handle.attached or self._random.random() > 0.02:
            return
        try:
            handle.acknowledge_cumulative(position)
        except NotAllowed:
            self._deliveries.met("cumulative acknowledgement refused")
        except OPERATING_ERRORS:
            return  # the subscription is moved, or is over
        else:
            self._deliveries.hold(False, "CUMUL", "{} acknowledged through {}", self.name, position)

    def _negative_ack(self, session: ConsumerSession, entry: _Held) -> None:
        random = self._random
        entry.redeliver_s = self._world.loop.time() + random.expovariate(1 / 0.3)
        if not self._deliveries.ordered_nacks:
            return
        position, key = entry.position, entry.key
        late = [
            it
            for it in self._held.values()
            if it.key == key and it.position > position and it.redeliver_s is None
        ]
        for each in late:
            self._taken += len(each.indexes)
            del self._held[each.position]
        self._guarded += 1
        guard = self._guarded
        before = self._guards.get(key)
        if before is None or position < before[0]:
            self._guards[key] = position, guard
        self._ask_negative_ack(session, [position], [it.position for it in late], key, guard)

    def _ask_negative_ack(
        self,
        session: ConsumerSession,
        positions: list[Position],
        returned: list[Position],
        key: str | None = None,
        guard: int = 0,
    ) -> None:
        def release() -> None:
            guarded = self._guards.get(key)
            if guarded is not None and guarded[1] == guard:
                del self._guards[key]

        def ask() -> None:
            handle = session.handle
            assert handle is not None
            if not handle.attached:
                return
            machine = session.reign.subscription.dispatcher
            takes = getattr(machine, "takes_negative_acks", None)
            if takes is not None and takes(handle.machine, positions):
                session.reign.on_negative_ack(session, positions, returned)
            else:
                self._deliveries.met("too many negative acks in order")
            try:
                handle.negative_ack(positions, returned)
            except OPERATING_ERRORS as error:
                self._world.trace.tell(self.name, "negative ack refused:", error)
            session.line.to_client(release)

        session.line.to_broker(ask)

    def _return(self, session: ConsumerSession, positions: list[Position]) -> None:
        """Ask for redelivery. A single-active type gets all unacknowledged entries."""
        if self._kind in SINGLE_ACTIVE:
            self._taken += sum(len(it.indexes) for it in self._held.values())
            self._held.clear()
        for position in positions:
            if position in self._held:
                self._taken += len(self._held.pop(position).indexes)

        def ask() -> None:
            handle = session.handle
            assert handle is not None
            if handle.attached:
                what = None if self._kind in SINGLE_ACTIVE else positions
                session.reign.on_return(session, what)
                handle.redeliver(what)

        session.line.to_broker(ask)


def _settle(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)
