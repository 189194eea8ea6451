"""One client's connection as a state machine: commands in, actions out.

Theory of operation. A connection has three phases:

    CONNECTING --CONNECT--> AUTHENTICATING --accepted--> CONNECTED
                                 |    ^
                    challenge    v    |    AUTH_RESPONSE
                                (client)

The machine passes the credentials of CONNECT and of each AUTH_RESPONSE to the authenticator, which
accepts, challenges or refuses the client. The handshake must be complete within KEEPALIVE_S of the
connection's start. The machine answers a PING in every phase. Before the client is connected, any
other command that the phase does not admit ends the connection.

After the handshake the machine admits a command, answers it itself, drops it, or ends the
connection. The rules state for each type of command when the machine admits it (commands.py). An
admitted command is a *request* or a *notice*. The shell (connection.py) answers a request exactly
once, and may wait for metadata or bookies. The shell carries out a notice at once. The machine
admits SENDs in runs (`on_sends`). Between commands the machine keeps the states of producer and
consumer ids, the number of requests under way, and the time when it last heard the client.

Both transports use this machine: gRPC frames and Pulsar's TCP framing carry the same bytes.

The states of a producer or consumer id:

    (unknown) --PRODUCER/SUBSCRIBE--> OPENING --opened--> OPEN --closed by the broker--> (unknown)
                                         |                 |
                                       CLOSE             CLOSE
                                         v                 v
                                         +---> CLOSING <---+ --opened, failed, closed--> (unknown)

An id whose opening fails becomes unknown, too. SENDs can be under way to a producer that either
side has closed, or whose opening fails. The machine drops these SENDs. If the broker closed the
producer, the client sends them again after its reconnect. A SEND for any other id that is not open
ends the connection.

Invariants (see `check`):
    1. Before the client is connected no id exists and no request is under way.
    2. `requests` is between 0 and REQUESTS_MAX.
    3. There are at most PRODUCERS_MAX producers and CONSUMERS_MAX consumers. The machine remembers
       at most CLOSED_PRODUCERS_MAX closed producers.
    4. The client has grants if and only if it is connected.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, cast

from magnetar.broker.session import reply
from magnetar.broker.session.access import Accepted, Challenged, Credentials, Refused
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.broker.session.access import Authenticator, Grants
    from magnetar.protos.framing import Command


PROTOCOL_VERSION: Final = 21
BROKER_METADATA_SINCE: Final = 18  # the Pulsar protocol version that introduced broker metadata
KEEPALIVE_S: Final = (
    30.0  # Pulsar's keepAliveIntervalSeconds; two silent intervals end the connection
)
REQUESTS_MAX: Final = (
    10_000  # under way at once per connection. The shell stops reading long before this limit
    # (REQUESTS_READ_MAX in connection.py).
)
PRODUCERS_MAX: Final = 50_000
CONSUMERS_MAX: Final = 50_000
"""The limits of the producer ids and of the consumer ids in use on one connection. They can be
high, because a producer or a consumer costs its broker less than an open topic. A client that needs
more ids opens another connection."""

CLOSED_PRODUCERS_MAX: Final = PRODUCERS_MAX
"""The limit of closed producers that the machine remembers, so that it recognises SENDs under way
to them. The broker may close all producers at once when it unloads topics. At this limit, the
closed producers of a connection need 8 MB."""

Type = pb.BaseCommand.Type


class Phase(Enum):
    """The phase of a connection."""

    CONNECTING = "connecting"  # CONNECT has not arrived
    AUTHENTICATING = "authenticating"  # a challenge is not answered yet
    CONNECTED = "connected"


class ResourceState(Enum):
    """The state of a producer or consumer id."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"  # the client closes the id, and the close is not complete


class Admission(Enum):
    """The condition on which a command is admitted."""

    CONNECTING = "it is the first command"
    AUTHENTICATING = "a challenge is not answered; ignored once the client is connected"
    CONNECTED = "the client is connected"
    OPENS_PRODUCER = "its producer id is free"
    OPENS_CONSUMER = "its consumer id is free"
    OPEN_PRODUCER = "its producer is open"
    OPEN_CONSUMER = "its consumer is open"
    CLOSES_PRODUCER = "its producer is open; otherwise the machine itself answers with success"
    CLOSES_CONSUMER = "its consumer is open; otherwise the machine itself answers with success"


@dataclass(frozen=True, slots=True)
class Rule:
    """The treatment of commands of one type."""

    admission: Admission
    request: bool  # False: the machine does not count the command or wait for its end


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Commands of this type are never admitted."""

    reason: str
    ends_connection: bool = False  # False: the command is a request, and the answer is an error


@dataclass(slots=True)
class Send:
    """Send these bytes to the client, before messages that wait to be sent."""

    data: bytes


@dataclass(slots=True)
class Decline:
    """Answer this request with an error."""

    command: Command
    code: pb.ServerError.ValueType
    reason: str


@dataclass(slots=True)
class Carry:
    """Carry out this notice for an open consumer now."""

    command: Command


@dataclass(slots=True)
class Start:
    """Carry out this request, concurrently with others. Call `on_request_ended` before sending its
    answer."""

    command: Command


@dataclass(slots=True)
class Confirm:
    """The client has sent PRODUCER again for an open producer: repeat the answer."""

    command: Command


@dataclass(slots=True)
class Close:
    """End the connection; `reason` is for the log."""

    reason: str
    last_command: bytes = b""  # the command to send first; b"": none


Action = Send | Decline | Carry | Start | Confirm | Close


class Sends(Enum):
    """The action for the shell on a run of SENDs."""

    PUBLISH = "publish"
    DROP = "drop"  # the producer was closed while the SENDs were under way


@dataclass(slots=True)
class Session:
    """The machine. Feed commands in with `on_command` and `on_sends`, and carry out the returned
    actions in order.

    `now` is the loop's time in seconds.
    """

    began_at: float
    server_version: str
    max_message_bytes: int
    rules: Mapping[int, Rule | Unsupported]  # the rule of every type of command
    authenticator: Authenticator
    phase: Phase = Phase.CONNECTING
    protocol_version: int = 0  # the lower version of both sides; 0: CONNECT has not come
    client_version: str = ""
    supports_partial_producer: bool = False  # for statistics only
    # True: delivered entries begin with the broker's metadata.
    wants_broker_metadata: bool = False
    role: str = ""
    grants: Grants | None = None  # None: not connected
    producers: dict[int, ResourceState] = field(default_factory=dict)
    consumers: dict[int, ResourceState] = field(default_factory=dict)
    requests: int = 0
    closed_producers: OrderedDict[int, None] = field(default_factory=OrderedDict)
    heard_at: float = field(init=False)
    pinged: bool = False  # the broker has sent a PING since it last heard the client

    def __post_init__(self) -> None:
        self.heard_at = self.began_at

    @property
    def connected(self) -> bool:
        return self.phase is Phase.CONNECTED

    # ---- commands --------------------------------------------------------------------------------

    def on_command(self, command: Command, now: float) -> list[Action]:
        """Handle a parsed command; `on_sends` handles SENDs. Returns the actions for the shell."""
        self.heard_at, self.pinged = now, False
        if self.phase is not Phase.CONNECTED:
            return self._handshake(command)
        rule = self.rules[command.type]
        if type(rule) is Unsupported:
            return _refuse(command, rule)
        assert type(rule) is Rule
        if rule.request:
            return self._request(command, rule.admission)
        if rule.admission is Admission.OPEN_CONSUMER:
            # The broker drops notices for a consumer that is not open, as Pulsar does. The entries
            # of a closed consumer are dispatched again.
            if self.consumers.get(_id(command, "consumer_id")) is ResourceState.OPEN:
                return [Carry(command)]
            # A client waits for the answer to a NEGATIVE_ACK, although the command is a notice.
            is_answered = command.type == Type.NEGATIVE_ACK
            return [_not_open(command)] if is_answered else []
        return self._answer(command, rule.admission)

    def on_sends(self, producer_id: int, now: float) -> Sends | Close:
        """Handle one SEND, or consecutive SENDs, of one producer. This is a hot path."""
        self.heard_at, self.pinged = now, False
        state = self.producers.get(producer_id)
        if state is ResourceState.OPEN:
            return Sends.PUBLISH
        if state is ResourceState.CLOSING or producer_id in self.closed_producers:
            return Sends.DROP
        if self.phase is not Phase.CONNECTED:
            return self._out_of_phase(Type.SEND)
        return Close(f"SEND for producer {producer_id}, which is not open on this connection")

    # ---- time ------------------------------------------------------------------------------------

    def timer_at(self) -> float:
        """Return the time at which the shell must next call `on_timer`."""
        if self.phase is not Phase.CONNECTED:
            return self.began_at + KEEPALIVE_S
        return self.heard_at + KEEPALIVE_S * (2 if self.pinged else 1)

    def on_timer(self, now: float) -> list[Action]:
        """Send a PING to a silent client; end the connection after a second silent interval, or if
        the handshake takes too long."""
        if now < self.timer_at():
            return []
        if self.phase is not Phase.CONNECTED:
            return [Close(f"the handshake was not complete within {KEEPALIVE_S:.0f} s")]
        if self.pinged:
            return [Close(f"nothing heard for {2 * KEEPALIVE_S:.0f} s")]
        self.pinged = True
        return [Send(reply.PING)]

    def on_stalled(self, lost_s: float, now: float) -> None:
        """The broker did not run for `lost_s` seconds. The time limits exclude these seconds,
        because the client's commands may be waiting to be read."""
        self.heard_at = min(now, self.heard_at + lost_s)
        self.began_at = min(now, self.began_at + lost_s)

    def on_paused(self, now: float) -> None:
        """Treat the client as heard at `now`. The shell calls this method while it does not read
        the client's commands. If it does not read them because too many bytes wait for the client,
        it calls this method only after the client has taken a frame."""
        self.heard_at, self.pinged = now, False

    # ---- what the shell has done -----------------------------------------------------------------

    def on_request_ended(self, command: Command, *, failed: bool) -> None:
        """Take note that the request of a `Start` has ended. `failed`: its answer is an error; a
        producer or consumer that it was to open is not open."""
        assert self.requests > 0, "a request ended twice"
        self.requests -= 1
        if failed:
            rule = self.rules[command.type]
            assert type(rule) is Rule
            if rule.admission is Admission.OPENS_PRODUCER:
                self.on_producer_closed(_id(command, "producer_id"))
            elif rule.admission is Admission.OPENS_CONSUMER:
                self.on_consumer_closed(_id(command, "consumer_id"))

    def on_producer_opened(self, producer_id: int) -> bool:
        """Take note that the shell has opened the producer. Returns False if the client has closed
        the id meanwhile; then the shell must close the producer again."""
        return self._opened(self.producers, producer_id)

    def on_consumer_opened(self, consumer_id: int) -> bool:
        """Like `on_producer_opened`, for a consumer."""
        return self._opened(self.consumers, consumer_id)

    def on_producer_closed(self, producer_id: int) -> None:
        """Take note that the producer failed to open, or that either side closed it."""
        if self.producers.pop(producer_id, None) is not None:
            self.closed_producers[producer_id] = None
            if len(self.closed_producers) > CLOSED_PRODUCERS_MAX:
                self.closed_producers.popitem(last=False)

    def on_consumer_closed(self, consumer_id: int) -> None:
        """Take note that the consumer failed to open, or that either side closed it."""
        self.consumers.pop(consumer_id, None)

    def check(self) -> None:
        """Assert the invariants of this module's docstring."""
        assert self.connected or not (self.producers or self.consumers or self.requests)
        assert 0 <= self.requests <= REQUESTS_MAX
        assert len(self.producers) <= PRODUCERS_MAX
        assert len(self.consumers) <= CONSUMERS_MAX
        assert len(self.closed_producers) <= CLOSED_PRODUCERS_MAX
        assert self.connected == (self.grants is not None)

    # ---- the handshake ---------------------------------------------------------------------------

    def _handshake(self, command: Command) -> list[Action]:
        # Other brokers send PINGs without CONNECT (ownership/liveness.py).
        if command.type == Type.PING:
            return [Send(reply.PONG)]
        rule = self.rules[command.type]
        if type(rule) is not Rule or rule.admission is not _HANDSHAKE[self.phase]:
            return [self._out_of_phase(command.type)]
        match command.body:
            case pb.CommandConnect() as connect:
                return self._connect(connect)
            case pb.CommandAuthResponse() as answer:
                sent = answer.response
                return self._authenticate(Credentials(sent.auth_method_name, sent.auth_data))
        raise AssertionError(f"{_name(command.type)} is no command of the handshake")

    def _connect(self, connect: pb.CommandConnect) -> list[Action]:
        self.phase = Phase.AUTHENTICATING
        self.client_version = connect.client_version or "unknown"
        self.protocol_version = min(PROTOCOL_VERSION, connect.protocol_version)
        self.supports_partial_producer = connect.feature_flags.supports_partial_producer
        wants = connect.feature_flags.supports_broker_entry_metadata
        self.wants_broker_metadata = wants and self.protocol_version >= BROKER_METADATA_SINCE
        return self._authenticate(Credentials(connect.auth_method_name, connect.auth_data))

    def _authenticate(self, credentials: Credentials) -> list[Action]:
        match self.authenticator.authenticate(credentials):
            case Accepted(role, grants):
                self.phase, self.role, self.grants = Phase.CONNECTED, role, grants
                version, limit = self.protocol_version, self.max_message_bytes
                return [Send(reply.connected(self.server_version, version, limit))]
            case Challenged(challenge):
                version = self.protocol_version
                return [Send(reply.auth_challenge(self.server_version, version, challenge))]
            case Refused(reason):
                error = reply.error(reply.NO_REQUEST, pb.AuthenticationError, reason)
                return [Close(f"authentication failed: {reason}", error)]

    def _out_of_phase(self, kind: int) -> Close:
        if self.phase is Phase.CONNECTING:
            return Close(f"the first command must be CONNECT, not {_name(kind)}")
        return Close(f"{_name(kind)} before the client has answered the challenge")

    # ---- requests --------------------------------------------------------------------------------

    def _answer(self, command: Command, admission: Admission) -> list[Action]:
        """Answer a command that the shell does not carry out."""
        assert admission is not Admission.OPEN_PRODUCER, "SENDs go to on_sends"
        if admission is Admission.CONNECTING:
            return [Close(f"a second {_name(command.type)}")]
        return [Send(reply.PONG)] if command.type == Type.PING else []

    def _request(self, command: Command, admission: Admission) -> list[Action]:
        if self.requests >= REQUESTS_MAX:
            text = (
                f"{REQUESTS_MAX} requests are under way on this connection; wait for some of them"
            )
            return [Decline(command, pb.TooManyRequests, text)]
        action = self._admit(command, admission)
        if type(action) is Start:
            self.requests += 1
        return [action]

    def _admit(self, command: Command, admission: Admission) -> Action:
        match admission:
            case Admission.OPENS_PRODUCER:
                return self._open_producer(command)
            case Admission.OPENS_CONSUMER:
                return self._open_consumer(command)
            case Admission.CLOSES_PRODUCER:
                return self._close(command, self.producers, _id(command, "producer_id"))
            case Admission.CLOSES_CONSUMER:
                return self._close(command, self.consumers, _id(command, "consumer_id"))
            case Admission.OPEN_CONSUMER:
                consumer_id = _id(command, "consumer_id")
                if self.consumers.get(consumer_id) is ResourceState.OPEN:
                    return Start(command)
                return _not_open(command)
            case Admission.CONNECTED:
                return Start(command)
        raise AssertionError(f"a request cannot have the admission {admission}")

    def _open_producer(self, command: Command) -> Action:
        producer_id = _id(command, "producer_id")
        state = self.producers.get(producer_id)
        if state is ResourceState.OPEN:  # the client missed the answer; the Go client asks again
            return Confirm(command)
        if state is not None:
            return _not_ready(command, f"producer {producer_id}", state)
        if len(self.producers) >= PRODUCERS_MAX:
            return _too_many(command, f"{PRODUCERS_MAX} producers")
        self.producers[producer_id] = ResourceState.OPENING
        self.closed_producers.pop(producer_id, None)
        return Start(command)

    def _open_consumer(self, command: Command) -> Action:
        consumer_id = _id(command, "consumer_id")
        state = self.consumers.get(consumer_id)
        if state is ResourceState.OPEN:  # the client missed the answer
            return Send(reply.success(_id(command, "request_id")))
        if state is not None:
            return _not_ready(command, f"consumer {consumer_id}", state)
        if len(self.consumers) >= CONSUMERS_MAX:
            return _too_many(command, f"{CONSUMERS_MAX} consumers")
        self.consumers[consumer_id] = ResourceState.OPENING
        return Start(command)

    def _close(
        self, command: Command, states: dict[int, ResourceState], resource_id: int
    ) -> Action:
        state = states.get(resource_id)
        if state is not None:
            # A close may take seconds. Meanwhile the machine must not confirm the id as open.
            states[resource_id] = ResourceState.CLOSING
        if state is ResourceState.OPEN:
            return Start(command)
        # The id is unknown, is not open yet, or is being closed. A close always succeeds.
        return Send(reply.success(_id(command, "request_id")))

    def _opened(self, states: dict[int, ResourceState], resource_id: int) -> bool:
        if states.get(resource_id) is ResourceState.OPENING:
            states[resource_id] = ResourceState.OPEN
            return True
        states.pop(resource_id, None)
        return False


_HANDSHAKE: Final = {
    Phase.CONNECTING: Admission.CONNECTING,
    Phase.AUTHENTICATING: Admission.AUTHENTICATING,
}


def _refuse(command: Command, unsupported: Unsupported) -> list[Action]:
    """Refuse a command of the protocol that this broker does not support."""
    text = f"{_name(command.type)} is not supported: {unsupported.reason}"
    if unsupported.ends_connection:
        return [Close(text)]
    return [Decline(command, pb.NotAllowedError, text)]


def _not_open(command: Command) -> Decline:
    text = f"consumer {_id(command, 'consumer_id')} is not open on this connection"
    return Decline(command, pb.ConsumerNotFound, text)


def _not_ready(command: Command, what: str, state: ResourceState) -> Decline:
    text = f"{what} is {state.value} on this connection already"
    return Decline(command, pb.ServiceNotReady, text)


def _too_many(command: Command, what: str) -> Decline:
    text = f"this connection has {what}, which is the limit"
    return Decline(command, pb.NotAllowedError, text)


def _id(command: Command, name: str) -> int:
    """Return an id of the command. The command must be of a type that has the field `name`."""
    return cast("int", getattr(command.body, name))


def _name(kind: int) -> str:
    return Type.Name(cast("pb.BaseCommand.Type.ValueType", kind))
