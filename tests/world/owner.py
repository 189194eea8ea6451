"""Brokers that own one topic in turn, or believe that they do, and the topic's clients.

An owner opens the real topic, as a broker does: log, cursors, sequence ids, and tombstones of the
topics before it. It serves for a while, trims, unloads the topic when it is idle, deletes it, or
just stops. No owner asks whether another one is serving: each takes the topic over.

The clients outlive the owners. A producer resends messages without a receipt, in order. A consumer
acknowledges most of its messages. A client ignores frames of a connection that it has left. Clients
do not return to an owner of an earlier epoch: a lookup names the last owner. Deliveries of a stale
owner before its first failed write are not checked.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from fakes.numbered import numbered
from fakes.policies import SettablePolicies
from fakes.topics import abandon
from world.lives import SUBSCRIPTIONS
from world.loop import until
from world.topic import QUICK, ToldLedgers

from magnetar.broker.cursor.cursors import Cursors
from magnetar.broker.cursor.journal import CursorConfig
from magnetar.broker.errors import LogDamaged, TopicDeleted, TopicNotFound
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.log import Log
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.log.sweep import OrphanSweep
from magnetar.broker.log.topic_deletion import TopicDeletions
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.broker.topic.contract import (
    ClientInfo,
    InitialPosition,
    ProducerRequest,
    SubscribeRequest,
    SubscriptionType,
)
from magnetar.broker.topic.deduplication import Deduplication, DeduplicationConfig
from magnetar.broker.topic.delayed_store import DelayedStore
from magnetar.broker.topic.environment import TopicEnvironment
from magnetar.broker.topic.producer_admission import ProducerNames
from magnetar.broker.topic.topic import PersistentTopic, TopicState
from magnetar.metadata.policies import UNLIMITED, Retention
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from world.cluster import World
    from world.nodes import ClientNode

    from magnetar.broker.dispatch.dispatcher import EntryDetail
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.contract import CloseReason, ReadyProducer
    from magnetar.broker.topic.producer import ProducerHandle
    from magnetar.broker.topic.protocol import Topic

NAME = TopicName.parse("persistent://public/default/lives")
CLIENT = ClientInfo("127.0.0.1:1", "world")
CURSORS = CursorConfig(
    gather_s=0.02, tail_bytes_min=200, ledger_bytes_max=600, ledger_entries_max=5
)
"""Cursor ledgers of five entries."""
IN_FLIGHT_MAX = 6  # the entries of one producer in flight
DRAIN_S = 90.0
SWEEP_S = 1.5


@dataclass
class Clients:
    """The clients of the topic and their state."""

    world: World
    deduplicates: bool
    retention_s: int
    producers: list[Producer] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)
    epoch: int = 0  # the epoch of the last owner that they found

    @classmethod
    def draw(cls, world: World) -> Clients:
        random = world.draw("clients")
        it = cls(world, random.random() < 0.7, random.choice((0, 0, 0, 3, UNLIMITED)))
        lives = world.oracle.logs.lives
        lives.deduplicates, lives.retention_s = it.deduplicates, it.retention_s
        it.producers = [Producer(world, f"p{number}") for number in range(random.randint(1, 2))]
        it.consumers = [Consumer(world, name) for name in SUBSCRIPTIONS]
        return it

    @property
    def everyone(self) -> list[Consumer | Producer]:
        return [*self.consumers, *self.producers]

    def policies(self, *, fresh: bool) -> SettablePolicies:
        """The policies that a broker knows. Until they are fresh, it may use a wrong retention."""
        kept = self.retention_s if fresh else 0
        policies = SettablePolicies(
            deduplication=self.deduplicates, retention=Retention(kept, UNLIMITED)
        )
        policies.is_fresh = fresh
        return policies

    def leave(self) -> None:
        """The clients ignore all connections from now on."""
        for client in self.everyone:
            client.session = None


class Session:
    """One connection. The client listens to its newest connection while the broker runs."""

    def __init__(self, owner: ClientNode, incarnation: str) -> None:
        self.incarnation = incarnation
        self.closed_by: CloseReason | None = None
        self._host = owner.host

    @property
    def alive(self) -> bool:
        return self._host.alive

    def closed(self, reason: CloseReason) -> None:
        self.closed_by = reason

    async def probe(self) -> bool:
        return False


class ProducerSession(Session):
    def __init__(self, owner: ClientNode, incarnation: str, producer: Producer) -> None:
        super().__init__(owner, incarnation)
        self._producer = producer
        self.refusals = 0

    def receipts(self, ledger: int, receipts: Iterable[tuple[int, int, int]]) -> None:
        for number, _, entry in receipts:
            if self.alive and self._producer.session is self:
                self._producer.on_receipt(number, Position(ledger, entry))

    def send_error(self, sequence_id: int, error: Exception) -> None:
        self.refusals += 1

    def ready(self, producer: ReadyProducer) -> None:
        raise AssertionError("a shared producer does not wait")

    def refused(self, error: Exception) -> None:
        raise AssertionError("a shared producer does not wait")


class Producer:
    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.session: ProducerSession | None = None
        self.unanswered: dict[int, None] = {}
        self._lives = world.oracle.logs.lives
        self._next = 0
        self._handle: ProducerHandle | None = None

    async def attach(self, topic: PersistentTopic, owner: ClientNode) -> None:
        """Connect, and resend messages without a receipt. Raises BrokerError."""
        self.session = session = ProducerSession(owner, topic.log.owned_record.incarnation, self)
        request = ProducerRequest(1, self.name, CLIENT)
        handle = await topic.add_producer(request, session)
        if self.session is session:
            self._handle = handle
            self._publish(list(self.unanswered))

    def send(self, count: int) -> None:
        numbers = range(self._next, self._next + min(count, IN_FLIGHT_MAX - len(self.unanswered)))
        self._next = numbers.stop if numbers else self._next
        self.unanswered.update(dict.fromkeys(numbers))
        self._publish(list(numbers))

    def on_receipt(self, number: int, position: Position) -> None:
        assert self.session is not None
        self.unanswered.pop(number, None)
        self._lives.on_receipt(self.session.incarnation, (self.name, number), position)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close_nowait()

    def _publish(self, numbers: list[int]) -> None:
        if numbers and self._handle is not None:
            sends = numbered(self.name, *numbers)
            self._handle.publish(sends, asyncio.get_running_loop().time())


class ConsumerSession(Session):
    def __init__(self, owner: ClientNode, incarnation: str, consumer: Consumer) -> None:
        super().__init__(owner, incarnation)
        self._consumer = consumer
        self.got: dict[Position, None] = {}  # the received positions that are not acknowledged yet
        self.last = EARLIEST

    @property
    def heard(self) -> bool:
        return self.alive and self._consumer.session is self

    def writable(self) -> bool:
        return True

    def deliver(self, entries: Sequence[StoredEntry], details: Mapping[int, EntryDetail]) -> None:
        for entry in entries:
            if self.heard:
                self._consumer.on_entry(self, entry)

    def reached_end(self) -> None: ...

    def active_changed(self, active: bool) -> None: ...


class Consumer:
    def __init__(self, world: World, subscription: str) -> None:
        self.subscription = subscription
        self.session: ConsumerSession | None = None
        self._oracle = world.oracle
        self._lives = world.oracle.logs.lives
        self._random = world.draw(f"consumer {subscription}")
        self._handle: ConsumerHandle | None = None

    async def attach(self, topic: PersistentTopic, owner: ClientNode) -> None:
        """Raises BrokerError."""
        self.session = session = ConsumerSession(owner, topic.log.owned_record.incarnation, self)
        request = SubscribeRequest(
            1,
            self.subscription,
            SubscriptionType.EXCLUSIVE,
            CLIENT,
            consumer_name="c",
            initial_position=InitialPosition.EARLIEST,
        )
        handle = await topic.subscribe(request, session)
        if self.session is session:
            self._handle = handle
            handle.flow(1_000)

    def on_entry(self, session: ConsumerSession, entry: StoredEntry) -> None:
        self._oracle.hold(
            entry.position > session.last,
            "ORDER",
            lambda: f"{entry.position} is delivered after {session.last}",
        )
        session.last = entry.position
        session.got[entry.position] = None
        message = entry.view.producer_name, entry.view.highest_sequence_id
        self._lives.on_delivery(session.incarnation, self.subscription, message, entry.position)

    def work(self, *, all_: bool = False) -> None:
        """Acknowledge some of the delivered messages."""
        session, handle = self.session, self._handle
        if session is None or handle is None or not session.heard or not session.got:
            return
        incarnation, name, lives = session.incarnation, self.subscription, self._lives
        if self._random.random() < 0.4 or all_:
            mark = list(session.got)[-1 if all_ else self._random.randrange(len(session.got))]
            for position in [each for each in session.got if each <= mark]:
                del session.got[position]
            lives.on_mark(incarnation, name, mark)

            def on_marked(error: BrokerError | None) -> None:
                if error is None and session.heard:
                    lives.on_mark_answer(incarnation, name, mark)

            handle.acknowledge_cumulative(mark, (), on_marked)
            return
        positions = [each for each in session.got if self._random.random() < 0.8]
        for position in positions:
            del session.got[position]
        if positions:
            lives.on_ack(incarnation, name, positions)

            def on_acked(error: BrokerError | None) -> None:
                if error is None and session.heard:
                    lives.on_answer(incarnation, name, positions)

            handle.acknowledge(positions, (), on_acked)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close_nowait()


class Owner:
    """Repeatedly takes the topic over and serves it for a while, until the world ends."""

    def __init__(self, client: ClientNode, clients: Clients, *, pause_s: float = 0.5) -> None:
        self.client = client
        self.clients = clients
        self.random = client.world.draw(f"{client.name} owns {client.starts}")
        self.pause_s = pause_s
        self._trace = client.world.trace

    def begin(self) -> None:
        self.client.host.spawn(self._run())

    async def _run(self) -> None:
        ledgers = ToldLedgers(await self.client.wait_running(), self.client)
        while True:
            await asyncio.sleep(self.random.expovariate(1 / self.pause_s))
            async with asyncio.TaskGroup() as tasks:
                await self._reign(ledgers, tasks)

    async def _reign(self, ledgers: ToldLedgers, tasks: asyncio.TaskGroup) -> None:
        topic: PersistentTopic | None = None
        try:
            fresh = self.random.random() < 0.6
            topic = await self.open(ledgers, tasks, fresh=fresh)
            self._trace.note(self.client.name, "serves", topic.log.owned_record.epoch, fresh)
            await self.attach(topic)
            await self._serve(topic)
            end = self.random.random()
            if end < 0.3:
                await self._delete(topic, ledgers)
            elif end < 0.6:
                await self._unload(topic)
        except OPERATING_ERRORS as error:
            self._trace.note(self.client.name, "serves no more", type(error).__name__)
            self._trace.tell(self.client.name, "  because", error)
            damaged = isinstance(error, LogDamaged)
            self.client.world.oracle.hold(not damaged, "I14", partial("{}".format, error))
        finally:
            if topic is not None:
                abandon(topic)

    async def open(
        self, ledgers: ToldLedgers, tasks: asyncio.TaskGroup, *, fresh: bool = True
    ) -> PersistentTopic:
        """Open or create the topic as `Broker._open_or_create` does, with both subscriptions.
        Raises `OPERATING_ERRORS`."""
        assert self.client.store is not None
        deletions = TopicDeletions(self.client.store, ledgers, self.client.clock)
        create, epoch, ledger_min, version = False, 0, 0, -1
        cache = EntryCache(20_000)
        while True:
            try:
                log = await Log.open(
                    NAME,
                    store=self.client.store,
                    ledgers=ledgers,
                    config=QUICK,
                    clock=self.client.clock,
                    cache=cache,
                    incarnation=f"{self.random.getrandbits(128):032x}",
                    create=create,
                    epoch_min=epoch,
                    ledger_min=ledger_min,
                    version_min=version,
                )
                break
            except TopicDeleted:
                await deletions.finish(NAME)
            except TopicNotFound:
                pass
            tombstone = await deletions.tombstone(NAME)
            create = True
            if tombstone is not None:
                epoch, ledger_min = tombstone.epoch, tombstone.ledger_min
                version = tombstone.version
        policies = self.clients.policies(fresh=fresh)
        cursors = await Cursors.open(log, CURSORS)
        config = DeduplicationConfig(entries_interval=7, interval_s=5.0)
        clock = self.client.clock
        environment = TopicEnvironment(
            store=self.client.store,
            ledgers=ledgers,
            log_config=QUICK,
            cache=cache,
            clock=clock,
            names=ProducerNames("world"),
            tasks=tasks,
            on_failed=self._on_failed,
        )
        topic = PersistentTopic(
            NAME,
            log,
            cursors,
            await Deduplication.open(log, cursors, policies, clock, config),
            await DelayedStore.open(log, cursors),
            environment,
            policies,
        )
        try:
            for name in SUBSCRIPTIONS:
                await topic.ensure_subscription(name, EARLIEST)
        except BaseException:
            abandon(topic)
            raise
        return topic

    async def attach(self, topic: PersistentTopic) -> None:
        """All clients connect here, except those that were at a later owner. Raises BrokerError."""
        epoch = topic.log.owned_record.epoch
        if epoch < self.clients.epoch:
            self._trace.fault(self.client.name, "stale owner serves on")
            return
        self.clients.epoch = epoch
        self.clients.leave()
        for client in self.clients.everyone:
            await client.attach(topic, self.client)

    def _on_failed(self, topic: Topic, error: BrokerError) -> None:
        self._trace.tell(self.client.name, "topic failed:", error)

    async def _serve(self, topic: PersistentTopic) -> None:
        random = self.random
        for _ in range(random.randint(1, 15)):
            for producer in self.clients.producers:
                if self._is_mine(producer.session, topic):
                    producer.send(random.randint(0, 4))
            await asyncio.sleep(random.expovariate(1 / 0.1))
            for consumer in self.clients.consumers:
                if self._is_mine(consumer.session, topic):
                    consumer.work()
            if topic.state is not TopicState.OPEN:
                return
            self._do_chores(topic)
            await topic.deduplication.visit(topic.producers)

    def _is_mine(self, session: Session | None, topic: PersistentTopic) -> bool:
        here = topic.log.owned_record.incarnation
        return (
            session is not None
            and session._host is self.client.host
            and (session.incarnation == here)
        )

    def _do_chores(self, topic: PersistentTopic) -> None:
        if self.random.random() < 0.3:
            topic.log.tend()
        if self.random.random() < 0.5:
            topic.trim()
        policies = topic.policies
        assert isinstance(policies, SettablePolicies)
        if not policies.is_fresh and self.random.random() < 0.3:
            policies.is_fresh = True
            policies.set(retention=Retention(self.clients.retention_s, UNLIMITED))

    async def _unload(self, topic: PersistentTopic) -> None:
        """Unload the topic as idle."""
        for client in self.clients.everyone:
            if self._is_mine(client.session, topic):
                client.close()
                client.session = None
        with suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                await until(lambda: topic.idle_since is not None)
        self._trace.fault(self.client.name, "idle topic unloaded")
        await topic.close()

    async def _delete(self, topic: PersistentTopic, ledgers: ToldLedgers) -> None:
        assert self.client.store is not None
        if topic.state is not TopicState.OPEN:
            return
        deletions = TopicDeletions(self.client.store, ledgers, self.client.clock)
        names = topic.begin_deletion(force=True)
        self._trace.fault(self.client.name, "topic deleted by its owner")
        try:
            await deletions.delete(topic.log.owned_record, brokers={}, clients=names)
        finally:
            topic.end_deletion()


class Sweeper:
    """Finishes deletions and deletes orphaned ledgers of any age."""

    def __init__(self, client: ClientNode) -> None:
        self.client = client

    def begin(self) -> None:
        self.client.clock.skew_ms = 40_000  # a deletion counts as stalled at once
        self.client.host.spawn(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except OPERATING_ERRORS as error:
                self.client.world.trace.tell(self.client.name, "swept nothing:", error)

    async def sweep(self) -> int:
        """Raises `OPERATING_ERRORS`."""
        ledgers = ToldLedgers(await self.client.wait_running(), self.client)
        store, clock = self.client.store, self.client.clock
        assert store is not None
        await TopicDeletions(store, ledgers, clock).sweep({})
        deleted = await OrphanSweep(store, ledgers, clock, grace_s=0.0).delete_all()
        if deleted:
            self.client.world.trace.fault(self.client.name, "orphaned ledger deleted", deleted)
        return deleted


async def judge_life(world: World, clients: Clients) -> None:
    """Open the topic a last time, let every subscription get its remaining messages, and sweep."""
    judge = world.add_client("life judge")
    ledgers = ToldLedgers(await judge.wait_running(), judge)
    owner = Owner(judge, clients)
    why = "the topic did not open"
    try:
        async with asyncio.timeout(DRAIN_S):
            while True:
                async with asyncio.TaskGroup() as tasks:
                    try:
                        topic = await owner.open(ledgers, tasks)
                    except OPERATING_ERRORS as error:
                        why = str(error)
                        await asyncio.sleep(0.5)
                        continue
                    await _drain(topic, owner)
                    await topic.close()
                    break
    except TimeoutError:
        raise world.oracle.broken("I18", f"the topic after the healing: {why}") from None
    record = topic.log.owned_record
    world.oracle.logs.lives.on_end(record.incarnation, topic.log.chain.records)
    await _judge_ledgers(world, judge, topic)
    judge.crash()


async def _drain(topic: PersistentTopic, owner: Owner) -> None:
    clients = owner.clients
    await owner.attach(topic)
    while True:
        await asyncio.sleep(0.1)
        for consumer in clients.consumers:
            consumer.work(all_=True)
        backlogs = [it.cursor.backlog_entries for it in topic.subscriptions.values()]
        if not any(producer.unanswered for producer in clients.producers) and not any(backlogs):
            return


async def _judge_ledgers(world: World, judge: ClientNode, topic: PersistentTopic) -> None:
    """LEAK: the sweeper leaves no ledger that the topic does not list, and bookies collect all."""
    judge.clock.skew_ms = 700_000  # tombstones are old enough
    sweeper = Sweeper(judge)
    for _ in range(2):  # the second sweep deletes ledgers that the first one must leave
        await sweeper.sweep()
    record = topic.log.owned_record.record
    listed = {part.ledger for part in record.ledgers}
    listed |= {*record.cursor_ledgers, *record.delayed_ledgers}
    listed.update(record.deleting)
    left = [
        ledger
        for ledger, life in world.oracle.lives.items()
        if life.versions and not life.deleted and life.versions[-1].custom.get("topic")
    ]
    leaked = sorted(set(left) - listed)
    world.oracle.hold(not leaked, "LEAK", lambda: f"{leaked} belong to no topic")
    tombstones = world.meta.tree.nodes.child_names("/deleted-topics")
    world.oracle.hold(not tombstones, "LEAK", lambda: "a tombstone stays")
