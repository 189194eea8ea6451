"""WatchTopics: the pushed topics, their times, and the number of topics in a message."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState
from support import wait_until

from magnetar.broker.errors import NotAllowed, RequestRefused
from magnetar.broker.session import topic_watch
from magnetar.broker.session.topic_watch import TopicWatches
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.errors import InvalidTopicName
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

pytestmark = pytest.mark.real_loop(deadline_s=60)

NAMESPACE = "public/default"
TOPIC = f"persistent://{NAMESPACE}/t"
NAME = TopicName.parse(TOPIC)


class Watch:
    """A client, and the topics that it knows."""

    def __init__(self, asked: pb.FindTopicsRequest, watches: TopicWatches) -> None:
        self.asked = asked
        self.watches = watches
        self.topics: set[str] = set()
        self.sent: deque[pb.TopicsUpdate] = deque()
        self._more = asyncio.Event()

    async def send(self, message: bytes) -> None:
        self.sent.append(pb.TopicsUpdate.FromString(message))
        self._more.set()

    async def next(self) -> pb.TopicsUpdate:
        while not self.sent:
            self._more.clear()
            await self._more.wait()
        update = self.sent.popleft()
        assert self.topics.isdisjoint(update.topics)
        assert self.topics.issuperset(update.gone)
        self.topics = (self.topics - set(update.gone)) | set(update.topics)
        return update

    async def knows(self, *topics: str) -> None:
        """Wait until the client knows exactly these topics."""
        while self.topics != set(topics):
            await self.next()


@asynccontextmanager
async def watching(
    broker: RunningBroker, topics: Sequence[str] = (), namespaces: Sequence[str] = ()
) -> AsyncIterator[Watch]:
    asked = pb.FindTopicsRequest(topics=topics, namespaces=namespaces)
    watch = Watch(asked, TopicWatches(beat_s=0.1))
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(watch.watches.serve(broker.broker, asked, watch.send))
        yield watch
        watch.watches.end_all()
        await serving


async def create(broker: RunningBroker, topic: str) -> None:
    await broker.broker.stored_topic(TopicName.parse(topic))


async def delete(broker: RunningBroker, topic: str) -> None:
    await broker.broker.delete_topic(TopicName.parse(topic), force=True)


async def test_topics_of_a_namespace_come_and_go_by_changes_of_any_broker() -> None:
    cluster = ClusterState()
    async with running_broker(cluster) as one, running_broker(cluster, 1) as other:
        first, second = NAME.with_partition(0), NAME.with_partition(1)
        partitioned = one.broker.catalog.partitioned
        await one.broker.create_partitioned_topic(NAME, 1, {})
        async with watching(other, namespaces=[NAMESPACE, NAMESPACE]) as watch:
            assert list((await watch.next()).topics) == [str(first)]
            await partitioned.grow(NAME, 2)
            await watch.knows(str(first), str(second))
            await partitioned.delete_untouched([first])
            await watch.knows(str(second))


async def test_a_watch_of_no_topics_gets_an_empty_list_and_then_signs_of_life() -> None:
    async with running_broker(ClusterState()) as it:
        for asked in ({"namespaces": [NAMESPACE]}, {"topics": [TOPIC]}):
            async with watching(it, **asked) as watch:
                for _ in range(3):
                    update = await watch.next()
                    assert (list(update.topics), list(update.gone), update.more) == ([], [], False)


async def test_a_watch_reports_the_partitions_of_a_named_topic_as_it_grows_and_is_deleted() -> None:
    async with running_broker(ClusterState()) as it:
        partitioned = it.broker.catalog.partitioned
        parts = [f"{TOPIC}-partition-{number}" for number in range(3)]
        async with watching(it, topics=[TOPIC, parts[0]]) as watch:
            await it.broker.create_partitioned_topic(NAME, 2, {})
            await watch.knows(*parts[:2])
            await partitioned.grow(NAME, 3)
            await watch.knows(*parts)
            # The other name is a partition of it, and exists as long as its record does.
            await partitioned.begin_deletion(NAME)
            await watch.knows(parts[0])


async def test_a_watch_reports_each_deletion_and_creation_of_a_named_topic() -> None:
    async with running_broker(ClusterState()) as it, watching(it, topics=[TOPIC]) as watch:
        for _ in range(2):
            await create(it, TOPIC)
            await watch.knows(TOPIC)
            await delete(it, TOPIC)
            await watch.knows()
        await it.broker.create_partitioned_topic(NAME, 1, {})
        await watch.knows(f"{TOPIC}-partition-0")


async def test_changes_are_gathered_for_a_client_that_does_not_read() -> None:
    async with running_broker(ClusterState()) as it:
        gate, asked = asyncio.Event(), pb.FindTopicsRequest(namespaces=[NAMESPACE])
        watch = Watch(asked, TopicWatches(beat_s=0.1))

        async def send(message: bytes) -> None:
            await watch.send(message)
            await gate.wait()

        async with asyncio.TaskGroup() as group:
            serving = group.create_task(watch.watches.serve(it.broker, asked, send))
            await watch.next()
            [running] = watch.watches._running
            await create(it, f"{TOPIC}-brief")
            await wait_until(lambda: list(running._added) == [f"{TOPIC}-brief"])
            await delete(it, f"{TOPIC}-brief")
            for number in range(50):
                await create(it, f"{TOPIC}-{number}")
            await wait_until(lambda: len(running._added) == 50 and f"{TOPIC}-49" in running._added)
            gate.set()
            update = await watch.next()
            assert sorted(update.topics) == sorted(f"{TOPIC}-{number}" for number in range(50))
            assert not update.gone
            watch.watches.end_all()
            await serving


async def test_many_topics_come_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_watch, "NAMES_PER_TURN", 2)
    async with running_broker(ClusterState()) as it:
        await it.broker.create_partitioned_topic(NAME, 5, {})
        async with watching(it, namespaces=[NAMESPACE]) as watch:
            updates = [await watch.next() for _ in range(3)]
            assert [(len(update.topics), update.more) for update in updates] == [
                (2, True),
                (2, True),
                (1, False),
            ]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (pb.FindTopicsRequest(topics=["a"] * 1_001), NotAllowed),
        (pb.FindTopicsRequest(topics=["a"], namespaces=[NAMESPACE]), NotAllowed),
        (pb.FindTopicsRequest(topics=["a", "b/c"]), InvalidTopicName),
        (pb.FindTopicsRequest(topics=["a", "non-persistent://public/default/b"]), NotAllowed),
        (pb.FindTopicsRequest(topics=[f"t{number}" for number in range(21)]), RequestRefused),
    ],
)
async def test_a_refused_request_leaves_no_watch(
    asked: pb.FindTopicsRequest, error: type[Exception]
) -> None:
    async with running_broker(ClusterState()) as it:
        watches, before = TopicWatches(named_max=20), it.store._watches.paths
        with pytest.raises(error):
            await watches.serve(it.broker, asked, lambda _: asyncio.sleep(0))
        assert not watches._running
        assert it.store._watches.paths == before


async def test_a_watch_that_ends_leaves_no_watch_in_the_metadata_store() -> None:
    async with running_broker(ClusterState()) as it:
        await it.broker.topics_of(NAME.namespace_name)
        before = set(it.store._watches.paths)
        async with watching(it, topics=[TOPIC]) as watch:
            await watch.next()
            assert set(it.store._watches.paths) > before
        async with watching(it, namespaces=[NAMESPACE]) as watch:
            await watch.next()
        assert set(it.store._watches.paths) == before
