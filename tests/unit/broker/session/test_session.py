"""The session machine: the commands that a client may send in each state, and their answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.session import reply
from magnetar.broker.session.access import AllowAll
from magnetar.broker.session.commands import RULES
from magnetar.broker.session.session import (
    CONSUMERS_MAX,
    KEEPALIVE_S,
    PRODUCERS_MAX,
    REQUESTS_MAX,
    Carry,
    Close,
    Confirm,
    Decline,
    Send,
    Sends,
    Session,
    Start,
)
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb


def command(body: object) -> framing.Command:
    """The command as it would have arrived."""
    [frame] = framing.split_frames(memoryview(framing.encode_command(body)))
    return framing.parse_command(frame)


def new_session() -> Session:
    return Session(0.0, "server", 5, rules=RULES, authenticator=AllowAll())


def answer(action: object) -> object:
    if isinstance(action, Decline):
        data = reply.error_for(action.command, action.code, action.reason)
    else:
        assert isinstance(action, Send)
        data = action.data
    [frame] = framing.split_frames(memoryview(data))
    return framing.parse_command(frame).body


def connect(version: int = 20) -> framing.Command:
    return command(pb.CommandConnect(client_version="test", protocol_version=version))


def connected() -> Session:
    session = new_session()
    session.on_command(connect(), 0.0)
    return session


def producer(producer_id: int = 1, request_id: int = 1) -> framing.Command:
    return command(pb.CommandProducer(topic="t", producer_id=producer_id, request_id=request_id))


def subscribe(consumer_id: int = 1, request_id: int = 1) -> framing.Command:
    return command(
        pb.CommandSubscribe(
            topic="t",
            subscription="s",
            subType=pb.CommandSubscribe.Shared,
            consumer_id=consumer_id,
            request_id=request_id,
        )
    )


def test_connect_is_answered_with_the_smaller_version() -> None:
    session = new_session()
    [action] = session.on_command(connect(version=12), 0.0)
    body = answer(action)
    assert isinstance(body, pb.CommandConnected)
    assert (body.server_version, body.protocol_version, body.max_message_size) == ("server", 12, 5)


@pytest.mark.parametrize(
    "first",
    [pb.CommandPong(), pb.CommandFlow(consumer_id=1, messagePermits=1)],
    ids=["pong", "flow"],
)
def test_nothing_is_accepted_before_connect(first: object) -> None:
    [action] = new_session().on_command(command(first), 0.0)
    assert isinstance(action, Close)
    assert "CONNECT" in action.reason


def test_a_ping_is_answered_before_connect() -> None:
    """Other brokers check in this way whether this broker runs."""
    session = new_session()
    assert session.on_command(command(pb.CommandPing()), 0.0) == [Send(reply.PONG)]
    assert not session.connected
    session.check()


def test_a_second_connect_ends_the_connection() -> None:
    [action] = connected().on_command(connect(), 1.0)
    assert isinstance(action, Close)


def test_send_needs_an_open_producer() -> None:
    session = connected()
    assert isinstance(session.on_sends(1, 1.0), Close)
    [start] = session.on_command(producer(), 1.0)
    assert isinstance(start, Start)
    assert isinstance(session.on_sends(1, 1.0), Close), "not open before the answer"
    assert session.on_producer_opened(1)
    assert session.on_sends(1, 1.0) is Sends.PUBLISH


def test_sends_on_the_way_to_a_closed_producer_are_dropped() -> None:
    session = connected()
    session.on_command(producer(), 1.0)
    session.on_producer_opened(1)
    session.on_producer_closed(1)
    assert session.on_sends(1, 1.0) is Sends.DROP


def test_all_producers_of_a_connection_may_be_closed_at_once() -> None:
    session = connected()

    def open_one(producer_id: int) -> None:
        asked = producer(producer_id)
        assert _starts(session.on_command(asked, 1.0))
        session.on_producer_opened(producer_id)
        session.on_request_ended(asked, failed=False)

    for number in range(PRODUCERS_MAX):
        open_one(number)
    session.check()
    [action] = session.on_command(producer(PRODUCERS_MAX, 7), 1.0)
    body = answer(action)
    assert isinstance(body, pb.CommandError)
    assert (body.request_id, body.error) == (7, pb.NotAllowedError)
    assert str(PRODUCERS_MAX) in body.message
    for number in range(PRODUCERS_MAX):
        session.on_producer_closed(number)
    for number in range(PRODUCERS_MAX):
        assert session.on_sends(number, 1.0) is Sends.DROP, (
            "the client did not know of the close yet"
        )
    open_one(PRODUCERS_MAX)
    session.on_producer_closed(PRODUCERS_MAX)
    session.check()
    assert isinstance(session.on_sends(0, 1.0), Close), (
        "the session remembers more ids than its limit"
    )


def test_the_consumers_of_a_connection_are_bounded() -> None:
    session = connected()
    for number in range(CONSUMERS_MAX):
        asked = subscribe(number)
        assert _starts(session.on_command(asked, 1.0))
        session.on_consumer_opened(number)
        session.on_request_ended(asked, failed=False)
    session.check()
    [action] = session.on_command(subscribe(CONSUMERS_MAX, 7), 1.0)
    body = answer(action)
    assert isinstance(body, pb.CommandError)
    assert (body.request_id, body.error) == (7, pb.NotAllowedError)
    assert str(CONSUMERS_MAX) in body.message
    session.on_consumer_closed(0)
    assert _starts(session.on_command(subscribe(CONSUMERS_MAX), 1.0))
    session.check()


def test_a_close_while_opening_discards_the_opening_object() -> None:
    session = connected()
    session.on_command(subscribe(), 1.0)
    [action] = session.on_command(
        command(pb.CommandCloseConsumer(consumer_id=1, request_id=2)), 1.0
    )
    assert answer(action) == pb.CommandSuccess(request_id=2)
    assert not session.on_consumer_opened(1)
    assert session.consumers == {}


def test_subscribing_again_with_an_open_id_is_idempotent() -> None:
    session = connected()
    session.on_command(subscribe(), 1.0)
    session.on_consumer_opened(1)
    [action] = session.on_command(subscribe(request_id=9), 1.0)
    assert answer(action) == pb.CommandSuccess(request_id=9)


def test_subscribing_again_while_the_id_is_closing_is_not_confirmed() -> None:
    """Otherwise the client would wait for messages of a consumer that is being closed."""
    session = connected()
    session.on_command(subscribe(), 1.0)
    session.on_consumer_opened(1)
    session.on_request_ended(subscribe(), failed=False)
    close = pb.CommandCloseConsumer(consumer_id=1, request_id=2)
    assert _starts(session.on_command(command(close), 1.0))
    [action] = session.on_command(subscribe(request_id=3), 1.0)
    body = answer(action)
    assert isinstance(body, pb.CommandError)
    assert (body.request_id, body.error) == (3, pb.ServiceNotReady)
    session.on_consumer_closed(1)
    assert _starts(session.on_command(subscribe(request_id=4), 1.0))


def test_an_id_that_is_opening_is_not_opened_twice() -> None:
    session = connected()
    session.on_command(producer(request_id=1), 1.0)
    [action] = session.on_command(producer(request_id=2), 1.0)
    body = answer(action)
    assert isinstance(body, pb.CommandError)
    assert (body.request_id, body.error) == (2, pb.ServiceNotReady)
    assert "opening" in body.message


def test_opening_a_producer_again_is_confirmed_once_it_is_open() -> None:
    session = connected()
    session.on_command(producer(), 1.0)
    session.on_producer_opened(1)
    session.on_request_ended(producer(), failed=False)
    again = producer(request_id=9)
    assert session.on_command(again, 1.0) == [Confirm(again)]
    assert session.requests == 0, "the request is answered in the same step"


def test_a_producer_that_is_closing_is_not_confirmed_and_its_sends_are_dropped() -> None:
    session = connected()
    session.on_command(producer(), 1.0)
    session.on_producer_opened(1)
    session.on_request_ended(producer(), failed=False)
    close = command(pb.CommandCloseProducer(producer_id=1, request_id=2))
    assert session.on_command(close, 1.0) == [Start(close)]
    [action] = session.on_command(producer(request_id=3), 1.0)
    body = answer(action)
    assert isinstance(body, pb.CommandError)
    assert (body.request_id, body.error) == (3, pb.ServiceNotReady)
    assert session.on_sends(1, 1.0) is Sends.DROP
    session.on_producer_closed(1)
    session.on_request_ended(close, failed=False)
    assert _starts(session.on_command(producer(request_id=4), 1.0))


@pytest.mark.parametrize("asked", [producer(), subscribe()], ids=["producer", "subscribe"])
def test_the_id_of_a_request_that_failed_can_be_used_again(asked: framing.Command) -> None:
    session = connected()
    assert _starts(session.on_command(asked, 1.0))
    session.on_request_ended(asked, failed=True)
    assert session.requests == 0
    assert _starts(session.on_command(asked, 1.0))


def test_notices_for_closed_consumers_are_dropped() -> None:
    flow = command(pb.CommandFlow(consumer_id=1, messagePermits=5))
    session = connected()
    assert session.on_command(flow, 1.0) == []
    session.on_command(subscribe(), 1.0)
    session.on_consumer_opened(1)
    assert session.on_command(flow, 1.0) == [Carry(flow)]


def test_a_negative_ack_for_a_closed_consumer_is_answered() -> None:
    """NEGATIVE_ACK is the only notice that always has a request id, and its client waits."""
    session = connected()
    nack = command(pb.CommandNegativeAck(consumer_id=3, request_id=7))
    [action] = session.on_command(nack, 0.0)
    refused = answer(action)
    assert isinstance(refused, pb.CommandError)
    assert (refused.request_id, refused.error) == (7, pb.ConsumerNotFound)


def test_requests_of_unknown_consumers_get_an_error() -> None:
    [action] = connected().on_command(command(pb.CommandSeek(consumer_id=4, request_id=8)), 1.0)
    body = answer(action)
    assert isinstance(body, pb.CommandError)
    assert (body.request_id, body.error) == (8, pb.ConsumerNotFound)
    assert "consumer 4" in body.message


def test_requests_under_way_are_bounded() -> None:
    session = connected()
    for number in range(REQUESTS_MAX):
        assert isinstance(session.on_command(producer(number, number), 1.0)[0], Start)
    [action] = session.on_command(producer(REQUESTS_MAX, REQUESTS_MAX), 1.0)
    body = answer(action)
    assert isinstance(body, pb.CommandError)
    assert body.error == pb.TooManyRequests
    session.on_request_ended(producer(0, 0), failed=True)
    assert isinstance(session.on_command(producer(REQUESTS_MAX, 0), 1.0)[0], Start)
    session.check()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (pb.CommandNewTxn(request_id=3), pb.CommandError),
        (pb.CommandTcClientConnectRequest(request_id=3, tc_id=0), pb.CommandError),
    ],
    ids=["new-txn", "tc-connect"],
)
def test_an_unsupported_command_is_refused_by_name(body: object, kind: type) -> None:
    [action] = connected().on_command(command(body), 1.0)
    refusal = answer(action)
    assert isinstance(refusal, kind)
    assert refusal.request_id == 3


def test_a_silent_client_is_pinged_and_then_closed() -> None:
    session = connected()
    assert session.on_timer(KEEPALIVE_S - 1) == []
    assert session.on_timer(KEEPALIVE_S) == [Send(reply.PING)]
    assert session.on_timer(KEEPALIVE_S + 1) == []
    [action] = session.on_timer(2 * KEEPALIVE_S)
    assert isinstance(action, Close)


def test_any_command_counts_as_a_sign_of_life() -> None:
    session = connected()
    session.on_timer(KEEPALIVE_S)
    session.on_command(command(pb.CommandPong()), KEEPALIVE_S + 5)
    assert session.timer_at() == 2 * KEEPALIVE_S + 5


def test_the_silence_of_a_client_that_is_not_read_does_not_count() -> None:
    session = connected()
    session.on_timer(KEEPALIVE_S)
    assert session.pinged
    session.on_paused(2 * KEEPALIVE_S)
    assert session.on_timer(2 * KEEPALIVE_S) == []
    assert session.timer_at() == 3 * KEEPALIVE_S


def test_a_connection_without_a_handshake_is_closed() -> None:
    [action] = new_session().on_timer(KEEPALIVE_S)
    assert isinstance(action, Close)


@given(st.lists(st.tuples(st.sampled_from("pcofgGrRsS"), st.integers(0, 2)), max_size=60))
def test_no_order_of_events_breaks_the_invariants(events: list[tuple[str, int]]) -> None:
    """Random worlds: opens, closes, answers and sends in any order that a shell could produce."""
    session = connected()
    under_way: list[framing.Command] = []
    for number, (event, resource) in enumerate(events):
        match event:
            case "p":
                under_way += started(session, producer(resource, number))
            case "c":
                under_way += started(session, subscribe(resource, number))
            case "r":
                body = pb.CommandCloseProducer(producer_id=resource, request_id=number)
                under_way += started(session, command(body))
            case "R":
                body = pb.CommandCloseConsumer(consumer_id=resource, request_id=number)
                under_way += started(session, command(body))
            case "o" if under_way:
                carry_out(session, ended := under_way.pop())
                session.on_request_ended(ended, failed=False)
            case "f" if under_way:
                session.on_request_ended(under_way.pop(), failed=True)
            case "g":
                session.on_producer_closed(resource)
            case "G":
                session.on_consumer_closed(resource)
            case "s":
                session.on_sends(resource, 1.0)
        session.check()
        assert session.requests == len(under_way)


def started(session: Session, asked: framing.Command) -> list[framing.Command]:
    """The request that the shell must execute, if there is one."""
    return [asked] if _starts(session.on_command(asked, 1.0)) else []


def carry_out(session: Session, asked: framing.Command) -> None:
    """Execute an action as the shell does."""
    match asked.body:
        case pb.CommandProducer() as body:
            session.on_producer_opened(body.producer_id)
        case pb.CommandSubscribe() as body:
            session.on_consumer_opened(body.consumer_id)
        case pb.CommandCloseProducer() as body:
            session.on_producer_closed(body.producer_id)
        case pb.CommandCloseConsumer() as body:
            session.on_consumer_closed(body.consumer_id)


def _starts(actions: list[object]) -> bool:
    return any(isinstance(action, Start) for action in actions)


@pytest.mark.parametrize(("version", "asks", "gets"), [(18, True, True), (17, True, False)])
def test_broker_metadata_is_for_new_clients_that_ask(version: int, asks: bool, gets: bool) -> None:
    for flags in (pb.FeatureFlags(supports_broker_entry_metadata=asks), pb.FeatureFlags(), None):
        session = new_session()
        body = pb.CommandConnect(
            client_version="test", protocol_version=version, feature_flags=flags
        )
        session.on_command(command(body), 0.0)
        wanted = flags is not None and flags.supports_broker_entry_metadata
        assert session.wants_broker_metadata == (gets and wanted)
