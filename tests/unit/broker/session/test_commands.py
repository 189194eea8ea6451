"""The command table: every command of the protocol is answered, ignored or refused, by its row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fakes.command_cases import (
    BODIES,
    CASES,
    CODES,
    ENDED,
    IGNORED,
    TOPIC,
    encoded,
    error_of,
    example,
    prepare,
)
from fakes.place import place

from magnetar.broker.session.access import Accepted, Permission
from magnetar.broker.session.commands import COMMANDS, REQUESTS, RULES, UNSUPPORTED
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import NamespaceName, TopicName

if TYPE_CHECKING:
    from magnetar.broker.session.access import Credentials, Outcome, Resource

Type = pb.BaseCommand.Type


def name_of(kind: int) -> str:
    return Type.Name(kind)


# ---- the tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Type.values(), ids=name_of)
def test_every_command_has_a_row_or_a_reason(kind: int) -> None:
    assert (kind in COMMANDS) != (kind in UNSUPPORTED)
    assert kind in RULES


def test_the_tables_name_no_other_command() -> None:
    assert COMMANDS.keys() | UNSUPPORTED.keys() == set(Type.values())


@pytest.mark.parametrize("kind", REQUESTS, ids=name_of)
def test_a_request_that_names_a_topic_or_namespace_needs_a_permission(kind: int) -> None:
    fields = BODIES[kind].DESCRIPTOR.fields_by_name
    assert ("topic" in fields or "namespace" in fields) == (REQUESTS[kind].needs is not None)


@pytest.mark.parametrize("kind", RULES, ids=name_of)
def test_a_command_that_is_answered_has_a_request_id(kind: int) -> None:
    answered = kind in REQUESTS or (kind in UNSUPPORTED and not UNSUPPORTED[kind].ends_connection)
    assert not answered or "request_id" in BODIES[kind].DESCRIPTOR.fields_by_name


# ---- every command, over a connection ------------------------------------------------------------


@pytest.mark.parametrize("kind", COMMANDS, ids=name_of)
async def test_every_command_with_a_row_is_handled(kind: int) -> None:
    body, answer = CASES[kind]
    assert type(body) is BODIES[kind]
    async with place() as here:
        client = await here.client()
        await prepare(client)
        await client.wire.send(encoded(body))
        if answer == ENDED:
            assert await client.ended() == []
        elif answer is IGNORED:
            await client.send(pb.CommandPing())
            await client.expect(pb.CommandPong)
        else:
            received: Any = await client.expect(answer)
            assert error_of(received) == CODES.get(kind, 0)
            if "request_id" in received.DESCRIPTOR.fields_by_name and kind != Type.SEEK:
                assert received.request_id == 9
        assert here.endpoint.failures == 0


@pytest.mark.parametrize("kind", UNSUPPORTED, ids=name_of)
async def test_every_command_without_a_row_is_refused_by_name(
    kind: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with place() as here:
        client = await here.client()
        await client.wire.send(encoded(example(kind)))
        if UNSUPPORTED[kind].ends_connection:
            assert await client.ended() == []
            assert f"{name_of(kind)} is not supported: only a broker sends it" in caplog.text
        else:
            refused: Any = (await client.receive()).body
            code = getattr(refused, "error_code", None) or refused.error
            text = getattr(refused, "error_message", None) or refused.message
            assert (refused.request_id, code) == (9, pb.NotAllowedError)
            assert f"{name_of(kind)} is not supported: this broker" in text
        assert here.endpoint.failures == 0


# ---- permissions ---------------------------------------------------------------------------------


class Lacking:
    """Grants all permissions except one, and records the requested permissions."""

    def __init__(self, lacking: Permission) -> None:
        self.asked: list[tuple[Permission, Resource]] = []
        self._lacking = lacking

    def authenticate(self, credentials: Credentials) -> Outcome:
        return Accepted("reader", self)

    def allow(self, permission: Permission, resource: Resource) -> bool:
        self.asked.append((permission, resource))
        return permission is not self._lacking


@pytest.mark.parametrize(
    "kind", [kind for kind, row in REQUESTS.items() if row.needs is not None], ids=name_of
)
async def test_a_request_without_its_permission_is_refused_before_its_handler(kind: int) -> None:
    needs = REQUESTS[kind].needs
    assert needs is not None
    grants = Lacking(needs.permission)
    async with place() as here:
        here.endpoint.make_authenticator = lambda: grants
        client = await here.client()
        body, _ = CASES[kind]
        await client.send(body)
        refused: Any = (await client.receive()).body
        code = getattr(refused, "error_code", None) or refused.error
        text = getattr(refused, "error_message", None) or refused.message
        assert (refused.request_id, code) == (9, pb.AuthorizationError)
        assert f"role 'reader' may not {needs.permission.value} on" in text
        listed = kind in (Type.GET_TOPICS_OF_NAMESPACE, Type.WATCH_TOPIC_LIST)
        named = NamespaceName.parse("public/default") if listed else TopicName.parse(TOPIC)
        assert grants.asked == [(needs.permission, named)]
        assert here.broker.topics == [], "the handler ran"
        assert here.connections[0]._session.requests == 0


async def test_a_producer_id_that_was_refused_is_free() -> None:
    grants = Lacking(Permission.PRODUCE)
    async with place() as here:
        here.endpoint.make_authenticator = lambda: grants
        client = await here.client()
        for _ in range(2):  # the second one is not told that the id is opening
            refused = await client.produce(TOPIC)
            assert refused.error == pb.AuthorizationError


async def test_a_producer_needs_the_right_to_consume_for_its_initial_subscription() -> None:
    grants = Lacking(Permission.CONSUME)
    async with place() as here:
        here.endpoint.make_authenticator = lambda: grants
        client = await here.client()
        refused = await client.produce(TOPIC, initial_subscription_name="s")
        assert refused.error == pb.AuthorizationError
        assert here.broker.topics == []
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)


async def test_commands_of_an_open_producer_or_consumer_need_no_further_permission() -> None:
    grants = Lacking(Permission.LOOKUP)
    async with place() as here:
        here.endpoint.make_authenticator = lambda: grants
        client = await here.client()
        await prepare(client)
        grants.asked.clear()
        for kind in (Type.GET_LAST_MESSAGE_ID, Type.CONSUMER_STATS, Type.CLOSE_CONSUMER):
            body, answer = CASES[kind]
            await client.send(body)
            assert isinstance((await client.receive()).body, answer)
        assert grants.asked == []


# ---- answers -------------------------------------------------------------------------------------


async def test_consumer_stats_have_the_numbers_of_the_broker() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        for number in range(3):
            await client.publish(sequence_id=number)
            await client.expect(pb.CommandSendReceipt)
        kind = pb.CommandSubscribe.Shared
        await client.subscribe(TOPIC, consumer_id=5, subType=kind, consumer_name="me")
        await client.flow(2, consumer_id=5)
        for _ in range(2):
            await client.message()
        stats = await client.ask(pb.CommandConsumerStats(consumer_id=5, request_id=0))
        assert isinstance(stats, pb.CommandConsumerStatsResponse)
        assert not stats.HasField("error_code")
        assert (stats.consumerName, stats.type) == ("me", "Shared")
        assert (stats.msgBacklog, stats.unackedMessages, stats.availablePermits) == (3, 2, 0)
        assert stats.msgRateOut > 0
        assert stats.msgThroughputOut > 0
        assert stats.msgRateRedeliver == 0
        assert not stats.blockedConsumerOnUnackedMsgs
        assert stats.address
        assert stats.connectedSince
        assert isinstance(await client.subscribe(TOPIC, "other", consumer_id=6), pb.CommandSuccess)


async def test_consumer_stats_of_an_unknown_consumer_are_a_named_error() -> None:
    async with place() as here:
        client = await here.client()
        refused = await client.ask(pb.CommandConsumerStats(consumer_id=5, request_id=0))
        assert isinstance(refused, pb.CommandConsumerStatsResponse)
        assert refused.error_code == pb.ConsumerNotFound
        assert "consumer 5" in refused.error_message


@pytest.mark.parametrize("named", [True, False])
async def test_a_producer_id_that_is_open_gets_the_same_answer_again(named: bool) -> None:
    """The Go client repeats its request until the broker answers with success."""
    fields = {"producer_name": "me"} if named else {}
    async with place() as here:
        client = await here.client()
        first = await client.produce(TOPIC, **fields)
        again = await client.produce(TOPIC, **fields)
        assert isinstance(again, pb.CommandProducerSuccess)
        assert again.producer_name == first.producer_name
        assert again.last_sequence_id == first.last_sequence_id
        assert len(here.topic.producers) == 1
        await client.publish()
        assert (await client.expect(pb.CommandSendReceipt)).producer_id == 1


async def test_a_producer_id_that_is_opening_is_not_ready() -> None:
    async with place() as here:
        client = await here.client()
        for number in (1, 2):
            await client.send(pb.CommandProducer(topic=TOPIC, producer_id=1, request_id=number))
        refused = await client.expect(pb.CommandError)
        assert (refused.request_id, refused.error) == (2, pb.ServiceNotReady)
        assert (await client.expect(pb.CommandProducerSuccess)).request_id == 1


async def test_a_producer_that_closes_can_be_opened_again_under_its_id() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        here.ledgers.hold()
        await client.publish()  # the close waits for its receipt
        await client.send(pb.CommandCloseProducer(producer_id=1, request_id=100))
        refused = await client.produce(TOPIC)
        assert refused.error == pb.ServiceNotReady
        assert "closing" in refused.message
        await client.publish(sequence_id=1)  # dropped: the client has closed the producer
        here.ledgers.release()
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
        assert (await client.expect(pb.CommandSuccess)).request_id == 100
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)
