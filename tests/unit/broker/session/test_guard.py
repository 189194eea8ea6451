"""A bug in the work of one connection or topic ends that connection or topic, and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.place import Place, place
from fakes.wire import StreamWire, WireClient

from magnetar.broker.session.access import Accepted, AllowAll, Credentials, Outcome
from magnetar.broker.session.connection import Connection, Transport
from magnetar.broker.topic import live_delivery
from magnetar.broker.topic.live_subscription import LiveSubscription
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName
from magnetar.runtime.memory_stream import memory_stream_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from magnetar.broker.session.access import Permission, Resource
    from magnetar.runtime.frames import Buffer, FrameStream

TOPIC = "persistent://public/default/t"
BUGS = pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), AssertionError("a bug")])


class Broken:
    """Authentication with a bug: in the check of credentials, or only in the check of
    permissions."""

    def __init__(self, bug: Exception, *, grants_only: bool) -> None:
        self._bug = bug
        self._grants_only = grants_only

    def authenticate(self, credentials: Credentials) -> Outcome:
        if self._grants_only:
            return Accepted("role", self)
        raise self._bug

    def allow(self, permission: Permission, resource: Resource) -> bool:
        raise self._bug


@asynccontextmanager
async def broken(
    bug: Exception, caplog: pytest.LogCaptureFixture, *, grants_only: bool
) -> AsyncIterator[tuple[Place, WireClient]]:
    """A client whose connection has a bug. A witness with a producer and a consumer is served
    before and after it."""
    async with place() as here:
        witness = await here.client()
        await witness.produce(TOPIC)
        await witness.subscribe(TOPIC)
        here.endpoint.make_authenticator = lambda: Broken(bug, grants_only=grants_only)
        yield here, await here.client(connected=False)
        await here.serving[1]
        assert here.endpoint.failures == 1
        [record] = [it for it in caplog.records if "connection failed" in it.message]
        assert record.exc_info is not None
        assert record.exc_info[1] is bug
        await witness.publish("still served")
        await witness.expect(pb.CommandSendReceipt)
        await witness.flow(1)
        assert (await witness.message())[1] == ["still served"]
        here.endpoint.make_authenticator = AllowAll
        another = await here.client()
        assert isinstance(await another.produce(TOPIC), pb.CommandProducerSuccess)


@BUGS
async def test_a_bug_in_the_readers_step_ends_its_connection(
    bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with broken(bug, caplog, grants_only=False) as (_, client):
        await client.send(pb.CommandConnect(client_version="test"))
        assert await client.ended() == []


@BUGS
async def test_a_bug_in_a_request_ends_its_connection(
    bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with broken(bug, caplog, grants_only=True) as (here, client):
        await client.connect()
        await client.send(pb.CommandProducer(topic=TOPIC, producer_id=1, request_id=1))
        assert await client.ended() == []
        assert here.connections[1]._session.producers.keys() == {1}, "the handler has begun"


async def test_requests_concurrent_with_a_failed_one_are_cancelled_without_a_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first request waits for bookies while the second one fails."""
    slow = "persistent://public/default/slow"

    class OnlySlow(Broken):
        def allow(self, permission: Permission, resource: Resource) -> bool:
            return str(resource) == slow or super().allow(permission, resource)

    bug = ZeroDivisionError("a bug")
    async with place() as here:
        here.endpoint.make_authenticator = lambda: OnlySlow(bug, grants_only=True)
        client = await here.client()
        here.ledgers.bookies = False
        bodies = [
            pb.CommandProducer(topic=name, producer_id=number, request_id=number)
            for number, name in enumerate((slow, TOPIC))
        ]
        await client.wire.send(b"".join(map(framing.encode_command, bodies)))
        assert await client.ended() == []
        here.ledgers.bookies = True
        await here.serving[0]
        assert here.endpoint.failures == 1
        for topic in here.broker.topics:
            assert topic.producers == {}


async def test_a_bug_in_a_queued_delivery_closes_the_non_persistent_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker notes the failure and tells the clients. The next request opens the topic."""
    monkeypatch.setattr(live_delivery, "SUBSCRIPTIONS_PER_STEP", 1)
    name = TopicName.parse("non-persistent://public/default/t")
    async with place() as here:
        client, witness = await here.client(), await here.client()
        await witness.produce(TOPIC)
        await client.produce(str(name))
        await client.subscribe(str(name), "a", 1)
        await client.subscribe(str(name), "b", 2)
        with monkeypatch.context() as broken:
            broken.setattr(LiveSubscription, "on_published", _fail)
            await client.publish()
            await client.expect(pb.CommandSendReceipt)
            told = [(await client.receive()).body for _ in range(3)]
        closed = {type(body).__name__: body for body in told}
        assert closed.keys() == {"CommandCloseProducer", "CommandCloseConsumer"}
        now = asyncio.get_running_loop().time()
        [failure] = here.broker.quarantine.failures_of(name, now)
        assert "ZeroDivisionError" in failure
        await client.produce(str(name), 2)
        await client.subscribe(str(name), "a", 3)
        await client.flow(1, 3)
        await client.publish("served again", producer_id=2)
        await client.expect(pb.CommandSendReceipt)
        assert (await client.message())[1] == ["served again"]
        await witness.publish("still served")
        await witness.expect(pb.CommandSendReceipt)


def _fail(*_: object) -> None:
    raise ZeroDivisionError("a bug")


class FailingStream:
    """A stream whose `send` has a bug."""

    def __init__(self, stream: FrameStream) -> None:
        self.peer = stream.peer
        self.receive = stream.receive
        self.close = stream.close

    async def send(self, parts: Sequence[Buffer]) -> None:
        raise ZeroDivisionError("a bug")


async def test_a_bug_in_the_writer_ends_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with place() as here:
        ours, theirs = memory_stream_pair("client", "broker", frames_max=2)
        connection = Connection(FailingStream(theirs), here.endpoint, Transport.GRPC)

        async def break_off() -> None:
            ours.abort("the client died")

        client = WireClient(StreamWire(ours, break_off))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(connection.run())
            await client.send(pb.CommandConnect(client_version="test"))
            assert await client.ended() == []
        assert here.endpoint.failures == 1
        assert "connection failed" in caplog.text
