"""When a stream over TCP sends beats and gives up, in virtual time and without a socket."""

from __future__ import annotations

import asyncio
import struct

import pytest

from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.tcp_frames import TcpFrameStream, TcpTimes

BEAT = b"\x01\0\0\0"
TIMES = TcpTimes(beat_s=0.1, silent_beats=100, first_frame_s=0.05)


class Transport(asyncio.Transport):
    """Records what the stream writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def write_eof(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        pass


def frame(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def server_end(transport: Transport) -> TcpFrameStream:
    stream = TcpFrameStream(TIMES, on_open=lambda _: None)
    stream.connection_made(transport)
    return stream


async def test_a_connection_that_sent_a_frame_in_time_may_be_idle() -> None:
    stream = server_end(Transport())
    await asyncio.sleep(0.04)
    stream.data_received(frame(b"first"))
    await asyncio.sleep(1.0)
    stream.data_received(frame(b"second"))
    assert [bytes(await stream.receive()) for _ in range(2)] == [b"first", b"second"]
    assert not stream.ended
    stream.connection_lost(None)


async def test_a_connection_without_a_whole_frame_is_ended_at_its_time() -> None:
    stream = server_end(Transport())
    stream.data_received(frame(b"first")[:-1])
    await asyncio.sleep(0.04)
    assert not stream.ended
    await asyncio.sleep(0.02)
    with pytest.raises(StreamClosed, match=r"no whole frame within 0\.05 s"):
        await stream.receive()
    stream.connection_lost(None)


async def test_a_busy_stream_does_not_beat_and_an_idle_one_does() -> None:
    transport = Transport()
    stream = TcpFrameStream(TIMES)
    stream.connection_made(transport)
    for _ in range(50):
        await stream.send([b"x"])
        await asyncio.sleep(0.01)
    assert transport.written == frame(b"x") * 50
    await asyncio.sleep(1.0)
    beats = transport.written.removeprefix(frame(b"x") * 50)
    assert beats == BEAT * (len(beats) // len(BEAT))
    assert 9 <= len(beats) // len(BEAT) <= 10
    stream.connection_lost(None)
