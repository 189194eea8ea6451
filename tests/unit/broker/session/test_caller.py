"""gRPC calls outside of sessions use the authentication of sessions and need permissions."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from grpc import aio

from magnetar.broker.session.access import (
    Accepted,
    Challenged,
    Credentials,
    Outcome,
    Permission,
    Refused,
)
from magnetar.broker.session.grpc import SERVICE
from magnetar.protos import broker_pb2 as pb
from magnetar.protos import framing
from magnetar.protos.names import TopicName
from magnetar.protos.pulsar_pb2 import CommandConnect, CommandPing
from magnetar.runtime.grpc_frames import GREETING_KEY, open_channel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from google.protobuf.message import Message

    from magnetar.broker.session.access import Resource

pytestmark = pytest.mark.real_loop

MINE, OTHER = "persistent://public/default/mine", "persistent://public/default/other"
CONSUME, LOOKUP, PRODUCE = Permission.CONSUME, Permission.LOOKUP, Permission.PRODUCE


class Grants:
    """Permits every action on one topic and its namespace."""

    def allow(self, permission: Permission, resource: Resource) -> bool:
        mine = TopicName.parse(MINE)
        return resource in (mine, mine.namespace_name)


class Tokens:
    def authenticate(self, credentials: Credentials) -> Outcome:
        match credentials.data:
            case b"right":
                return Accepted("reader", Grants())
            case b"more":
                return Challenged(Credentials("token", b"what else?"))
        return Refused("the token is not valid")


def greeting(token: bytes) -> bytes:
    return framing.encode_command(
        CommandConnect(client_version="c", auth_method_name="token", auth_data=token)
    )


@asynccontextmanager
async def channel_to_broker() -> AsyncIterator[aio.Channel]:
    async with running_broker(ClusterState(), make_authenticator=Tokens) as broker:
        channel = open_channel(broker.grpc_url.removeprefix("grpc://"))
        yield channel
        await channel.close()


async def ask(channel: aio.Channel, method: str, request: Message, connect: bytes | None) -> Any:
    """Call the method. Returns the answer, or the text of the failure."""
    streams = method in ("ReadRange", "WatchPositions", "WatchTopics")
    call = channel.unary_stream if streams else channel.unary_unary
    metadata = () if connect is None else ((GREETING_KEY, connect),)
    asked = call(f"/{SERVICE}/{method}")(request.SerializeToString(), metadata=metadata)
    try:
        return await (asked.read() if streams else asked)
    except aio.AioRpcError as error:
        return error.details()


def calls(topic: str) -> list[tuple[str, Message, Permission]]:
    namespace = "public/default" if topic == MINE else "public/other"
    return [
        ("PlanRange", pb.PlanRangeRequest(topic=topic), CONSUME),
        ("ReadRange", pb.ReadRangeRequest(topic=topic), CONSUME),
        ("FindTopics", pb.FindTopicsRequest(topics=[topic]), LOOKUP),
        ("FindTopics", pb.FindTopicsRequest(namespaces=[namespace]), LOOKUP),
        ("WatchTopics", pb.FindTopicsRequest(topics=[topic]), LOOKUP),
        ("WatchTopics", pb.FindTopicsRequest(namespaces=[namespace]), LOOKUP),
        ("PlanTopics", pb.PlanTopicsRequest(topics=[pb.TopicAsk(topic=topic)]), CONSUME),
        (
            "WatchPositions",
            pb.WatchPositionsRequest(topics=[pb.TopicAsk(topic=topic)]),
            CONSUME,
        ),
        ("FindEntry", pb.FindEntryRequest(topic=topic, index=1), CONSUME),
        (
            "HoldTopics",
            pb.HoldTopicsRequest(subscription="s", topics=[pb.TopicPlace(topic=topic)]),
            CONSUME,
        ),
        ("TopicPolicies", pb.TopicPoliciesRequest(topic=topic), LOOKUP),
        (
            "NoteBatches",
            pb.NoteBatchesRequest(
                sink="s", query="q", topics=[pb.TopicDigest(topic=topic, digest="d")]
            ),
            PRODUCE,
        ),
    ]


@pytest.mark.parametrize(
    ("connect", "why"),
    [
        (None, "NotAuthenticated: authentication failed: the token is not valid"),
        (greeting(b"wrong"), "NotAuthenticated: authentication failed: the token is not valid"),
        (greeting(b"more"), "NotAuthenticated: authentication failed: a call cannot answer"),
        (framing.encode_command(CommandPing()), "the greeting of the call is not a CONNECT"),
        (b"no", "MalformedFrame"),
    ],
    ids=["no credentials", "wrong credentials", "a challenge", "no CONNECT", "no frame"],
)
async def test_a_call_of_an_unknown_client_is_refused(connect: bytes | None, why: str) -> None:
    async with channel_to_broker() as channel:
        for method, request, _ in calls(MINE):
            assert why in await ask(channel, method, request, connect), method


async def test_a_call_without_the_permission_is_refused_by_name() -> None:
    async with channel_to_broker() as channel:
        for method, request, permission in calls(OTHER):
            answer = await ask(channel, method, request, greeting(b"right"))
            assert f"NotAuthorized: role 'reader' may not {permission.value} on" in answer, method


async def test_a_call_with_the_permission_is_answered() -> None:
    async with channel_to_broker() as channel:
        for method, request, _ in calls(MINE):
            answer = await ask(channel, method, request, greeting(b"right"))
            if method == "ReadRange":
                assert answer.startswith("TopicNotFound")
            else:
                assert isinstance(answer, bytes), (method, answer)


def test_every_call_has_a_required_permission() -> None:
    methods = {method for method, _, _ in calls(MINE)}
    service = pb.DESCRIPTOR.services_by_name["Broker"]
    assert methods | {"Session"} == set(service.methods_by_name)
