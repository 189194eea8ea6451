"""Authentication: the machine, and connections of a broker that requires it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fakes.place import FRAMES_MAX, place
from support import settle

from magnetar.broker.session import reply
from magnetar.broker.session.access import (
    Accepted,
    AllowAll,
    Challenged,
    Credentials,
    Outcome,
    Refused,
)
from magnetar.broker.session.commands import RULES
from magnetar.broker.session.connection import LAST_COMMAND_TIMEOUT_S
from magnetar.broker.session.session import KEEPALIVE_S, Close, Phase, Send, Session
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.frames import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from google.protobuf.message import Message

TOPIC = "persistent://public/default/t"


class Token:
    """Accepts one token."""

    def __init__(self) -> None:
        self.seen: list[Credentials] = []

    def authenticate(self, credentials: Credentials) -> Outcome:
        self.seen.append(credentials)
        if credentials == Credentials("token", b"secret"):
            return Accepted("writer", AllowAll())
        return Refused("the token is not valid")


class Sum:
    """Accepts a client that answers `rounds` challenges."""

    def __init__(self, rounds: int = 2) -> None:
        self._left = rounds

    def authenticate(self, credentials: Credentials) -> Outcome:
        if credentials.data == b"wrong":
            return Refused("a wrong answer")
        if not self._left:
            return Accepted("counter", AllowAll())
        self._left -= 1
        return Challenged(Credentials("sum", b"what is left: %d" % self._left))


def command(body: Message) -> framing.Command:
    """The command as it would have arrived."""
    [frame] = framing.split_frames(memoryview(framing.encode_command(body)))
    return framing.parse_command(frame)


def sent(data: bytes) -> Message:
    [frame] = framing.split_frames(memoryview(data))
    return framing.parse_command(frame).body


def connect(data: bytes = b"secret") -> pb.CommandConnect:
    return pb.CommandConnect(
        client_version="test", protocol_version=20, auth_method_name="token", auth_data=data
    )


def response(data: bytes) -> pb.CommandAuthResponse:
    return pb.CommandAuthResponse(response=pb.AuthData(auth_method_name="sum", auth_data=data))


# ---- the machine ---------------------------------------------------------------------------------


def test_connect_with_valid_credentials_connects() -> None:
    session = Session(0.0, "server", 5, rules=RULES, authenticator=Token())
    assert session.phase is Phase.CONNECTING
    [action] = session.on_command(command(connect()), 1.0)
    assert isinstance(action, Send)
    assert isinstance(sent(action.data), pb.CommandConnected)
    assert (session.phase, session.role) == (Phase.CONNECTED, "writer")
    session.check()


def test_connect_with_invalid_credentials_is_refused_and_closed() -> None:
    session = Session(0.0, "server", 5, rules=RULES, authenticator=Token())
    [action] = session.on_command(command(connect(b"guess")), 1.0)
    assert isinstance(action, Close)
    assert action.reason == "authentication failed: the token is not valid"
    body = sent(action.last_command)
    assert isinstance(body, pb.CommandError)
    assert (body.request_id, body.error) == (reply.NO_REQUEST, pb.AuthenticationError)
    assert body.message == "the token is not valid"
    assert not session.connected
    session.check()


def test_each_challenge_is_answered_before_the_client_is_connected() -> None:
    session = Session(0.0, "server", 5, rules=RULES, authenticator=Sum(rounds=2))
    asked: Message = connect()
    for left in (1, 0):
        [action] = session.on_command(command(asked), 1.0)
        assert isinstance(action, Send)
        body = sent(action.data)
        assert isinstance(body, pb.CommandAuthChallenge)
        assert (body.server_version, body.protocol_version) == ("server", 20)
        assert body.challenge.auth_method_name == "sum"
        assert body.challenge.auth_data == b"what is left: %d" % left
        assert session.phase is Phase.AUTHENTICATING
        session.check()
        asked = response(b"right")
    [action] = session.on_command(command(asked), 1.0)
    assert isinstance(action, Send)
    assert isinstance(sent(action.data), pb.CommandConnected)
    assert (session.phase, session.role) == (Phase.CONNECTED, "counter")


def test_a_wrong_answer_to_a_challenge_is_refused_and_closed() -> None:
    session = Session(0.0, "server", 5, rules=RULES, authenticator=Sum())
    session.on_command(command(connect()), 1.0)
    [action] = session.on_command(command(response(b"wrong")), 1.0)
    assert isinstance(action, Close)
    body = sent(action.last_command)
    assert isinstance(body, pb.CommandError)
    assert body.error == pb.AuthenticationError


@pytest.mark.parametrize(
    "early",
    [
        pb.CommandConnect(client_version="again"),
        pb.CommandLookupTopic(topic="t", request_id=1),
        pb.CommandProducer(topic="t", producer_id=1, request_id=1),
        pb.CommandFlow(consumer_id=1, messagePermits=1),
        pb.CommandNewTxn(request_id=1),
        pb.CommandSuccess(request_id=1),
    ],
    ids=lambda body: type(body).__name__,
)
def test_a_command_before_the_client_is_authenticated_ends_the_connection(early: Message) -> None:
    session = Session(0.0, "server", 5, rules=RULES, authenticator=Sum())
    session.on_command(command(connect()), 1.0)
    [action] = session.on_command(command(early), 1.0)
    assert isinstance(action, Close)
    assert "before the client has answered the challenge" in action.reason
    session.check()


def test_a_send_before_the_client_is_authenticated_ends_the_connection() -> None:
    session = Session(0.0, "server", 5, rules=RULES, authenticator=Sum())
    answer = session.on_sends(1, 1.0)
    assert isinstance(answer, Close)
    assert "CONNECT" in answer.reason
    session.on_command(command(connect()), 1.0)
    answer = session.on_sends(1, 1.0)
    assert isinstance(answer, Close)
    assert "before the client has answered the challenge" in answer.reason


def test_an_auth_response_without_a_challenge_changes_nothing() -> None:
    token = Token()
    session = Session(0.0, "server", 5, rules=RULES, authenticator=token)
    [action] = session.on_command(command(response(b"first")), 1.0)
    assert isinstance(action, Close)
    session = Session(0.0, "server", 5, rules=RULES, authenticator=token)
    session.on_command(command(connect()), 1.0)
    assert session.on_command(command(response(b"late")), 1.0) == []
    assert session.connected
    assert len(token.seen) == 1


def test_answers_to_challenges_do_not_extend_the_handshake() -> None:
    session = Session(0.0, "server", 5, rules=RULES, authenticator=Sum(rounds=100))
    session.on_command(command(connect()), 0.0)
    for now in range(1, int(KEEPALIVE_S)):
        session.on_command(command(response(b"right")), float(now))
        assert session.on_timer(float(now)) == []
    [action] = session.on_timer(KEEPALIVE_S)
    assert isinstance(action, Close)
    assert "handshake" in action.reason


# ---- connections ---------------------------------------------------------------------------------


async def test_a_refused_client_gets_the_error_and_then_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with place() as here:
        here.endpoint.make_authenticator = Token
        client = await here.client(connected=False)
        await client.send(connect(b"guess"))
        error = await client.expect(pb.CommandError)
        assert (error.request_id, error.error) == (reply.NO_REQUEST, pb.AuthenticationError)
        assert await client.ended() == []
        await here.serving[0]
        assert here.endpoint.failures == 0
    assert "authentication failed: the token is not valid" in caplog.text


async def test_commands_behind_a_refused_connect_are_not_carried_out() -> None:
    async with place() as here:
        here.endpoint.make_authenticator = Token
        client = await here.client(connected=False)
        bodies = (
            connect(b"guess"),
            pb.CommandProducer(topic=TOPIC, producer_id=1, request_id=1),
        )
        await client.wire.send(b"".join(map(framing.encode_command, bodies)))
        assert [type(command.body) for command in await client.ended()] == [pb.CommandError]
        assert here.broker.topics == []


async def test_a_refused_client_on_a_slow_link_gets_the_error() -> None:
    async with place() as here:
        here.endpoint.make_authenticator = Token
        client = await here.client(connected=False)
        connection = here.connections[0]
        for _ in range(4 * FRAMES_MAX):
            names = ["t" * (FRAME_BYTES_MAX // 2)]
            answer = reply.topics_of_namespace(1, names, "", filtered=False, changed=True)
            connection._outbox.put(answer)
        await settle()  # the link is full, and frames wait in the outbox
        await connection._take(memoryview(framing.encode_command(connect(b"guess"))))
        await settle()
        assert pb.BaseCommand.ERROR in {received.type for received in await client.ended()}


async def test_a_refused_client_that_does_not_read_is_closed_soon() -> None:
    async with place() as here:
        here.endpoint.make_authenticator = Token
        await here.client(connected=False)
        connection = here.connections[0]
        connection._outbox.put(bytes(1 << 20))  # the client reads none of it
        await asyncio.sleep(0)
        for _ in range(3):
            connection._outbox.put(bytes(1 << 20))
        began = asyncio.get_running_loop().time()
        await connection._take(memoryview(framing.encode_command(connect(b"guess"))))
        await here.serving[0]
        assert asyncio.get_running_loop().time() - began <= LAST_COMMAND_TIMEOUT_S + 1


async def test_a_client_that_answers_its_challenges_is_served() -> None:
    async with place() as here:
        here.endpoint.make_authenticator = Sum
        client = await here.client(connected=False)
        await client.send(connect())
        for _ in range(2):
            challenge = await client.expect(pb.CommandAuthChallenge)
            assert challenge.challenge.auth_method_name == "sum"
            await client.send(response(b"right"))
        await client.expect(pb.CommandConnected)
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)


async def test_each_connection_is_authenticated_on_its_own() -> None:
    async with place() as here:
        here.endpoint.make_authenticator = Sum
        for _ in range(2):  # the second connection gets as many challenges as the first one
            client = await here.client(connected=False)
            await client.send(connect())
            for _ in range(2):
                await client.expect(pb.CommandAuthChallenge)
                await client.send(response(b"right"))
            await client.expect(pb.CommandConnected)
