"""One client's connection as a state machine: commands in, obligations out.

Theory of operation. A session begins with CONNECT and nothing else is accepted before it. Then
every command is either answered here, or it becomes a *request* that the shell carries out (it may
wait for metadata or bookies), or a *notice* that needs no answer of its own (SEND, FLOW, ACK,
REDELIVER). The machine keeps what must be remembered between commands and nothing more: which
producer and consumer ids exist and in which phase they are, how many requests are under way, and
when the peer was last heard.

The same machine serves both transports: gRPC frames and Pulsar's TCP framing carry the same bytes.

The phases of a producer or consumer id:

    (unknown) --PRODUCER/SUBSCRIBE--> OPENING --opened--> OPEN --CLOSE or closed by the broker-->
    (unknown)
                                         \\--CLOSE--> CLOSING --opened or failed--> (unknown)

A consumer that was open is CLOSING, too, until its close was carried out.

A producer that the broker closed may still have SENDs on the way; they are dropped without a word
(the client sends them again after its reconnect). A SEND for an id that never existed ends the
connection.

Invariants (see `check`):
    1. Before CONNECT no id exists and no request is under way.
    2. `requests` is between 0 and REQUESTS_MAX.
    3. There are at most PRODUCERS_MAX producers and CONSUMERS_MAX consumers, and at most
       CLOSED_PRODUCERS_MAX producers are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, cast

from magnetar.broker.session import reply
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.protos.framing import Command


PROTOCOL_VERSION: Final = 21
BROKER_METADATA_SINCE: Final = 18  # of Pulsar's protocol versions
KEEPALIVE_S: Final = (
    30.0  # Pulsar's keepAliveIntervalSeconds; a silent peer is closed after two of them
)
REQUESTS_MAX: Final = (
    10_000  # under way at once per connection; the shell stops reading much earlier, so that only
    # a huge frame can hold so many
)
PRODUCERS_MAX: Final = 50_000
CONSUMERS_MAX: Final = 50_000
"""Of one connection, opening or open. A topic that is served costs its broker more than either;
what a client has beyond this goes over another connection, or to other brokers."""

CLOSED_PRODUCERS_MAX: Final = PRODUCERS_MAX
"""Remembered, so that SENDs still on the way are recognised: all may be unloaded at once. 8 MB of a
connection that comes to it."""

Type = pb.BaseCommand.Type


class Phase(Enum):
    """Where a producer or consumer id stands."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"  # the client closed it while it was opening; a consumer: or open


@dataclass(slots=True)
class Send:
    """Put these bytes on the wire, before bulk."""

    data: bytes


@dataclass(slots=True)
class Publish:
    """A SEND of an open producer; not frozen, because there is one per entry."""

    producer_id: int
    sequence_id: int
    highest_sequence_id: int
    messages: int
    entry: memoryview


@dataclass(slots=True)
class Carry:
    """A notice for an open consumer: FLOW, ACK or REDELIVER_UNACKNOWLEDGED_MESSAGES."""

    command: Command


@dataclass(slots=True)
class Start:
    """A request to carry out beside others; the shell calls `on_request_ended` when it is
    answered."""

    command: Command


@dataclass(slots=True)
class Discard:
    """Close this just opened producer or consumer again: its client has gone on."""

    kind: type[Publish | Carry]
    id: int


@dataclass(slots=True)
class Close:
    """End the connection; `reason` is for the log."""

    reason: str


Action = Send | Publish | Carry | Start | Discard | Close


@dataclass(slots=True)
class Session:
    """Feed commands in with `on_command`; carry out what comes back, in order.

    `now` is the loop's time in seconds.
    """

    now: float
    server_version: str
    max_message_bytes: int
    protocol_version: int = 0  # of both sides; 0: CONNECT has not come
    client_version: str = ""
    wants_broker_metadata: bool = False  # in front of the entries that are delivered to it
    producers: dict[int, Phase] = field(default_factory=dict)
    consumers: dict[int, Phase] = field(default_factory=dict)
    requests: int = 0
    closed_producers: OrderedDict[int, None] = field(default_factory=OrderedDict)
    heard_at: float = field(init=False)
    pinged: bool = False  # a PING is out since we last heard anything

    def __post_init__(self) -> None:
        self.heard_at = self.now

    @property
    def connected(self) -> bool:
        return self.client_version != ""

    def on_command(self, command: Command, now: float) -> list[Action]:
        """One command that parsed."""
        self.heard_at, self.pinged = now, False
        kind, body = command.type, command.body
        if isinstance(body, pb.CommandSend):
            return self._send(body, command.entry)
        if not self.connected:
            return self._connect(body) if isinstance(body, pb.CommandConnect) else _not_first(kind)
        if kind in _NOTICES:
            return self._notice(command)
        if kind in _REQUESTS:
            return self._request(command)
        if kind == Type.PING:
            return [Send(reply.PONG)]
        if kind == Type.PONG or kind == Type.AUTH_RESPONSE:
            return []
        return _refuse(command)

    def takes_send(self, producer_id: int, now: float) -> bool:
        """A SEND came. True: publish it, as `on_command` would say in more words. False: ask
        `on_command`."""
        self.heard_at, self.pinged = now, False
        return self.producers.get(producer_id) is Phase.OPEN

    def timer_at(self) -> float:
        """When to call `on_timer` next."""
        return self.heard_at + KEEPALIVE_S * (2 if self.pinged else 1)

    def on_timer(self, now: float) -> list[Action]:
        """Ask a silent peer for a sign of life; give it up after a second silent interval."""
        if now < self.timer_at():
            return []
        if not self.connected:
            return [Close(f"no CONNECT within {KEEPALIVE_S:.0f} s")]
        if self.pinged:
            return [Close(f"nothing heard for {2 * KEEPALIVE_S:.0f} s")]
        self.pinged = True
        return [Send(reply.PING)]

    def on_paused(self, now: float) -> None:
        """The client is not being read: its silence says nothing."""
        self.heard_at, self.pinged = now, False

    def on_request_ended(self) -> None:
        """A `Start` was carried out and answered."""
        assert self.requests > 0, "a request ended twice"
        self.requests -= 1

    def on_producer_opened(self, producer_id: int) -> list[Action]:
        """The shell has opened it; the answer may follow unless it says Discard."""
        return self._opened(self.producers, producer_id, Publish)

    def on_consumer_opened(self, consumer_id: int) -> list[Action]:
        """The shell has opened it; the answer may follow unless it says Discard."""
        return self._opened(self.consumers, consumer_id, Carry)

    def on_producer_gone(self, producer_id: int) -> None:
        """It failed to open, or was closed by either side."""
        if self.producers.pop(producer_id, None) is not None:
            self.closed_producers[producer_id] = None
            if len(self.closed_producers) > CLOSED_PRODUCERS_MAX:
                self.closed_producers.popitem(last=False)

    def on_consumer_gone(self, consumer_id: int) -> None:
        """It failed to open, or was closed by either side."""
        self.consumers.pop(consumer_id, None)

    def check(self) -> None:
        """Assert the invariants of this module's docstring."""
        assert self.connected or not (self.producers or self.consumers or self.requests)
        assert 0 <= self.requests <= REQUESTS_MAX
        assert len(self.producers) <= PRODUCERS_MAX
        assert len(self.consumers) <= CONSUMERS_MAX
        assert len(self.closed_producers) <= CLOSED_PRODUCERS_MAX

    def _connect(self, connect: pb.CommandConnect) -> list[Action]:
        self.client_version = connect.client_version or "unknown"
        self.protocol_version = min(PROTOCOL_VERSION, connect.protocol_version)
        wants = connect.feature_flags.supports_broker_entry_metadata
        self.wants_broker_metadata = wants and self.protocol_version >= BROKER_METADATA_SINCE
        return [
            Send(
                reply.connected(self.server_version, self.protocol_version, self.max_message_bytes)
            )
        ]

    def _send(self, send: pb.CommandSend, entry: memoryview | None) -> list[Action]:
        if self.producers.get(send.producer_id) is Phase.OPEN:
            assert entry is not None, "a SEND without an entry does not parse"
            return [
                Publish(
                    send.producer_id,
                    send.sequence_id,
                    send.highest_sequence_id,
                    send.num_messages,
                    entry,
                )
            ]
        if send.producer_id in self.closed_producers:
            return []
        return [
            Close(f"SEND for producer {send.producer_id}, which is not open on this connection")
        ]

    def _notice(self, command: Command) -> list[Action]:
        consumer_id = _id(command, "consumer_id")
        # What comes for a consumer that is gone is dropped, as Pulsar does: its entries were or
        # will be given out again.
        return [Carry(command)] if self.consumers.get(consumer_id) is Phase.OPEN else []

    def _request(self, command: Command) -> list[Action]:
        if self.requests >= REQUESTS_MAX:
            return _error(
                command,
                pb.TooManyRequests,
                f"{REQUESTS_MAX} requests are under way on this connection; wait for some of them",
            )
        admitted = _ADMIT.get(command.type, Session._admit)(self, command)
        if any(isinstance(action, Start) for action in admitted):
            self.requests += 1
        return admitted

    def _admit(self, command: Command) -> list[Action]:
        return [Start(command)]

    def _admit_producer(self, command: Command) -> list[Action]:
        producer_id = _id(command, "producer_id")
        phase = self.producers.get(producer_id)
        if phase is not None:
            return _error(
                command,
                pb.ServiceNotReady,
                f"producer {producer_id} is {phase.value} on this connection already",
            )
        if len(self.producers) >= PRODUCERS_MAX:
            return _too_many(command, f"{PRODUCERS_MAX} producers")
        self.producers[producer_id] = Phase.OPENING
        self.closed_producers.pop(producer_id, None)
        return [Start(command)]

    def _admit_subscribe(self, command: Command) -> list[Action]:
        consumer_id = _id(command, "consumer_id")
        phase = self.consumers.get(consumer_id)
        if phase is Phase.OPEN:  # the client asks again since it missed the answer
            return [Send(reply.success(_id(command, "request_id")))]
        if phase is not None:
            return _error(
                command,
                pb.ServiceNotReady,
                f"consumer {consumer_id} is {phase.value} on this connection already",
            )
        if len(self.consumers) >= CONSUMERS_MAX:
            return _too_many(command, f"{CONSUMERS_MAX} consumers")
        self.consumers[consumer_id] = Phase.OPENING
        return [Start(command)]

    def _admit_close_producer(self, command: Command) -> list[Action]:
        return self._admit_close(command, self.producers, _id(command, "producer_id"))

    def _admit_close_consumer(self, command: Command) -> list[Action]:
        consumer_id = _id(command, "consumer_id")
        admitted = self._admit_close(command, self.consumers, consumer_id)
        if self.consumers.get(consumer_id) is Phase.OPEN:
            # It may take seconds. Who subscribes again meanwhile must not be told that it is open.
            self.consumers[consumer_id] = Phase.CLOSING
        return admitted

    def _admit_close(
        self, command: Command, phases: dict[int, Phase], resource_id: int
    ) -> list[Action]:
        match phases.get(resource_id):
            case Phase.OPEN:
                return [Start(command)]
            case Phase.OPENING:
                phases[resource_id] = Phase.CLOSING
        # Closed already, or about to be: closing is idempotent.
        return [Send(reply.success(_id(command, "request_id")))]

    def _admit_of_consumer(self, command: Command) -> list[Action]:
        consumer_id = _id(command, "consumer_id")
        if self.consumers.get(consumer_id) is Phase.OPEN:
            return [Start(command)]
        return _error(
            command,
            pb.ConsumerNotFound,
            f"consumer {consumer_id} is not open on this connection",
        )

    def _opened(
        self, phases: dict[int, Phase], resource_id: int, kind: type[Publish | Carry]
    ) -> list[Action]:
        if phases.get(resource_id) is Phase.OPENING:
            phases[resource_id] = Phase.OPEN
            return []
        phases.pop(resource_id, None)
        return [Discard(kind, resource_id)]


_NOTICES: Final = frozenset({Type.FLOW, Type.ACK, Type.REDELIVER_UNACKNOWLEDGED_MESSAGES})
_REQUESTS: Final = frozenset(
    {
        Type.PARTITIONED_METADATA,
        Type.LOOKUP,
        Type.PRODUCER,
        Type.SUBSCRIBE,
        Type.CLOSE_PRODUCER,
        Type.CLOSE_CONSUMER,
        Type.UNSUBSCRIBE,
        Type.SEEK,
        Type.GET_LAST_MESSAGE_ID,
        Type.CONSUMER_STATS,
        Type.GET_TOPICS_OF_NAMESPACE,
    }
)
_ANSWERS: Final = frozenset(
    kind
    for name, kind in Type.items()
    if name.endswith(("_RESPONSE", "SUCCESS")) or kind == Type.ERROR
)
_ADMIT: Final[dict[int, Callable[[Session, Command], list[Action]]]] = {
    Type.PRODUCER: Session._admit_producer,
    Type.SUBSCRIBE: Session._admit_subscribe,
    Type.CLOSE_PRODUCER: Session._admit_close_producer,
    Type.CLOSE_CONSUMER: Session._admit_close_consumer,
    Type.UNSUBSCRIBE: Session._admit_of_consumer,
    Type.SEEK: Session._admit_of_consumer,
    Type.GET_LAST_MESSAGE_ID: Session._admit_of_consumer,
    Type.CONSUMER_STATS: Session._admit_of_consumer,
}


def _not_first(kind: int) -> list[Action]:
    return [Close(f"the first command must be CONNECT, not {_name(kind)}")]


def _refuse(command: Command) -> list[Action]:
    """A command that exists in the protocol and is not served here."""
    name = _name(command.type)
    if command.type in _ANSWERS or getattr(command.body, "request_id", None) is None:
        return [Close(f"{name} is not a command that a client sends")]
    return _error(command, pb.NotAllowedError, f"{name} is not supported by this broker")


def _too_many(command: Command, what: str) -> list[Action]:
    text = f"there are {what} on this connection, as many as it may have"
    return _error(command, pb.NotAllowedError, text)


def _error(command: Command, code: pb.ServerError.ValueType, message: str) -> list[Action]:
    return [Send(reply.error_for(command, code, message))]


def _id(command: Command, name: str) -> int:
    """An id that every command of this kind has; which kinds do, the tables above say."""
    return cast("int", getattr(command.body, name))


def _name(kind: int) -> str:
    return Type.Name(cast("pb.BaseCommand.Type.ValueType", kind))
