"""The admission of producers to a topic: names, access modes, the queue for exclusive access.

A *connected* producer publishes. A *waiting* one asked for exclusive access (WaitForExclusive)
while other producers were connected. When the last of these leaves, the first of the queue takes
their place. The topic's epoch rises with each new exclusive producer, and is durable before that
producer learns of it. So a former exclusive producer that returns is recognised and fenced.

A producer, connected or waiting, that blocks a new one is probed first. If its client does not
answer, the producer is evicted and the new producer is admitted. If the new producer is the same
one after a reconnect, the former one is evicted without a probe.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import (
    BrokerError,
    NotAllowed,
    ProducerBusy,
    ProducerFenced,
    TopicClosing,
)
from magnetar.broker.topic.contract import AccessMode, CloseReason
from magnetar.broker.topic.holding import Holding
from magnetar.broker.topic.producer import ProducerHandle, ProducerState
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from magnetar.broker.errors import LogError
    from magnetar.broker.log.log import Log
    from magnetar.broker.policies.source import PolicySource
    from magnetar.broker.topic.contract import ProducerEvents, ProducerRequest
    from magnetar.broker.topic.disconnector import Disconnector
    from magnetar.broker.topic.pipeline import Pipeline
    from magnetar.runtime.turns import Turns

EPOCH_PROPERTY: Final = "topic-epoch"
"""The property of the topic's record with the epoch of the last exclusive producer."""

BROUGHT_EPOCH_MAX: Final = 1 << 62
"""The highest epoch that a producer may bring. As in Pulsar, a producer may bring an epoch that is
higher than the topic's, because the topic's record may be an old copy that was restored. The limit
leaves room for the next producers: epochs have 64 bits, and each new epoch is higher by one."""

WAITING_MAX: Final = 1_000
"""The limit of producers that wait for exclusive access to one topic. Further ones get
ProducerBusy."""

log = get_logger(__name__)


class ProducerNames:
    """Makes names for producers that bring none. No name is given twice in the cluster: `prefix` is
    unique to this process (cluster, broker and incarnation)."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0

    def next(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"


class ProducerAdmission:
    """The producers of one topic."""

    __slots__ = (
        "_disconnector",
        "_epoch_asked",
        "_exceeds_rate",
        "_is_resuming",
        "_last_sequence_id",
        "_log",
        "_log_failed",
        "_names",
        "_pipeline",
        "_policies",
        "_require_open",
        "_spawn",
        "_time_stamp",
        "_topic",
        "_turns",
        "connected",
        "holding",
        "waiting",
    )

    def __init__(
        self,
        topic: str,
        topic_log: Log,
        pipeline: Pipeline,
        policies: PolicySource,
        names: ProducerNames,
        *,
        time_stamp: Callable[[], str],
        require_open: Callable[[], None],
        log_failed: Callable[[LogError], None],
        exceeds_rate: Callable[[], bool],
        last_sequence_id: Callable[[str], int],
        spawn: Callable[[Coroutine[None, None, None]], object],
        disconnector: Disconnector,
        turns: Turns,
    ) -> None:
        self.connected: dict[str, ProducerHandle] = {}
        self.waiting: dict[str, ProducerHandle] = {}  # the waiting producers in FIFO order
        self.holding = Holding(exceeds_rate)
        self._is_resuming = False  # True: a task continues what `resume` began
        self._epoch_asked = -1  # the highest epoch whose write has begun; -1: no write has begun
        self._topic = topic
        self._log = topic_log
        self._pipeline = pipeline
        self._policies = policies
        self._names = names
        self._time_stamp = time_stamp
        self._require_open = require_open
        self._log_failed = log_failed
        self._exceeds_rate = exceeds_rate
        self._last_sequence_id = last_sequence_id
        self._spawn = spawn
        self._disconnector = disconnector
        self._turns = turns

    @property
    def epoch(self) -> int:
        """The epoch of the last exclusive producer; -1: there was none."""
        return int(self._log.properties.get(EPOCH_PROPERTY, "-1"))

    async def add(self, request: ProducerRequest, events: ProducerEvents) -> ProducerHandle:
        """Admit a producer, or put it into the queue. Raises the errors of `Topic.add_producer`."""
        while True:
            self._require_open()
            self._log.require_capacity()
            self._require_epoch(request)
            if request.access_mode is AccessMode.EXCLUSIVE_WITH_FENCING:
                await self._fence_all(request.name)
                self._require_epoch(request)  # another producer may have become exclusive meanwhile
                break
            in_the_way = self._in_the_way(request)
            if in_the_way is None:
                break
            if not self._succeeds(request, in_the_way) and await in_the_way.events.probe():
                self._require_open()
                if not self._is_here(in_the_way):
                    continue  # it has left during the probe
                if self._may_wait(request, in_the_way):
                    return self._enqueue(request, events)
                raise self._refusal(request, in_the_way)
            in_the_way.evict(CloseReason.REPLACED)
        self._require_room(request)
        handle = self._new_producer(request, events, self.connected)
        if handle.exclusive:
            try:
                await self._grant_epoch(handle)
            except BaseException:
                handle.close_nowait()
                raise
        return handle

    def stop(self) -> list[ProducerHandle]:
        """Drop all later publishes of all producers, and those that they hold. Returns the
        producers, which the caller must evict. The waiting ones are first, so that the topic
        promotes none of them."""
        for handle in self.connected.values():
            handle.stop_taking()
        self.holding.clear()
        return [*self.waiting.values(), *self.connected.values()]

    def disconnect_all(self, reason: CloseReason) -> None:
        """Stop all producers, and begin to disconnect them."""
        self._disconnector.start(self.stop(), lambda handle: handle.evict(reason))

    def resume(self, now: float) -> None:
        """Let the producers that hold publishes continue: the outcome of a publish is known, or the
        publish rate admits more."""
        if self.holding and not self._is_resuming and self.holding.resume(now):
            self._is_resuming = True
            self._spawn(self._resume_rest())

    async def _resume_rest(self) -> None:
        more = True
        try:
            while more:
                await self._turns.take()
                more = self.holding.resume(asyncio.get_running_loop().time())
        finally:
            self._is_resuming = False

    # ---- conflicting producers -------------------------------------------------------------------

    def _in_the_way(self, request: ProducerRequest) -> ProducerHandle | None:
        """A producer that blocks the new one. None: the new one is admitted."""
        namesake = self.connected.get(request.name) or self.waiting.get(request.name)
        if namesake is not None:
            return namesake
        alone = request.access_mode is not AccessMode.SHARED
        first = next(iter(self.connected.values()), None)  # an exclusive one is alone
        if first is not None and (first.exclusive or alone):
            return first
        return next(iter(self.waiting.values()), None)

    @staticmethod
    def _succeeds(request: ProducerRequest, old: ProducerHandle) -> bool:
        """Returns True when the request is from the same producer after a reconnect, and the broker
        has not seen the end of the old connection yet."""
        return (
            old.name == request.name
            and not old.request.user_provided_name
            and not request.user_provided_name
            and old.request.producer_id == request.producer_id
            and old.request.epoch < request.epoch
        )

    def _may_wait(self, request: ProducerRequest, other: ProducerHandle) -> bool:
        waits = request.access_mode is AccessMode.WAIT_FOR_EXCLUSIVE
        return waits and other.name != request.name

    def _refusal(self, request: ProducerRequest, other: ProducerHandle) -> BrokerError:
        if other.name == request.name:
            return ProducerBusy(self._topic, request.name, "the name is in use")
        if request.access_mode is AccessMode.EXCLUSIVE:
            return ProducerFenced(self._topic, request.name, f"{other.name!r} is connected")
        if other.request.access_mode is AccessMode.EXCLUSIVE_WITH_FENCING and request.epoch > 0:
            why = f"{other.name!r} has fenced the producers before it"
            return ProducerFenced(self._topic, request.name, why)
        what = "waits for exclusive access" if other.is_waiting else "is exclusive"
        return ProducerBusy(self._topic, request.name, f"{other.name!r} {what}")

    def _require_epoch(self, request: ProducerRequest) -> None:
        """Check the epoch that a returning exclusive producer brings. Raises ProducerFenced if the
        topic has had another exclusive producer since, and NotAllowed if the epoch is too high."""
        brought, current = request.topic_epoch, self.epoch
        if brought is None or request.access_mode is AccessMode.SHARED:
            return
        if brought < current:
            why = f"its epoch is {brought}, but the topic has reached epoch {current} since"
            raise ProducerFenced(self._topic, request.name, why)
        if brought > max(current, BROUGHT_EPOCH_MAX):
            raise NotAllowed(f"topic epoch {brought}", "the broker gave it to no producer")

    def _require_room(self, request: ProducerRequest) -> None:
        limit = self._policies.effective.producers_max
        count = len(self.connected) + len(self.waiting)
        if limit and count >= limit:
            why = f"the topic has {count} producers, and max_producers_per_topic allows {limit}"
            raise ProducerBusy(self._topic, request.name, why)

    async def _fence_all(self, by: str) -> None:
        """The producer named `by` fences all other producers, also those that connect during the
        call. Raises as `_require_open`."""
        while self.waiting or self.connected:
            await self._disconnector.run(self.stop(), lambda handle: self._fence(handle, by))
            self._require_open()

    def _fence(self, handle: ProducerHandle, by: str) -> None:
        if self.waiting.get(handle.name) is handle:
            self._refuse_waiting(handle, ProducerFenced(self._topic, handle.name, "it was fenced"))
            self._on_left(handle)
        elif self._is_here(handle):
            log.info("producer fenced", topic=self._topic, producer=handle.name, by=by)
            handle.evict(CloseReason.FENCED)

    def _is_here(self, handle: ProducerHandle) -> bool:
        """Returns True when the producer is connected or waits."""
        name = handle.name
        return self.connected.get(name) is handle or self.waiting.get(name) is handle

    # ---- coming and going ------------------------------------------------------------------------

    def _new_producer(
        self, request: ProducerRequest, events: ProducerEvents, among: dict[str, ProducerHandle]
    ) -> ProducerHandle:
        # A client that reconnects brings the name that the broker made for it.
        name = request.name or self._free_name()
        assert name not in self.connected
        assert name not in self.waiting
        handle = ProducerHandle(
            request,
            name,
            events,
            self._log,
            self._pipeline,
            self.holding,
            connected_since=self._time_stamp(),
            leave=self._on_left,
            log_failed=self._log_failed,
            exceeds_rate=self._exceeds_rate,
            now=asyncio.get_running_loop().time(),
        )
        handle.last_sequence_id = self._last_sequence_id(name)
        among[name] = handle
        return handle

    def _free_name(self) -> str:
        """A new name. The next name may be in use, because clients may bring any name. It may also
        have stored sequence ids of an earlier producer."""
        while True:
            name = self._names.next()
            in_use = name in self.connected or name in self.waiting
            if not in_use and self._last_sequence_id(name) < 0:
                return name

    def _enqueue(self, request: ProducerRequest, events: ProducerEvents) -> ProducerHandle:
        if len(self.waiting) >= WAITING_MAX:
            why = f"{WAITING_MAX} producers wait for exclusive access"
            raise ProducerBusy(self._topic, request.name, why)
        self._require_room(request)
        handle = self._new_producer(request, events, self.waiting)
        handle.state = ProducerState.WAITING
        return handle

    def _on_left(self, handle: ProducerHandle) -> None:
        """A producer has ended."""
        if self.waiting.get(handle.name) is handle:
            del self.waiting[handle.name]
            return
        assert self.connected[handle.name] is handle, "it has left already"
        del self.connected[handle.name]
        self.resume(asyncio.get_running_loop().time())
        if self.waiting and not self.connected:
            name, first = next(iter(self.waiting.items()))
            del self.waiting[name]
            self.connected[name] = first  # the first producer blocks others from now on
            self._spawn(self._promote(first))

    async def _promote(self, handle: ProducerHandle) -> None:
        """The first producer of the queue becomes exclusive."""
        try:
            self._require_open()
            self._require_epoch(handle.request)
            await self._grant_epoch(handle)
            self._require_open()
        except BrokerError as error:
            if handle.state is ProducerState.WAITING:
                self._refuse_waiting(handle, error)
                self._on_left(handle)
            return
        handle.state = ProducerState.OPEN
        handle.last_sequence_id = self._last_sequence_id(handle.name)
        handle.events.ready(handle)

    def _refuse_waiting(self, handle: ProducerHandle, error: BrokerError) -> None:
        handle.end()
        handle.events.refused(error)

    async def _grant_epoch(self, handle: ProducerHandle) -> None:
        """A new exclusive producer gets the next epoch; a returning one keeps its own. The epoch is
        durable before the producer knows it.

        A write of a higher epoch may be in flight, or its reply may be lost. The producer of that
        write has left, and knows no epoch. A returning producer then gets the epoch of that write.
        With its own epoch, it would be fenced later, although no other producer was exclusive."""
        current, brought = self.epoch, handle.request.topic_epoch
        reached = max(current, self._epoch_asked)
        epoch = reached + 1 if brought is None else max(brought, reached)
        if epoch != current:
            self._epoch_asked = epoch
            await self._log.set_property(EPOCH_PROPERTY, str(epoch))
        if handle.state not in (ProducerState.OPEN, ProducerState.WAITING):
            # The producer failed meanwhile, was fenced, or is closing.
            raise TopicClosing(self._topic)
        handle.topic_epoch = epoch
