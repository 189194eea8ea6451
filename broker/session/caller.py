"""The client of a gRPC call other than a session: its role and its permissions.

The broker authenticates such a call in the same way as a session. The greeting of the call holds a
CONNECT, which the session machine judges before the broker reads the request. For a call without a
greeting, the broker assumes a CONNECT without credentials. A call cannot answer a challenge.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import NotAuthenticated, NotAuthorized
from magnetar.broker.session.access import Permission
from magnetar.broker.session.commands import RULES
from magnetar.broker.session.session import Close, Session
from magnetar.protos import broker_pb2, framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.errors import InvalidTopicName
from magnetar.protos.names import NamespaceName, TopicName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from google.protobuf.message import Message

    from magnetar.broker.session.access import Grants, Resource
    from magnetar.broker.session.endpoint import Endpoint

_ANONYMOUS: Final = framing.encode_command(pb.CommandConnect(client_version="unknown"))


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client."""

    role: str
    grants: Grants

    def require(self, request: Message) -> None:
        """Check that the client has the permission for each topic and namespace of the request.
        Raises NotAuthorized, InvalidNamespaceName."""
        permission, resources = _NEEDS[type(request)]
        for resource in resources(request):
            if not self.grants.allow(permission, resource):
                raise NotAuthorized(self.role, permission.value, str(resource))


def authenticated(endpoint: Endpoint, greeting: bytes) -> Caller:
    """Authenticate the client of a call with this greeting; b"": the call has none. Raises
    NotAuthenticated, FrameError, CommandError."""
    now = asyncio.get_running_loop().time()
    session = Session(
        now,
        server_version="",
        max_message_bytes=endpoint.broker.message_bytes_max,
        rules=RULES,
        authenticator=endpoint.make_authenticator(),
    )
    frame, _ = framing.first_frame(memoryview(greeting or _ANONYMOUS), 0)
    connect = framing.parse_command(frame)
    if connect.type != pb.BaseCommand.CONNECT:
        raise NotAuthenticated("the greeting of the call is not a CONNECT")
    [action] = session.on_command(connect, now)
    if session.grants is None:
        reason = "authentication failed: a call cannot answer a challenge"
        raise NotAuthenticated(action.reason if isinstance(action, Close) else reason)
    return Caller(session.role, session.grants)


def _topics(names: Iterable[str]) -> Iterator[Resource]:
    """Return the valid names. An invalid name needs no permission: the call itself refuses it."""
    for name in names:
        try:
            yield TopicName.parse(name)
        except InvalidTopicName:
            continue


def _one(request: Message) -> Iterator[Resource]:
    assert isinstance(
        request,
        broker_pb2.PlanRangeRequest
        | broker_pb2.ReadRangeRequest
        | broker_pb2.FindEntryRequest
        | broker_pb2.TopicPoliciesRequest,
    )
    return _topics([request.topic])


def _each(request: Message) -> Iterator[Resource]:
    assert isinstance(
        request,
        broker_pb2.PlanTopicsRequest
        | broker_pb2.WatchPositionsRequest
        | broker_pb2.HoldTopicsRequest
        | broker_pb2.NoteBatchesRequest,
    )
    return _topics(part.topic for part in request.topics)


def _found(request: Message) -> Iterator[Resource]:
    assert isinstance(request, broker_pb2.FindTopicsRequest)
    yield from _topics(request.topics)
    yield from map(NamespaceName.parse, request.namespaces)


_NEEDS: Final[
    Mapping[type[Message], tuple[Permission, Callable[[Message], Iterator[Resource]]]]
] = {
    broker_pb2.PlanRangeRequest: (Permission.CONSUME, _one),
    broker_pb2.ReadRangeRequest: (Permission.CONSUME, _one),
    broker_pb2.FindEntryRequest: (Permission.CONSUME, _one),
    broker_pb2.PlanTopicsRequest: (Permission.CONSUME, _each),
    broker_pb2.WatchPositionsRequest: (Permission.CONSUME, _each),
    broker_pb2.HoldTopicsRequest: (Permission.CONSUME, _each),
    broker_pb2.FindTopicsRequest: (Permission.LOOKUP, _found),
    broker_pb2.TopicPoliciesRequest: (Permission.LOOKUP, _one),
    broker_pb2.NoteBatchesRequest: (Permission.PRODUCE, _each),
}
