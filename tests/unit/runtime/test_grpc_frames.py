"""The special cases of frames over gRPC: wire form, unreachable and odd peers, other calls."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import weakref
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from fakes.grpc_reply import read_frames
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from support import free_port, settle, wait_until

from magnetar.runtime.errors import CallFailed, PortInUse, StreamClosed
from magnetar.runtime.grpc_frames import (
    FRAME_LIMIT_BYTES,
    GREETING_BYTES_MAX,
    GREETING_KEY,
    STREAM_WINDOW_BYTES,
    STREAMS_MAX,
    call_unary,
    decode_frame,
    encode_frame,
    frame_reply_handler,
    frame_stream_handler,
    gated_push_handler,
    gated_reply_handler,
    gated_unary_handler,
    grpc_server,
    open_channel,
    open_frame_stream,
    unary_handler,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from magnetar.runtime.frames import Buffer, FrameStream
    from magnetar.runtime.grpc_frames import AcceptedStream, MethodHandler

pytestmark = pytest.mark.real_loop


@asynccontextmanager
async def serving(
    *, streams_max: int | None = None, **methods: MethodHandler
) -> AsyncIterator[aio.Channel]:
    services = {"t.T": methods}
    async with (
        grpc_server(
            services, host="127.0.0.1", port=0, grace_s=0.2, streams_max=streams_max
        ) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield channel


async def test_a_fast_client_gets_no_larger_window_for_streams_that_are_not_read() -> None:
    taken = 0

    async def read(stream: FrameStream) -> None:
        nonlocal taken
        with suppress(StreamClosed):
            while True:
                taken += len(await stream.receive())

    async def ignore(_: FrameStream) -> None:
        await asyncio.Event().wait()

    part = bytes(64 << 10)
    async with serving(
        Read=frame_stream_handler(read), Ignore=frame_stream_handler(ignore)
    ) as channel:
        fast = open_frame_stream(channel, "/t.T/Read", peer="the server")
        for _ in range(1_000):
            await fast.send([part])
        await wait_until(lambda: taken == 1_000 * len(part))
        unread = open_frame_stream(channel, "/t.T/Ignore", peer="the server")
        await unread.send([part])
        sent = len(part)
        with suppress(TimeoutError, StreamClosed):
            while sent <= 4 * STREAM_WINDOW_BYTES:
                async with asyncio.timeout(1):
                    await unread.send([part])
                sent += len(part)
        # One more frame waits at each end.
        assert sent <= STREAM_WINDOW_BYTES + 2 * len(part)
        await fast.close()


async def test_one_connection_has_a_bounded_number_of_open_calls() -> None:
    begun = 0
    end = asyncio.Event()

    async def hold(_: FrameStream) -> None:
        nonlocal begun
        begun += 1
        await end.wait()

    async with serving(Hold=frame_stream_handler(hold), streams_max=STREAMS_MAX) as channel:
        streams = [
            open_frame_stream(channel, "/t.T/Hold", peer="the server", close_s=0.1)
            for _ in range(STREAMS_MAX + 5)
        ]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(ended(stream))
            await wait_until(lambda: begun == STREAMS_MAX)
            await settle()
            assert begun == STREAMS_MAX
            end.set()


async def test_a_server_of_trusted_clients_takes_more_calls_at_once() -> None:
    """A broker that takes over topics has about a hundred calls at each bookie at the same time."""

    async def echo(request: bytes) -> bytes:
        await asyncio.sleep(0.001)
        return request

    async with serving(Echo=unary_handler(echo)) as channel:
        for _ in range(3):
            async with asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(call_unary(channel, "/t.T/Echo", b"x"))
                    for _ in range(3 * STREAMS_MAX)
                ]
            assert {call.result() for call in calls} == {b"x"}


# -- the wire form ---------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


@given(st.lists(st.binary(max_size=200), min_size=1).filter(any))
def test_a_frame_is_a_protobuf_message_of_one_bytes_field(parts: list[bytes]) -> None:
    data = b"".join(parts)
    message = encode_frame(parts)
    assert message == b"\x0a" + varint(len(data)) + data
    assert decode_frame(message) == data


@pytest.mark.parametrize("size", [127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_the_length_grows_by_a_byte_where_protobufs_does(size: int) -> None:
    message = encode_frame([bytes(size)])
    assert message[: len(message) - size] == b"\x0a" + varint(size)
    assert len(decode_frame(message)) == size


def test_a_frame_is_read_without_a_copy() -> None:
    message = encode_frame([b"x" * 1000])
    assert decode_frame(message).obj is message


@pytest.mark.parametrize(
    "message",
    [
        b"\x12\x01a",  # another field
        b"\x0a\x02a",  # short
        b"\x0a\x01ab",  # long
        b"\x0a",  # no length
        b"\x0a\x80\x80\x80\x80\x80",  # a length without end
        b"\x0a\x81",
        b"\x0a\x01a\x0a\x01b",  # the field twice
    ],
)
def test_a_malformed_frame_is_named(message: bytes) -> None:
    with pytest.raises(StreamClosed, match="malformed frame"):
        decode_frame(message)


def test_a_frame_at_the_limit_is_encoded_and_a_larger_one_is_a_bug() -> None:
    encode_frame([bytes(FRAME_LIMIT_BYTES)])
    with pytest.raises(AssertionError):
        encode_frame([bytes(FRAME_LIMIT_BYTES), b"x"])


async def test_a_frame_of_the_largest_size_passes_and_a_larger_message_is_refused_by_grpc() -> None:
    heard: list[int] = []

    async def listen(stream: FrameStream) -> None:
        while True:
            heard.append(len(await stream.receive()))

    services = {"t.T": {"S": frame_stream_handler(listen)}}
    no_limit = [("grpc.max_send_message_length", -1)]
    async with (
        grpc_server(services, host="127.0.0.1", port=0) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
        aio.insecure_channel(f"127.0.0.1:{port}", options=no_limit) as unlimited,
    ):
        stream = open_frame_stream(channel, "/t.T/S", peer="server")
        await stream.send([bytes(FRAME_LIMIT_BYTES)])
        await wait_until(lambda: heard == [FRAME_LIMIT_BYTES])
        await stream.close()
        raw = unlimited.stream_stream("/t.T/S")()
        await raw.write(bytes(FRAME_LIMIT_BYTES + 100))
        with pytest.raises(aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await raw.read()
    assert heard == [FRAME_LIMIT_BYTES]


# -- streams ---------------------------------------------------------------------------------------


async def test_an_unreachable_peer_raises_an_unclean_end_with_its_name() -> None:
    async with open_channel(f"127.0.0.1:{free_port()}") as channel:
        stream = open_frame_stream(channel, "/t.T/S", peer="unknown")
        with pytest.raises(StreamClosed, match=r"^UNAVAILABLE: Failed to connect") as caught:
            await stream.receive()
        assert str(caught.value).endswith("Connection refused")
        assert not caught.value.clean
        with pytest.raises(StreamClosed):
            await stream.send([b"x"])
        await stream.close()


async def test_sending_to_an_unreachable_peer_ends_too() -> None:
    async with open_channel(f"127.0.0.1:{free_port()}") as channel:
        stream = open_frame_stream(channel, "/t.T/S", peer="unknown")
        with pytest.raises(StreamClosed):
            await stream.send([b"x"])
        await stream.close()


async def test_closing_the_channel_ends_its_streams_without_a_false_cancellation() -> None:
    async def hold(stream: FrameStream) -> None:
        await stream.receive()

    async def until_closed(work: Callable[[], Awaitable[object]]) -> str:
        try:
            while True:
                await work()
        except StreamClosed as closed:
            return "clean" if closed.clean else "broken"

    async with serving(S=frame_stream_handler(hold)) as channel:
        read = open_frame_stream(channel, "/t.T/S", peer="server")
        written = open_frame_stream(channel, "/t.T/S", peer="server")
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(until_closed(read.receive))
            writing = group.create_task(until_closed(lambda: written.send([bytes(1 << 20)])))
            await settle(50)
            await channel.close()
            assert await reading == "broken"
            assert await writing == "broken"
        await read.close()
        await written.close()


async def test_a_first_send_learns_that_its_channel_was_closed_before_the_call_began() -> None:
    async def hold(stream: FrameStream) -> None:
        await stream.receive()

    async def _until_closed(stream: FrameStream) -> None:
        with suppress(StreamClosed):
            while True:
                await stream.send([bytes(1 << 20)])

    for turns in range(4):  # turns of the loop between the call and the close
        async with serving(S=frame_stream_handler(hold)) as channel:
            stream = open_frame_stream(channel, "/t.T/S", peer="server")
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(_until_closed(stream))
                await settle(turns)
                await channel.close()
                await sending
            await stream.close()


class CutOff:
    """A call whose channel is closed while it writes, as grpc.aio has it then."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, _: bytes) -> None:
        self._call.cancel()
        raise asyncio.CancelledError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


async def test_closing_the_channel_during_a_goodbye_is_no_cancellation() -> None:
    """The task that closes the stream must continue: nothing would notice that it was cancelled."""

    async def hold(stream: FrameStream) -> None:
        await stream.receive()

    async with serving(S=frame_stream_handler(hold)) as channel:
        stream: Any = open_frame_stream(channel, "/t.T/S", peer="server")
        stream._call = CutOff(stream._call)
        await stream.close()
        with pytest.raises(StreamClosed):
            await stream.receive()


async def test_a_server_that_stops_ends_its_streams_within_its_grace() -> None:
    async def hold(stream: FrameStream) -> None:
        await stream.receive()
        await asyncio.Event().wait()

    handler = frame_stream_handler(hold)
    loop = asyncio.get_running_loop()
    async with grpc_server({"t.T": {"S": handler}}, host="127.0.0.1", port=0, grace_s=0.05) as port:
        channel = open_channel(f"127.0.0.1:{port}")
        stream = open_frame_stream(channel, "/t.T/S", peer="server")
        await stream.send([b"x"])
        begin_s = loop.time()
    assert loop.time() - begin_s < 20
    with pytest.raises(StreamClosed) as caught:
        await stream.receive()
    assert not caught.value.clean
    await stream.close()
    await channel.close()


async def test_stream_that_is_closed_during_its_first_send_ends_at_the_client_too() -> None:
    async def close_while_sending(stream: FrameStream) -> None:
        async def send() -> None:
            with suppress(StreamClosed):
                await stream.send([b"first"])

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            await asyncio.sleep(0)
            await stream.close()

    async with serving(S=frame_stream_handler(close_while_sending)) as channel:
        for _ in range(10):
            stream = open_frame_stream(channel, "/t.T/S", peer="peer")
            with suppress(StreamClosed):  # the stream may have ended already
                await stream.send([b"hello"])
            with suppress(StreamClosed):
                async with asyncio.timeout(5):  # else TimeoutError fails the test
                    while True:
                        assert await stream.receive() == b"first"
            await stream.close()


async def test_a_malformed_frame_ends_that_stream_only() -> None:
    reasons: list[str] = []

    async def echo(stream: FrameStream) -> None:
        try:
            while True:
                await stream.send([await stream.receive()])
        except StreamClosed as closed:
            reasons.append(closed.reason)
            raise

    async with serving(S=frame_stream_handler(echo)) as channel:
        good = open_frame_stream(channel, "/t.T/S", peer="server")
        raw = channel.stream_stream("/t.T/S")()
        await raw.write(b"\x12\x03bad")
        await wait_until(lambda: reasons)
        await good.send([b"still here"])
        assert await good.receive() == b"still here"
        await good.close()
        raw.cancel()
    assert "malformed" in reasons[0]


async def test_a_client_that_only_half_closes_has_not_said_goodbye() -> None:
    ends: list[bool] = []

    async def listen(stream: FrameStream) -> None:
        try:
            await stream.receive()
        except StreamClosed as closed:
            ends.append(closed.clean)

    async with serving(S=frame_stream_handler(listen)) as channel:
        raw = channel.stream_stream("/t.T/S")()
        await raw.done_writing()
        await wait_until(lambda: ends)
        raw.cancel()
    assert ends == [False]


async def test_a_stream_end_of_another_stream_is_the_handlers_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def other_stream_broke(stream: FrameStream) -> None:
        await stream.receive()
        raise StreamClosed("bookie b1 is gone", clean=False)

    async with serving(S=frame_stream_handler(other_stream_broke)) as channel:
        stream = open_frame_stream(channel, "/t.T/S", peer="server")
        await stream.send([b"x"])
        with pytest.raises(StreamClosed, match="ABORTED: StreamClosed: bookie b1 is gone"):
            await stream.receive()
        await stream.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# -- the greeting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, GREETING_BYTES_MAX])
async def test_the_greeting_comes_with_the_call_and_is_the_first_frame(size: int) -> None:
    seen: list[bytes] = []

    async def listen(stream: AcceptedStream) -> None:
        seen.extend((stream.greeting, await stream.receive(), await stream.receive()))

    async with serving(S=frame_stream_handler(listen)) as channel:
        stream = open_frame_stream(channel, "/t.T/S", peer="server", greets=True)
        greeting = random.Random(size).randbytes(size)
        await stream.send([greeting[: size // 2], greeting[size // 2 :]])
        await stream.send([b"second"])
        await wait_until(lambda: len(seen) == 3)
        assert seen == [greeting, greeting, b"second"]
        await stream.close()


async def test_a_stream_without_a_greeting_has_none() -> None:
    seen: list[bytes] = []

    async def listen(stream: AcceptedStream) -> None:
        seen.extend((stream.greeting, await stream.receive()))

    async with serving(S=frame_stream_handler(listen)) as channel:
        stream = open_frame_stream(channel, "/t.T/S", peer="server")
        await stream.send([b"first"])
        await wait_until(lambda: len(seen) == 2)
        assert seen == [b"", b"first"]
        await stream.close()


async def test_a_greeting_above_the_limit_is_refused_at_both_ends() -> None:
    called: list[str] = []

    async def listen(stream: FrameStream) -> None:
        called.append(stream.peer)

    async with serving(S=frame_stream_handler(listen)) as channel:
        stream = open_frame_stream(channel, "/t.T/S", peer="server", greets=True)
        for _ in range(2):
            with pytest.raises(StreamClosed, match="65537 bytes; at most 65536 are allowed"):
                await stream.send([bytes(GREETING_BYTES_MAX + 1)])
        await stream.close()
        noise = random.Random(1).randbytes(2 * GREETING_BYTES_MAX)
        raw = channel.stream_stream("/t.T/S")(metadata=((GREETING_KEY, noise),))
        with pytest.raises(aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await raw.read()
        assert called == []


async def test_a_close_before_the_greeting_wakes_the_receiver() -> None:
    async with serving() as channel:
        stream = open_frame_stream(channel, "/t.T/S", peer="server", greets=True)
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(ended(stream))
            await settle()
            await stream.close()
        assert receiving.result() == "closed here"
        assert await ended(stream) == "closed here"


async def ended(stream: FrameStream) -> str:
    try:
        await stream.receive()
    except StreamClosed as closed:
        return closed.reason
    return "a frame"


# -- other calls -----------------------------------------------------------------------------------


class NoSuchLedger(Exception):
    definite = True


async def test_a_call_answers_or_fails_with_the_error_text() -> None:
    async def answer(request: bytes) -> bytes:
        if request == b"known":
            return b"answer"
        if request == b"bug":
            raise ZeroDivisionError("details stay here")
        raise NoSuchLedger(request.decode())

    async with serving(U=unary_handler(answer)) as channel:
        assert await call_unary(channel, "/t.T/U", b"known") == b"answer"
        with pytest.raises(CallFailed, match="ABORTED: NoSuchLedger: 7"):
            await call_unary(channel, "/t.T/U", b"7")
        with pytest.raises(CallFailed, match="INTERNAL: internal error"):
            await call_unary(channel, "/t.T/U", b"bug")
        with pytest.raises(CallFailed, match="UNIMPLEMENTED"):
            await call_unary(channel, "/t.T/Nothing", b"")


async def test_a_call_may_be_cancelled_and_a_closed_channel_is_not_a_cancellation() -> None:
    waiting = 0

    async def never(request: bytes) -> bytes:
        nonlocal waiting
        waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            waiting -= 1
        return request

    async def fails(channel: aio.Channel) -> None:
        with pytest.raises(CallFailed):
            await call_unary(channel, "/t.T/U", b"")

    async with serving(U=unary_handler(never)) as channel:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call_unary(channel, "/t.T/U", b"")
        await wait_until(lambda: waiting == 0)
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(fails(channel))
            await wait_until(lambda: waiting == 1)
            await channel.close()
            await failing


async def test_one_request_is_answered_by_several_frames() -> None:
    async def count(request: bytes) -> AsyncIterator[Sequence[Buffer]]:
        for i in range(int(request)):
            yield [b"entry ", b"%d" % i]
        if request == b"3":
            raise NoSuchLedger("3")

    async with serving(R=frame_reply_handler(count)) as channel:
        frames = [bytes(f) async for f in read_frames(channel, "/t.T/R", b"2")]
        assert frames == [b"entry 0", b"entry 1"]
        assert [f async for f in read_frames(channel, "/t.T/R", b"0")] == []
        failing = read_frames(channel, "/t.T/R", b"3")
        for i in range(3):
            assert await anext(failing) == b"entry %d" % i
        with pytest.raises(StreamClosed, match="ABORTED: NoSuchLedger: 3"):
            await anext(failing)


async def test_an_answer_that_is_left_early_ends_at_the_server() -> None:
    left = asyncio.Event()

    async def endless(_: bytes) -> AsyncIterator[Sequence[Buffer]]:
        try:
            while True:
                yield [bytes(100_000)]
        finally:
            left.set()

    async with serving(R=frame_reply_handler(endless)) as channel:
        async with aclosing(read_frames(channel, "/t.T/R", b"")) as frames:
            async for _ in frames:
                break
        await left.wait()


# -- the server ------------------------------------------------------------------------------------


class _Token:
    """Dies with the request that has it."""


class _Request(bytes):
    token: _Token


class _Gate:
    """Hands out requests that can be observed."""

    def __init__(self) -> None:
        self.tokens: list[weakref.ref[_Token]] = []

    @asynccontextmanager
    async def hold(self, read: Callable[[], Awaitable[bytes]]) -> AsyncIterator[bytes]:
        request = _Request(await read())
        request.token = _Token()
        self.tokens.append(weakref.ref(request.token))
        yield request


@pytest.mark.parametrize("kind", ["unary", "reply", "push"])
async def test_a_refused_call_does_not_keep_its_request(kind: str) -> None:
    async def admit(_: bytes) -> None:
        return

    async def refuse(_: None, request: bytes) -> bytes:
        copy = request
        raise NoSuchLedger(len(copy))

    async def refuse_reply(_: None, request: bytes) -> AsyncIterator[Sequence[Buffer]]:
        yield [await refuse(None, request)]

    async def refuse_push(
        _: None, request: bytes, _send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        await refuse(None, request)

    gate = _Gate()
    handlers = {
        "unary": gated_unary_handler(refuse, gate, admit),
        "reply": gated_reply_handler(refuse_reply, gate, admit),
        "push": gated_push_handler(refuse_push, gate, admit),
    }
    async with serving(Ask=handlers[kind]) as channel:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(CallFailed):
                    await call_unary(channel, "/t.T/Ask", b"asked")
            # gRPC ends the handler in its own thread, later than the call of the client.
            await wait_until(lambda: [token() for token in gate.tokens] == [None] * 3)
        finally:
            gc.enable()


async def test_a_port_in_use_is_named() -> None:
    async with grpc_server({}, host="127.0.0.1", port=0) as port:
        with pytest.raises(PortInUse, match=str(port)):
            async with grpc_server({}, host="127.0.0.1", port=port):
                pass


async def test_a_port_can_be_taken_again_at_once() -> None:
    port = free_port()  # not one that the kernel may give to a connection meanwhile
    for _ in range(2):
        async with grpc_server({}, host="127.0.0.1", port=port) as bound:
            assert bound == port
