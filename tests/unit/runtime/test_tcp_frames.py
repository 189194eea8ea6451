"""Frames over TCP: the wire form, beats, limits, and hostile peers."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
import tracemalloc
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

import pytest
from fakes.loops import LOOPS, loop_of
from support import free_port, settle, wait_until

from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.listener import bind_port, port_of
from magnetar.runtime.tcp_frames import (
    FRAME_LIMIT_BYTES,
    READ_HIGH_BYTES,
    WRITE_HIGH_BYTES,
    FrameServer,
    TcpFrameStream,
    TcpTimes,
    connect_frames,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from magnetar.runtime.frames import FrameStream

    Handler = Callable[[FrameStream], Awaitable[None]]

pytestmark = pytest.mark.real_loop

BEAT, GOODBYE = b"\x01\0\0\0", b"\x02\0\0\0"
QUICK = TcpTimes(beat_s=0.05, silent_beats=3, close_s=0.2)
"""A silent peer is noticed within 0.2 s."""
PATIENT = TcpTimes(close_s=30.0)


@pytest.fixture(params=LOOPS, autouse=True)
def _loop(request: pytest.FixtureRequest) -> Iterator[None]:
    with loop_of(request.param):
        yield


@asynccontextmanager
async def serving(
    handle: Handler, *, times: TcpTimes = PATIENT, connections_max: int = 10
) -> AsyncIterator[tuple[FrameServer, int]]:
    """A server, and its port."""
    server = FrameServer(handle, connections_max=connections_max, times=times)
    listener = bind_port("127.0.0.1", 0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.run(listener))
        yield server, port_of(listener)
        running.cancel()


@asynccontextmanager
async def raw_server(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A peer that sends raw bytes. Returns its address."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


class Listening:
    """A handler that records the frames, and how the stream ended."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.ends: list[StreamClosed] = []

    async def __call__(self, stream: FrameStream) -> None:
        try:
            while True:
                self.heard.append(bytes(await stream.receive()))
        except StreamClosed as closed:
            self.ends.append(closed)


async def echo(stream: FrameStream) -> None:
    while True:
        await stream.send([await stream.receive()])


async def end_of(stream: FrameStream) -> StreamClosed:
    try:
        while True:
            await stream.receive()
    except StreamClosed as closed:
        return closed


# -- the wire form ---------------------------------------------------------------------------------


async def test_a_frame_is_its_length_and_its_bytes_and_a_close_says_goodbye() -> None:
    received: list[bytes] = []
    done = asyncio.Event()

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(-1))
        writer.close()
        done.set()

    async with raw_server(record) as address:
        stream = await connect_frames(address)
        await stream.send([b"ab", memoryview(b"c")])
        await stream.send([b"d"])
        await stream.close()
        await done.wait()
    assert received == [b"\0\0\0\x03abc\0\0\0\x01d" + GOODBYE]


class FakeTransport(asyncio.Transport):
    """A transport that accepts everything; `paused` says whether the protocol has paused
    reading."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.paused = False
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("seed", range(20))
async def test_frames_survive_any_cuts_between_reads(seed: int) -> None:
    chance = random.Random(seed)
    frames = [chance.randbytes(chance.choice((1, 2, 5, 300, 70_000))) for _ in range(30)]
    wire = b""
    for frame in frames:
        wire += struct.pack(">I", len(frame)) + frame + BEAT * chance.randrange(2)
    wire += GOODBYE
    stream = TcpFrameStream(PATIENT)
    stream.connection_made(FakeTransport())
    heard: list[bytes] = []
    at = 0
    while at < len(wire):
        size = chance.choice((1, 3, 4, 5, 1000, 100_000))
        stream.data_received(wire[at : at + size])
        at += size
        while stream._frames:
            heard.append(bytes(await stream.receive()))
    assert heard == frames
    assert (await end_of(stream)).clean
    stream.connection_lost(None)


async def test_reading_pauses_above_the_high_water_mark_and_continues_below_half_of_it() -> None:
    stream, transport = TcpFrameStream(PATIENT), FakeTransport()
    stream.connection_made(transport)
    frame = struct.pack(">I", 1 << 16) + bytes(1 << 16)
    for number in range(1, 17):
        assert not transport.paused
        stream.data_received(frame)
        assert transport.paused == (number << 16 >= READ_HIGH_BYTES)
    for left in range(15, -1, -1):
        await stream.receive()
        assert transport.paused == (left << 16 >= READ_HIGH_BYTES // 2)
    stream.connection_lost(None)


async def test_many_tiny_frames_also_pause_reading() -> None:
    """A frame of one byte takes some 200 bytes of memory while it waits."""
    stream, transport = TcpFrameStream(PATIENT), FakeTransport()
    stream.connection_made(transport)
    count = READ_HIGH_BYTES // 200
    stream.data_received(b"\0\0\0\x01x" * count)
    assert transport.paused
    for _ in range(count):
        assert await stream.receive() == b"x"
    assert not transport.paused
    stream.connection_lost(None)


async def test_a_frame_that_trickles_in_takes_no_more_memory_than_its_bytes() -> None:
    stream, size = TcpFrameStream(PATIENT), 200_000
    stream.connection_made(FakeTransport())
    stream.data_received(struct.pack(">I", size))
    pieces = [bytes([number % 256]) for number in range(size)]
    tracemalloc.start()
    for piece in pieces:
        stream.data_received(piece)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert await stream.receive() == b"".join(pieces)
    assert peak_bytes < 2 * size
    stream.connection_lost(None)


async def test_a_part_may_change_once_send_has_returned() -> None:
    may_read = asyncio.Event()
    heard: list[bytes] = []
    listening = Listening()

    async def late(stream: FrameStream) -> None:
        await may_read.wait()
        await listening(stream)

    async with serving(late) as (_, port):
        stream = await connect_frames(f"127.0.0.1:{port}", times=PATIENT)
        for number in range(1, 100):
            part = bytearray([number]) * 100_000
            sending = asyncio.ensure_future(stream.send([part]))  # noqa: TID251
            done, _ = await asyncio.wait({sending}, timeout=0.05)
            if not done:  # the peer's buffers are full
                may_read.set()
                await sending
            part[:] = bytes(len(part))
            if may_read.is_set():
                break
        await stream.close()
        await wait_until(lambda: listening.ends)
    heard = listening.heard
    assert heard == [bytes([number]) * 100_000 for number in range(1, len(heard) + 1)]
    assert len(heard) * 100_000 > WRITE_HIGH_BYTES


# -- hostile peers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    [
        b"\0\0\0\0",  # an empty frame
        b"\x01\0\0\x01",  # a beat with content
        b"\x02\0\0\x01",
        b"\x03\0\0\0",  # an end without a reason
        b"\x03\0\x04\x01",  # a reason of 1,025 bytes
        b"\x04\0\0\x01",  # an unknown kind
        b"\xff\xff\xff\xff",
        b"GET ",
        b"\x16\x03\x01\x02",  # TLS
    ],
)
async def test_a_malformed_prefix_ends_the_stream_with_an_error_that_shows_it(
    prefix: bytes,
) -> None:
    listening = Listening()
    async with serving(listening) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\0\0\0\x02ok" + prefix + b"\0\0\0\x02no")
        words = await reader.read(-1)
        writer.close()
        await wait_until(lambda: listening.ends)
    assert words[:1] == b"\x03"
    assert f"malformed frame: kind {prefix[0]}".encode() in words
    # frames that were not received yet are dropped with the stream
    assert listening.heard in ([b"ok"], [])
    assert "malformed frame" in listening.ends[0].reason
    assert not listening.ends[0].clean


async def test_an_announced_frame_takes_no_memory_before_it_arrives() -> None:
    writers = []
    async with serving(Listening(), connections_max=60) as (server, port):
        tracemalloc.start()
        for _ in range(50):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(struct.pack(">I", FRAME_LIMIT_BYTES) + b"x")
            writers.append(writer)
        await wait_until(lambda: server.connections == 50)
        await settle()
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for writer in writers:
            writer.close()
        await wait_until(lambda: server.connections == 0)
    assert peak_bytes < FRAME_LIMIT_BYTES // 4


async def test_half_a_frame_and_then_silence_ends_the_stream() -> None:
    listening = Listening()
    async with serving(listening, times=QUICK) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\0\0\0\x02ok\0\0\0\x05hal")
        await wait_until(lambda: listening.ends)
        writer.close()
    assert listening.heard == [b"ok"]
    assert listening.ends[0].reason == "the peer was silent for 0.15 s"
    assert not listening.ends[0].clean


@pytest.mark.parametrize("talk", [b"", BEAT, b"\0\0\0\x05hal"])
async def test_a_connection_without_a_whole_frame_is_ended(talk: bytes) -> None:
    listening = Listening()
    async with serving(listening, times=TcpTimes(first_frame_s=0.1)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(talk)
        words = await reader.read(-1)
        writer.close()
        await wait_until(lambda: listening.ends)
    assert b"no whole frame within 0.1 s" in words
    assert (listening.heard, listening.ends[0].clean) == ([], False)


async def test_a_reset_connection_is_an_unclean_end() -> None:
    listening = Listening()
    async with serving(listening) as (_, port):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(b"\0\0\0\x02ok")
        await wait_until(lambda: listening.heard)
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
        await wait_until(lambda: listening.ends)
    assert not listening.ends[0].clean


@pytest.mark.parametrize(("talk", "where"), [(b"", "between frames"), (b"\0\0", "inside a frame")])
async def test_an_end_without_goodbye_is_unclean_and_says_where(talk: bytes, where: str) -> None:
    listening = Listening()
    async with serving(listening) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\0\0\0\x02ok" + talk)
        writer.close()
        await wait_until(lambda: listening.ends)
    assert listening.heard == [b"ok"]
    assert listening.ends[0].reason == f"the connection ended {where} without goodbye"
    assert not listening.ends[0].clean


async def test_bytes_after_goodbye_are_dropped() -> None:
    listening = Listening()
    async with serving(listening) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\0\0\0\x02ok" + GOODBYE + b"\0\0\0\x02no")
        await wait_until(lambda: listening.ends)
        writer.close()
    assert (listening.heard, listening.ends[0].clean) == ([b"ok"], True)


# -- beats -----------------------------------------------------------------------------------------


async def test_a_silent_server_ends_the_stream() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)  # until the client has disconnected
        writer.close()

    async with raw_server(nothing) as address:
        stream = await connect_frames(address, times=QUICK)
        assert (await end_of(stream)).reason == "the peer was silent for 0.15 s"
        await stream.close()


async def test_a_standstill_of_the_own_process_does_not_count_as_silence_of_the_peer() -> None:
    async with serving(echo, times=QUICK) as (_, port):
        stream = await connect_frames(f"127.0.0.1:{port}", times=QUICK)
        for _ in range(5):
            await asyncio.sleep(0.06)
            time.sleep(0.3)  # noqa: ASYNC251 - both ends stand still, for six beats
        await stream.send([b"still there"])
        assert await stream.receive() == b"still there"
        await stream.close()


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("the handler is closed")])
async def test_a_handle_that_is_closed_ends_the_goodbye(error: Exception) -> None:
    """uvloop raises RuntimeError where asyncio raises an OSError."""
    aborted: list[bool] = []

    class Gone(asyncio.Transport):
        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            pass

        def write(self, data: object) -> None:
            pass

        def write_eof(self) -> None:
            raise error

        def abort(self) -> None:
            aborted.append(True)

    stream = TcpFrameStream(QUICK)
    stream.connection_made(Gone())
    stream.say_goodbye()
    assert aborted == [True]


async def test_an_idle_stream_sends_beats_and_stays_open() -> None:
    async with serving(echo, times=QUICK) as (_, port):
        stream = await connect_frames(f"127.0.0.1:{port}", times=QUICK)
        await asyncio.sleep(0.5)  # ten beats
        await stream.send([b"still there"])
        assert await stream.receive() == b"still there"
        await stream.close()


async def test_a_peer_that_reads_slowly_does_not_count_as_silent() -> None:
    may_read = asyncio.Event()
    listening = Listening()

    async def slow(stream: FrameStream) -> None:
        await may_read.wait()
        await listening(stream)

    sent = 0

    async def flood(stream: FrameStream) -> None:
        nonlocal sent
        with suppress(StreamClosed):
            while not may_read.is_set():
                await stream.send([bytes(100_000)])
                sent += 1

    async with serving(slow, times=QUICK) as (_, port), asyncio.TaskGroup() as group:
        stream = await connect_frames(f"127.0.0.1:{port}", times=QUICK)
        flooding = group.create_task(flood(stream))
        await asyncio.sleep(0.6)  # much longer than silence may last
        assert not stream.ended
        assert not flooding.done()
        may_read.set()
        await flooding
        await wait_until(lambda: len(listening.heard) == sent)
        await stream.close()


# -- connecting, serving, closing ------------------------------------------------------------------


async def test_a_refused_connection_is_a_closed_stream() -> None:
    port = free_port()
    with pytest.raises(StreamClosed, match=f"cannot connect to 127.0.0.1:{port}: ") as closed:
        await connect_frames(f"127.0.0.1:{port}")
    assert not closed.value.clean


@pytest.mark.parametrize("address", ["", "b1", "b1:", ":3181", "b1:x", "b1:70000", "b1:-1"])
async def test_an_address_that_is_not_host_and_port_is_named(address: str) -> None:
    with pytest.raises(StreamClosed, match="it is not host:port"):
        await connect_frames(address)


async def test_a_connection_that_is_not_accepted_ends_with_its_deadline() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        # These connections fill the backlog. The kernel drops the next connection.
        for other in (first, second):
            other.setblocking(False)
            other.connect_ex(address)
        with pytest.raises(StreamClosed, match=r"cannot connect to .*: no answer within 0\.2 s"):
            await connect_frames(f"127.0.0.1:{address[1]}", times=TcpTimes(connect_s=0.2))


async def test_a_connection_beyond_the_limit_is_refused_until_another_ends() -> None:
    async with serving(echo, connections_max=2) as (server, port):
        address = f"127.0.0.1:{port}"
        first, second = await connect_frames(address), await connect_frames(address)
        await wait_until(lambda: server.connections == 2)
        third = await connect_frames(address)
        assert (await end_of(third)).reason == "too many connections, the limit is 2"
        await third.close()
        await first.close()
        await wait_until(lambda: server.connections == 1)
        fourth = await connect_frames(address)
        for stream in (second, fourth):
            await stream.send([b"x"])
            assert await stream.receive() == b"x"
            await stream.close()


async def test_a_server_that_is_cancelled_says_goodbye_and_closes_its_port() -> None:
    async with serving(echo) as (_, port):
        stream = await connect_frames(f"127.0.0.1:{port}", times=PATIENT)
        await stream.send([b"x"])
        assert await stream.receive() == b"x"
        closing = asyncio.ensure_future(end_of(stream))  # noqa: TID251
    assert (await closing).clean
    await stream.close()
    with pytest.raises(StreamClosed):
        await connect_frames(f"127.0.0.1:{port}")


async def test_a_close_ends_although_the_peer_never_closes() -> None:
    gone = asyncio.Event()

    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    async with raw_server(stay) as address:
        stream = await connect_frames(address, times=TcpTimes(close_s=0.1))
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        await stream.close()
        assert loop.time() - begin_s > 0.09  # uvloop counts whole milliseconds
        assert (await end_of(stream)).clean
        gone.set()


async def test_cancelling_a_close_resets_the_connection() -> None:
    gone = asyncio.Event()
    lost: list[BaseException | bytes] = []

    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        try:
            lost.append(await reader.read(-1))
        except ConnectionResetError as error:
            lost.append(error)
        writer.close()

    async with raw_server(stay) as address:
        stream = await connect_frames(address, times=PATIENT)
        closing = asyncio.ensure_future(stream.close())  # noqa: TID251
        await settle()
        closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled()
        gone.set()
        await wait_until(lambda: lost)
    assert cast("TcpFrameStream", stream).ended


async def test_a_reason_that_is_too_long_is_cut() -> None:
    async def fail(stream: FrameStream) -> None:
        await stream.receive()
        raise Refused("x" * 5000)

    async with serving(fail) as (_, port):
        stream = await connect_frames(f"127.0.0.1:{port}")
        await stream.send([b"x"])
        reason = (await end_of(stream)).reason
        await stream.close()
    assert (reason[:10], len(reason)) == ("Refused: x", 1024)


class Refused(Exception):
    definite = True
