"""The contract of every FrameStream, tested over each implementation.

To test a new implementation, add a function to `WIRES` that serves a handler and returns the
client's end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
from fakes.loops import loop_of
from support import is_foreign, settle, wait_until

from magnetar.runtime.frames import FRAME_BYTES_MAX, Buffer, FrameStream, Outbox, StreamClosed
from magnetar.runtime.grpc_frames import (
    CLOSE_S,
    frame_stream_handler,
    grpc_server,
    open_channel,
    open_frame_stream,
)
from magnetar.runtime.listener import bind_port, port_of
from magnetar.runtime.memory_stream import memory_stream_pair, serve_memory_stream
from magnetar.runtime.tcp_frames import FrameServer, TcpTimes, connect_frames

pytestmark = pytest.mark.real_loop

GREETING = b"the first frame"

Handler = Callable[[FrameStream], Awaitable[None]]
Wire = Callable[[Handler], AbstractAsyncContextManager[FrameStream]]


@asynccontextmanager
async def memory_wire(handler: Handler, *, close_s: float = CLOSE_S) -> AsyncIterator[FrameStream]:
    client, server = memory_stream_pair("client", "server", frames_max=4)
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_memory_stream(server, handler))
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def grpc_wire(
    handler: Handler, *, close_s: float = CLOSE_S, greets: bool = False
) -> AsyncIterator[FrameStream]:
    async def greeted(stream: FrameStream) -> None:
        assert await stream.receive() == GREETING
        await handler(stream)

    services = {"test.Wire": {"Stream": frame_stream_handler(greeted if greets else handler)}}
    async with (
        grpc_server(services, host="127.0.0.1", port=0, grace_s=0.2) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        stream = open_frame_stream(
            channel,
            "/test.Wire/Stream",
            peer=f"127.0.0.1:{port}",
            close_s=close_s,
            greets=greets,
        )
        if greets:
            await stream.send([GREETING])
        try:
            yield stream
        finally:
            await stream.close()


@asynccontextmanager
async def tcp_wire(handler: Handler, *, close_s: float = CLOSE_S) -> AsyncIterator[FrameStream]:
    times = TcpTimes(close_s=close_s)
    server = FrameServer(handler, connections_max=10, times=times)
    listener = bind_port("127.0.0.1", 0)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.run(listener))
        stream = await connect_frames(f"127.0.0.1:{port_of(listener)}", times=times)
        try:
            yield stream
        finally:
            await stream.close()
            await wait_until(lambda: server.connections == 0, what="the handler's end")
            serving.cancel()


WIRES = {
    "memory": memory_wire,
    "grpc": grpc_wire,
    "grpc after a greeting": partial(grpc_wire, greets=True),
    "tcp": tcp_wire,
    "tcp on uvloop": tcp_wire,
}


@pytest.fixture(params=list(WIRES))
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    chosen = WIRES[request.param]
    with loop_of("uvloop" if "uvloop" in request.param else "asyncio"):
        yield partial(chosen, close_s=30.0) if "patient" in request.fixturenames else chosen


@pytest.fixture
def patient() -> None:
    """Make the close of the wire wait 30 s instead of one. On a busy machine, a peer may need more
    than one second to read the rest, and the close would break the stream. Do not use this
    fixture when the peer never answers."""


class Refused(Exception):
    definite = True


async def receive_all(stream: FrameStream, into: list[bytes]) -> StreamClosed:
    try:
        while True:
            into.append(bytes(await stream.receive()))
    except StreamClosed as closed:
        return closed


async def echo(stream: FrameStream) -> None:
    while True:
        await stream.send([await stream.receive()])


async def sink(stream: FrameStream) -> None:
    await receive_all(stream, [])


async def flood(stream: FrameStream, size: int, sent: list[float]) -> None:
    """Send until the stream is closed; `sent` gets the time of each frame."""
    try:
        while True:
            await stream.send([bytes(size)])
            sent.append(asyncio.get_running_loop().time())
    except StreamClosed:
        return


async def wait_stuck(sent: list[float]) -> None:
    """Wait until the sender, which always has a frame, has sent none for 0.15 s."""
    loop = asyncio.get_running_loop()
    await wait_until(lambda: sent and loop.time() - sent[-1] > 0.15, what="the sender to be stuck")


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, FRAME_BYTES_MAX, 5_253_120])
async def test_a_frame_arrives_as_it_was_sent(wire: Wire, size: int) -> None:
    content = random.Random(size).randbytes(size)
    cut = size // 3
    shapes: list[list[Buffer]] = [
        [content],
        [content[:cut], content[cut:]],
        [bytearray(content)],
        [memoryview(content)[:cut], b"", memoryview(content)[cut:]],
    ]

    async with wire(echo) as stream:
        for parts in shapes:
            await stream.send(parts)
            assert await stream.receive() == content


async def test_order_is_kept_both_ways_at_once(wire: Wire) -> None:
    count = 3000
    sizes = random.Random(1)
    items = [i.to_bytes(4) * sizes.choice([1, 3, 50, 5000]) for i in range(count)]

    async def all_through_an_outbox(stream: FrameStream) -> None:
        outbox = Outbox(stream.send, pending_bytes_max=1 << 20)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(outbox.run())
            for item in items:
                await outbox.wait_room()
                outbox.put(item[:2], item[2:])
            await outbox.wait_sent()
            running.cancel()

    async def read(stream: FrameStream) -> None:
        expected = b"".join(items)
        at = 0
        while at < len(expected):
            frame = await stream.receive()
            assert frame == expected[at : at + len(frame)]
            at += len(frame)

    async def both(stream: FrameStream) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(all_through_an_outbox(stream))
            await read(stream)

    async with wire(both) as stream:
        await both(stream)


async def test_a_frame_stays_valid_while_it_is_referenced(wire: Wire) -> None:
    async with wire(echo) as stream:
        kept = []
        for i in range(50):
            await stream.send([bytes([i]) * 1000])
            kept.append(await stream.receive())
        assert [bytes(frame) for frame in kept] == [bytes([i]) * 1000 for i in range(50)]


async def test_the_peer_has_a_name(wire: Wire) -> None:
    names: list[str] = []

    async def name(stream: FrameStream) -> None:
        names.append(stream.peer)

    async with wire(name) as stream:
        await receive_all(stream, [])
        assert stream.peer
    assert names[0]


@pytest.mark.usefixtures("patient")
async def test_the_server_reads_all_frames_of_a_client_that_closes(wire: Wire) -> None:
    heard: list[bytes] = []
    ends: list[StreamClosed] = []

    async def listen(stream: FrameStream) -> None:
        for _ in range(2):  # read slowly
            heard.append(bytes(await stream.receive()))
            await asyncio.sleep(0.02)
        ends.append(await receive_all(stream, heard))
        ends.append(await receive_all(stream, heard))

    async with wire(listen) as stream:
        for i in range(4):
            await stream.send([b"%d" % i])
        await stream.close()
        await wait_until(lambda: len(ends) == 2)
    assert heard == [b"0", b"1", b"2", b"3"]
    assert [end.clean for end in ends] == [True, True]


async def test_the_client_reads_all_frames_of_a_handler_that_returns(wire: Wire) -> None:
    returned = asyncio.Event()

    async def tell(stream: FrameStream) -> None:
        for i in range(4):
            await stream.send([b"%d" % i])
        returned.set()

    async with wire(tell) as stream:
        await returned.wait()
        await settle()
        heard: list[bytes] = []
        assert (await receive_all(stream, heard)).clean
        assert heard == [b"0", b"1", b"2", b"3"]
        assert (await receive_all(stream, heard)).clean
        with pytest.raises(StreamClosed):
            await stream.send([b"too late"])


@pytest.mark.parametrize("seed", range(5))
async def test_frames_before_a_close_arrive_although_the_other_end_keeps_sending(
    wire: Wire, seed: int
) -> None:
    """A close makes later sends fail. The frames that were sent before must still arrive."""
    chance = random.Random(seed)

    async def last_words(stream: FrameStream) -> None:
        for _ in range(chance.randrange(5)):
            await stream.receive()
        await stream.send([b"not here"])
        await stream.send([b"ask the owner"])

    async with wire(last_words) as stream, asyncio.TaskGroup() as group:
        talking = group.create_task(flood(stream, 100_000, []))
        await settle(chance.randrange(50))
        await wait_until(talking.done)
        heard: list[bytes] = []
        await receive_all(stream, heard)
        assert heard == [b"not here", b"ask the owner"]


@pytest.mark.usefixtures("patient")
async def test_closing_wakes_the_tasks_of_the_same_end(wire: Wire) -> None:
    ends: list[StreamClosed] = []

    async def close_meanwhile(stream: FrameStream) -> None:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(receive_all(stream, []))
            await settle()
            assert not reading.done()
            await stream.close()
            ends.append(await reading)
        ends.append(await receive_all(stream, []))
        with pytest.raises(StreamClosed):
            await stream.send([b"too late"])

    async with wire(close_meanwhile) as stream:  # the server's end
        assert (await receive_all(stream, [])).clean
    async with wire(sink) as stream:  # the client's end
        await close_meanwhile(stream)
    assert [end.clean for end in ends] == [True] * 4


async def test_receive_returns_no_frame_after_the_close_of_the_same_end(wire: Wire) -> None:
    async with wire(lambda stream: flood(stream, 1000, [])) as stream:
        heard: list[bytes] = []
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(receive_all(stream, heard))
            await wait_until(lambda: heard)
            closing = group.create_task(stream.close())
            await settle(1)
            before = len(heard)
            await closing
            assert (await reading).clean
        assert len(heard) == before


@pytest.mark.parametrize("closer", ["server", "client"])
async def test_closing_ends_a_send_that_the_peer_does_not_read(wire: Wire, closer: str) -> None:
    done = asyncio.Event()

    async def flood_and_close(stream: FrameStream) -> None:
        async with asyncio.TaskGroup() as group:
            sent: list[float] = []
            flooding = group.create_task(flood(stream, 128 << 10, sent))
            await wait_stuck(sent)
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            await stream.close()
            await stream.close()
            await flooding
            assert loop.time() - begin_s < 20
        done.set()

    async def deaf(stream: FrameStream) -> None:
        await done.wait()

    if closer == "client":
        async with wire(deaf) as stream:
            await flood_and_close(stream)
    else:
        async with wire(flood_and_close) as stream:
            await deaf(stream)


@pytest.mark.usefixtures("patient")
async def test_a_sender_waits_for_a_slow_receiver(wire: Wire) -> None:
    may_read = asyncio.Event()
    heard: list[bytes] = []
    sent: list[float] = []

    async def slow(stream: FrameStream) -> None:
        await may_read.wait()
        await receive_all(stream, heard)

    async with wire(slow) as stream, asyncio.TaskGroup() as group:
        flooding = group.create_task(flood(stream, 128 << 10, sent))
        await wait_stuck(sent)
        waiting = len(sent)
        assert waiting < 256  # 32 MiB
        may_read.set()
        await wait_until(lambda: len(sent) > 2 * waiting + 2)
        await stream.close()
        await flooding
        await wait_until(lambda: len(heard) >= len(sent))


@pytest.mark.parametrize(
    ("error", "text"),
    [(Refused("no such ledger"), "Refused: no such ledger"), (KeyError("x"), "internal error")],
)
async def test_a_handler_that_fails_breaks_the_stream(
    wire: Wire, error: Exception, text: str
) -> None:
    async def fail(stream: FrameStream) -> None:
        await stream.receive()
        await stream.send([b"so far so good"])
        raise error

    async with wire(fail) as stream:
        await stream.send([b"hello"])
        heard: list[bytes] = []
        closed = await receive_all(stream, heard)
        assert heard == [b"so far so good"]
        assert not closed.clean
        assert text in closed.reason


async def test_a_bug_in_a_handler_is_raised(wire: Wire) -> None:
    seen: list[BaseException | None] = []

    async def buggy(stream: FrameStream) -> None:
        await stream.receive()
        raise ExceptionGroup("", [AssertionError("confirmed went backwards")])

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _, context: is_foreign(context) or seen.append(context.get("exception"))
    )
    try:
        async with wire(buggy) as stream:
            await stream.send([b"hello"])
            closed = await receive_all(stream, [])
            assert (closed.clean, closed.reason.endswith("internal error")) == (False, True)
    except ExceptionGroup as error:
        seen.append(error)
    assert len(seen) == 1
    assert "confirmed went backwards" in repr(seen[0])


async def test_the_handler_ends_when_its_client_disappears(wire: Wire) -> None:
    heard, ended = asyncio.Event(), asyncio.Event()
    ends: list[bool] = []

    async def wait_without_end(stream: FrameStream) -> None:
        try:
            await stream.receive()
            heard.set()
            await stream.receive()
        except StreamClosed as closed:
            ends.append(closed.clean)
            raise
        finally:
            ended.set()

    async with wire(wait_without_end) as stream, asyncio.TaskGroup() as group:
        await stream.send([b"hello"])
        await heard.wait()  # the server starts a handler only for a call that has begun
        reading = group.create_task(stream.receive())
        await settle()
        reading.cancel()
        await ended.wait()
        assert reading.cancelled()
        with pytest.raises(StreamClosed):
            await stream.receive()
    assert True not in ends


async def test_a_handler_that_receives_can_be_cancelled(wire: Wire) -> None:
    outcome: list[str] = []

    async def cancel_own_reader(stream: FrameStream) -> None:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(stream.receive())
            await settle()
            reading.cancel()
        outcome.append("cancelled" if reading.cancelled() else "swallowed")
        with pytest.raises(StreamClosed):
            await stream.receive()

    async with wire(cancel_own_reader) as stream:
        await receive_all(stream, [])
    assert outcome == ["cancelled"]


async def test_two_tasks_that_use_one_direction_raise_an_assertion_error(wire: Wire) -> None:
    async with wire(sink) as stream, asyncio.TaskGroup() as group:
        reading = group.create_task(receive_all(stream, []))
        await settle()
        with pytest.raises(AssertionError, match="two tasks receive"):
            await stream.receive()
        await stream.close()
        await reading


async def test_sending_an_empty_frame_raises_an_assertion_error(wire: Wire) -> None:
    async with wire(sink) as stream:
        with pytest.raises(AssertionError):
            await stream.send([b"", b""])


async def test_a_closed_wire_leaves_no_task_behind(wire: Wire) -> None:
    for _ in range(3):
        async with wire(echo) as stream:
            await stream.send([b"x"])
            await stream.receive()
    await wait_until(lambda: len(asyncio.all_tasks()) == 1, what="only the test's own task")
