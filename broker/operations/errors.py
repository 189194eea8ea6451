"""The errors of administrators' requests, with the HTTP status and the advice for each.

The table at the end is the only place for both: a row gives the HTTP status of an error, and the
advice that the command line prints after the reason. If Pulsar's admin API has the same error, the
status is Pulsar's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.broker import errors
from magnetar.metadata.errors import MetadataError
from magnetar.protos.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.broker.log.position import Position
    from magnetar.metadata.model import BrokerRegistration


class ServedElsewhere(errors.BrokerError):
    """Another broker serves the topic or bundle. The client must send the request to that broker's
    HTTP address."""

    def __init__(self, topic: str, owner: BrokerRegistration) -> None:
        super().__init__(f"topic {topic} is served by {owner.broker} at {owner.http_url}")
        self.topic = topic
        self.owner = owner


class NotReady(errors.BrokerError):
    """The broker is not registered with the metadata store."""

    def __init__(self, broker: str) -> None:
        super().__init__(f"broker {broker} is not registered with the metadata store")
        self.broker = broker


class InvalidArgument(errors.BrokerError):
    """A part of the request is invalid. The error says what was expected."""

    def __init__(self, name: str, found: object, expected: str, *, text: str = "") -> None:
        """`text`: the whole text, instead of the one made here."""
        super().__init__(text or f"invalid {name} {_shown(found)}: expected {expected}")
        self.name = name
        self.expected = expected

    @classmethod
    def of(cls, place: Sequence[str | int], error: Mapping[str, Any]) -> InvalidArgument:
        """Make the error from one of pydantic's errors. `place`: the names and numbers of the parts
        of the request, from the outside in."""
        name = ".".join(map(str, place))[:SHOWN_CHARACTERS_MAX]
        text = ""
        if error["type"] == "value_error":  # our own validator, whose text names the fields
            text = f"invalid {name}: {error['ctx']['error']}"
        elif error["type"] == "missing":
            text = f"the request lacks {name}"
        return cls(name, error["input"], _expected(error), text=text)


class PartitionBusy(errors.BrokerError):
    """The state of a partition does not allow the requested change of all partitions."""

    def __init__(self, partition: str, reason: str) -> None:
        super().__init__(f"{partition}: {reason}")
        self.partition = partition


class PartitionFailed(errors.BrokerError):
    """A request about all partitions failed at one partition. If it was a change, the other
    partitions may have made it."""

    definite = False

    def __init__(self, partition: str, reason: str) -> None:
        super().__init__(f"{partition}: {reason}")
        self.partition = partition


class MessageNotFound(errors.BrokerError):
    """The subscription has fewer unacknowledged entries than the requested position."""

    def __init__(self, subscription: str, number: int, backlog: int) -> None:
        super().__init__(
            f"subscription {subscription!r} has no message at position {number};"
            f" entries in its backlog: {backlog}"
        )
        self.subscription = subscription
        self.number = number
        self.backlog = backlog


class PositionNotFound(errors.BrokerError):
    """The message id is beyond the end of the topic. Moving the subscription there would drop its
    whole backlog."""

    def __init__(self, topic: str, position: Position, last: Position) -> None:
        super().__init__(f"topic {topic} has no message {position}: its last message is {last}")
        self.topic = topic
        self.position = position
        self.last = last


class TenantExists(errors.BrokerError):
    def __init__(self, tenant: str) -> None:
        super().__init__(f"tenant {tenant} exists already")
        self.tenant = tenant


class TenantNotEmpty(errors.BrokerError):
    """The tenant has namespaces, so it cannot be deleted."""

    def __init__(self, tenant: str, namespaces: Sequence[str]) -> None:
        super().__init__(f"tenant {tenant} has namespaces: {_some(namespaces)}")
        self.tenant = tenant


class NamespaceExists(errors.BrokerError):
    def __init__(self, namespace: str) -> None:
        super().__init__(f"namespace {namespace} exists already")
        self.namespace = namespace


class NamespaceNotEmpty(errors.BrokerError):
    """The namespace has topics, so it cannot be deleted."""

    def __init__(self, namespace: str, topics: Sequence[str]) -> None:
        super().__init__(f"namespace {namespace} has topics: {_some(topics)}")
        self.namespace = namespace


class ClusterNotFound(errors.BrokerError):
    """The request names another cluster. A broker knows only its own cluster."""

    def __init__(self, cluster: str, known: str) -> None:
        super().__init__(f"cluster {_shown(cluster)} is unknown: this is cluster {known!r}")
        self.cluster = cluster


class BundleNotFound(errors.BrokerError):
    """The namespace has no bundle with these bounds."""

    def __init__(self, namespace: str, bundle: str) -> None:
        super().__init__(f"namespace {namespace} has no bundle {_shown(bundle)}")
        self.namespace = namespace
        self.bundle = bundle


class NotForwarded(errors.BrokerError):
    """Another broker did not execute its part of the request."""

    def __init__(self, url: str, method: str, path: str, why: str) -> None:
        super().__init__(f"{method} {path} at the broker {url} {why}")
        self.url = url


class Protected(errors.BrokerError):
    """The tenant or namespace cannot be deleted: clients use it by default, so it always exists."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} cannot be deleted: topics without a namespace are in it")
        self.what = what


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a failed request."""

    status: int  # the HTTP status
    advice: str  # the advice on the command line; "": the reason is enough


_LATER: Final = "try again in a moment"
_OF_ALL_PARTITIONS: Final = (
    "`magnetar topics partitioned-stats`, `partitioned-terminate` and `delete-partitioned-topic`"
    " are for all partitions"
)

# The first row with the class of the error, or with one of its base classes, decides. So base
# classes come last.
OUTCOMES: Final[tuple[tuple[type[Exception], Outcome], ...]] = (
    (ServedElsewhere, Outcome(307, "ask that broker")),
    (InvalidArgument, Outcome(400, "")),
    (ProtocolError, Outcome(412, "")),  # an invalid name
    (PositionNotFound, Outcome(412, "use `latest` to drop the backlog")),
    (MessageNotFound, Outcome(404, "")),
    (errors.TopicNotFound, Outcome(404, "`magnetar topics list` shows the topics of a namespace")),
    (errors.NoSchema, Outcome(404, "`magnetar schemas get TOPIC --all-version` shows all")),
    (errors.InvalidSchema, Outcome(422, "")),
    (errors.IncompatibleSchema, Outcome(409, "change schema-compatibility-strategy to allow it")),
    (errors.TooManySchemas, Outcome(507, "delete the schema with --force, or use another topic")),
    (errors.SubscriptionNotFound, Outcome(404, "`magnetar subscriptions list TOPIC` shows all")),
    (ClusterNotFound, Outcome(404, "")),
    (BundleNotFound, Outcome(404, "`magnetar namespaces bundles NAMESPACE` shows all")),
    (errors.TenantNotFound, Outcome(404, "`magnetar tenants list` shows all")),
    (errors.NamespaceNotFound, Outcome(404, "`magnetar namespaces list TENANT` shows all")),
    (TenantExists, Outcome(409, "")),
    (NamespaceExists, Outcome(409, "")),
    (TenantNotEmpty, Outcome(409, "delete them first")),
    (NamespaceNotEmpty, Outcome(409, "delete them first")),
    (Protected, Outcome(412, "")),
    (errors.TopicExists, Outcome(409, "")),
    (errors.SubscriptionExists, Outcome(409, "")),
    (errors.TopicInUse, Outcome(412, "close them first, or use --force")),
    (errors.TooManyRequests, Outcome(429, _LATER)),
    (
        PartitionBusy,
        Outcome(412, "repeat the request when that has changed; it continues where it stopped"),
    ),
    (PartitionFailed, Outcome(503, "repeat the request; it continues where it stopped")),
    (errors.NonPersistentInUse, Outcome(412, "close them first, or use --force")),
    (errors.ReservedName, Outcome(412, "choose another name")),
    (errors.IsPartitioned, Outcome(405, _OF_ALL_PARTITIONS)),
    (errors.InvalidPartitionCount, Outcome(406, "")),
    (errors.ConsumersConnected, Outcome(412, "close them first, or use --force")),
    (errors.NotAllowed, Outcome(405, "")),
    (errors.TopicFull, Outcome(507, "delete subscriptions and properties that are not used")),
    (errors.TopicTerminated, Outcome(412, "publish to another topic")),
    (errors.LogDamaged, Outcome(503, "the broker's log names the ledger")),
    (errors.BrokerError, Outcome(503, _LATER)),
    (LedgerError, Outcome(503, _LATER)),
    (MetadataError, Outcome(503, _LATER)),
    (TimeoutError, Outcome(503, _LATER)),
)
SHOWN_NAMES_MAX: Final = 5
SHOWN_CHARACTERS_MAX: Final = 200
"""The limit of characters of a request's value in an error: a hostile value may be megabytes
long."""


def outcome_of(error: Exception) -> Outcome:
    """Return the outcome for one of OPERATING_ERRORS (broker/refusal.py). Other errors are bugs."""
    for kind, outcome in OUTCOMES:
        if isinstance(error, kind):
            return outcome
    raise AssertionError(f"no outcome for {error!r}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES_MAX} more" if len(names) > SHOWN_NAMES_MAX else ""
    return ", ".join(names[:SHOWN_NAMES_MAX]) + more


def _expected(error: Mapping[str, Any]) -> str:
    text: str = error["msg"]
    if (found := _SHOULD_HAVE.fullmatch(text)) is not None:
        return f"a {found[1].lower()} with {found[2]}"
    return _EXPECTED.get(error["type"]) or text.removeprefix("Input should be ")


_SHOULD_HAVE: Final = re.compile(r"(\w+) should have (.+)")
_EXPECTED: Final = {
    "extra_forbidden": "no field of this name",
    "int_parsing_size": "a number with fewer digits",
}


def _shown(found: object) -> str:
    text = repr(found)
    if len(text) <= SHOWN_CHARACTERS_MAX:
        return text
    return f"{text[:SHOWN_CHARACTERS_MAX]}... ({len(text)} characters)"
