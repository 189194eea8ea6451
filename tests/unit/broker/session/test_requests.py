"""Limits of requests of gRPC calls before the broker has authenticated the client."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.place import place

from magnetar.broker.errors import RequestRefused
from magnetar.broker.session.connection import Connection, Transport
from magnetar.broker.session.grpc import SERVICE
from magnetar.broker.session.limits import (
    REQUEST_BYTES_MAX,
    REQUEST_FAIR_S,
    REQUEST_FIELDS_MAX,
    REQUESTS_BYTES_MAX,
    REQUESTS_READ_MAX,
    Requests,
)
from magnetar.broker.session.topic_ranges import TOPICS_MAX
from magnetar.protos import broker_pb2, framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.field_count import has_more_fields
from magnetar.runtime.errors import CallFailed, StreamClosed
from magnetar.runtime.grpc_frames import call_unary, open_channel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.runtime.frames import Buffer


async def answered(request: bytes) -> bytes:
    return request


async def never(started: list[object]) -> bytes:
    started.append(None)
    await asyncio.Event().wait()
    raise AssertionError


async def test_requests_that_never_end_hold_the_gate_until_others_wait() -> None:
    requests, started = Requests(), list[object]()

    async def slow() -> None:
        with pytest.raises(RequestRefused, match=r"took longer than 0\.25 s"):
            async with requests.hold(partial(never, started)):
                raise AssertionError

    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(slow()) for _ in range(REQUESTS_READ_MAX + 8)]
        await asyncio.sleep(REQUEST_FAIR_S / 2)
        assert len(started) == REQUESTS_READ_MAX
        began = asyncio.get_running_loop().time()
        async with requests.hold(partial(answered, b"honest")) as request:
            assert request == b"honest"
        assert asyncio.get_running_loop().time() - began < 2 * REQUEST_FAIR_S
        assert len(started) == REQUESTS_READ_MAX + 8
        for task in waiting:
            task.cancel()


async def test_a_slow_request_that_ends_slowly_is_refused_once() -> None:
    requests, started = Requests(), list[object]()

    async def read() -> bytes:
        try:
            return await never(started)
        finally:
            await asyncio.sleep(REQUEST_FAIR_S)

    async def slow() -> None:
        with pytest.raises(RequestRefused, match=r"took longer than 0\.25 s"):
            async with requests.hold(read):
                raise AssertionError

    async with asyncio.TaskGroup() as group:
        for _ in range(REQUESTS_READ_MAX):
            group.create_task(slow())
        await asyncio.sleep(REQUEST_FAIR_S / 2)
        assert len(started) == REQUESTS_READ_MAX
        async with requests.hold(partial(answered, b"honest")) as request:
            assert request == b"honest"


async def test_the_bytes_of_requests_that_are_being_answered_are_bounded() -> None:
    requests, end = Requests(), asyncio.Event()
    largest = bytes(REQUEST_BYTES_MAX)

    async def handle() -> None:
        async with requests.hold(partial(answered, largest)):
            await end.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(REQUESTS_BYTES_MAX // REQUEST_BYTES_MAX):
            group.create_task(handle())
        await asyncio.sleep(1)
        with pytest.raises(RequestRefused, match="are being answered"):
            async with requests.hold(partial(answered, b"x")):
                raise AssertionError
        end.set()
    async with requests.hold(partial(answered, b"x")):
        pass


@pytest.mark.real_loop
async def test_a_request_of_frame_size_is_refused_and_an_honest_one_answered() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        open_channel(broker.grpc_url.removeprefix("grpc://")) as channel,
    ):
        method = f"/{SERVICE}/PlanRange"
        with pytest.raises(CallFailed, match="at most 2097152 are allowed"):
            await call_unary(channel, method, bytes(REQUEST_BYTES_MAX + 1))
        topic = "persistent://public/default/none"
        asked = broker_pb2.PlanRangeRequest(topic=topic).SerializeToString()
        reply = broker_pb2.PlanRangeReply.FromString(await call_unary(channel, method, asked))
        assert not reply.exists


@pytest.mark.real_loop
@pytest.mark.parametrize(
    ("method", "field"),
    [
        ("PlanTopics", b"\x0a\x00"),
        ("WatchPositions", b"\x0a\x00"),
        ("FindTopics", b"\x0a\x00"),
        ("WatchTopics", b"\x0a\x00"),
        ("HoldTopics", b"\x22\x00"),
        ("NoteBatches", b"\x22\x00"),
    ],
)
async def test_a_request_of_a_million_topics_is_refused_without_parsing(
    method: str, field: bytes
) -> None:
    async with (
        running_broker(ClusterState()) as broker,
        open_channel(broker.grpc_url.removeprefix("grpc://")) as channel,
    ):
        request = field * (REQUEST_BYTES_MAX // len(field))
        with pytest.raises(CallFailed, match="more than 6000 fields"):
            await call_unary(channel, f"/{SERVICE}/{method}", request)


def test_the_largest_honest_request_has_few_enough_fields() -> None:
    place = broker_pb2.EntryPlace(ledger=2**62, entry=2**62)
    topics = [broker_pb2.TopicPlace(topic="t" * 1_024, place=place)] * TOPICS_MAX
    held = broker_pb2.HoldTopicsRequest(
        subscription="s", query="q", query_start_ms=2**62, topics=topics
    )
    asks = [broker_pb2.TopicAsk(topic="t", from_ledger=2**62, copies_of=[1])] * TOPICS_MAX
    for request in (held, broker_pb2.PlanTopicsRequest(topics=asks)):
        data = request.SerializeToString()
        assert len(data) < REQUEST_BYTES_MAX
        assert not has_more_fields(data, request.DESCRIPTOR, REQUEST_FIELDS_MAX)


class _Client:
    """Sends CONNECT and PING, each in a frame, and is silent until it is closed."""

    peer = "127.0.0.1:1"

    def __init__(self) -> None:
        self.frames: list[weakref.ref[memoryview]] = []
        self._closed = asyncio.Event()

    async def send(self, parts: Sequence[Buffer]) -> None:
        pass

    async def receive(self) -> memoryview:
        if len(self.frames) == 2:
            await self._closed.wait()
            raise StreamClosed("closed here", clean=True)
        body = pb.CommandPing() if self.frames else pb.CommandConnect(client_version="c")
        frame = memoryview(framing.encode_command(body))
        self.frames.append(weakref.ref(frame))
        return frame

    async def close(self) -> None:
        self._closed.set()


async def test_an_idle_connection_does_not_keep_its_last_frame() -> None:
    async with place() as here, asyncio.TaskGroup() as group:
        client = _Client()
        group.create_task(Connection(client, here.endpoint, Transport.GRPC).run())
        await asyncio.sleep(1)
        assert [frame() for frame in client.frames] == [None, None]
        await client.close()
