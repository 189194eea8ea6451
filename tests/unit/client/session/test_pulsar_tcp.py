"""The client's stream of Pulsar's own frames over TCP, on both kinds of loops."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.loops import LOOPS, loop_of
from support import free_port, wait_until

from magnetar.client.session.pulsar_tcp import FRAME_LIMIT_BYTES, PulsarStream
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.tcp_frames import READ_HIGH_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

pytestmark = pytest.mark.real_loop


@pytest.fixture(params=LOOPS, autouse=True)
def _loop(request: pytest.FixtureRequest) -> Iterator[None]:
    with loop_of(request.param):
        yield


@asynccontextmanager
async def stream_to(handle: Handler) -> AsyncIterator[PulsarStream]:
    """A stream to a peer that speaks bytes."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    stream = PulsarStream(f"127.0.0.1:{port}", connect_timeout_s=10)
    try:
        yield stream
    finally:
        await stream.close()
        server.close()


def frame(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


async def received(stream: PulsarStream) -> tuple[bytearray, StreamClosed]:
    """All bytes until the end, and the end."""
    got = bytearray()
    try:
        while True:
            got += await stream.receive()
    except StreamClosed as closed:
        return got, closed


@pytest.mark.parametrize("piece", [1, 3, 4, 5, 7, 100])
async def test_frames_arrive_whole_however_they_are_cut(piece: int) -> None:
    frames = b"".join(frame(bytes([size % 256]) * size) for size in (4, 5, 30, 1))
    whole = {0}
    for size in (4, 5, 30, 1):
        whole.add(max(whole) + 4 + size)

    async def dribble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(frames), piece):
            writer.write(frames[at : at + piece])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with stream_to(dribble) as stream:
        got = 0
        while got < len(frames):
            got += len(await stream.receive())
            assert got in whole
        _, closed = await received(stream)
    assert closed.clean


async def test_large_frames_go_both_ways() -> None:
    content = bytes(range(256)) * (20 << 10)  # 5 MiB

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(4 + len(content)))
        await writer.drain()

    async with stream_to(echo) as stream:
        await stream.send([frame(content)[:4], content[:100], memoryview(content)[100:]])
        assert await stream.receive() == frame(content)


async def test_no_server_is_an_error_that_names_the_address() -> None:
    stream = PulsarStream(f"127.0.0.1:{free_port()}", connect_timeout_s=10)
    with pytest.raises(StreamClosed, match=r"cannot connect to 127\.0\.0\.1:"):
        await stream.receive()
    with pytest.raises(StreamClosed, match="cannot connect"):
        await stream.send([b"x"])
    await stream.close()


async def test_an_end_inside_a_frame_is_unclean() -> None:
    async def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(b"whole") + frame(b"cut")[:-1])
        writer.close()

    async with stream_to(cut) as stream:
        got, closed = await received(stream)
    assert got == frame(b"whole")
    assert not closed.clean
    assert "inside a frame" in closed.reason


async def test_a_frame_beyond_the_limit_ends_the_stream_before_it_is_gathered() -> None:
    async def exaggerate(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack(">I", FRAME_LIMIT_BYTES) + b"x")
        await writer.drain()

    async with stream_to(exaggerate) as stream:
        _, closed = await received(stream)
    assert str(FRAME_LIMIT_BYTES) in closed.reason


async def test_a_reader_that_is_slow_holds_the_sender_back() -> None:
    written = 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        while written < 64 << 20:
            writer.write(frame(bytes(64 << 10)))
            await writer.drain()
            written += 64 << 10
        writer.close()

    async with stream_to(flood) as stream:
        got = len(await stream.receive())
        loop = asyncio.get_running_loop()
        last, since = written, loop.time()
        while loop.time() - since < 0.1:  # until the server cannot write for 0.1 s
            await asyncio.sleep(0.01)
            if written != last:
                last, since = written, loop.time()
        assert stream._frames_bytes < READ_HIGH_BYTES + (1 << 20)
        assert written < 32 << 20
        rest, closed = await received(stream)
    assert got + len(rest) == (64 << 20) + 1024 * 4
    assert closed.clean


async def test_close_sends_what_was_given_and_wakes_a_waiting_receive() -> None:
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(-1))
        writer.close()

    async with stream_to(listen) as stream:
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(received(stream))
            await stream.send([frame(b"last")])
            await stream.close()
            await stream.close()
        assert receiving.result()[1].clean
        await wait_until(lambda: bytes(heard) == frame(b"last"))
        with pytest.raises(StreamClosed, match="closed here"):
            await stream.send([b"x"])


async def test_close_ends_an_attempt_to_connect() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async with stream_to(never) as stream, asyncio.TaskGroup() as group:
        receiving = group.create_task(received(stream))
        await asyncio.sleep(0)  # until the stream begins to connect
        await stream.close()
    assert receiving.done()


async def test_close_in_the_turn_in_which_the_attempt_to_connect_times_out() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async with stream_to(never) as stream, asyncio.TaskGroup() as group:
        receiving = group.create_task(received(stream))
        await asyncio.sleep(0)  # until the stream begins to connect
        assert stream._connecting is not None
        stream._connecting.reschedule(0)
        await asyncio.sleep(0)
        assert stream._connecting.expired(), "the attempt is about to end"
        await stream.close()
    assert receiving.done()


async def test_a_cancelled_receive_ends_the_stream() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async with stream_to(never) as stream:
        await stream.send([b"x"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream.receive()
        with pytest.raises(StreamClosed, match="cancelled here"):
            await stream.receive()


@pytest.mark.parametrize("host", ["x" * 64, "a..b"])
async def test_a_host_name_that_is_none_ends_the_stream(host: str) -> None:
    stream = PulsarStream(f"{host}:6650", connect_timeout_s=10)
    with pytest.raises(StreamClosed, match="cannot connect"):
        await stream.receive()
    await stream.close()
