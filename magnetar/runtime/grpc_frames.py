"""Frame streams over gRPC, and the other kinds of calls that the servers use.

On the wire a frame is a protobuf message with one `bytes` field, number 1 (`message Frame { bytes
data = 1; }`), so any gRPC stack can use it. This module writes a frame with one join and reads it
as a slice. Protobuf would make an object per frame and copy the frame twice.

How a stream ends. The client closes a stream with an empty frame (the goodbye) and a half-close.
The server closes it when its handler returns: the call ends with status OK. Every other end is
unclean. The goodbye is needed because gRPC does not let the server distinguish a half-close from a
lost client in time.

The greeting. A server must not buffer a large message of a client that it has not admitted. But
gRPC passes only whole messages to the server, and has one size limit for the messages of all calls.
So the client's first frame can travel in the call's metadata (GREETING_KEY). gRPC limits the size
of the metadata, and the server gets the metadata before it reads a message. A call to a `gated_...`
handler can have a greeting, too.

How grpc.aio treats cancellation. Cancelling a read or a write cancels the whole call. When this
process cancels a call, for example by closing its channel, a reader of the call gets CancelledError
although its task was not cancelled. `_cancelled_by_call` distinguishes this case from a cancelled
task.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
from grpc import aio

from magnetar.runtime.errors import CallFailed, PortInUse, StreamClosed
from magnetar.runtime.frames import Buffer, FrameStream, is_stream_end, size_of
from magnetar.runtime.listener import authority, bind_port
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import is_bug, is_operating_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    Context = aio.ServicerContext[bytes, bytes]
    MethodHandler = grpc.RpcMethodHandler[bytes, bytes]
    FrameCall = aio.StreamStreamCall[bytes, bytes]

log = get_logger(__name__)

T = TypeVar("T")

FRAME_LIMIT_BYTES = 16 << 20
"""The size of the largest frame. The largest content, a stored entry with its header, has little
more than 5 MiB. gRPC refuses a larger frame before it allocates memory for the frame."""

GREETING_KEY = "greeting-bin"
"""The metadata key of the greeting. gRPC encodes the greeting in base64."""

GREETING_BYTES_MAX = 64 << 10

_METADATA_BYTES_MAX = GREETING_BYTES_MAX * 4 // 3 + (8 << 10)
"""The size limit of a call's metadata: the greeting in base64, and 8 KiB for the metadata of gRPC
itself and of proxies. 8 KiB is gRPC's usual limit."""

STREAM_WINDOW_BYTES = 512 << 10
"""The most bytes that gRPC buffers for a stream while the server does not read the stream. With a
round trip of 50 ms, a client can send 10 MB/s. Without this limit, gRPC enlarges the window for a
fast client (to 2.5 MB over loopback), even for streams that the server never reads."""

STREAMS_MAX = 100
"""The most open calls on one connection of an untrusted client. HTTP/2 recommends at least this
number. The unread calls of a connection thus hold 50 MB at most. Further calls wait at the client.
Many of them then fail as UNAVAILABLE: the client begins a waiting call before the server has ended
an earlier call. A session has its own connection, and a Spark process has only a few calls
open at a broker. Bookies have no limit: a broker that takes over thousands of topics makes calls
for each topic."""

CLOSE_S = 1.0
"""The time in seconds that a close waits for the peer before it breaks the stream."""

_UNREACHABLE = re.compile(r"^failed to connect to all addresses; last error: \w+: ipv[46]:\S+: ")

_GOODBYE = b"\x0a\x00"  # an empty frame

_MESSAGE_LIMIT_BYTES = FRAME_LIMIT_BYTES + 16  # tag and length before the frame

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", _MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", _MESSAGE_LIMIT_BYTES),
    # Detects a peer that vanished (power cut, partition) after 15 s at most.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_OPTIONS,
    # Our own backoff decides when to reconnect. gRPC would wait a second or more after a restart.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, this is the time limit of one attempt. A busy server accepts slowly.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_OPTIONS,
    ("grpc.server_handshake_timeout_ms", 10_000),  # ends a connection that sends nothing
    ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", _METADATA_BYTES_MAX),
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # a probe would grow the window
    ("grpc.so_reuseport", 0),  # otherwise a second server can listen on the same port
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # accept the clients' keep-alive
]


def open_frame_stream(
    channel: aio.Channel,
    method: str,
    *,
    peer: str,
    metadata: Sequence[tuple[str, str | bytes]] = (),
    close_s: float = CLOSE_S,
    greets: bool = False,
) -> FrameStream:
    """Begin a stream to `method` ("/package.Service/Method") over `channel`.

    `peer` is the name for logs. Returns at once: the first send or receive raises StreamClosed if
    the peer cannot be reached. The caller closes the stream. `greets`: the first frame that the
    caller sends is the greeting. It begins the call, and has at most GREETING_BYTES_MAX bytes.
    """

    def begin(*greeting: tuple[str, bytes]) -> _ClientStream:
        call: FrameCall = channel.stream_stream(method)(metadata=(*metadata, *greeting))
        return _ClientStream(call, peer, close_s)

    return _GreetingStream(begin, peer) if greets else begin()


class AcceptedStream(FrameStream, Protocol):
    """The server's end of a stream."""

    greeting: bytes
    """The client's greeting, which `receive` returns as the first frame. b"": the call has none."""


def frame_stream_handler(handler: Callable[[AcceptedStream], Awaitable[None]]) -> MethodHandler:
    """Return the server's side of frame streams. It runs `handler` for each stream, and ends the
    stream when the handler returns.

    The handler may let StreamClosed of its stream propagate. When the client is lost, gRPC cancels
    the handler, or `receive` raises an unclean StreamClosed, whichever happens first. An operating
    error of the handler breaks the stream with the error's text. Any other error breaks it with
    "internal error". The loop's exception handler also gets an error that is a bug.
    """

    async def serve(_: object, context: Context) -> None:
        # Without this call, gRPC sends the metadata with the first frame. If `close` cancels that
        # write, gRPC sends the metadata again with the status. That fails, and the client does not
        # learn that the call has ended.
        await context.send_initial_metadata(())
        stream = _ServerStream(context)
        failure = None
        try:
            await handler(stream)
        except Exception as error:
            if not (stream.ended and is_stream_end(error)):
                failure = _failure_of(context, error)
        finally:
            stream.end("the handler ended", clean=True)
        if failure is not None:
            await context.abort(*failure)

    return grpc.stream_stream_rpc_method_handler(serve)


def frame_reply_handler(
    handler: Callable[[bytes], AsyncIterator[Sequence[Buffer]]],
) -> MethodHandler:
    """Return the server's side of a read: one request, answered by frames. The handler yields the
    parts of each frame.

    Handles errors like `frame_stream_handler`. Closes the generator when the client leaves.
    """

    async def serve(request: bytes, context: Context) -> None:
        try:
            async with aclosing(handler(request)) as frames:  # type: ignore[type-var]
                async for parts in frames:
                    await context.write(encode_frame(parts))
            return
        except aio.BaseError:
            return  # the client is gone
        except Exception as error:
            failure = _failure_of(context, error)
        await context.abort(*failure)

    return grpc.unary_stream_rpc_method_handler(serve)


def unary_handler(handler: Callable[[bytes], Awaitable[bytes]]) -> MethodHandler:
    """Return the server's side of `call_unary`: one request, one answer, both as bytes. Handles
    errors like `frame_stream_handler`."""

    async def serve(request: bytes, context: Context) -> bytes:
        try:
            return await handler(request)
        except Exception as error:
            failure = _failure_of(context, error)
        await context.abort(*failure)

    return grpc.unary_unary_rpc_method_handler(serve)


class RequestGate(Protocol):
    """Bounds the memory that the requests of untrusted clients use."""

    def hold(self, read: Callable[[], Awaitable[bytes]]) -> AbstractAsyncContextManager[bytes]:
        """Read a request, and count its bytes while the context is open."""


Admit = Callable[[bytes], Awaitable[T]]
"""Takes the greeting of a call (b"": there is none) and returns the facts about the client that the
handler needs. Raises an operating error to refuse the call before its request is read."""


def gated_unary_handler(
    handler: Callable[[T, bytes], Awaitable[bytes]], gate: RequestGate, admit: Admit[T]
) -> MethodHandler:
    """Like `unary_handler`, for untrusted clients. On the wire it is the same call. gRPC buffers
    more of a request than its first window only when the gate permits the read."""

    async def answer(context: Context) -> bytes:
        client = await admit(_greeting_of(context))
        async with gate.hold(partial(_request_of, context)) as request:
            return await handler(client, request)

    async def serve(_: object, context: Context) -> bytes:
        try:
            return await answer(context)
        except Exception as error:
            failure = _failure_of(context, error)
        await context.abort(*failure)

    return grpc.stream_unary_rpc_method_handler(serve)


def gated_reply_handler(
    handler: Callable[[T, bytes], AsyncIterator[Sequence[Buffer]]],
    gate: RequestGate,
    admit: Admit[T],
) -> MethodHandler:
    """Like `frame_reply_handler`, for untrusted clients."""

    async def answer(context: Context) -> None:
        client = await admit(_greeting_of(context))
        async with (
            gate.hold(partial(_request_of, context)) as request,
            aclosing(handler(client, request)) as frames,  # type: ignore[type-var]
        ):
            async for parts in frames:
                await context.write(encode_frame(parts))

    return grpc.stream_stream_rpc_method_handler(_lasting(answer))


def gated_push_handler(
    handler: Callable[[T, bytes, Callable[[bytes], Awaitable[None]]], Awaitable[None]],
    gate: RequestGate,
    admit: Admit[T],
) -> MethodHandler:
    """Return the server's side of a push: an untrusted client sends one request, and the handler
    answers with any number of messages until it returns. Handles errors like
    `frame_stream_handler`, and cancels the handler when the client leaves.

    The gate counts the request only during the read. The handler must bound the part of the request
    that it keeps.
    """

    async def push(context: Context) -> None:
        client = await admit(_greeting_of(context))
        async with gate.hold(partial(_request_of, context)) as request:
            pass
        await handler(client, request, context.write)

    return grpc.stream_stream_rpc_method_handler(_lasting(push))


def _lasting(
    answer: Callable[[Context], Awaitable[None]],
) -> Callable[[object, Context], Awaitable[None]]:
    """Return the handler of a call whose answer has any number of messages."""

    async def serve(_: object, context: Context) -> None:
        try:
            await answer(context)
            return
        except aio.BaseError:
            return  # the client is gone
        except Exception as error:
            failure = _failure_of(context, error)
        await context.abort(*failure)

    return serve


def _greeting_of(context: Context) -> bytes:
    """Return the last greeting in the metadata of a call. b"": there is none."""
    found = dict(context.invocation_metadata() or ()).get(GREETING_KEY, b"")
    return found if isinstance(found, bytes) else found.encode()


async def _request_of(context: Context) -> bytes:
    """Return the only message of the call; empty if the client sent none."""
    read: Callable[[], Awaitable[object]] = context.read
    message = await read()
    return b"" if message is aio.EOF else message  # type: ignore[return-value]


async def call_unary(channel: aio.Channel, method: str, request: bytes) -> bytes:
    """Send one request and return the answer. Raises CallFailed. The call has no deadline:
    a caller with a deadline cancels it."""
    ask: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    try:
        return await ask(request)
    except aio.AioRpcError as error:
        raise CallFailed(method, _status(error)) from error
    except asyncio.CancelledError:
        if not _cancelled_by_call():
            raise
        raise CallFailed(method, "the channel was closed here") from None


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    own_connection: bool = False,
) -> aio.Channel:
    """Return a channel to "host:port". It connects at the first call. The caller closes it.

    `credentials`: for TLS; None: the channel is not encrypted. `own_connection`: the channel has
    its own TCP connection; otherwise all channels of a process to one address share a connection.
    """
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
    if credentials is None:
        return aio.insecure_channel(address, options=options)
    return aio.secure_channel(address, credentials, options=options)


@asynccontextmanager
async def grpc_server(
    services: Mapping[str, Mapping[str, MethodHandler]],
    *,
    host: str,
    port: int,
    grace_s: float = CLOSE_S,
    frame_bytes_max: int = FRAME_LIMIT_BYTES,
    streams_max: int | None = None,
) -> AsyncIterator[int]:
    """Serve `{"package.Service": {"Method": handler}}` while the context is open. Yields the port.

    A client may send frames of at most `frame_bytes_max`, and have at most `streams_max` calls open
    on a connection (None: any number). Port 0: any free port. Raises PortInUse, AddressUnusable.

    At the end of the context, the server accepts no new call. After `grace_s` it cancels the calls
    under way, so the caller should close long-lived streams first.
    """
    # Raises the exact error. gRPC raises the same error for all reasons, and also prints it.
    bind_port(host, port).close()
    limit = ("grpc.max_receive_message_length", frame_bytes_max + 16)
    options = [option for option in SERVER_OPTIONS if option[0] != limit[0]]
    if streams_max is not None:
        options.append(("grpc.max_concurrent_streams", streams_max))
    server = aio.server(options=[*options, limit])
    for name, methods in services.items():
        handler = grpc.method_handlers_generic_handler(name, dict(methods))
        server.add_generic_rpc_handlers((handler,))
    try:
        bound = server.add_insecure_port(authority(host, port))
    except RuntimeError as error:
        raise PortInUse(host, port) from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace_s)


def encode_frame(parts: Sequence[Buffer]) -> bytes:
    """Return the gRPC message that carries the concatenation of `parts`: one join."""
    size = size_of(parts)
    assert 0 < size <= FRAME_LIMIT_BYTES, f"a frame of {size} bytes"
    header = bytearray(b"\x0a")
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    header.append(size)
    return b"".join((header, *parts))


def decode_frame(message: bytes) -> memoryview:
    """Return the frame inside a gRPC message, without a copy. Raises StreamClosed if malformed."""
    if not message:
        return memoryview(message)  # protobuf encodes an empty field like this
    size = 0
    for at in range(1, min(len(message), 6)):  # a valid length has at most five bytes
        byte = message[at]
        size |= (byte & 0x7F) << 7 * (at - 1)
        if byte < 0x80:
            if message[0] != 0x0A or len(message) != at + 1 + size:
                break
            return memoryview(message)[at + 1 :]
    raise StreamClosed("malformed frame: not a message of one bytes field", clean=False)


class _ServerStream:
    """The server's end of a call. The handler's return ends the call.

    Only a cancellation of its task can end a waiting gRPC read or write early. So `close` cancels
    the task, and `_broken_off` takes the cancellation back, as `asyncio.timeout` does.
    `asyncio.timeout` itself would take more time than the rest of a frame's bookkeeping.
    """

    def __init__(self, context: Context) -> None:
        self.peer = context.peer()
        self.greeting = _greeting_of(context)
        self._greets = bool(self.greeting)  # True: `receive` has not returned the greeting yet
        self._context = context
        self._end: tuple[str, bool] | None = None  # None: open
        self._sender: asyncio.Task[Any] | None = None  # the task inside `send`
        self._receiver: asyncio.Task[Any] | None = None
        self._closed_here = False

    @property
    def ended(self) -> bool:
        return self._end is not None

    async def send(self, parts: Sequence[Buffer]) -> None:
        assert self._sender is None, "two tasks send on one stream"
        self._check_open()
        message = encode_frame(parts)
        self._sender = task = _this_task()
        cancels = task.cancelling()
        try:
            await self._context.write(message)
        except (aio.BaseError, asyncio.CancelledError) as error:
            raise self._broken_off(error, task, cancels) from None
        finally:
            self._sender = None

    async def receive(self) -> memoryview:
        assert self._receiver is None, "two tasks receive on one stream"
        self._check_open()
        if self._greets:
            self._greets = False
            return memoryview(self.greeting)
        read: Callable[[], Awaitable[object]] = self._context.read
        self._receiver = task = _this_task()
        cancels = task.cancelling()
        try:
            message = await read()
        except (aio.BaseError, asyncio.CancelledError) as error:
            raise self._broken_off(error, task, cancels) from None
        finally:
            self._receiver = None
        if message is aio.EOF:
            self.end("the client went away", clean=False)
            raise self._closed()
        assert isinstance(message, bytes)
        return self._frame(message)

    def _frame(self, message: bytes) -> memoryview:
        try:
            frame = decode_frame(message)
        except StreamClosed as error:
            self.end(error.reason, clean=False)
            raise
        if not frame:
            self.end("closed by the peer", clean=True)
            raise self._closed()
        return frame

    async def close(self) -> None:
        self.end("closed here", clean=True)
        if not self._closed_here:
            self._closed_here = True
            for task in (self._sender, self._receiver):
                if task is not None:
                    task.cancel()  # `_broken_off` takes the cancellation back

    def end(self, reason: str, *, clean: bool) -> None:
        """Note the end of the stream. Only the first call has an effect."""
        if self._end is None:
            self._end = reason, clean

    def _broken_off(
        self, error: BaseException, task: asyncio.Task[Any], cancels: int
    ) -> BaseException:
        """Return the error to raise after a read or write that ended with `error`. `task` had
        `cancels` cancellation requests before that read or write."""
        if not isinstance(error, asyncio.CancelledError):
            self.end("the client went away", clean=False)
        elif not (self._closed_here and task.uncancel() <= cancels):
            self.end("cancelled here", clean=False)
            return error
        return self._closed()

    def _check_open(self) -> None:
        if self._end is not None:
            raise self._closed()

    def _closed(self) -> StreamClosed:
        assert self._end is not None
        reason, clean = self._end
        return StreamClosed(reason, clean=clean)


class _GreetingStream:
    """The client's end of a call that begins when the first frame, the greeting, is sent."""

    def __init__(self, begin: Callable[[tuple[str, bytes]], _ClientStream], peer: str) -> None:
        self.peer = peer
        self._begin = begin
        self._stream: _ClientStream | None = None  # None: the call has not begun
        self._moved = asyncio.Event()  # set when the call begins or the stream is closed
        self._end: tuple[str, bool] | None = None  # None: open

    async def send(self, parts: Sequence[Buffer]) -> None:
        if self._stream is not None:
            await self._stream.send(parts)
            return
        self._check_open()
        size = size_of(parts)
        if size > GREETING_BYTES_MAX:
            why = f"the first frame has {size} bytes; at most {GREETING_BYTES_MAX} are allowed"
            self._finish(why, clean=False)
            self._check_open()
        self._stream = self._begin((GREETING_KEY, b"".join(parts)))
        self._moved.set()

    async def receive(self) -> memoryview:
        if self._stream is None:
            try:
                await self._moved.wait()
            except asyncio.CancelledError:
                await self.close()
                raise
            self._check_open()
        assert self._stream is not None
        return await self._stream.receive()

    async def close(self) -> None:
        self._finish("closed here", clean=True)
        if self._stream is not None:
            await self._stream.close()

    def _finish(self, reason: str, *, clean: bool) -> None:
        if self._end is None:
            self._end = reason, clean
            self._moved.set()

    def _check_open(self) -> None:
        if self._end is not None:
            reason, clean = self._end
            raise StreamClosed(reason, clean=clean)


class _ClientStream:
    """The client's end of a call."""

    def __init__(self, call: FrameCall, peer: str, close_s: float) -> None:
        self.peer = peer
        self._call = call
        self._close_s = close_s
        # `call.read()` would drop frames that arrived before the status.
        self._messages = aiter(call)
        self._end: tuple[str, bool] | None = None  # None: open
        self._sending = False
        self._receiving = False
        self._idle: asyncio.Event | None = None  # None: no task waits for the send to end
        self._drained = asyncio.Event()  # the reader has seen the end
        self._closing = False
        call.add_done_callback(self._release_first_send)

    def _release_first_send(self, _: object) -> None:
        """Wake a write that waits for the call to begin.

        NOTE: in grpc.aio this write never returns if the call ends before it has begun, for example
        when its channel is closed. grpc.aio has no public way to wake the write."""
        begun: asyncio.Event | None = getattr(self._call, "_metadata_sent", None)
        if begun is not None:
            begun.set()

    async def send(self, parts: Sequence[Buffer]) -> None:
        assert not self._sending, "two tasks send on one stream"
        if self._end is not None or self._closing:
            raise self._closed()
        message = encode_frame(parts)
        self._sending = True
        try:
            await self._call.write(message)
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StreamClosed("the peer has ended the stream", clean=False) from error
        except asyncio.CancelledError:
            self._finish("cancelled here", clean=False)
            if not _cancelled_by_call():
                raise
            raise self._closed() from None
        finally:
            self._sending = False
            if self._idle is not None:
                self._idle.set()

    async def receive(self) -> memoryview:
        assert not self._receiving, "two tasks receive on one stream"
        if self._end is not None or self._closing:
            raise self._closed()
        self._receiving = True
        try:
            while True:
                frame = await self._next()
                if not self._closing:
                    return frame
        finally:
            self._receiving = False

    async def _next(self) -> memoryview:
        try:
            return decode_frame(await anext(self._messages))
        except StopAsyncIteration:
            self._finish("closed by the peer", clean=True)
        except aio.AioRpcError as error:
            self._finish(_status(error), clean=False)
        except StreamClosed as error:
            self._finish(error.reason, clean=False)
            self._call.cancel()
        except asyncio.CancelledError:
            self._finish("cancelled here", clean=False)
            if not _cancelled_by_call():
                raise
        raise self._closed()

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        cancels = _this_task().cancelling()
        try:
            async with asyncio.timeout(self._close_s):
                await self._say_goodbye()
        except (TimeoutError, StreamClosed):
            pass  # the `finally` breaks the stream
        except asyncio.CancelledError:
            if _this_task().cancelling() > cancels:
                raise
            # The channel was closed meanwhile; this task was not cancelled.
        finally:
            self._call.cancel()  # does nothing to a call that has ended

    async def _say_goodbye(self) -> None:
        if self._sending:
            self._idle = asyncio.Event()
            await self._idle.wait()
        if self._call.done():
            return
        try:
            await self._call.write(_GOODBYE)
            await self._call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return
        if self._receiving:
            await self._drained.wait()
        while self._end is None:
            await self._next()

    def _finish(self, reason: str, *, clean: bool) -> None:
        if self._end is None:
            self._end = reason, clean
            self._drained.set()

    def _closed(self) -> StreamClosed:
        if self._closing:
            return StreamClosed("closed here", clean=True)
        assert self._end is not None
        reason, clean = self._end
        return StreamClosed(reason, clean=clean)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _cancelled_by_call() -> bool:
    """Return whether the CancelledError just caught comes from the gRPC call, and not from a
    cancellation of this task."""
    return _this_task().cancelling() == 0


def _status(error: aio.AioRpcError) -> str:
    return f"{error.code().name}: {shorten(error.details() or '')}"


def shorten(details: str) -> str:
    """Return `details` without the text that gRPC writes before the cause of a failed connection:
    "failed to connect to all addresses; last error: ..." and the escaped address."""
    return _UNREACHABLE.sub("", details)


def _failure_of(context: Context, error: Exception) -> tuple[grpc.StatusCode, str]:
    """Log a handler's failure. Report a bug to the loop's exception handler instead. Returns the
    arguments for `context.abort`. The caller must call `abort` after its `except` block, without a
    reference to the request.

    NOTE: grpc.aio keeps the exception of `abort` and the call in a reference cycle. Inside the
    `except` block, that exception would also refer to the request, through its traceback and the
    handled error. 500 refused calls would then keep 1 GB until the next garbage collection.
    """
    if is_bug(error):
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a bug in a gRPC handler", "exception": error}
        )
        return grpc.StatusCode.INTERNAL, "internal error"
    if is_operating_error(error):
        log.warning("call failed", peer=context.peer(), error=repr(error))
        return grpc.StatusCode.ABORTED, f"{type(error).__name__}: {error}"
    log.error("call failed", peer=context.peer(), exc_info=error)
    return grpc.StatusCode.INTERNAL, "internal error"
