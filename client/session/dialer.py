"""Opens session streams over gRPC. Importing this module loads grpc."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.client.session.service_url import host_and_port
from magnetar.runtime.grpc_frames import open_channel, open_frame_stream

if TYPE_CHECKING:
    import grpc
    from grpc import aio

    from magnetar.client.session.pool import Purpose
    from magnetar.runtime.frames import FrameStream

SESSION_METHOD: Final = "/magnetar.broker.Broker/Session"

LATE_COMPLETIONS_S: Final = 0.02
"""Seconds that the loop runs on after its channels were closed. grpc.aio has one thread for all
loops of a process. This thread may still deliver completions to the loop. If the loop is closed by
then, the delivery raises an error in another loop."""


class GrpcDialer:
    """Opens streams. A broker has one channel for each purpose, and each channel its own TCP
    connection: deliveries in bulk do not delay receipts in the kernel's buffers."""

    def __init__(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        """`credentials`: those of TLS; None: the streams are not encrypted."""
        self._credentials = credentials
        self._channels: dict[tuple[str, Purpose], aio.Channel] = {}

    def open(self, broker: str, purpose: Purpose) -> FrameStream:
        channel = self._channels.get((broker, purpose))
        if channel is None:
            channel = self._channels[broker, purpose] = open_channel(
                host_and_port(broker), self._credentials, own_connection=True
            )
        return open_frame_stream(channel, SESSION_METHOD, peer=broker, greets=True)

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
        if channels:
            await asyncio.sleep(LATE_COMPLETIONS_S)
