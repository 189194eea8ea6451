"""A topic on fake ledgers and a metadata store in memory, with the sessions of its clients."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from fakes.entries import entry_of, sends_of
from fakes.ledgers import FakeLedgers
from fakes.policies import SettablePolicies
from fakes.sessions import FakeConsumerSession, FakeProducerSession
from fakes.topic_log import SMALL, TOPIC, drawn_incarnation
from support import wait_until

from magnetar.broker.log.cache import EntryCache
from magnetar.broker.topic.contract import (
    AccessMode,
    ClientInfo,
    InitialPosition,
    ProducerRequest,
    SubscribeRequest,
    SubscriptionType,
)
from magnetar.broker.topic.environment import TopicEnvironment
from magnetar.broker.topic.producer_admission import ProducerNames
from magnetar.broker.topic.topic import PersistentTopic, TopicState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.cluster_state import ClusterState

    from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
    from magnetar.broker.dispatch.permits import Limits
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.key_shared_settings import KeySharedSettings
    from magnetar.broker.log.log import LogConfig
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.deduplication import DeduplicationConfig
    from magnetar.broker.topic.producer import ProducerHandle
    from magnetar.broker.topic.protocol import Topic
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.entry import EntryView

CLIENT = ClientInfo("127.0.0.1:1", "test")


def publish(handle: ProducerHandle, *views: EntryView, first: int) -> None:
    """Publish entries as one run, the first with this sequence id."""
    handle.publish(sends_of(*views, first=first), asyncio.get_running_loop().time())


class TopicRig:
    """An open topic. `failures` holds the errors that the topic reported to its broker."""

    def __init__(self, ledgers: FakeLedgers) -> None:
        self.topic: PersistentTopic
        self.ledgers = ledgers
        self.failures: list[BrokerError] = []
        # A test may publish before it subscribes: by default the messages are kept.
        self.policies = SettablePolicies()
        self._consumers = 0
        self._published = 0
        self._producer: tuple[ProducerHandle, FakeProducerSession] | None = None

    def on_failed(self, topic: Topic, error: BrokerError) -> None:
        assert topic is self.topic
        assert self.topic.state is TopicState.FAILED
        self.failures.append(error)

    async def produce(
        self,
        name: str = "",
        *,
        session: FakeProducerSession | None = None,
        mode: AccessMode = AccessMode.SHARED,
        topic_epoch: int | None = None,
        user_provided: bool = True,
        epoch: int = 0,
    ) -> tuple[ProducerHandle, FakeProducerSession]:
        session = session or FakeProducerSession()
        request = ProducerRequest(
            1,
            name,
            CLIENT,
            user_provided_name=user_provided,
            epoch=epoch,
            access_mode=mode,
            topic_epoch=topic_epoch,
        )
        return await self.topic.add_producer(request, session), session

    async def publish(self, *texts: str, batches: bool = False, time_ms: int = 0) -> list[Position]:
        """One message for each text (of a batch: its words); returns when they are durable."""
        return await self.publish_entries(
            *[
                entry_of(
                    *(text.split() if batches else [text]),
                    publish_time_ms=time_ms or 1_700_000_000_000,
                )
                for text in texts
            ]
        )

    async def publish_entries(self, *views: EntryView) -> list[Position]:
        """Publish entries one by one; returns when they are durable."""
        if self._producer is None:
            self._producer = await self.produce("publisher")
        handle, session = self._producer
        before = len(session.answers)
        for view in views:
            publish(handle, view, first=self._published)
            self._published += 1
        await wait_until(lambda: len(session.answers) == before + len(views), what="receipts")
        positions = [answer for _, answer in session.answers[before:]]
        assert not any(isinstance(position, Exception) for position in positions)
        return positions  # type: ignore[return-value]

    async def subscribe(
        self,
        name: str = "s",
        *,
        kind: SubscriptionType = SubscriptionType.EXCLUSIVE,
        session: FakeConsumerSession | None = None,
        permits: int = 1_000,
        durable: bool = True,
        start: Position | None = None,
        initial: InitialPosition = InitialPosition.EARLIEST,
        priority: int = 0,
        rollback_s: int = 0,
        compacted: bool = False,
        policy: KeySharedPolicy | None = None,
    ) -> tuple[ConsumerHandle, FakeConsumerSession]:
        session = session or FakeConsumerSession()
        self._consumers += 1
        request = SubscribeRequest(
            self._consumers,
            name,
            kind,
            CLIENT,
            consumer_name=f"c{self._consumers}",
            durable=durable,
            initial_position=initial,
            start=start,
            start_rollback_s=rollback_s,
            priority=priority,
            read_compacted=compacted,
            key_shared=policy,
        )
        handle = await self.topic.subscribe(request, session)
        if permits:
            handle.flow(permits)
        return handle, session


@contextlib.asynccontextmanager
async def opened_topic(
    world: ClusterState,
    *,
    config: LogConfig = SMALL,
    limits: Limits | None = None,
    policies: SettablePolicies | None = None,
    cache_bytes: int = 1 << 20,
    store: MetadataStore | None = None,
    deduplication: DeduplicationConfig | None = None,
    ledgers: FakeLedgers | None = None,
    key_shared: KeySharedSettings | None = None,
    close: bool = True,
) -> AsyncIterator[TopicRig]:
    """A broker that serves the topic. `close=False`: the broker dies at the end instead of closing
    the topic."""
    it = TopicRig(FakeLedgers(world.ledgers) if ledgers is None else ledgers)
    if policies is not None:
        it.policies = policies
    async with asyncio.TaskGroup() as tasks:
        environment = TopicEnvironment(
            store=store if store is not None else world.store(),
            ledgers=it.ledgers,
            log_config=config,
            cache=EntryCache(cache_bytes),
            clock=world.clock,
            names=ProducerNames("test-1"),
            tasks=tasks,
            on_failed=it.on_failed,
            limits=limits,
            deduplication=deduplication,
            key_shared=key_shared,
        )
        topic = it.topic = await PersistentTopic.open(
            TOPIC, environment, policies=it.policies, incarnation=drawn_incarnation()
        )
        try:
            yield it
            if close:
                await topic.close()
        finally:
            abandon(topic)


def abandon(topic: PersistentTopic) -> None:
    """Stop the topic as a broker's death does: its tasks end, and it writes nothing any more."""
    for subscription in topic.subscriptions.values():
        subscription._drop_dispatcher()
    topic.cursors.abandon()
    topic.delayed.abandon()
    topic.log.abandon()
