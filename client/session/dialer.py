"""Opens session streams over gRPC. Importing this module loads grpc."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.client.session.service_url import host_and_port
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import open_channel, open_frame_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc
    from grpc import aio

    from magnetar.client.session.pool import Purpose
    from magnetar.runtime.frames import Buffer, FrameStream

SESSION_METHOD: Final = "/magnetar.broker.Broker/Session"

LATE_COMPLETIONS_S: Final = 0.02
"""The time in seconds that the loop runs on after its channels were closed. grpc.aio has one thread
for all loops of a process. This thread may still deliver completions to the loop. If the loop is
already closed, the delivery raises an error in another loop."""


class GrpcDialer:
    """Opens streams. Each stream has a channel with a TCP connection of its own, so that bulk
    deliveries do not delay receipts in the kernel's buffers.

    When a stream is closed, it closes its channel. So a client keeps no connections to brokers that
    it has left.
    """

    def __init__(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        """`credentials`: the credentials of TLS. None: the streams are not encrypted."""
        self._credentials = credentials
        self._channels: set[aio.Channel] = set()  # the channels of streams that are not closed
        self._opened = False  # whether at least one stream was opened

    def open(self, broker: str, _: Purpose) -> FrameStream:
        channel = open_channel(host_and_port(broker), self._credentials, own_connection=True)
        self._channels.add(channel)
        self._opened = True
        stream = open_frame_stream(channel, SESSION_METHOD, peer=broker, greets=True)
        return _StreamOfChannel(stream, channel, self._channels)

    async def close(self) -> None:
        while self._channels:
            channel = next(iter(self._channels))
            await channel.close()
            self._channels.discard(channel)  # last: a cancelled call is repeated
        if self._opened:
            await asyncio.sleep(LATE_COMPLETIONS_S)


class _StreamOfChannel:
    """A stream that closes its channel when it is closed.

    NOTE: grpc.aio ends the TCP connection of a closed channel when nothing refers to the channel or
    to its calls any more. So this object drops both.
    """

    def __init__(self, stream: FrameStream, channel: aio.Channel, open_: set[aio.Channel]) -> None:
        """`open_`: the channels that are not closed."""
        self.peer = stream.peer
        self._stream: FrameStream | None = stream  # None: the stream was closed
        self._channel: aio.Channel | None = channel  # None: a task closes it
        self._open = open_

    async def send(self, parts: Sequence[Buffer]) -> None:
        await self._not_closed().send(parts)

    async def receive(self) -> memoryview:
        return await self._not_closed().receive()

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is None:  # another call of close() closes the stream, and then the channel
            return
        try:
            await self._not_closed().close()
        finally:
            self._stream = None
            self._open.discard(channel)
            await channel.close()

    def _not_closed(self) -> FrameStream:
        if self._stream is None:
            raise StreamClosed("closed here", clean=True)
        return self._stream
