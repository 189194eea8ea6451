"""The broker's operating errors. Each error says whether the outcome of the call is known.

`definite` is True when the call that raised the error certainly changed nothing. When `Log.append`
raises an error, the log has appended none of the entries. When the log passes the same error to
`on_failed`, the outcome of the entries is unknown.
"""

from __future__ import annotations


class BrokerError(Exception):
    """Base of every operating error of this package."""

    definite = True


# ---- the log of a topic --------------------------------------------------------------------------


class LogError(BrokerError):
    """Base of the errors of a topic's log."""


class LogFenced(LogError):
    """Another broker has taken the topic over, the topic was deleted, or the topic's cursors failed
    permanently. This log accepts no more appends."""

    definite = False

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"this broker no longer owns {topic}: {why}")
        self.topic = topic
        self.why = why


class LogClosed(LogError):
    """This broker closed the log or is closing it."""

    definite = False

    def __init__(self, topic: str) -> None:
        super().__init__(f"the log of {topic} is closed")
        self.topic = topic


class LogUnavailable(LogError):
    """Bookies or the metadata store do not answer at the moment; try again later."""

    definite = False

    def __init__(self, topic: str, doing: str, cause: Exception) -> None:
        super().__init__(f"{topic}: {doing} failed: {cause}")
        self.topic = topic
        self.doing = doing
        self.cause = cause


class LogDamaged(LogError):
    """The topic's stored data contradicts itself: for example, a ledger is gone or a record cannot
    be decoded. The broker skips no data silently. It serves the topic only after an operator has
    repaired the data."""

    def __init__(self, topic: str, ledger: int, why: str) -> None:
        super().__init__(f"{topic}: ledger {ledger}: {why}")
        self.topic = topic
        self.ledger = ledger
        self.why = why


class TopicFull(LogError):
    """The topic's record has no space for the change. Stored messages can still be read."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"{topic} is full: {why}")
        self.topic = topic
        self.why = why


class TopicTerminated(LogError):
    """The topic accepts no more messages, permanently. Stored messages can still be read."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"{topic} is terminated: it takes no more messages")
        self.topic = topic


class ReadFailed(LogError):
    """Entries could not be read now; they may be readable later."""

    definite = False

    def __init__(self, position: tuple[int, int], cause: Exception) -> None:
        ledger, entry = position
        super().__init__(f"entry {ledger}:{entry} cannot be read: {cause}")
        self.position = position
        self.cause = cause


# ---- cursors -------------------------------------------------------------------------------------


class CursorError(BrokerError):
    """Base of the errors of cursors. Cursors also raise LogFenced and LogClosed."""


class SubscriptionNotFound(CursorError):
    """The subscription does not exist."""

    def __init__(self, subscription: str) -> None:
        super().__init__(f"subscription {subscription!r} does not exist")
        self.subscription = subscription


class SubscriptionExists(CursorError):
    """The request creates a subscription that exists already."""

    def __init__(self, subscription: str) -> None:
        super().__init__(f"subscription {subscription!r} exists already")
        self.subscription = subscription


class TooManyReceipts(CursorError):
    """Too many acknowledgements of a topic wait for a receipt. The broker still makes this
    acknowledgement durable, but sends no receipt for it."""

    definite = False

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} acknowledgements wait for a receipt")
        self.limit = limit


class InvalidCursorRecord(CursorError):
    """The stored state of a cursor cannot be decoded (cursor/FORMAT.md)."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"cursor record: {reason}")
        self.reason = reason


# ---- ownership and policies ----------------------------------------------------------------------


class TenantNotFound(BrokerError):
    def __init__(self, tenant: str) -> None:
        super().__init__(f"tenant {tenant} does not exist")
        self.tenant = tenant


class NamespaceNotFound(BrokerError):
    def __init__(self, namespace: str) -> None:
        super().__init__(f"namespace {namespace} does not exist")
        self.namespace = namespace


class RequestRefused(BrokerError):
    """The broker refused a gRPC request, for example because it was too large or too slow."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the request was refused: {reason}")
        self.reason = reason


class TopicNotFound(BrokerError):
    """The topic does not exist, and the request does not create it."""

    def __init__(self, topic: str, *, partitioned: bool = False) -> None:
        """`partitioned`: a topic of this name may exist, but it has no partitions."""
        super().__init__(f"{'partitioned ' if partitioned else ''}topic {topic} does not exist")
        self.topic = topic


class TopicDeleted(LogError):
    """The topic is being deleted."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"{topic} is being deleted")
        self.topic = topic


class NoSchema(BrokerError):
    """The topic has no schema, or no version that the request asks for. `version`: the number in
    the request; None: the request names no number."""

    def __init__(self, topic: str, version: int | None = None) -> None:
        wanted = "" if version is None else f" of version {version}"
        super().__init__(f"topic {topic} has no schema{wanted}")
        self.topic = topic
        self.version = version


class InvalidSchema(BrokerError):
    """The definition of a schema is not valid for its type, or too large."""

    def __init__(self, why: str) -> None:
        super().__init__(f"invalid schema: {why}")
        self.why = why


class IncompatibleSchema(BrokerError):
    """The topic's compatibility strategy or a schema policy refuses the schema."""


class TooManySchemas(BrokerError):
    """The record of the topic's schema has no space for another version."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"topic {topic} takes no further version of its schema: {why}")
        self.topic = topic


class TopicExists(BrokerError):
    """The request creates a topic that exists already."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} exists already")
        self.topic = topic


class TopicInUse(BrokerError):
    """Producers or consumers are connected, so the topic is not deleted."""

    def __init__(self, topic: str, producers: int, consumers: int) -> None:
        super().__init__(
            f"topic {topic} has {producers} connected producers and {consumers} connected consumers"
        )
        self.topic = topic
        self.producers = producers
        self.consumers = consumers


class TooManyRequests(BrokerError):
    """A queue of the broker is full. Try again in a moment."""

    def __init__(self, subject: str, why: str) -> None:
        super().__init__(f"{subject}: too many requests: {why}")
        self.subject = subject
        self.why = why


class NonPersistentInUse(BrokerError):
    """Producers or consumers use the topic that is to be deleted."""

    def __init__(self, topic: str, users: int) -> None:
        super().__init__(f"topic {topic} has {users} connected producers and consumers")
        self.topic = topic
        self.users = users


class ReservedName(BrokerError):
    """No user can create a topic of this name."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"topic {topic} cannot be created: {why}")
        self.topic = topic
        self.why = why


class IsPartitioned(BrokerError):
    """The topic is partitioned, and the request needs a topic without partitions."""

    def __init__(self, topic: str, partitions: int) -> None:
        one = f"{topic}-partition-0"
        super().__init__(
            f"topic {topic} has {partitions} partitions: name one of them, as in {one}"
        )
        self.topic = topic
        self.partitions = partitions


class InvalidPartitionCount(BrokerError):
    """A topic cannot have this many partitions."""

    def __init__(self, topic: str, partitions: int, expected: str) -> None:
        super().__init__(f"topic {topic} cannot have {partitions} partitions: expected {expected}")
        self.topic = topic
        self.partitions = partitions
        self.expected = expected


class UnsupportedPattern(BrokerError):
    """The broker does not evaluate this pattern of topic names."""

    def __init__(self, pattern: str, why: str) -> None:
        super().__init__(f"pattern {pattern[:200]!r}: {why}")
        self.pattern = pattern
        self.why = why


class ListUnavailable(BrokerError):
    """The list of topics cannot be read now."""

    def __init__(self, namespace: str, why: str) -> None:
        super().__init__(f"the topics of {namespace} cannot be listed: {why}; try again")
        self.namespace = namespace
        self.why = why


class TooManyWatchers(BrokerError):
    """The connection has reached the limit of watchers of topic lists."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"this connection has {limit} watchers of topic lists already")
        self.limit = limit


class BundleUnavailable(BrokerError):
    """The broker can neither serve the bundle's topics nor name another broker that does: for
    example, the bundle is moving between brokers. Look the topic up again."""

    def __init__(self, bundle: str, why: str) -> None:
        # Apache's C++ client closes the whole connection on some errors, unless their text contains
        # the words "Failed to acquire ownership of".
        super().__init__(f"Failed to acquire ownership of bundle {bundle}: {why}")
        self.bundle = bundle
        self.why = why


class PoliciesUnavailable(BrokerError):
    """The metadata store did not return the policies or bundles that the request depends on. The
    client may repeat the request."""

    def __init__(self, subject: str, why: str) -> None:
        super().__init__(f"policies of {subject} are unknown: {why}; try again")
        self.subject = subject
        self.why = why


class NotOwner(BrokerError):
    """Another broker serves the topic: look the topic up again."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"{topic} is not served by this broker; look it up again")
        self.topic = topic


class ConsumerNotFound(BrokerError):
    """The connection has no open consumer with this id."""

    def __init__(self, consumer_id: int) -> None:
        super().__init__(f"consumer {consumer_id} is not open on this connection")
        self.consumer_id = consumer_id


class RangeDeleted(BrokerError):
    """A range read asks for entries of a ledger that the topic no longer has."""

    def __init__(self, topic: str, ledger: int) -> None:
        super().__init__(f"{topic}: ledger {ledger} was deleted")
        self.topic = topic
        self.ledger = ledger


class RangeNotConfirmed(BrokerError):
    """A range read asks for entries that this broker's log has not confirmed. Another broker may
    have the entries, if it has taken the topic over and this broker has not noticed."""

    def __init__(self, topic: str, ledger: int, last: int, confirmed: int) -> None:
        super().__init__(
            f"{topic}: entry {last} of ledger {ledger} is not confirmed; the last is {confirmed}"
        )
        self.topic = topic
        self.ledger = ledger
        self.last = last
        self.confirmed = confirmed


class QueryFenced(BrokerError):
    """A newer Spark query holds the subscription."""

    def __init__(self, topic: str, subscription: str, newer: str) -> None:
        super().__init__(
            f"{topic}: subscription {subscription!r} is held by the newer query {newer};"
            " give each query a subscription of its own"
        )
        self.topic = topic
        self.subscription = subscription
        self.newer = newer


# ---- topics and subscriptions --------------------------------------------------------------------


class TopicClosing(BrokerError):
    """This broker unloads the topic: look the topic up again."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"{topic} is being unloaded")  # Apache's C++ client knows these words
        self.topic = topic


class TopicFailed(BrokerError):
    """The broker closed the topic after an unexpected exception. The topic's clients open it
    again."""

    definite = False

    def __init__(self, topic: str, error: BaseException) -> None:
        super().__init__(f"{topic} failed: internal error {type(error).__name__}")
        self.topic = topic
        self.error = error


class TaskFailed(BrokerError):
    """An unexpected exception ended a task of the broker. The broker starts the task again."""

    def __init__(self, task: str, error: BaseException) -> None:
        super().__init__(f"task {task!r} failed: internal error {type(error).__name__}")
        self.task = task
        self.error = error


class TopicQuarantined(BrokerError):
    """The topic failed several times within a minute. The broker does not serve it for a while."""

    def __init__(self, topic: str, reason: str, ends_in_s: float) -> None:
        super().__init__(
            f"{topic} is quarantined for {ends_in_s:.0f} s more, because it failed repeatedly: "
            f"{reason}"
        )
        self.topic = topic
        self.reason = reason
        self.ends_in_s = ends_in_s


class TooManyAnswers(BrokerError):
    """The answer does not fit into the memory that the broker reserves for answers to slow
    clients."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"an answer of {size} bytes does not fit beside the answers that other clients have "
            f"not taken yet; the limit is {limit}"
        )
        self.size = size
        self.limit = limit


class ProducerBusy(BrokerError):
    """A connected producer has the same name, or an exclusive producer has the topic."""

    def __init__(self, topic: str, producer: str, why: str) -> None:
        super().__init__(f"producer {producer!r} cannot join {topic}: {why}")
        self.topic = topic
        self.producer = producer
        self.why = why


class ProducerFenced(BrokerError):
    """Another producer has taken exclusive access and ended this producer; or this producer asked
    for exclusive access, and another producer is connected or has had it since."""

    def __init__(self, topic: str, producer: str, why: str) -> None:
        super().__init__(f"producer {producer!r} is fenced on {topic}: {why}")
        self.topic = topic
        self.producer = producer
        self.why = why


class StraddlingBatch(BrokerError):
    """Only a part of the batch is stored already. Deduplication drops or stores whole batches."""

    def __init__(self, first: int, last: int, stored: int) -> None:
        super().__init__(
            f"batch with sequence ids {first} to {last}: those up to {stored} are stored already;"
            f" send the messages after {stored} in a batch of their own"
        )
        self.first = first
        self.last = last
        self.stored = stored


class BacklogQuotaHeld(BrokerError):
    """The topic's backlog exceeds its quota. Producers must wait until the backlog is below the
    quota."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"{topic} makes its producers wait: {why}")
        self.topic = topic
        self.why = why


class BacklogQuotaRefused(BrokerError):
    """The topic's backlog exceeds its quota. Sends fail until the backlog is below the quota."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"{topic} refuses its producers: {why}")
        self.topic = topic
        self.why = why


class ConsumerBusy(BrokerError):
    """The subscription's type or its connected consumers exclude this consumer."""

    def __init__(self, subscription: str, why: str) -> None:
        super().__init__(f"subscription {subscription!r}: {why}")
        self.subscription = subscription
        self.why = why


class ConsumerAssignFailed(BrokerError):
    """The hash ranges or the policy of a Key_Shared consumer contradict those of the connected
    consumers."""

    def __init__(self, subscription: str, why: str) -> None:
        super().__init__(f"subscription {subscription!r}: {why}")
        self.subscription = subscription
        self.why = why


class NotAllowed(BrokerError):
    """The request contradicts itself or its target, or the broker does not support it."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what = what
        self.why = why


class NotAuthenticated(BrokerError):
    """The client's credentials are missing or wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotAuthorized(BrokerError):
    """The client lacks a permission."""

    def __init__(self, role: str, permission: str, resource: str) -> None:
        super().__init__(f"role {role!r} may not {permission} on {resource}")
        self.role = role
        self.permission = permission
        self.resource = resource


class SubscriptionFenced(BrokerError):
    """A seek or a deletion of the subscription is in progress, or its topic is being closed: try
    again in a moment."""

    def __init__(self, subscription: str, why: str) -> None:
        super().__init__(f"subscription {subscription!r} {why}; try again")
        self.subscription = subscription
        self.why = why


class ConsumersConnected(BrokerError):
    """Other consumers are connected to the subscription, so it is not deleted."""

    def __init__(self, subscription: str, count: int) -> None:
        super().__init__(f"subscription {subscription!r} has {count} connected consumers")
        self.subscription = subscription
        self.count = count


class InvalidPermits(BrokerError):
    """A consumer granted permits for less than one message."""

    def __init__(self, permits: int) -> None:
        super().__init__(f"{permits} permits; at least 1 must be granted")
        self.permits = permits


class InvalidAck(BrokerError):
    """An acknowledgement names an entry that cannot exist, or messages that the batch cannot
    have."""

    def __init__(self, subscription: str, position: tuple[int, int], why: str = "") -> None:
        ledger, entry = position
        text = (
            f"entry {ledger}:{entry}: {why}" if why else f"there can be no entry {ledger}:{entry}"
        )
        super().__init__(f"subscription {subscription!r}: {text}")
        self.subscription = subscription
        self.position = position
        self.why = why
