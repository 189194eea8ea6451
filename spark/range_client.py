"""Blocking calls to a broker for Spark's Python processes.

Each call carries the credentials of the options in its metadata, as a CONNECT command. Each process
keeps one channel for each pair of an `Access` and a broker until the process ends: Spark reuses a
worker for many tasks, and opening a channel costs more than a small task. This module imports grpc,
so Spark's processes load it only after Spark's start. grpc's threads do not survive the fork that
creates a worker.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from magnetar.client.errors import InvalidConfiguration, PulsarException
from magnetar.client.session.connection import connect_command
from magnetar.client.session.service_url import host_and_port, scheme_of
from magnetar.client.session.tls import Tls
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.framing import encode_command
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import CHANNEL_OPTIONS, GREETING_KEY, decode_frame
from magnetar.spark.planner import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from google.protobuf.message import Message

    from magnetar.spark.access import Access

# The number of frames to read ahead. A frame has about 2 MiB, and at most 16 MiB.
FRAMES_AHEAD: Final = 2
# If a broker sends nothing for this number of seconds, the reader looks for the owner again. After
# a takeover, a broker needs up to 3 s to open a topic.
SILENCE_S_MAX: Final = 10.0

NO_LEDGERS: Final = (1 << 63) - 1  # as a TopicAsk's first ledger: the answer lists none

_SERVICE: Final = "/magnetar.broker.Broker/"
_PLAN: Final = f"{_SERVICE}PlanRange"
_READ: Final = f"{_SERVICE}ReadRange"

Reply = TypeVar("Reply", bound="Message")

Greeting: TypeAlias = "tuple[tuple[str, bytes], ...]"

Pushes: TypeAlias = "tuple[Iterator[Reply], Callable[[], object]]"
"""An iterator over the messages that a broker pushes, and a function that ends the pushes. The
iterator blocks, so read it in a thread of its own. It raises BrokerLost, BrokerRefused."""


class BrokerLost(Exception):
    """The broker does not answer or does not own the topic. Find the owner and try again. `name` is
    the broker's name for the error; "": the broker named no error."""

    definite = False

    def __init__(self, text: str, *, name: str = "") -> None:
        super().__init__(text)
        self.name = name


class BrokerRefused(Exception):
    """The broker refused permanently. `name` is the broker's name for the error."""

    definite = True

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}" if name else text)
        self.name = name


@dataclass(frozen=True, slots=True)
class Plan:
    """A broker's answer to PlanRange."""

    owner: str  # URL of the owner; "": the broker that answered is the owner
    exists: bool
    ledgers: tuple[Span, ...]


def plan_range(access: Access, broker: str, topic: str) -> Plan:
    """Ask a broker for the readable ledgers of a topic. Raises BrokerLost, BrokerRefused."""
    reply = _ask(access, broker, _PLAN, pb.PlanRangeRequest(topic=topic), pb.PlanRangeReply)
    ledgers = (Span(r.ledger, r.first_entry, r.last_entry, r.bytes) for r in reply.ledgers)
    return Plan(reply.owner_url, reply.exists, tuple(ledgers))


def topic_policies(
    access: Access, broker: str, topic: str, sink: str = ""
) -> pb.TopicPoliciesReply:
    """Ask a broker for the policies of a topic, and for the last batch that a sink noted in the
    topic. Raises BrokerLost, BrokerRefused."""
    request = pb.TopicPoliciesRequest(topic=topic, sink=sink)
    return _ask(access, broker, f"{_SERVICE}TopicPolicies", request, pb.TopicPoliciesReply)


def find_topics(
    access: Access, broker: str, topics: Sequence[str], namespaces: Sequence[str]
) -> pb.FindTopicsReply:
    """Ask any broker for the existing topics and partitions among `topics` and in `namespaces`.
    Raises BrokerLost, BrokerRefused."""
    request = pb.FindTopicsRequest(topics=topics, namespaces=namespaces)
    return _ask(access, broker, f"{_SERVICE}FindTopics", request, pb.FindTopicsReply)


def plan_topics(access: Access, broker: str, topics: Mapping[str, int]) -> list[pb.TopicPlan]:
    """Ask a broker for the plans of topics. `topics`: {topic: the first ledger that its plan must
    list}. Raises BrokerLost, BrokerRefused."""
    asks = [pb.TopicAsk(topic=topic, from_ledger=ledger) for topic, ledger in topics.items()]
    request = pb.PlanTopicsRequest(topics=asks)
    reply = _ask(access, broker, f"{_SERVICE}PlanTopics", request, pb.PlanTopicsReply)
    return _as_many(broker, reply.topics, len(asks))


def ledger_copies(
    access: Access, broker: str, ledgers: Mapping[str, Sequence[int]]
) -> pb.PlanTopicsReply:
    """Ask a broker which bookies have the copies of sealed ledgers. `ledgers`: {topic: its
    ledgers}. Raises BrokerLost, BrokerRefused."""
    asks = [
        pb.TopicAsk(topic=topic, from_ledger=NO_LEDGERS, copies_of=part)
        for topic, part in ledgers.items()
    ]
    request = pb.PlanTopicsRequest(topics=asks)
    return _ask(access, broker, f"{_SERVICE}PlanTopics", request, pb.PlanTopicsReply)


def watch_positions(
    access: Access, broker: str, topics: Mapping[str, int]
) -> Pushes[pb.PositionsUpdate]:
    """Ask a broker to push the states of topics. `topics`: {topic: the first ledger that its state
    must list}."""
    asks = [pb.TopicAsk(topic=topic, from_ledger=ledger) for topic, ledger in topics.items()]
    request = pb.WatchPositionsRequest(topics=asks)
    return _watch(access, broker, "WatchPositions", request, pb.PositionsUpdate)


def watch_topics(
    access: Access, broker: str, topics: Sequence[str], namespaces: Sequence[str]
) -> Pushes[pb.TopicsUpdate]:
    """Ask any broker to push the existing topics and partitions among `topics` and in
    `namespaces`."""
    request = pb.FindTopicsRequest(topics=topics, namespaces=namespaces)
    return _watch(access, broker, "WatchTopics", request, pb.TopicsUpdate)


def find_entries(
    access: Access, asks: Sequence[tuple[str, pb.FindEntryRequest]]
) -> list[pb.FindEntryReply | BrokerLost | BrokerRefused]:
    """Ask for the ledger and entry id at an index, a publish time or a place. `asks`: pairs of a
    broker and a request. The requests are sent at the same time, each by a thread of its own.

    Returns an answer or an error for each request.
    """
    replies = _find_once(access, asks)
    refused = {
        at: reply
        for at, reply in enumerate(replies)
        if isinstance(reply, BrokerRefused) and reply.name == NOT_AUTHENTICATED
    }
    if refused and renews_credentials(access, next(iter(refused.values()))):
        again = _find_once(access, [asks[at] for at in refused])
        for at, reply in zip(refused, again, strict=True):
            replies[at] = reply
    return replies


def hold_topics(access: Access, broker: str, request: pb.HoldTopicsRequest) -> list[pb.HeldTopic]:
    """Ask a broker to create a subscription on topics that lack it, and to acknowledge the entries
    before the requested places. Raises BrokerLost, BrokerRefused."""
    reply = _ask(access, broker, f"{_SERVICE}HoldTopics", request, pb.HoldTopicsReply)
    return _as_many(broker, reply.topics, len(request.topics))


def note_batches(
    access: Access, broker: str, request: pb.NoteBatchesRequest
) -> list[pb.NotedTopic]:
    """Ask a broker to note a batch of a sink. Raises BrokerLost, BrokerRefused."""
    reply = _ask(access, broker, f"{_SERVICE}NoteBatches", request, pb.NoteBatchesReply)
    return _as_many(broker, reply.topics, len(request.topics))


def error_named(broker: str, text: str) -> BrokerLost | BrokerRefused:
    """Convert the error that a broker named for one topic."""
    name, _, reason = text.partition(": ")
    if name in PERMANENT:
        return BrokerRefused(name, reason)
    return BrokerLost(f"{broker}: {text}", name=name)


def renews_credentials(access: Access, error: BrokerRefused) -> bool:
    """Return whether a broker refused the credentials, which may be outdated. The next call then
    has new ones, if the client can get them."""
    authentication = access.authentication()
    if error.name != NOT_AUTHENTICATED or authentication is None:
        return False
    authentication.auth.on_refused()
    return True


def _watch(
    access: Access, broker: str, method: str, request: Message, kind: type[Reply]
) -> Pushes[Reply]:
    channel = _channel(access, broker)
    ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(_SERVICE + method)
    call = ask(request.SerializeToString(), metadata=_greeting(access))

    def updates() -> Iterator[Reply]:
        try:
            for message in call:
                yield kind.FromString(message)
        except grpc.RpcError as error:
            raise _failure(error, broker) from None
        except DecodeError as error:
            raise BrokerLost(f"{broker}: {error}") from None

    return updates(), call.cancel


def _as_many(broker: str, answers: Sequence[Reply], count: int) -> list[Reply]:
    if len(answers) != count:
        raise BrokerLost(f"{broker} answered for {len(answers)} topics instead of {count}")
    return list(answers)


def _find_once(
    access: Access, asks: Sequence[tuple[str, pb.FindEntryRequest]]
) -> list[pb.FindEntryReply | BrokerLost | BrokerRefused]:
    try:
        greeting = _greeting(access)  # one for all threads: it may cost a request for a token
    except BrokerLost as error:
        return [error] * len(asks)

    def ask(one: tuple[str, pb.FindEntryRequest]) -> pb.FindEntryReply | BrokerLost | BrokerRefused:
        broker, request = one
        method = f"{_SERVICE}FindEntry"
        try:
            return _ask_once(access, broker, method, request, pb.FindEntryReply, greeting)
        except (BrokerLost, BrokerRefused) as error:
            return error

    with ThreadPoolExecutor(len(asks)) as threads:
        return list(threads.map(ask, asks))


def _ask(access: Access, broker: str, method: str, request: Message, reply: type[Reply]) -> Reply:
    try:
        return _ask_once(access, broker, method, request, reply, _greeting(access))
    except BrokerRefused as error:
        if not renews_credentials(access, error):
            raise
    return _ask_once(access, broker, method, request, reply, _greeting(access))


def _ask_once(
    access: Access,
    broker: str,
    method: str,
    request: Message,
    reply: type[Reply],
    greeting: Greeting,
) -> Reply:
    ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = _channel(access, broker).unary_unary(method)
    message = request.SerializeToString()
    try:
        return reply.FromString(ask(message, metadata=greeting, timeout=SILENCE_S_MAX))
    except grpc.RpcError as error:
        raise _failure(error, broker) from None
    except DecodeError as error:
        raise BrokerLost(f"{broker}: {error}") from None


@contextmanager
def frames_of(
    access: Access, broker: str, topic: str, span: Span
) -> Iterator[Iterator[memoryview]]:
    """Yield an iterator over the frames of a span. A thread reads ahead until the block ends.

    The iterator raises BrokerLost and BrokerRefused.
    """
    request = pb.ReadRangeRequest(
        topic=topic, ledger=span.ledger, first_entry=span.first, last_entry=span.last
    )
    ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = _channel(access, broker).unary_stream(_READ)
    call = ask(request.SerializeToString(), metadata=_greeting(access))
    ahead: queue.Queue[memoryview | Exception | None] = queue.Queue(FRAMES_AHEAD)
    left = threading.Event()

    def fetch() -> None:
        end: Exception | None = None
        try:
            for message in call:
                ahead.put(decode_frame(message))
                if left.is_set():
                    return
        except grpc.RpcError as error:
            end = _failure(error, broker)
        except StreamClosed as error:
            end = BrokerLost(f"{broker}: {error}")
        ahead.put(end)

    fetcher = threading.Thread(target=fetch, name="magnetar-read-ahead", daemon=True)
    fetcher.start()
    try:
        yield _arriving(ahead, broker)
    finally:
        left.set()
        call.cancel()
        while fetcher.is_alive():  # the thread may be blocked in one put()
            try:
                ahead.get(timeout=0.01)
            except queue.Empty:
                continue


def _arriving(
    ahead: queue.Queue[memoryview | Exception | None], broker: str
) -> Iterator[memoryview]:
    while True:
        try:
            item = ahead.get(timeout=SILENCE_S_MAX)
        except queue.Empty:
            raise BrokerLost(f"{broker} sent nothing for {SILENCE_S_MAX:.0f} s") from None
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item


# Mechanics

NOT_AUTHENTICATED: Final = "NotAuthenticated"

# Permanent errors: another attempt gets the same answer. A broker's other errors are temporary: the
# owner is changing, the topic is being opened, or bookies are unavailable.
PERMANENT: Final = {
    "InvalidNamespaceName",
    "InvalidTopicName",
    "NamespaceNotFound",
    "NotAllowed",
    NOT_AUTHENTICATED,
    "NotAuthorized",
    "QueryFenced",
    "RangeDeleted",
    "TenantNotFound",
    "TopicNotFound",
}
# The permanent errors that mean that planned entries no longer exist.
DELETED: Final = {"NamespaceNotFound", "RangeDeleted", "TenantNotFound", "TopicNotFound"}
_TEMPORARY_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNKNOWN,
}

_channels: dict[tuple[Access, str], grpc.Channel] = {}
_channels_lock = threading.Lock()


def _channel(access: Access, broker: str) -> grpc.Channel:
    """Return the channel to a broker. Raises BrokerRefused if TLS cannot be used."""
    with _channels_lock:
        if (access, broker) not in _channels:
            _channels[access, broker] = _new_channel(access, broker)
        return _channels[access, broker]


def _new_channel(access: Access, broker: str) -> grpc.Channel:
    address = host_and_port(broker)
    if not access.encrypts:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    if not scheme_of(broker).is_tls:
        reason = f"the topic's owner is {broker}, without TLS, and service.url demands TLS"
        raise BrokerRefused("", reason)
    try:
        credentials = Tls.of(access.client_options(broker)).grpc_credentials()
    except InvalidConfiguration as error:
        raise BrokerRefused("", str(error)) from None
    return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


def _greeting(access: Access) -> Greeting:
    """Return the metadata of a call: the credentials. Raises BrokerLost if the client cannot get
    the credentials now."""
    authentication = access.authentication()
    if authentication is None:
        return ()
    credentials = authentication.auth
    try:
        data = asyncio.run(credentials.data())
    except PulsarException as error:
        raise BrokerLost(f"the client has no credentials: {error}") from None
    return ((GREETING_KEY, encode_command(connect_command(credentials.method, data))),)


def _failure(error: Any, broker: str) -> BrokerLost | BrokerRefused:
    """Convert the error of a gRPC call. Each such error is also a grpc.Call."""
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.ABORTED:
        name, _, reason = text.partition(": ")
        if name in PERMANENT:
            return BrokerRefused(name, reason)
        return BrokerLost(f"{broker}: {text}", name=name)
    if code in _TEMPORARY_CODES:
        return BrokerLost(f"{broker}: {code.name}: {text}")
    return BrokerRefused("", f"{broker}: {code.name}: {text}")
