"""Pulsar's TCP transport: frames from pieces of any size, and closes that do not need the peer."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from support import wait_until

from magnetar.broker.session.pulsar_tcp import (
    CLOSE_TIMEOUT_S,
    READ_AHEAD_BYTES,
    PulsarServer,
    PulsarTcpStream,
)
from magnetar.protos.framing import COMMAND_FRAME_BYTES_MAX
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.listener import bind_port, port_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from magnetar.runtime.frames import FrameStream

pytestmark = pytest.mark.real_loop


@asynccontextmanager
async def serving(
    handle: Callable[[FrameStream], Awaitable[None]],
) -> AsyncIterator[tuple[PulsarServer, int]]:
    server, listener = PulsarServer(handle), bind_port("127.0.0.1", 0)
    port = port_of(listener)
    async with asyncio.TaskGroup() as group:
        await server.start(listener, group)
        yield server, port
        await server.stop()


def frame(size: int) -> bytes:
    return struct.pack(">I", size) + bytes(number % 256 for number in range(size))


async def test_frames_are_whole_whatever_the_pieces() -> None:
    frames = [frame(size) for size in (0, 1, 10, 300_000, 4, COMMAND_FRAME_BYTES_MAX - 4)]
    got = bytearray()

    async def collect(stream: PulsarTcpStream) -> None:
        stream.on_connected()  # otherwise frames are small
        while len(got) < len(sent):
            received = await stream.receive()
            at = 0
            while at < len(received):  # `received` holds only whole frames
                at += 4 + struct.unpack_from(">I", received, at)[0]
            assert at == len(received)
            got.extend(received)

    sent = b"".join(frames)
    async with serving(collect) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in range(0, 400, 7):
            writer.write(sent[at : at + 7])
            await asyncio.sleep(0)
        writer.write(sent[at + 7 :])
        await wait_until(lambda: bytes(got) == sent)
        writer.close()


class FakeTransport(asyncio.Transport):
    """A transport that records if its protocol has paused the reads."""

    reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


async def test_bytes_for_a_busy_session_are_bounded_and_a_large_frame_is_still_gathered() -> None:
    transport, small, large = FakeTransport(), frame(1_000), frame(4 << 20)
    stream = PulsarTcpStream(lambda _: None)
    stream.connection_made(transport)
    stream.on_connected()
    took = 0
    while transport.reading:
        stream.data_received(small)
        took += len(small)
        assert took < READ_AHEAD_BYTES + 2 * len(small)
    assert took >= READ_AHEAD_BYTES
    assert len(await stream.receive()) == took
    assert transport.reading
    begun = READ_AHEAD_BYTES + 4  # no session knows yet that this is one frame
    stream.data_received(large[:begun])
    assert not transport.reading
    async with asyncio.TaskGroup() as group:
        receiving = group.create_task(stream.receive())
        for at in range(begun, len(large), 1 << 16):
            await asyncio.sleep(0)
            assert transport.reading, at
            stream.data_received(large[at : at + (1 << 16)])
    assert receiving.result() == large


async def test_a_frame_does_not_change_while_the_next_ones_arrive() -> None:
    stream = PulsarTcpStream(lambda _: None)
    stream.connection_made(FakeTransport())
    first, second = frame(10), frame(20)
    for data in (first[:3], first[3:] + second[:7]):
        stream.data_received(data)
    got = await stream.receive()
    stream.data_received(second[7:])
    assert await stream.receive() == second
    assert got == first
    assert got.readonly


@pytest.mark.parametrize(
    ("last", "clean", "reason"),
    [
        (b"", True, "between frames"),
        (frame(10)[:-1], False, "inside a frame"),
        (struct.pack(">I", COMMAND_FRAME_BYTES_MAX - 3), False, "exceeds the limit"),
    ],
    ids=["clean", "inside", "too large"],
)
async def test_the_error_says_how_a_stream_ended(last: bytes, clean: bool, reason: str) -> None:
    ends: list[StreamClosed] = []

    async def read(stream: FrameStream) -> None:
        try:
            while True:
                await stream.receive()
        except StreamClosed as end:
            ends.append(end)

    async with serving(read) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(frame(5) + last)
        writer.write_eof()
        await wait_until(lambda: ends)
        writer.close()
    assert ends[0].clean is clean
    assert reason in ends[0].reason


async def test_a_peer_that_does_not_read_cannot_keep_its_connection() -> None:
    """A close and a stop of the server end the connection, also with many such peers."""

    waiting: list[FrameStream] = []
    ended: list[StreamClosed] = []

    async def pour(stream: FrameStream) -> None:
        waiting.append(stream)
        try:
            while True:
                await stream.send([bytes(1 << 20)])
        except StreamClosed as end:
            ended.append(end)

    loop = asyncio.get_running_loop()
    clients = [socket.socket() for _ in range(15)]
    async with serving(pour) as (server, port):
        for client in clients:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
        await wait_until(lambda: len(waiting) == len(clients))
        began = loop.time()
        await waiting[0].close()
        await wait_until(lambda: len(ended) == 1)
        assert loop.time() - began < CLOSE_TIMEOUT_S + 10
        began = loop.time()
        await server.stop()
        await wait_until(lambda: len(ended) == len(clients))
        assert loop.time() - began < CLOSE_TIMEOUT_S * (len(clients) - 1), "one after the other"
    for client in clients:
        client.close()


async def test_a_peer_that_disconnects_at_once_ends_its_session_cleanly() -> None:
    seen: list[str] = []

    async def read(stream: FrameStream) -> None:
        try:
            await stream.receive()
        except StreamClosed as end:
            seen.append(end.reason)

    async with serving(read) as (_, port):
        for _ in range(20):
            client = socket.create_connection(("127.0.0.1", port))
            # This close resets the connection instead of ending it.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        await wait_until(lambda: len(seen) == 20)
