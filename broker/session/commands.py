"""Every command of the protocol. A supported command has its admission, the permission that it
needs, and its handler. An unsupported command has the reason why the broker refuses it.

Each type of command is in exactly one of `COMMANDS` and `UNSUPPORTED`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.session import (
    answers,
    consumers,
    deliveries,
    lookup,
    producers,
    publishing,
    request,
    schemas,
    watchers,
)
from magnetar.broker.session.access import Permission
from magnetar.broker.session.session import Admission, Rule, Unsupported
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import NamespaceName

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from magnetar.broker.session.access import Resource
    from magnetar.broker.session.answers import Answer
    from magnetar.broker.session.context import Context
    from magnetar.protos.sends import SendRun

Type = pb.BaseCommand.Type


@dataclass(frozen=True, slots=True)
class Needs:
    """A permission, and the part of the command that names the resource."""

    permission: Permission
    resource: Callable[[Any], Resource]  # the resource that the command's body names


@dataclass(frozen=True, slots=True)
class Request:
    """A command whose handler returns one answer, and runs in a task of its own. Only a PRODUCER
    that waits for exclusive access gets a second answer, when the wait is over."""

    admission: Admission
    handler: Callable[[Context, Any], Awaitable[bytes | Answer]]
    needs: Needs | None = None  # None: an earlier command was granted the resource


@dataclass(frozen=True, slots=True)
class Notice:
    """A command that is not a request. Its handler runs in the connection's reader task, and may
    answer the command itself: ACK, NEGATIVE_ACK."""

    admission: Admission
    handler: Callable[[Context, Any], None]


@dataclass(frozen=True, slots=True)
class Run:
    """A command that arrives in runs. Its handler takes a whole run, in the connection's reader
    task."""

    admission: Admission
    handler: Callable[[Context, SendRun, float], None]


@dataclass(frozen=True, slots=True)
class Internal:
    """A command that the session machine handles itself."""

    admission: Admission


def _topic(body: Any) -> Resource:
    return request.topic_name(body.topic)


def _namespace(body: Any) -> Resource:
    return NamespaceName.parse(body.namespace)


_PRODUCE: Final = Needs(Permission.PRODUCE, _topic)
_CONSUME: Final = Needs(Permission.CONSUME, _topic)
_LOOKUP: Final = Needs(Permission.LOOKUP, _topic)
_LIST: Final = Needs(Permission.LOOKUP, _namespace)

SEND: Final = Run(Admission.OPEN_PRODUCER, publishing.publish_run)

COMMANDS: Final[Mapping[int, Request | Notice | Run | Internal]] = {
    # The handshake and signs of life.
    Type.CONNECT: Internal(Admission.CONNECTING),
    Type.AUTH_RESPONSE: Internal(Admission.AUTHENTICATING),
    Type.PING: Internal(Admission.CONNECTED),
    Type.PONG: Internal(Admission.CONNECTED),
    # Lookup.
    Type.PARTITIONED_METADATA: Request(Admission.CONNECTED, lookup.partitions, _LOOKUP),
    Type.LOOKUP: Request(Admission.CONNECTED, lookup.lookup, _LOOKUP),
    Type.GET_TOPICS_OF_NAMESPACE: Request(
        Admission.CONNECTED, answers.shared_list(lookup.topics_of_namespace), _LIST
    ),
    # Schemas, and watches of topic lists.
    Type.GET_SCHEMA: Request(Admission.CONNECTED, schemas.get_schema, _LOOKUP),
    Type.GET_OR_CREATE_SCHEMA: Request(Admission.CONNECTED, schemas.get_or_create_schema, _PRODUCE),
    Type.WATCH_TOPIC_LIST: Request(Admission.CONNECTED, watchers.watch, _LIST),
    Type.WATCH_TOPIC_LIST_CLOSE: Request(Admission.CONNECTED, watchers.end_watch),
    # Producers.
    Type.PRODUCER: Request(Admission.OPENS_PRODUCER, producers.open_producer, _PRODUCE),
    Type.SEND: SEND,
    Type.CLOSE_PRODUCER: Request(Admission.CLOSES_PRODUCER, producers.close_producer),
    # Consumers.
    Type.SUBSCRIBE: Request(Admission.OPENS_CONSUMER, consumers.subscribe, _CONSUME),
    Type.FLOW: Notice(Admission.OPEN_CONSUMER, deliveries.flow),
    Type.ACK: Notice(Admission.OPEN_CONSUMER, deliveries.acknowledge),
    Type.REDELIVER_UNACKNOWLEDGED_MESSAGES: Notice(Admission.OPEN_CONSUMER, deliveries.redeliver),
    Type.NEGATIVE_ACK: Notice(Admission.OPEN_CONSUMER, deliveries.negative_ack),
    Type.SEEK: Request(Admission.OPEN_CONSUMER, consumers.seek),
    Type.GET_LAST_MESSAGE_ID: Request(Admission.OPEN_CONSUMER, consumers.last_message_id),
    Type.CONSUMER_STATS: Request(Admission.OPEN_CONSUMER, consumers.consumer_stats),
    Type.UNSUBSCRIBE: Request(Admission.OPEN_CONSUMER, consumers.unsubscribe),
    Type.DRAIN_CONSUMER: Request(Admission.OPEN_CONSUMER, consumers.drain_consumer),
    Type.CLOSE_CONSUMER: Request(Admission.CLOSES_CONSUMER, consumers.close_consumer),
}

_FROM_BROKERS: Final = Unsupported("only a broker sends it", ends_connection=True)
_TRANSACTIONS: Final = Unsupported("this broker has no transactions")

UNSUPPORTED: Final[Mapping[int, Unsupported]] = {
    Type.CONNECTED: _FROM_BROKERS,
    Type.AUTH_CHALLENGE: _FROM_BROKERS,
    Type.SUCCESS: _FROM_BROKERS,
    Type.ERROR: _FROM_BROKERS,
    Type.PARTITIONED_METADATA_RESPONSE: _FROM_BROKERS,
    Type.LOOKUP_RESPONSE: _FROM_BROKERS,
    Type.GET_TOPICS_OF_NAMESPACE_RESPONSE: _FROM_BROKERS,
    Type.PRODUCER_SUCCESS: _FROM_BROKERS,
    Type.SEND_RECEIPT: _FROM_BROKERS,
    Type.SEND_ERROR: _FROM_BROKERS,
    Type.MESSAGE: _FROM_BROKERS,
    Type.ACK_RESPONSE: _FROM_BROKERS,
    Type.ACTIVE_CONSUMER_CHANGE: _FROM_BROKERS,
    Type.REACHED_END_OF_TOPIC: _FROM_BROKERS,
    Type.TOPIC_MIGRATED: _FROM_BROKERS,
    Type.CONSUMER_STATS_RESPONSE: _FROM_BROKERS,
    Type.GET_LAST_MESSAGE_ID_RESPONSE: _FROM_BROKERS,
    Type.GET_SCHEMA_RESPONSE: _FROM_BROKERS,
    Type.GET_OR_CREATE_SCHEMA_RESPONSE: _FROM_BROKERS,
    Type.WATCH_TOPIC_LIST_SUCCESS: _FROM_BROKERS,
    Type.WATCH_TOPIC_UPDATE: _FROM_BROKERS,
    Type.TC_CLIENT_CONNECT_REQUEST: _TRANSACTIONS,
    Type.TC_CLIENT_CONNECT_RESPONSE: _FROM_BROKERS,
    Type.NEW_TXN: _TRANSACTIONS,
    Type.NEW_TXN_RESPONSE: _FROM_BROKERS,
    Type.ADD_PARTITION_TO_TXN: _TRANSACTIONS,
    Type.ADD_PARTITION_TO_TXN_RESPONSE: _FROM_BROKERS,
    Type.ADD_SUBSCRIPTION_TO_TXN: _TRANSACTIONS,
    Type.ADD_SUBSCRIPTION_TO_TXN_RESPONSE: _FROM_BROKERS,
    Type.END_TXN: _TRANSACTIONS,
    Type.END_TXN_RESPONSE: _FROM_BROKERS,
    Type.END_TXN_ON_PARTITION: _TRANSACTIONS,
    Type.END_TXN_ON_PARTITION_RESPONSE: _FROM_BROKERS,
    Type.END_TXN_ON_SUBSCRIPTION: _TRANSACTIONS,
    Type.END_TXN_ON_SUBSCRIPTION_RESPONSE: _FROM_BROKERS,
}

RULES: Final[Mapping[int, Rule | Unsupported]] = {
    **{kind: Rule(row.admission, isinstance(row, Request)) for kind, row in COMMANDS.items()},
    **UNSUPPORTED,
}
"""The parts of the tables that the session machine needs."""

REQUESTS: Final = {kind: row for kind, row in COMMANDS.items() if isinstance(row, Request)}
NOTICES: Final = {kind: row.handler for kind, row in COMMANDS.items() if isinstance(row, Notice)}
