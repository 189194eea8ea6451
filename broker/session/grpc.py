"""The broker's gRPC service (broker.proto): sessions of clients, and range reads for Spark."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError, Message

from magnetar.broker.errors import TopicNotFound
from magnetar.broker.session import ranges
from magnetar.broker.session.connection import Connection, Transport
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.errors import MalformedCommand
from magnetar.protos.names import TopicName
from magnetar.runtime.frames import StreamClosed
from magnetar.runtime.grpc_frames import (
    frame_reply_handler,
    frame_stream_handler,
    unary_handler,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from magnetar.broker.session.endpoint import Endpoint
    from magnetar.runtime.frames import Buffer, FrameStream
    from magnetar.runtime.grpc_frames import MethodHandler

SERVICE = "magnetar.broker.Broker"

Request = TypeVar("Request", bound=Message)


class BrokerService:
    """The handlers and the open sessions; a stop closes the sessions first."""

    def __init__(self) -> None:
        self._serving = asyncio.Event()
        self._endpoint: Endpoint
        self._sessions: set[FrameStream] = set()

    def serve(self, endpoint: Endpoint) -> None:
        """Answer calls from now on; earlier calls wait for this. (A broker is made after its port
        is bound, because its registration contains the port.)"""
        self._endpoint = endpoint
        self._serving.set()

    @property
    def handlers(self) -> Mapping[str, MethodHandler]:
        """The methods of SERVICE, for `grpc_server`."""
        return {
            "Session": frame_stream_handler(self._session),
            "PlanRange": unary_handler(self._plan),
            "ReadRange": frame_reply_handler(self._read),
        }

    @property
    def session_count(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    async def close_sessions(self) -> None:
        """End every session; the clients look for another broker."""
        async with asyncio.TaskGroup() as group:
            for stream in list(self._sessions):
                group.create_task(stream.close())

    async def _session(self, stream: FrameStream) -> None:
        self._sessions.add(stream)
        try:
            await self._serving.wait()
            await Connection(stream, self._endpoint, Transport.GRPC).run()
        except StreamClosed:
            return
        finally:
            self._sessions.discard(stream)

    async def _plan(self, request: bytes) -> bytes:
        await self._serving.wait()
        name = TopicName.parse(_parsed(pb.PlanRangeRequest, request).topic)
        broker = self._endpoint.broker
        located = await broker.locate(name, authoritative=False)
        if located.broker != broker.me:
            return pb.PlanRangeReply(owner_url=located.broker.grpc_url).SerializeToString()
        try:
            planned = await ranges.plan(broker, name)
        except TopicNotFound:
            return pb.PlanRangeReply(exists=False).SerializeToString()
        reply = pb.PlanRangeReply(exists=True)
        for part in planned:
            reply.ledgers.add(
                ledger=part.ledger,
                first_entry=part.first,
                last_entry=part.last,
                first_index=part.first_index,
                bytes=part.bytes,
            )
        return reply.SerializeToString()

    async def _read(self, request: bytes) -> AsyncIterator[Sequence[Buffer]]:
        await self._serving.wait()
        body = _parsed(pb.ReadRangeRequest, request)
        frames = ranges.read(
            self._endpoint.broker,
            TopicName.parse(body.topic),
            ledger=body.ledger,
            first=body.first_entry,
            last=body.last_entry,
        )
        async for frame in frames:
            yield frame


def _parsed(kind: type[Request], data: bytes) -> Request:
    """Raises MalformedCommand."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedCommand(kind.__name__, str(error)) from None
