"""What can go wrong for a user of the client: Apache's names, Apache's numbers, and our data.

Each error says in `definite` whether what failed certainly had no effect. Only a definite failure
of a send may be repeated without risking a duplicate.
"""

from enum import IntEnum
from typing import ClassVar, Final

from magnetar.protos import pulsar_pb2 as pb

START_ADVICE: Final = "Is a server running? `magnetar standalone --data-dir DIR` starts one"
"""Ends what the client and the command line say when they reach no broker."""


class Result(IntEnum):
    """What a send's callback is told; the numbers are those of Apache's client."""

    Ok = 0
    UnknownError = 1
    InvalidConfiguration = 2
    Timeout = 3
    LookupError = 4
    ConnectError = 5
    ReadError = 6
    AuthenticationError = 7
    AuthorizationError = 8
    ErrorGettingAuthenticationData = 9
    BrokerMetadataError = 10
    BrokerPersistenceError = 11
    ChecksumError = 12
    ConsumerBusy = 13
    NotConnected = 14
    AlreadyClosed = 15
    InvalidMessage = 16
    ConsumerNotInitialized = 17
    ProducerNotInitialized = 18
    ProducerBusy = 19
    TooManyLookupRequestException = 20
    InvalidTopicName = 21
    InvalidUrl = 22
    ServiceUnitNotReady = 23
    OperationNotSupported = 24
    ProducerBlockedQuotaExceededError = 25
    ProducerBlockedQuotaExceededException = 26
    ProducerQueueIsFull = 27
    MessageTooBig = 28
    TopicNotFound = 29
    SubscriptionNotFound = 30
    ConsumerNotFound = 31
    UnsupportedVersionError = 32
    TopicTerminated = 33
    CryptoError = 34
    IncompatibleSchema = 35
    ConsumerAssignError = 36
    CumulativeAcknowledgementNotAllowedError = 37
    TransactionCoordinatorNotFoundError = 38
    InvalidTxnStatusError = 39
    NotAllowedError = 40
    TransactionConflict = 41
    TransactionNotFound = 42
    ProducerFenced = 43
    MemoryBufferIsFull = 44
    Interrupted = 45

    def __str__(self) -> str:
        return self.name


class PulsarException(Exception):
    """Every error that the client raises.

    `reason` is for people; `topic`, `subscription` and `broker` name what it is about, as far as
    that is known. `advice` ends the text: what the user can do.
    """

    result: ClassVar[Result] = Result.UnknownError
    definite: ClassVar[bool] = False

    def __init__(
        self,
        reason: str = "",
        *,
        topic: str | None = None,  # these three, None: it is not about one, or not known which
        subscription: str | None = None,
        broker: str | None = None,
        advice: str = "",
    ) -> None:
        self.reason = reason
        self.topic = topic
        self.subscription = subscription
        self.broker = broker
        about = {"topic": topic, "subscription": subscription, "broker": broker}
        named = ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)
        text = f"{reason} ({named})" if reason and named else reason or named
        super().__init__(f"{text}. {advice}" if advice else text)

    def error(self) -> Result:
        """The number of this error, as in Apache's asyncio client."""
        return self.result


# What the client itself finds


class InvalidConfiguration(PulsarException, ValueError):
    """An option with a value that cannot be."""

    result = Result.InvalidConfiguration
    definite = True


class InvalidUrl(PulsarException):
    """A service URL that cannot be; says what was expected."""

    result = Result.InvalidUrl
    definite = True


class InvalidTopicName(PulsarException):
    """A topic name that cannot be; says what was expected."""

    result = Result.InvalidTopicName
    definite = True


class InvalidMessage(PulsarException):
    """A message that cannot be sent as it is, or a message id that cannot be read."""

    result = Result.InvalidMessage
    definite = True


class NotAllowedError(PulsarException):
    """Refused for good: by the broker, or because it is not supported here (yet)."""

    result = Result.NotAllowedError
    definite = True


class OperationNotSupported(PulsarException):
    """A call that makes no sense on this object, or from this thread."""

    result = Result.OperationNotSupported
    definite = True


class CumulativeAcknowledgementNotAllowedError(PulsarException):
    """Shared and Key_Shared subscriptions acknowledge one by one."""

    result = Result.CumulativeAcknowledgementNotAllowedError
    definite = True


class AlreadyClosed(PulsarException):
    """The client, producer, consumer or reader was closed before this call."""

    result = Result.AlreadyClosed
    definite = True


class MessageTooBig(PulsarException):
    """The message exceeds what the broker takes; it was not sent."""

    result = Result.MessageTooBig
    definite = True

    def __init__(self, size_bytes: int, limit_bytes: int, *, topic: str | None = None) -> None:
        super().__init__(f"{size_bytes} bytes exceed the limit of {limit_bytes} bytes", topic=topic)
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class ProducerQueueIsFull(PulsarException):
    """As many messages as `max_pending_messages` allows wait for their receipts; not sent."""

    result = Result.ProducerQueueIsFull
    definite = True

    def __init__(self, limit_messages: int, *, topic: str | None = None) -> None:
        super().__init__(f"{limit_messages} messages are pending, which is the limit", topic=topic)
        self.limit_messages = limit_messages


class MemoryBufferIsFull(PulsarException):
    """The messages that wait for their receipts hold as many bytes as is allowed; not sent."""

    result = Result.MemoryBufferIsFull
    definite = True

    def __init__(self, limit_bytes: int, *, topic: str | None = None) -> None:
        super().__init__(f"{limit_bytes} bytes are pending, which is the limit", topic=topic)
        self.limit_bytes = limit_bytes


class Timeout(PulsarException):
    """Time ran out. A send that timed out may have been stored all the same."""

    result = Result.Timeout


class ConnectError(PulsarException):
    """No broker could be reached, or the connection broke while an answer was awaited."""

    result = Result.ConnectError


class Interrupted(PulsarException):
    """The client was shut down before the outcome was known."""

    result = Result.Interrupted


# What the broker answers


class UnknownError(PulsarException):
    """The broker gave no better reason."""

    result = Result.UnknownError


class LookupError(PulsarException):  # noqa: A001 - Apache's name
    """No broker took responsibility for the topic within the allowed number of redirects."""

    result = Result.LookupError
    definite = True


class AuthenticationError(PulsarException):
    """The broker does not know who this is."""

    result = Result.AuthenticationError
    definite = True


class AuthorizationError(PulsarException):
    """The broker knows who this is, and it may not."""

    result = Result.AuthorizationError
    definite = True


class BrokerMetadataError(PulsarException):
    """The broker could not read or change its metadata."""

    result = Result.BrokerMetadataError


class BrokerPersistenceError(PulsarException):
    """The broker could not store the message, or does not know whether it did."""

    result = Result.BrokerPersistenceError


class ServiceUnitNotReady(PulsarException):
    """The broker does not serve the topic (yet, any more)."""

    result = Result.ServiceUnitNotReady


class ChecksumError(PulsarException):
    """The message arrived damaged, and was not stored."""

    result = Result.ChecksumError
    definite = True


class ConsumerBusy(PulsarException):
    """The subscription is held by another consumer, or is of another type."""

    result = Result.ConsumerBusy
    definite = True


class ProducerBusy(PulsarException):
    """A producer of this name is connected."""

    result = Result.ProducerBusy
    definite = True


class ProducerFenced(PulsarException):
    """Another producer took exclusive access; this one is finished. What it had under way may or
    may not have been stored."""

    result = Result.ProducerFenced


class TopicTerminated(PulsarException):
    """The topic takes no more messages, ever. What was under way may or may not have been
    stored."""

    result = Result.TopicTerminated


class TopicNotFound(PulsarException):
    """There is no such topic, or no such tenant or namespace."""

    result = Result.TopicNotFound
    definite = True


class SubscriptionNotFound(PulsarException):
    """There is no such subscription."""

    result = Result.SubscriptionNotFound
    definite = True


class ConsumerNotFound(PulsarException):
    """The broker does not know this consumer."""

    result = Result.ConsumerNotFound
    definite = True


class ConsumerAssignError(PulsarException):
    """The sticky hash ranges of two consumers overlap."""

    result = Result.ConsumerAssignError
    definite = True


class IncompatibleSchema(PulsarException):
    """The schema does not fit that of the topic."""

    result = Result.IncompatibleSchema
    definite = True


class UnsupportedVersionError(PulsarException):
    """The broker does not speak this version of the protocol."""

    result = Result.UnsupportedVersionError
    definite = True


class TooManyLookupRequestException(PulsarException):
    """The broker is asked too much at a time."""

    result = Result.TooManyLookupRequestException
    definite = True


class ProducerBlockedQuotaExceededError(PulsarException):
    """The topic's backlog is at its limit; producers are to wait."""

    result = Result.ProducerBlockedQuotaExceededError
    definite = True


class ProducerBlockedQuotaExceededException(PulsarException):
    """The topic's backlog is at its limit; producers are to fail."""

    result = Result.ProducerBlockedQuotaExceededException
    definite = True


_BY_SERVER_ERROR: dict[int, type[PulsarException]] = {
    pb.UnknownError: UnknownError,
    pb.MetadataError: BrokerMetadataError,
    pb.PersistenceError: BrokerPersistenceError,
    pb.AuthenticationError: AuthenticationError,
    pb.AuthorizationError: AuthorizationError,
    pb.ConsumerBusy: ConsumerBusy,
    pb.ServiceNotReady: ServiceUnitNotReady,
    pb.ProducerBlockedQuotaExceededError: ProducerBlockedQuotaExceededError,
    pb.ProducerBlockedQuotaExceededException: ProducerBlockedQuotaExceededException,
    pb.ChecksumError: ChecksumError,
    pb.UnsupportedVersionError: UnsupportedVersionError,
    pb.TopicNotFound: TopicNotFound,
    pb.SubscriptionNotFound: SubscriptionNotFound,
    pb.ConsumerNotFound: ConsumerNotFound,
    pb.TooManyRequests: TooManyLookupRequestException,
    pb.TopicTerminatedError: TopicTerminated,
    pb.ProducerBusy: ProducerBusy,
    pb.InvalidTopicName: InvalidTopicName,
    pb.IncompatibleSchema: IncompatibleSchema,
    pb.ConsumerAssignError: ConsumerAssignError,
    pb.NotAllowedError: NotAllowedError,
    pb.ProducerFenced: ProducerFenced,
    # Transactions are none of this client's, so these can only be a confused broker's.
    pb.TransactionCoordinatorNotFound: UnknownError,
    pb.InvalidTxnStatus: UnknownError,
    pb.TransactionConflict: UnknownError,
    pb.TransactionNotFound: UnknownError,
}

# These may pass: a topic is unavailable for moments whenever it moves between brokers. A request
# that meets one is tried again until its time is up; any other error is the answer.
_RETRIABLE: frozenset[type[PulsarException]] = frozenset(
    {
        ConnectError,
        UnknownError,
        BrokerMetadataError,
        BrokerPersistenceError,
        ServiceUnitNotReady,
    }
)


def from_server_error(
    error: int,
    message: str,
    *,
    topic: str | None = None,
    subscription: str | None = None,
    broker: str | None = None,
) -> PulsarException:
    """The exception for what a broker answered."""
    kind = _BY_SERVER_ERROR.get(error, UnknownError)
    return kind(message, topic=topic, subscription=subscription, broker=broker)


def is_retriable(error: PulsarException) -> bool:
    """Whether the same request may succeed later, or at another broker."""
    return type(error) in _RETRIABLE


def ends_producer(error: PulsarException) -> bool:
    """Whether a producer that had been created is finished by this error; all others pass."""
    return isinstance(error, (ProducerFenced, TopicTerminated))
