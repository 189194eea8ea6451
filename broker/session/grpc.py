"""The broker's gRPC service (broker.proto): sessions of our client, and range reads for Spark."""

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

    from magnetar.broker.broker import Broker
    from magnetar.runtime.frames import Buffer, FrameStream
    from magnetar.runtime.grpc_frames import MethodHandler

SERVICE = "magnetar.broker.Broker"

Request = TypeVar("Request", bound=Message)


class BrokerService:
    """The handlers, and the sessions under way, which a stop must close first."""

    def __init__(self) -> None:
        self._serving = asyncio.Event()
        self._broker: Broker
        self._sessions: set[FrameStream] = set()

    def serve(self, broker: Broker) -> None:
        """From now on calls are answered; those that came before have waited. (A broker is made
        after its port is bound, because it is registered with that.)"""
        self._broker = broker
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
        """End every session; their clients look for another broker."""
        async with asyncio.TaskGroup() as group:
            for stream in list(self._sessions):
                group.create_task(stream.close())

    async def _session(self, stream: FrameStream) -> None:
        self._sessions.add(stream)
        try:
            await self._serving.wait()
            await Connection(stream, self._broker, Transport.GRPC).run()
        except StreamClosed:
            return
        finally:
            self._sessions.discard(stream)

    async def _plan(self, request: bytes) -> bytes:
        await self._serving.wait()
        name = TopicName.parse(_parsed(pb.PlanRangeRequest, request).topic)
        located = await self._broker.locate(name, authoritative=False)
        if located.broker != self._broker.me:
            return pb.PlanRangeReply(owner_url=located.broker.grpc_url).SerializeToString()
        try:
            planned = await ranges.plan(self._broker, name)
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
            self._broker,
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
