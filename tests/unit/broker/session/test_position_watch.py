"""WatchPositions: the pushed changes, their times, and the sizes of updates."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState

from magnetar.broker.errors import NotAllowed, RequestRefused
from magnetar.broker.session import position_watch
from magnetar.broker.session.position_watch import PositionWatches
from magnetar.client.asyncio import Client
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.real_loop(deadline_s=60)

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)


class Watch:
    """A client that takes one message at a time."""

    def __init__(self, broker: RunningBroker, *topics: str, from_ledger: int = 0) -> None:
        asks = [pb.TopicAsk(topic=topic, from_ledger=from_ledger) for topic in topics]
        self.request = pb.WatchPositionsRequest(topics=asks)
        self.watches = PositionWatches(beat_s=0.1)
        self.broker = broker.broker
        self._sent: deque[pb.PositionsUpdate] = deque()
        self._more = asyncio.Event()

    async def run(self) -> None:
        await self.watches.serve(self.broker, self.request, self._send)

    async def _send(self, message: bytes) -> None:
        self._sent.append(pb.PositionsUpdate.FromString(message))
        self._more.set()

    async def next(self) -> pb.PositionsUpdate:
        while not self._sent:
            self._more.clear()
            await self._more.wait()
        return self._sent.popleft()

    async def settle(self) -> list[pb.PositionsUpdate]:
        """Return after two consecutive signs of life: the broker has then sent all changes. Returns
        the updates until then."""
        news, lives = [], 0
        while self._sent or lives < 2:
            update = await self.next()
            lives = 0 if update.topics else lives + 1
            news += [update] if update.topics else []
        return news

    async def topic(self) -> pb.TopicUpdate:
        """The update of one topic."""
        while not (topics := (await self.next()).topics):
            pass
        [update] = topics
        return update

    @property
    def is_quiet(self) -> bool:
        return not any(update.topics for update in self._sent)


@asynccontextmanager
async def watching(broker: RunningBroker, *topics: str) -> AsyncIterator[Watch]:
    watch = Watch(broker, *topics)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(watch.run())
        yield watch
        watch.watches.end_all()
        await serving


async def publish(client: Client, *values: bytes, topic: str = TOPIC) -> None:
    producer = await client.create_producer(topic)
    for value in values:
        await producer.send(value)
    await producer.close()


def entries(update: pb.TopicUpdate) -> list[int]:
    return [ledger.last_entry + 1 for ledger in update.plan.ledgers]


async def test_the_first_update_has_the_state_and_later_ones_only_changed_ledgers() -> None:
    async with running_broker(ClusterState()) as it, Client(it.grpc_url) as client:
        await client.subscribe(TOPIC, "keeps")
        await publish(client, b"1", b"2")
        log = (await it.broker.stored_topic(NAME, create=False)).log
        await log.roll()
        await publish(client, b"3")
        async with watching(it, TOPIC) as watch:
            first = await watch.topic()
            assert (entries(first), first.plan.next_index) == ([2, 1], 3)
            assert watch.is_quiet
            await publish(client, b"4")
            news = await watch.topic()
            assert (entries(news), news.plan.next_index) == ([2], 4)
            assert news.from_ledger == news.plan.ledgers[0].ledger == first.plan.ledgers[1].ledger
            assert news.first_ledger == first.plan.ledgers[0].ledger


async def test_a_trim_is_pushed() -> None:
    async with running_broker(ClusterState()) as it, Client(it.grpc_url) as client:
        await publish(client, b"1", b"2")
        async with watching(it, TOPIC) as watch:
            last = (await watch.topic()).plan.ledgers[0].ledger
            await (await it.broker.stored_topic(NAME, create=False)).truncate()
            while (news := await watch.topic()).plan.first_index == 0:
                pass
            assert news.first_ledger > last
            assert (news.plan.first_index, entries(news)) == (2, [])


async def test_a_watch_reports_a_topic_that_is_created_later_and_deleted() -> None:
    async with (
        running_broker(ClusterState()) as it,
        Client(it.grpc_url) as client,
        watching(it, TOPIC) as watch,
    ):
        assert not (await watch.topic()).plan.exists
        await publish(client, b"1")
        while (await watch.topic()).plan.next_index < 1:
            pass
        await it.broker.delete_topic(NAME, force=True)
        while (await watch.topic()).plan.exists:
            pass
        await publish(client, b"1")
        while (await watch.topic()).plan.next_index < 1:
            pass


async def test_all_ledgers_of_a_topic_that_is_created_again_are_sent() -> None:
    """Its ledgers may have smaller ids than those of the deleted topic: another broker may own it,
    with an older block of ids."""
    async with running_broker(ClusterState()) as it, Client(it.grpc_url) as client:
        await publish(client, b"1")
        async with watching(it, TOPIC) as watch:
            await watch.topic()
            await it.broker.delete_topic(NAME, force=True)
            await publish(client, b"1", b"2")
            while not (news := await watch.topic()).plan.ledgers:
                pass
            assert news.from_ledger == 0


async def test_an_unloaded_topic_stays_watched_without_being_opened() -> None:
    async with running_broker(ClusterState()) as it, Client(it.grpc_url) as client:
        await publish(client, b"1")
        async with watching(it, TOPIC) as watch:
            await watch.topic()
            await it.broker.unload_topic(NAME)
            await watch.settle()
            assert not it.broker.is_open(NAME)
            await publish(client, b"2")
            while (news := await watch.topic()).plan.next_index < 2:
                pass
            assert news.from_ledger > 0  # the same topic: only the changed ledgers


@pytest.mark.parametrize("open_then", [True, False])
async def test_a_topic_that_moves_is_reported_once(open_then: bool) -> None:
    cluster = ClusterState()
    async with (
        running_broker(cluster, 0) as one,
        running_broker(cluster, 1) as two,
        Client(one.grpc_url) as client,
    ):
        await publish(client, b"1")
        located = await one.broker.locate(NAME, authoritative=False)
        old, new = (one, two) if located.broker == one.registration else (two, one)
        async with watching(old, TOPIC) as watch, watching(new, TOPIC) as elsewhere:
            assert (await elsewhere.topic()).plan.owner_url == old.grpc_url
            await watch.topic()
            if not open_then:
                await old.broker.unload_topic(NAME)
                await watch.settle()
            await old.broker.unload_bundle(old.broker.policies.bundle_of(NAME))
            while (news := (await watch.topic()).plan).exists:
                pass
            assert news.owner_url == new.grpc_url or news.error
            await publish(client, b"2")
            assert await watch.settle() == []


async def test_an_idle_watch_sends_a_sign_of_life() -> None:
    async with running_broker(ClusterState()) as it, watching(it, TOPIC) as watch:
        await watch.topic()
        assert not (await watch.next()).topics


async def test_a_slow_client_gets_the_gathered_changes_in_one_message() -> None:
    async with running_broker(ClusterState()) as it, Client(it.grpc_url) as client:
        watch, may_go = Watch(it, TOPIC), asyncio.Event()
        sent: list[pb.PositionsUpdate] = []
        whole = asyncio.Event()

        async def send(message: bytes) -> None:
            sent.append(pb.PositionsUpdate.FromString(message))
            if sent[-1].topics[0].plan.next_index == 50:
                whole.set()
            await may_go.wait()

        async with asyncio.TaskGroup() as group:
            serving = group.create_task(watch.watches.serve(it.broker, watch.request, send))
            await publish(client, *[b"x"] * 50)
            assert len(sent) == 1
            may_go.set()
            await whole.wait()
            assert len(sent) < 5
            watch.watches.end_all()
            await serving


async def test_many_changed_topics_are_divided_among_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(position_watch, "NEWS_LEDGERS_MAX", 2)
    topics = [f"{TOPIC}-{number}" for number in range(5)]
    async with running_broker(ClusterState()) as it, Client(it.grpc_url) as client:
        for topic in topics:
            await publish(client, b"1", topic=topic)
        watch, may_go = Watch(it, *topics), asyncio.Event()
        sent: list[dict[int, int]] = []
        whole = asyncio.Event()

        async def send(message: bytes) -> None:
            news = pb.PositionsUpdate.FromString(message).topics
            sent.append({each.topic: each.plan.next_index for each in news})
            if {place for each in sent for place, index in each.items() if index == 2} == {
                *range(5)
            }:
                whole.set()
            await may_go.wait()

        async with asyncio.TaskGroup() as group:
            serving = group.create_task(watch.watches.serve(it.broker, watch.request, send))
            for topic in topics:
                await publish(client, b"2", topic=topic)
            may_go.set()
            await whole.wait()
            assert max(map(len, sent)) == 2
            watch.watches.end_all()
            await serving


async def test_too_many_topics_and_watches_are_refused() -> None:
    async with running_broker(ClusterState()) as it:
        with pytest.raises(NotAllowed, match="there are 1001, more than 1000"):
            await Watch(it, *[TOPIC] * 1_001).run()
        wide = Watch(it, *[f"{TOPIC}-{number}" for number in range(1_000)])
        watches = PositionWatches(watched_max=2_000)
        refusals = 0

        async def serve(asked: pb.WatchPositionsRequest) -> None:
            nonlocal refusals
            try:
                await watches.serve(it.broker, asked, _drop)
            except RequestRefused:
                refusals += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(serve(wide.request))
            await asyncio.sleep(0)
            watches.end_all()
        assert refusals == 1
        async with asyncio.TaskGroup() as group:
            for _ in range(position_watch.WATCHES_MAX):
                group.create_task(serve(pb.WatchPositionsRequest()))
            await asyncio.sleep(0)
            with pytest.raises(RequestRefused, match="the broker has 256 watches"):
                await watches.serve(it.broker, pb.WatchPositionsRequest(), _drop)
            watches.end_all()


async def _drop(_: bytes) -> None:
    """A client that takes all messages at once."""
