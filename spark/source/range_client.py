"""The broker's calls for Spark, blocking, as its Python processes want them.

Each process keeps one channel a broker for its life: Spark reuses a worker for many tasks, and a
channel costs more than a small task. grpc is imported here and not at Spark's start, because its
threads do not survive the fork that makes a worker.
"""

from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc

from magnetar.client.session.service_url import host_and_port
from magnetar.protos import broker_pb2 as pb
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import CHANNEL_OPTIONS, decode_frame
from magnetar.spark.planner import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

# While one frame (2 MiB, 16 at most) is decoded, the next one and the one after it arrive.
FRAMES_AHEAD: Final = 2
# A broker that is alive but silent for this long is treated as lost. Opening a topic after a
# takeover takes up to 3 s.
SILENCE_S_MAX: Final = 10.0

_PLAN: Final = "/magnetar.broker.Broker/PlanRange"
_READ: Final = "/magnetar.broker.Broker/ReadRange"


class BrokerLost(Exception):
    """This broker does not answer, or does not own the topic: look for the owner, try again."""

    definite = False


class BrokerRefused(Exception):
    """Asking again would give the same answer. `name` is the broker's name for the error."""

    definite = True

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}" if name else text)
        self.name = name


@dataclass(frozen=True, slots=True)
class Plan:
    """What a broker says of a topic."""

    owner: str  # URL of the owner; empty: the broker that was asked
    exists: bool
    ledgers: tuple[Span, ...]


def plan_range(broker: str, topic: str) -> Plan:
    """What of the topic can be read now. Raises BrokerLost, BrokerRefused."""
    request = pb.PlanRangeRequest(topic=topic)
    ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = _channel(broker).unary_unary(_PLAN)
    try:
        answer = ask(request.SerializeToString(), timeout=SILENCE_S_MAX)
    except grpc.RpcError as error:
        raise _failure(error, broker) from None
    reply = pb.PlanRangeReply.FromString(answer)
    ledgers = (Span(r.ledger, r.first_entry, r.last_entry, r.bytes) for r in reply.ledgers)
    return Plan(reply.owner_url, reply.exists, tuple(ledgers))


@contextmanager
def frames_of(broker: str, topic: str, span: Span) -> Iterator[Iterator[memoryview]]:
    """The frames of the span's records, read ahead by a thread while inside.

    Iterating raises BrokerLost, BrokerRefused.
    """
    request = pb.ReadRangeRequest(
        topic=topic, ledger=span.ledger, first_entry=span.first, last_entry=span.last
    )
    ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = _channel(broker).unary_stream(_READ)
    call = ask(request.SerializeToString())
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
        while fetcher.is_alive():  # at most one put waits for room
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
            raise BrokerLost(f"{broker} was silent for {SILENCE_S_MAX:.0f} s") from None
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item


# Mechanics

# Whoever asks again gets these again. What else a broker reports passes when the owner has changed,
# the topic has been opened, or bookies have come back.
_LASTING = {"TopicNotFound", "RangeNotConfirmed", "InvalidTopicName"}
_PASSING_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNKNOWN,
}

_channels: dict[str, grpc.Channel] = {}
_channels_lock = threading.Lock()


def _channel(broker: str) -> grpc.Channel:
    with _channels_lock:
        if broker not in _channels:
            _channels[broker] = grpc.insecure_channel(
                host_and_port(broker), options=CHANNEL_OPTIONS
            )
        return _channels[broker]


def _failure(error: Any, broker: str) -> BrokerLost | BrokerRefused:
    """By what the broker says; a call that failed is always a grpc.Call too."""
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.ABORTED:
        name, _, reason = text.partition(": ")
        if name in _LASTING:
            return BrokerRefused(name, reason)
        return BrokerLost(f"{broker}: {text}")
    if code in _PASSING_CODES:
        return BrokerLost(f"{broker}: {code.name}: {text}")
    return BrokerRefused("", f"{broker}: {code.name}: {text}")
