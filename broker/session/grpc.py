"""The broker's gRPC service (broker.proto): sessions of clients, and calls for Spark."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from magnetar.broker.errors import RequestRefused, TopicNotFound
from magnetar.broker.session import ranges
from magnetar.broker.session.batch_notes import note_batches, note_of
from magnetar.broker.session.caller import Caller, authenticated
from magnetar.broker.session.connection import Connection, Transport
from magnetar.broker.session.limits import REQUEST_FIELDS_MAX, Requests
from magnetar.broker.session.position_watch import PositionWatches
from magnetar.broker.session.topic_ranges import TopicRanges, ledger_range
from magnetar.broker.session.topic_watch import TopicWatches
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.errors import MalformedCommand
from magnetar.protos.field_count import has_more_fields
from magnetar.protos.names import TopicName
from magnetar.runtime.frames import StreamClosed
from magnetar.runtime.grpc_frames import (
    GREETING_KEY,
    frame_stream_handler,
    gated_push_handler,
    gated_reply_handler,
    gated_unary_handler,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from google.protobuf.descriptor import Descriptor

    from magnetar.broker.broker import Broker
    from magnetar.broker.session.endpoint import Endpoint
    from magnetar.runtime.frames import Buffer, FrameStream
    from magnetar.runtime.grpc_frames import AcceptedStream, MethodHandler

SERVICE = "magnetar.broker.Broker"

Request = TypeVar("Request", bound=Message)


class BrokerService:
    """The handlers of the calls, and the open sessions."""

    def __init__(self) -> None:
        self._serving = asyncio.Event()
        self._endpoint: Endpoint
        self._sessions: set[FrameStream] = set()
        self._ranges = TopicRanges()
        self._watches = PositionWatches()
        self._topic_watches = TopicWatches()
        self._requests = Requests()

    def serve(self, endpoint: Endpoint) -> None:
        """Answer calls from now on, and the earlier calls, which have waited. (The port is bound
        before the broker is made, because the broker's registration contains the port.)"""
        self._endpoint = endpoint
        self._serving.set()

    @property
    def handlers(self) -> Mapping[str, MethodHandler]:
        """The methods of SERVICE, for `grpc_server`."""
        return {
            "Session": frame_stream_handler(self._session),
            "PlanRange": self._call(pb.PlanRangeRequest, _plan),
            "ReadRange": gated_reply_handler(self._read, self._requests, self._admit),
            "FindTopics": self._call(pb.FindTopicsRequest, self._ranges.find),
            "WatchTopics": gated_push_handler(self._watch_topics, self._requests, self._admit),
            "PlanTopics": self._call(pb.PlanTopicsRequest, self._ranges.plan),
            "WatchPositions": gated_push_handler(self._watch, self._requests, self._admit),
            "FindEntry": self._call(pb.FindEntryRequest, self._ranges.find_entry),
            "HoldTopics": self._call(pb.HoldTopicsRequest, self._ranges.hold),
            "TopicPolicies": self._call(pb.TopicPoliciesRequest, _policies),
            "NoteBatches": self._call(pb.NoteBatchesRequest, note_batches),
        }

    def _call(
        self, kind: type[Request], answer: Callable[[Broker, Request], Awaitable[Message]]
    ) -> MethodHandler:
        async def handle(caller: Caller, request: bytes) -> bytes:
            asked = _parsed(kind, request)
            caller.require(asked)
            return (await answer(self._endpoint.broker, asked)).SerializeToString()

        return gated_unary_handler(handle, self._requests, self._admit)

    async def _admit(self, greeting: bytes) -> Caller:
        await self._serving.wait()
        return authenticated(self._endpoint, greeting)

    @property
    def session_count(self) -> int:
        """The number of open sessions."""
        return len(self._sessions)

    async def close_sessions(self) -> None:
        """End every session and every watch; the clients look for another broker."""
        self._watches.end_all()
        self._topic_watches.end_all()
        async with asyncio.TaskGroup() as group:
            for stream in list(self._sessions):
                group.create_task(stream.close())

    async def _session(self, stream: AcceptedStream) -> None:
        if not stream.greeting:
            raise RequestRefused(f"CONNECT must be in the metadata of the call, as {GREETING_KEY}")
        self._sessions.add(stream)
        try:
            await self._serving.wait()
            await Connection(stream, self._endpoint, Transport.GRPC).run()
        except StreamClosed:
            return
        finally:
            self._sessions.discard(stream)

    async def _read(self, caller: Caller, request: bytes) -> AsyncIterator[Sequence[Buffer]]:
        body = _parsed(pb.ReadRangeRequest, request)
        caller.require(body)
        frames = ranges.read(
            self._endpoint.broker,
            TopicName.parse(body.topic),
            ledger=body.ledger,
            first=body.first_entry,
            last=body.last_entry,
        )
        async for frame in frames:
            yield frame

    async def _watch(
        self, caller: Caller, request: bytes, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        asked = _parsed(pb.WatchPositionsRequest, request)
        caller.require(asked)
        await self._watches.serve(self._endpoint.broker, asked, send)

    async def _watch_topics(
        self, caller: Caller, request: bytes, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        asked = _parsed(pb.FindTopicsRequest, request)
        caller.require(asked)
        await self._topic_watches.serve(self._endpoint.broker, asked, send)


async def _plan(broker: Broker, asked: pb.PlanRangeRequest) -> pb.PlanRangeReply:
    name = TopicName.parse(asked.topic)
    located = await broker.locate(name, authoritative=False)
    if located.broker != broker.me:
        return pb.PlanRangeReply(owner_url=located.broker.grpc_url)
    try:
        planned = await ranges.plan(broker, name)
    except TopicNotFound:
        return pb.PlanRangeReply(exists=False)
    return pb.PlanRangeReply(exists=True, ledgers=map(ledger_range, planned))


async def _policies(broker: Broker, asked: pb.TopicPoliciesRequest) -> pb.TopicPoliciesReply:
    name = TopicName.parse(asked.topic)
    located = await broker.locate(name, authoritative=False)
    if located.broker != broker.me:
        return pb.TopicPoliciesReply(owner_url=located.broker.grpc_url)
    reply = pb.TopicPoliciesReply()
    with suppress(TopicNotFound):  # for an absent topic the namespace's policies apply
        topic = await broker.stored_topic(name, create=False)
        if topic.deduplication.wanted:
            # The topic may not have applied the newest policy yet. Until then, a next owner would
            # not know the producers' sequence ids.
            await topic.deduplication.follow()
        note = note_of(topic.log.properties, asked.sink) if asked.sink else None
        if note is not None:
            reply.noted.query, reply.noted.batch = note.query, note.batch
    policies = broker.policies.policies_of(name)
    reply.deduplication = policies.deduplication
    reply.max_message_bytes = policies.max_message_bytes
    return reply


def _parsed(kind: type[Request], data: bytes) -> Request:
    """Parse a request. Raises MalformedCommand, RequestRefused."""
    if has_more_fields(data, cast("Descriptor", kind.DESCRIPTOR), REQUEST_FIELDS_MAX):
        raise RequestRefused(f"it has more than {REQUEST_FIELDS_MAX} fields")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedCommand(kind.__name__, str(error)) from None
