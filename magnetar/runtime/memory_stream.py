"""A frame stream within one process, for standalone and simulations."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.frames import is_stream_end
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import is_bug, is_operating_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from magnetar.runtime.frames import Buffer, FrameStream

log = get_logger(__name__)


class MemoryStream:
    """One end of a pair; see `memory_stream_pair`. A `FrameStream`."""

    def __init__(self, peer: str, incoming: _Pipe, outgoing: _Pipe) -> None:
        self.peer = peer
        self._incoming = incoming
        self._outgoing = outgoing
        self._sending = False
        self._receiving = False

    async def send(self, parts: Sequence[Buffer]) -> None:
        assert not self._sending, "two tasks send on one stream"
        self._sending = True
        try:
            frame = b"".join(parts)
            assert frame, "a frame is never empty"
            await self._outgoing.put(frame)
        except asyncio.CancelledError:
            self.abort("cancelled by the peer")  # a network would report the same
            raise
        finally:
            self._sending = False

    async def receive(self) -> memoryview:
        assert not self._receiving, "two tasks receive on one stream"
        self._receiving = True
        try:
            return memoryview(await self._incoming.get())
        except asyncio.CancelledError:
            self.abort("cancelled by the peer")
            raise
        finally:
            self._receiving = False

    @property
    def ended(self) -> bool:
        """True when either end has closed or broken the stream."""
        return self._incoming.ended

    async def close(self) -> None:
        self._end("closed by the peer", clean=True)

    def abort(self, reason: str) -> None:
        """Break the stream like a lost connection: both ends see an unclean end."""
        self._end(reason, clean=False)

    def _end(self, reason: str, *, clean: bool) -> None:
        here = reason if not clean else "closed here"
        self._outgoing.end(send=(here, clean), receive=(reason, clean))
        self._incoming.end(send=(reason, clean), receive=(here, clean))
        self._incoming.drop()


class _Pipe:
    """One direction of a stream. It holds at most `frames_max` frames; then the sender waits."""

    def __init__(self, frames_max: int) -> None:
        assert frames_max > 0
        self._frames: deque[bytes] = deque()
        self._frames_max = frames_max
        self._sender_end: tuple[str, bool] | None = None  # None: open
        self._receiver_end: tuple[str, bool] | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._sender_end is not None

    async def put(self, frame: bytes) -> None:
        while self._sender_end is None and len(self._frames) >= self._frames_max:
            await self._wait_change()
        if self._sender_end is not None:
            reason, clean = self._sender_end
            raise StreamClosed(reason, clean=clean)
        self._frames.append(frame)
        self._changed.set()

    async def get(self) -> bytes:
        while not self._frames and self._receiver_end is None:
            await self._wait_change()
        if not self._frames:
            assert self._receiver_end is not None
            reason, clean = self._receiver_end
            raise StreamClosed(reason, clean=clean)
        frame = self._frames.popleft()
        self._changed.set()
        return frame

    def end(self, *, send: tuple[str, bool], receive: tuple[str, bool]) -> None:
        """End this direction. `send` and `receive`: the reason that each side reports, and whether
        the end is clean. Only the first call has an effect."""
        if self._sender_end is None:
            self._sender_end, self._receiver_end = send, receive
            self._changed.set()

    def drop(self) -> None:
        """Drop the remaining frames: the receiver has closed and will not read them."""
        self._frames.clear()

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def memory_stream_pair(
    name_a: str, name_b: str, *, frames_max: int
) -> tuple[MemoryStream, MemoryStream]:
    """Return the two ends of a new stream; the end of `name_a` has `name_b` as its peer.

    At most `frames_max` frames wait in each direction.
    """
    a_to_b, b_to_a = _Pipe(frames_max), _Pipe(frames_max)
    return MemoryStream(name_b, b_to_a, a_to_b), MemoryStream(name_a, a_to_b, b_to_a)


async def serve_memory_stream(
    stream: MemoryStream, handler: Callable[[FrameStream], Awaitable[None]]
) -> None:
    """Run a server's `handler` on its end of a pair. The stream ends as it does over a network.

    The handler's return closes the stream. An operating error breaks it with the error's text, any
    other error with "internal error". A bug is raised as well.
    """
    try:
        await handler(stream)
    except Exception as error:
        if stream.ended and is_stream_end(error):
            return
        if is_bug(error):
            stream.abort("internal error")
            raise
        if is_operating_error(error):
            log.warning("stream failed", peer=stream.peer, error=repr(error))
            stream.abort(f"{type(error).__name__}: {error}")
        else:
            log.error("stream failed", peer=stream.peer, exc_info=error)
            stream.abort("internal error")
    finally:
        await stream.close()
