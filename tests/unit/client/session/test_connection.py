"""Sessions: opening, keep-alive, protocol violations, ends. Lookups over sessions."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import TOPIC, A, B, client_among
from support import settle

from magnetar.client.authentication import (
    Authentication,
    AuthenticationBasic,
    AuthenticationToken,
    credentials_of,
)
from magnetar.client.errors import (
    AuthenticationError,
    ClosedDuringCall,
    ConnectError,
    ErrorGettingAuthenticationData,
    LookupError,  # noqa: A004 - Apache's name
    PulsarException,
    TopicNotFound,
    UnknownError,
)
from magnetar.client.session.connection import KEEPALIVE_S, SILENT_INTERVALS_MAX, Connection
from magnetar.client.session.lookup import REDIRECTS_MAX
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import UNCOMPRESSED_FACTOR
from magnetar.protos.framing import (
    COMMAND_FRAME_BYTES_MAX,
    encode_command,
    encode_payload_command,
    parse_command,
    split_frames,
)
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.memory_stream import memory_stream_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONNECTED = encode_command(pb.CommandConnected(server_version="fake"))


class Peer:
    """A connection and the broker's end of its stream."""

    def __init__(self, authentication: Authentication | None = None, broker: str = A) -> None:
        ours, self.stream = memory_stream_pair("client", "broker", frames_max=16)
        self.connection = Connection(
            ours,
            broker,
            open_timeout_s=10,
            keepalive_s=KEEPALIVE_S,
            credentials=credentials_of(authentication),
        )
        self.got: list[Any] = []

    async def read(self) -> None:
        try:
            while True:
                for part in split_frames(await self.stream.receive()):
                    self.got.append(parse_command(part).body)
        except StreamClosed:
            return


@asynccontextmanager
async def conversation(
    *, accept: bool = True, authentication: Authentication | None = None, broker: str = A
) -> AsyncIterator[Peer]:
    """A running connection that the broker has accepted."""
    peer = Peer(authentication, broker)
    async with asyncio.TaskGroup() as group:
        group.create_task(peer.connection.run())
        group.create_task(peer.read())
        if accept:
            await peer.stream.send([CONNECTED])
            await peer.connection.wait_opened()
        yield peer
        await peer.connection.close()


class Listener:
    """A producer or consumer that stores the calls of its connection."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append((name, *arguments))


async def test_connect_is_the_first_command_of_a_session() -> None:
    async with conversation() as peer:
        await settle()
        assert isinstance(peer.got[0], pb.CommandConnect)
        assert peer.got[0].protocol_version == 21
        assert peer.got[0].client_version.startswith("Magnetar-Python")
        assert peer.connection.max_message_bytes == 5_242_880


async def test_a_session_without_an_answer_to_connect_fails_in_time() -> None:
    async with conversation(accept=False) as peer:
        began = asyncio.get_running_loop().time()
        with pytest.raises(ConnectError, match="the broker did not answer within 10 s"):
            await peer.connection.wait_opened()
        assert asyncio.get_running_loop().time() - began == pytest.approx(10)


async def test_a_refused_connect_raises_the_brokers_reason() -> None:
    async with conversation(accept=False) as peer:
        refusal = pb.CommandError(
            request_id=2**64 - 1, error=pb.AuthenticationError, message="wrong token"
        )
        await peer.stream.send([encode_command(refusal)])
        with pytest.raises(AuthenticationError, match="wrong token"):
            await peer.connection.wait_opened()


@pytest.mark.parametrize(
    ("announced", "sends", "takes"),
    [(1000, 1000, 5 << 20), (5 << 20, 5 << 20, 5 << 20), (12 << 20, 5 << 20, 12 << 20)],
)
async def test_the_limits_follow_the_brokers_largest_message(
    announced: int, sends: int, takes: int
) -> None:
    async with conversation(accept=False) as peer:
        connected = pb.CommandConnected(server_version="fake", max_message_size=announced)
        await peer.stream.send([encode_command(connected)])
        await peer.connection.wait_opened()
        assert peer.connection.max_message_bytes == sends
        assert peer.connection.uncompressed_bytes_max == UNCOMPRESSED_FACTOR * takes
        message = pb.CommandMessage(consumer_id=9)
        message.message_id.ledgerId = message.message_id.entryId = 1
        command = b"".join(encode_payload_command(message, [b"x"]))[4:-1]
        for size, is_taken in ((takes, True), (takes + COMMAND_FRAME_BYTES_MAX, False)):
            frame = (len(command) + size).to_bytes(4) + command + bytes(size)
            await peer.stream.send([frame])
            await settle()
            assert ("broke the protocol" in str(peer.connection.error)) is not is_taken
        await peer.stream.close()


async def test_credentials_are_sent_and_sent_again_on_request() -> None:
    async with conversation(authentication=AuthenticationBasic("u", "p")) as peer:
        (connect,) = peer.got
        assert (connect.auth_method_name, connect.auth_data) == ("basic", b"u:p")
        peer.got.clear()
        challenge = pb.CommandAuthChallenge(server_version="fake")
        challenge.challenge.auth_data = b"PulsarAuthRefresh"
        await peer.stream.send([encode_command(challenge) * 3])
        await settle()
        # the credentials answer all three requests
        (answer,) = (it for it in peer.got if type(it) is pb.CommandAuthResponse)
        assert answer.response.auth_method_name == "basic"
        assert answer.response.auth_data == b"u:p"
        peer.got.clear()
        await peer.stream.send([encode_command(challenge)])
        await settle()
        assert [type(it) for it in peer.got] == [pb.CommandAuthResponse]
        await peer.stream.close()


class Counted(AuthenticationBasic):
    """Credentials that count the brokers' refusals and the requests for other credentials."""

    def __init__(self) -> None:
        super().__init__("u", "p")
        self.refused = 0
        self.auth.on_refused = self.count  # type: ignore[method-assign]

    def count(self) -> None:
        self.refused += 1


async def test_credentials_learn_that_a_broker_refuses_them_or_asks_for_others() -> None:
    asked, refused = Counted(), Counted()
    async with conversation(authentication=asked) as peer:
        await peer.stream.send([encode_command(pb.CommandAuthChallenge(server_version="fake"))])
        await settle()
        await peer.stream.close()
    async with conversation(accept=False, authentication=refused) as peer:
        refusal = pb.CommandError(
            request_id=2**64 - 1, error=pb.AuthenticationError, message="expired"
        )
        await peer.stream.send([encode_command(refusal)])
        with pytest.raises(AuthenticationError):
            await peer.connection.wait_opened()
    assert (asked.refused, refused.refused) == (1, 1)


async def test_credentials_that_are_missing_fail_the_session_by_name() -> None:
    async with client_among(authentication=AuthenticationToken("")) as (client, cluster):
        with pytest.raises(ErrorGettingAuthenticationData, match="0 bytes"):
            await client.create_producer("t")
        assert cluster.brokers[A].commands(pb.CommandConnect) == []


@pytest.mark.parametrize(
    ("broker", "plain", "tls", "next_broker"),
    [
        ("grpc://a:6660", "grpc://b:6660", "grpcs://b:6661", "grpc://b:6660"),
        ("grpcs://a:6661", "grpc://b:6660", "grpcs://b:6661", "grpcs://b:6661"),
        ("pulsar://a:6650", "pulsar://b:6650", "pulsar+ssl://b:6651", "pulsar://b:6650"),
        ("pulsar+ssl://a:6651", "pulsar://b:6650", "pulsar+ssl://b:6651", "pulsar+ssl://b:6651"),
        ("pulsar+ssl://a:6651", "pulsar://b:6650", "", None),  # never without TLS
        ("grpc://a:6660", "pulsar://b:6650", "", None),
        ("grpc://a:6660", "grpc://b:6660,c:6660", "", None),
        ("grpc://a:6660", "grpc://b:66600", "", None),
    ],
)
async def test_a_closing_broker_names_the_next_one_with_the_sessions_transport(
    broker: str, plain: str, tls: str, next_broker: str | None
) -> None:
    async with conversation(broker=broker) as peer:
        producer, consumer = Listener(), Listener()
        peer.connection.add_producer(1, producer)
        peer.connection.add_consumer(2, consumer)
        urls = {"assignedBrokerServiceUrl": plain, "assignedBrokerServiceUrlTls": tls}
        unasked = 2**64 - 1
        await peer.stream.send(
            [
                encode_command(pb.CommandCloseProducer(producer_id=1, request_id=unasked, **urls)),
                encode_command(pb.CommandCloseConsumer(consumer_id=2, request_id=unasked, **urls)),
            ]
        )
        await settle()
        told = [one for one in (*producer.told, *consumer.told) if one[0] != "on_frame_end"]
        assert told == [("on_closed_by_broker", next_broker)] * 2


class Broken:
    """A producer or consumer with a bug in each call of its connection."""

    topic = "t"
    ended: PulsarException | None = None

    def shut_down(self, error: PulsarException) -> None:
        self.ended = error

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


@pytest.mark.parametrize(
    "command",
    [
        pb.CommandCloseProducer(producer_id=1, request_id=2**64 - 1),
        pb.CommandCloseConsumer(consumer_id=2, request_id=2**64 - 1),
        pb.CommandActiveConsumerChange(consumer_id=2, is_active=True),
    ],
    ids=lambda command: type(command).__name__,
)
async def test_bug_in_an_event_of_one_producer_or_consumer_keeps_the_session(command: Any) -> None:
    async with conversation() as peer:
        producer, consumer = Broken(), Broken()
        peer.connection.add_producer(1, producer)
        peer.connection.add_consumer(2, consumer)
        await peer.stream.send([encode_command(command)])
        await settle()
        ended = [one for one in (producer, consumer) if one.ended is not None]
        assert len(ended) == 1
        assert isinstance(ended[0].ended, UnknownError)
        assert peer.connection.error is None


async def test_both_sides_send_ping() -> None:
    async with conversation() as peer:
        await peer.stream.send([encode_command(pb.CommandPing())])
        for _ in range(10):
            await asyncio.sleep(KEEPALIVE_S)
            await peer.stream.send([encode_command(pb.CommandPong())])
        kinds = [type(body) for body in peer.got]
        assert kinds.count(pb.CommandPong) == 1
        assert kinds.count(pb.CommandPing) >= 10
        assert peer.connection.error is None


async def test_a_session_with_a_silent_broker_ends() -> None:
    async with conversation() as peer:
        listener = Listener()
        peer.connection.add_producer(1, listener)
        await asyncio.sleep(KEEPALIVE_S * SILENT_INTERVALS_MAX + 1)
        assert isinstance(peer.connection.error, ConnectError)
        assert "sent nothing for 60 s" in peer.connection.error.reason
        assert [name for name, *_ in listener.told] == ["on_disconnected"]


async def test_requests_are_answered_by_their_ids_in_any_order() -> None:
    async with conversation() as peer:
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(
                    peer.connection.request(
                        pb.CommandCloseProducer(producer_id=number), pb.CommandSuccess
                    )
                )
                for number in range(3)
            ]
            await settle()
            ids = [body.request_id for body in peer.got[-3:]]
            for request_id in reversed(ids):
                await peer.stream.send([encode_command(pb.CommandSuccess(request_id=request_id))])
        assert [one.result().request_id for one in asked] == ids


async def test_an_error_is_raised_in_the_caller_of_its_request() -> None:
    async with conversation() as peer:
        asking = asyncio.get_running_loop().create_task(
            peer.connection.request(pb.CommandLookupTopic(topic="t"), pb.CommandSuccess)
        )
        await settle()
        error = pb.CommandError(
            request_id=peer.got[-1].request_id, error=pb.TopicNotFound, message="gone"
        )
        await peer.stream.send([encode_command(error)])
        with pytest.raises(TopicNotFound, match="gone"):
            await asking


async def test_the_wrong_kind_of_answer_is_an_error() -> None:
    async with conversation() as peer:
        asking = asyncio.get_running_loop().create_task(
            peer.connection.request(pb.CommandLookupTopic(topic="t"), pb.CommandProducerSuccess)
        )
        await settle()
        answer = pb.CommandSuccess(request_id=peer.got[-1].request_id)
        await peer.stream.send([encode_command(answer)])
        with pytest.raises(ConnectError, match="CommandSuccess"):
            await asking


async def test_broken_stream_fails_all_waiting_calls() -> None:
    async with conversation() as peer:
        producer, consumer = Listener(), Listener()
        peer.connection.add_producer(1, producer)
        peer.connection.add_consumer(2, consumer)
        asking = asyncio.get_running_loop().create_task(
            peer.connection.request(pb.CommandLookupTopic(topic="t"), pb.CommandSuccess)
        )
        await settle()
        peer.stream.abort("cable cut")
        with pytest.raises(ConnectError, match="cable cut"):
            await asking
        assert [name for name, *_ in producer.told + consumer.told] == ["on_disconnected"] * 2
        with pytest.raises(ConnectError):
            await peer.connection.request(pb.CommandLookupTopic(topic="t"), pb.CommandSuccess)
        told: list[Any] = []
        peer.connection.ask(pb.CommandLookupTopic(topic="t"), told.append)
        assert isinstance(told[0], PulsarException)


async def test_a_request_of_a_closed_client_may_have_been_executed() -> None:
    peer = Peer()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(peer.connection.run())
        group.create_task(peer.read())
        await peer.stream.send([CONNECTED])
        await peer.connection.wait_opened()
        asking = asyncio.get_running_loop().create_task(
            peer.connection.request(pb.CommandLookupTopic(topic="t"), pb.CommandSuccess)
        )
        await settle()
        running.cancel()
        with pytest.raises(ClosedDuringCall) as caught:
            await asking
        assert not caught.value.definite
        peer.stream.abort("the end of the test")


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x00\x00\x00\x09\x00\x00",
        b"\xff\xff\xff\xff\x00\x00\x00\x00",
        b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff",
    ],
)
async def test_protocol_violation_ends_the_session(nonsense: bytes) -> None:
    async with conversation() as peer:
        await peer.stream.send([nonsense])
        await settle()
        assert isinstance(peer.connection.error, ConnectError)
        assert "broke the protocol" in peer.connection.error.reason


async def test_a_command_of_a_later_version_is_ignored() -> None:
    async with conversation() as peer:
        later = b"\x00\x00\x00\x06\x00\x00\x00\x02\x08\x63"
        await peer.stream.send([later, encode_command(pb.CommandPing())])
        await settle()
        assert peer.connection.error is None
        assert isinstance(peer.got[-1], pb.CommandPong)


async def test_receipts_of_a_frame_are_followed_by_its_end() -> None:
    async with conversation() as peer:
        producer = Listener()
        peer.connection.add_producer(1, producer)
        receipts = [
            encode_command(
                pb.CommandSendReceipt(
                    producer_id=producer_id,
                    sequence_id=sequence,
                    message_id=pb.MessageIdData(ledgerId=2**64 - 1, entryId=4),
                )
            )
            for producer_id, sequence in ((1, 7), (9, 7), (1, 8))
        ]
        await peer.stream.send(receipts)
        await settle()
        assert producer.told == [
            ("on_receipts", [7], -1, [4]),
            ("on_receipts", [8], -1, [4]),
            ("on_frame_end",),
        ]


async def test_a_broker_has_one_session_to_publish_and_one_to_consume() -> None:
    async with client_among() as (client, cluster):
        for name in ("t", "u"):
            await client.create_producer(name)
            await client.subscribe(name, "s")
        publishing, consuming = cluster.brokers[A].sessions
        kinds = [{type(body) for body in session.commands} for session in (publishing, consuming)]
        assert {pb.CommandLookupTopic, pb.CommandProducer} <= kinds[0]
        assert pb.CommandSubscribe not in kinds[0]
        assert pb.CommandSubscribe in kinds[1]
        assert pb.CommandLookupTopic not in kinds[1]


async def test_a_lookup_is_followed_to_the_owner() -> None:
    async with client_among() as (client, cluster):
        cluster.owners[TOPIC] = B
        await (await client.create_producer("t")).send(b"x")
        assert cluster.brokers[A].commands(pb.CommandProducer) == []
        (looked_up,) = cluster.brokers[B].commands(pb.CommandLookupTopic)
        assert looked_up.authoritative


async def test_brokers_that_redirect_to_each_other_raise_lookup_error() -> None:
    async with client_among() as (client, cluster):
        response = pb.CommandLookupTopicResponse
        for url, other in ((A, B), (B, A)):
            answers = [
                response(request_id=0, brokerServiceUrl=other, response=response.Redirect)
                for _ in range(REDIRECTS_MAX)
            ]
            cluster.brokers[url].script(pb.CommandLookupTopic, *answers)
        with pytest.raises(LookupError, match="redirects"):
            await client.create_producer("t")


@pytest.mark.parametrize(
    ("service_url", "named", "is_used"),
    [
        ("pulsar://a:6650", {"brokerServiceUrl": "pulsar://a:6650"}, True),
        ("pulsar://a:6650", {"brokerServiceUrl": "grpc://a:6660"}, False),
        ("pulsar://a:6650", {"brokerServiceUrlTls": "pulsar+ssl://a:6651"}, False),
        ("pulsar+ssl://a:6651", {"brokerServiceUrlTls": "pulsar+ssl://a:6651"}, True),
        ("pulsar+ssl://a:6651", {"brokerServiceUrl": "pulsar://a:6650"}, False),
    ],
)
async def test_a_lookup_uses_the_address_of_its_own_transport(
    service_url: str, named: dict[str, str], is_used: bool
) -> None:
    urls = (service_url,)
    async with client_among(*urls, service_url=service_url, operation_timeout_seconds=1) as (
        client,
        cluster,
    ):
        response = pb.CommandLookupTopicResponse
        answer = response(request_id=0, response=response.Connect, **named)
        cluster.brokers[service_url].script(pb.CommandLookupTopic, *[answer] * 20)
        if is_used:
            await client.create_producer("t")
        else:
            with pytest.raises(ConnectError, match="owner address"):
                await client.create_producer("t")


async def test_a_broker_behind_a_proxy_is_reached_through_it() -> None:
    async with client_among(A) as (client, cluster):
        response = pb.CommandLookupTopicResponse
        answer = response(
            request_id=0,
            response=response.Connect,
            brokerServiceUrl="grpc://hidden:6660",
            proxy_through_service_url=True,
        )
        cluster.brokers[A].script(pb.CommandLookupTopic, answer, answer)
        await client.create_producer("t")
        await client.subscribe("t", "s")
        connects = cluster.brokers[A].commands(pb.CommandConnect)
        targets = [connect.proxy_to_broker_url for connect in connects]
        assert targets == ["", "hidden:6660", "hidden:6660"]


async def test_a_refused_lookup_raises_and_an_unusable_answer_is_asked_for_again() -> None:
    async with client_among() as (client, cluster):
        response = pb.CommandLookupTopicResponse
        failed = response(
            request_id=0, response=response.Failed, error=pb.TopicNotFound, message="no tenant"
        )
        cluster.brokers[A].script(pb.CommandLookupTopic, failed)
        with pytest.raises(TopicNotFound, match="no tenant"):
            await client.create_producer("t")
        unusable = response(request_id=0, response=response.Connect, brokerServiceUrl="what")
        cluster.brokers[A].script(pb.CommandLookupTopic, unusable)
        await client.create_producer("t")  # the lookup was sent again


async def test_a_dead_address_in_the_service_url_is_skipped() -> None:
    async with client_among(service_url="grpc://nowhere:1,a:6660") as (client, _):
        began = asyncio.get_running_loop().time()
        await client.create_producer("t")
        assert asyncio.get_running_loop().time() == began
