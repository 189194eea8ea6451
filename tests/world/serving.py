"""Brokers that serve one topic in turn, the producers of the topic, and the director that chooses
the broker.

The director stands for the ownership: it names the broker that should serve. A broker that is not
named any more either closes the topic (an unload), or serves on until its log is fenced (it was cut
off or stopped, and another broker took over). Clients go to the owner of the latest epoch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from fakes.policies import SettablePolicies
from fakes.topics import abandon
from world.consumers import Consumer
from world.deliveries import NAME, Deliveries, Reign
from world.loop import until
from world.owner import Producer
from world.topic import QUICK, ToldLedgers

from magnetar.broker.cursor.cursors import Cursors
from magnetar.broker.cursor.journal import CursorConfig
from magnetar.broker.dispatch.active import FailoverRules
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.errors import LogDamaged
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.log import Log
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.broker.topic.deduplication import Deduplication, DeduplicationConfig
from magnetar.broker.topic.delayed_store import DelayedStore, DelayedStoreConfig
from magnetar.broker.topic.environment import TopicEnvironment
from magnetar.broker.topic.producer_admission import ProducerNames
from magnetar.broker.topic.topic import PersistentTopic, TopicState
from magnetar.protos.entry import checksums_of, parse_entry
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch, encode_message
from magnetar.protos.names import TopicName
from magnetar.protos.sends import SendRun

if TYPE_CHECKING:
    from world.cluster import World
    from world.nodes import ClientNode

    from magnetar.broker.errors import BrokerError
    from magnetar.broker.topic.contract import SubscriptionType
    from magnetar.broker.topic.protocol import Topic

TOPIC = TopicName.parse("persistent://public/default/subscribed")
KEYS = tuple(f"key-{number}" for number in range(6))
LOG = replace(QUICK, ledger_entries_max=20)
CURSORS = CursorConfig(
    gather_s=0.02, tail_bytes_min=2_000, ledger_bytes_max=8_000, ledger_entries_max=40
)
DELAYED = DelayedStoreConfig(run_entries=3, garbage_bytes_min=200, close_entries_min=1)
"""Segments of three entries."""
BATCH_MAX = 3
SERVE_ON_S = 6.0  # a broker serves another broker's topic for this time, until its lease ends
DRAIN_S = 120.0


@dataclass
class Serving:
    """The time in which one broker serves the topic."""

    broker: ClientNode
    reign: Reign
    unload: bool = False  # the broker should close the topic


class Director:
    def __init__(
        self,
        world: World,
        brokers: list[ClientNode],
        kind: SubscriptionType,
        *,
        ordered: bool,
        relaxed_share: float,
    ) -> None:
        random = world.draw("director")
        self.world = world
        self.brokers = brokers
        self.deliveries = Deliveries(
            world, kind, ordered_nacks=ordered, relaxed_share=relaxed_share
        )
        self.line_delay_s = random.choice((0.001, 0.03))
        self.delays = random.random() < 0.5  # some messages are delayed
        self.batches = random.random() < 0.5
        self.limits = Limits(
            unacked_per_consumer=random.choice((12, 1_000)),
            unacked_per_subscription=random.choice((20, 1_000)),
            turn_messages=random.choice((1, 4)),
            read_entries=random.choice((3, 20)),
        )
        self.key_shared = KeySharedSettings(
            ring_points=random.choice((1, 10, 100)),
            look_ahead_per_consumer=random.choice((5, 100)),
            look_ahead_per_subscription=random.choice((10, 100)),
            withheld_max=random.choice((3, 100)),
            part_entries=2,  # a consumer that leaves mostly holds more
        )
        self.wanted = brokers[0]
        self.servings: list[Serving] = []
        self.producers = [KeyedProducer(self, f"p{number}") for number in range(2)]
        self.consumers: list[Consumer] = []
        self._joined = 0
        self._begun: dict[str, int] = {}  # keyed by broker: the number of the start

    def find(self) -> Serving | None:
        """The result of a lookup."""
        living = [it for it in self.servings if not it.reign.over and it.broker.alive]
        return max(living, key=lambda it: it.reign.epoch, default=None)

    def join(self) -> Consumer:
        """Start another consumer."""
        self._joined += 1
        consumer = Consumer(f"k{self._joined}", self)
        self.consumers.append(consumer)
        self.world.loop.create_task(consumer.run())
        return consumer

    def name_another(self, *, unload: bool) -> None:
        """Choose another broker. `unload`: the present broker closes the topic first."""
        others = [it for it in self.brokers if it is not self.wanted and it.alive]
        for serving in self.servings:
            if unload and serving.broker is self.wanted:
                serving.unload = True
        if others:
            self.wanted = self.world.random.choice(others)

    def begin(self, broker: ClientNode) -> None:
        """Serve the topic on a broker that has started, perhaps a while ago."""
        if self._begun.get(broker.name) != broker.starts:
            self._begun[broker.name] = broker.starts
            broker.host.spawn(self._run(broker))

    async def _run(self, broker: ClientNode) -> None:
        ledgers = ToldLedgers(await broker.wait_running(), broker)
        while True:
            await until(lambda: self.wanted is broker, every_s=0.05)
            async with asyncio.TaskGroup() as tasks:
                await self._serve(broker, ledgers, tasks)
            await asyncio.sleep(0.1)

    async def _serve(
        self, broker: ClientNode, ledgers: ToldLedgers, tasks: asyncio.TaskGroup
    ) -> None:
        topic: PersistentTopic | None = None
        serving: Serving | None = None
        trace = self.world.trace
        try:
            topic = await self._open(broker, ledgers, tasks)
            serving = Serving(broker, Reign(self.deliveries, topic))
            self.servings.append(serving)
            trace.note(broker.name, "serves", topic.log.owned_record.epoch)
            await self._until_over(serving, topic)
            if topic.state is TopicState.OPEN:
                trace.fault(broker.name, "topic with consumers unloaded")
                await topic.close()
        except OPERATING_ERRORS as error:
            trace.note(broker.name, "serves no more", type(error).__name__)
            trace.tell(broker.name, "  because", error)
            self.deliveries.hold(not isinstance(error, LogDamaged), "I14", "{}", error)
        finally:
            if serving is not None:
                serving.reign.on_end()
            if topic is not None:
                abandon(topic)

    async def _until_over(self, serving: Serving, topic: PersistentTopic) -> None:
        left_s: float | None = None
        while topic.state is TopicState.OPEN and not serving.unload:
            await asyncio.sleep(0.05)
            now = self.world.loop.time()
            if self.wanted is serving.broker:
                left_s = None
            elif left_s is None:
                left_s = now
            elif now > left_s + SERVE_ON_S:
                return
            if self.find() is serving:
                for producer in self.producers:
                    await producer.work(topic, serving.broker)

    async def _open(
        self, broker: ClientNode, ledgers: ToldLedgers, tasks: asyncio.TaskGroup
    ) -> PersistentTopic:
        """Open the topic as `PersistentTopic.open` does, with small cursor and delayed ledgers.
        Raises `OPERATING_ERRORS`."""
        assert broker.store is not None
        policies = SettablePolicies()
        random = self.world.draw(f"{broker.name} {broker.starts} {self.world.loop.time()}")
        environment = TopicEnvironment(
            store=broker.store,
            ledgers=ledgers,
            log_config=LOG,
            cache=EntryCache(random.choice((2_000, 20_000))),
            clock=broker.clock,
            names=ProducerNames("world"),
            tasks=tasks,
            on_failed=lambda topic, error: self._on_failed(broker, topic, error),
            limits=self.limits,
            failover=FailoverRules(delay_s=0.3),
            key_shared=self.key_shared,
        )
        log = await Log.open(
            TOPIC,
            store=environment.store,
            ledgers=ledgers,
            config=LOG,
            clock=broker.clock,
            cache=environment.cache,
            incarnation=f"{random.getrandbits(128):032x}",
        )
        cursors = await Cursors.open(log, CURSORS)
        delayed = await DelayedStore.open(log, cursors, DELAYED)
        config = DeduplicationConfig()
        restored = await Deduplication.open(log, cursors, policies, broker.clock, config)
        await log.owned_record.verify()
        topic = PersistentTopic(TOPIC, log, cursors, restored, delayed, environment, policies)
        try:
            await topic.ensure_subscription(NAME, EARLIEST)
        except BaseException:
            abandon(topic)
            raise
        return topic

    def _on_failed(self, broker: ClientNode, topic: Topic, error: BrokerError) -> None:
        self.world.trace.tell(broker.name, "topic failed:", error)

    # -- the end -----------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Check STUCK and LOST after all faults are healed. At least one broker runs."""
        self.wanted = next(broker for broker in self.brokers if broker.alive)
        self.consumers = [it for it in self.consumers if not it.gone]
        if all(it.leaves for it in self.consumers):
            self.join()
        for consumer in self.consumers:
            consumer.willing = True
        for producer in self.producers:
            producer.silent = True
        try:
            async with asyncio.timeout(DRAIN_S):
                await until(self._is_drained, every_s=0.1)
        except TimeoutError:
            raise self.world.oracle.broken("STUCK", self._describe()) from None
        self.deliveries.judge()

    def _is_drained(self) -> bool:
        serving = self.find()
        if serving is None or serving.broker is not self.wanted:
            return False
        topic = serving.reign.topic
        settled = topic.state is TopicState.OPEN and not any(it.unanswered for it in self.producers)
        return settled and not topic.subscriptions[NAME].cursor.backlog_entries

    def _describe(self) -> str:
        serving = self.find()
        if serving is None:
            return f"no broker serves the topic; {self.wanted.name} should"
        subscription = serving.reign.subscription
        reasons = [str(reason) for reason in subscription.explain()]
        left = {producer.name: list(producer.unanswered) for producer in self.producers}
        connected = [str(consumer) for consumer in self.consumers if consumer.connected]
        return (
            f"{serving.broker.name} serves, {self.wanted.name} should; {connected} are connected;"
            f" backlog {subscription.cursor.backlog_entries}; without receipt {left}; {reasons}"
        )


class KeyedProducer(Producer):
    """Sends messages and batches of one key, some of them delayed."""

    def __init__(self, director: Director, name: str) -> None:
        super().__init__(director.world, name)
        self.silent = False
        self._director = director
        self._world = director.world
        self._random = director.world.draw(f"producer {name}")
        self._made: dict[int, list[OutgoingMessage]] = {}  # keyed by number

    async def work(self, topic: PersistentTopic, broker: ClientNode) -> None:
        """Connect when the topic's broker is ready. Raises BrokerError."""
        session = self.session
        here = topic.log.owned_record.incarnation
        if session is None or session.incarnation != here or session.closed_by is not None:
            try:
                await self.attach(topic, broker)
            except OPERATING_ERRORS as error:
                self._world.trace.tell(self.name, "not attached:", error)
                self.session = None
        elif not self.silent and self._random.random() < 0.4:
            self.send(self._random.randint(1, 4))

    def on_receipt(self, number: int, position: Position) -> None:
        number //= BATCH_MAX
        self.unanswered.pop(number, None)
        self._director.deliveries.receipts[position] = len(self._made[number])

    def _publish(self, numbers: list[int]) -> None:
        if numbers and self._handle is not None:
            views = [parse_entry(self._entry(number)) for number in numbers]
            entries = [bytes(view.data) for view in views]
            sends = SendRun(
                1,
                sequence_ids=[number * BATCH_MAX for number in numbers],
                highest_sequence_ids=[0] * len(numbers),
                entries=entries,
                checksums=checksums_of(entries),
                views=dict(enumerate(views)),
            )
            self._handle.publish(sends, asyncio.get_running_loop().time())

    def _entry(self, number: int) -> bytes:
        messages = self._made.get(number)
        if messages is None:
            messages = self._made[number] = self._make(number)
        header = EntryHeader(self.name, 1_700_000_000_000)
        encode = encode_batch if len(messages) > 1 else None
        parts = encode(messages, header) if encode else encode_message(messages[0], header)
        return b"".join(parts)

    def _make(self, number: int) -> list[OutgoingMessage]:
        draw = Random(f"{self._world.seed} {self.name} {number}")
        key, first = draw.choice(KEYS), number * BATCH_MAX
        if self._director.delays and draw.random() < 0.3:
            due_ms = int(1_700_000_000_000 + self._world.loop.time() * 1_000)
            due_ms += draw.randint(500, 6_000)
            return [OutgoingMessage(b"d", first, partition_key=key, deliver_at_ms=due_ms)]
        count = draw.randint(1, BATCH_MAX) if self._director.batches else 1
        return [OutgoingMessage(b"m", first + at, partition_key=key) for at in range(count)]
