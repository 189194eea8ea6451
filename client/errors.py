"""The errors that the client raises, with the names and numbers of Apache's client.

`definite` is True if the failed operation certainly had no effect. Repeating a send after a
definite error cannot create a duplicate; after any other error it can.
"""

from typing import ClassVar, Final

from magnetar.client.enums import NamedEnum
from magnetar.protos import pulsar_pb2 as pb

START_ADVICE: Final = "Is a server running? `magnetar standalone --data-dir DIR` starts one"
"""The last sentence of the error when the client or the command line reaches no broker."""


class Result(NamedEnum):
    """The result that a send callback gets. The numbers are those of Apache's client."""

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


class PulsarException(Exception):
    """The base class of all errors that the client raises.

    `reason` is a text for people. `topic`, `subscription` and `broker` name the objects concerned,
    as far as they are known. `advice` says what the user can do; it ends the error's text.
    """

    result: ClassVar[Result] = Result.UnknownError
    definite: ClassVar[bool] = False

    def __init__(
        self,
        reason: str = "",
        *,
        topic: str | None = None,  # for these three, None means: not applicable or not known
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
        """Return the number of this error, as in Apache's asyncio client."""
        return self.result


# Errors that the client finds


class InvalidConfiguration(PulsarException, ValueError):
    """An option has an invalid value. This error is a ValueError, as in Apache's client."""

    result = Result.InvalidConfiguration
    definite = True


class WrongType(InvalidConfiguration, TypeError):
    """An argument has the wrong type. This error is a ValueError and a TypeError: Apache's client
    raises either of them."""


class InvalidUrl(PulsarException, ValueError):
    """The service URL is invalid. The reason says what the client expects."""

    result = Result.InvalidUrl
    definite = True


class InvalidTopicName(PulsarException):
    """The topic name is invalid. The reason says what is expected."""

    result = Result.InvalidTopicName
    definite = True


class InvalidMessage(PulsarException, ValueError, TypeError):
    """The client cannot send or read this message, or cannot read a serialized message id.

    This error is a TypeError and a ValueError: Apache's client raises either of them, depending on
    the argument.
    """

    result = Result.InvalidMessage
    definite = True


class NotAllowedError(PulsarException):
    """The broker refuses the operation permanently, or this client does not support it yet."""

    result = Result.NotAllowedError
    definite = True


class CryptoError(PulsarException):
    """A key is missing or unusable, so the client cannot encrypt or decrypt a message."""

    result = Result.CryptoError
    definite = True


class ErrorGettingAuthenticationData(PulsarException):
    """The client could not get the credentials for the broker."""

    result = Result.ErrorGettingAuthenticationData
    definite = True


class OperationNotSupported(PulsarException):
    """The call is not possible on this object, from this thread or with this broker."""

    result = Result.OperationNotSupported
    definite = True


class CumulativeAcknowledgementNotAllowedError(PulsarException):
    """Shared and Key_Shared subscriptions do not support cumulative acknowledgement."""

    result = Result.CumulativeAcknowledgementNotAllowedError
    definite = True


class AlreadyClosed(PulsarException):
    """The client, producer, consumer or reader was closed before this call."""

    result = Result.AlreadyClosed
    definite = True


class ClosedDuringCall(AlreadyClosed):
    """The client was closed during this call. The broker may have executed the request."""

    definite = False


class MessageTooBig(PulsarException):
    """The message exceeds the broker's limit. The client did not send it."""

    result = Result.MessageTooBig
    definite = True

    def __init__(self, size_bytes: int, limit_bytes: int, *, topic: str | None = None) -> None:
        super().__init__(f"{size_bytes} bytes exceed the limit of {limit_bytes} bytes", topic=topic)
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class ProducerQueueIsFull(PulsarException):
    """The number of messages that wait for their receipts has reached the limit. The client did not
    send this message."""

    result = Result.ProducerQueueIsFull
    definite = True

    def __init__(self, limit_messages: int, *, topic: str | None = None) -> None:
        super().__init__(f"{limit_messages} messages are pending, which is the limit", topic=topic)
        self.limit_messages = limit_messages


class MemoryBufferIsFull(PulsarException):
    """The size of the messages that wait for their receipts has reached the limit. The client did
    not send this message."""

    result = Result.MemoryBufferIsFull
    definite = True

    def __init__(self, limit_bytes: int, *, topic: str | None = None) -> None:
        super().__init__(f"{limit_bytes} bytes are pending, which is the limit", topic=topic)
        self.limit_bytes = limit_bytes


class Timeout(PulsarException):
    """The time limit of the operation passed. A send that timed out may have been stored."""

    result = Result.Timeout


class ConnectError(PulsarException):
    """The client reached no broker, or the connection broke before the broker answered."""

    result = Result.ConnectError


class LookupError(PulsarException):  # noqa: A001 - Apache's name
    """The brokers redirected the lookup of a topic more often than the client allows."""

    result = Result.LookupError
    definite = True


class Interrupted(PulsarException):
    """The outcome is unknown, for example after Ctrl-C or a `close` of the client."""

    result = Result.Interrupted


class InterruptedByUser(Interrupted, KeyboardInterrupt):
    """Ctrl-C ended the wait. This error is an Interrupted, as in Apache's client, and also a
    KeyboardInterrupt, which Python programs catch."""


# Errors of requests to the broker


class UnknownError(PulsarException):
    """The broker reported no specific error, the `message_router` failed, or an unexpected
    exception in the client ended a producer or consumer."""

    result = Result.UnknownError


class AuthenticationError(PulsarException):
    """The broker could not authenticate the client."""

    result = Result.AuthenticationError
    definite = True


class AuthorizationError(PulsarException):
    """The client does not have the permission for this operation."""

    result = Result.AuthorizationError
    definite = True


class BrokerMetadataError(PulsarException):
    """The broker could not read or change its metadata, or `unsubscribe` was called while the
    subscription had other consumers."""

    result = Result.BrokerMetadataError


class BrokerPersistenceError(PulsarException):
    """The broker could not store the message, or does not know whether it is stored."""

    result = Result.BrokerPersistenceError


class ServiceUnitNotReady(PulsarException):
    """The broker does not serve the topic at the moment."""

    result = Result.ServiceUnitNotReady


class ChecksumError(PulsarException):
    """A message arrived damaged: at the broker, which did not store it, or at the consumer."""

    result = Result.ChecksumError
    definite = True


class ConsumerBusy(PulsarException):
    """The subscription cannot admit the consumer now: its connected consumers exclude others or use
    another type or policy, or the limit of consumers is reached."""

    result = Result.ConsumerBusy
    definite = True


class ProducerBusy(PulsarException):
    """The topic cannot admit the producer now: the name is in use, another producer has or awaits
    exclusive access, or the limit of producers is reached."""

    result = Result.ProducerBusy
    definite = True


class ProducerFenced(PulsarException):
    """Another producer took exclusive access and ended this one, whose pending messages may have
    been stored; or this producer asked for exclusive access, and another producer is connected."""

    result = Result.ProducerFenced


class TopicTerminated(PulsarException):
    """The topic was terminated and accepts no more messages. Pending messages may have been
    stored."""

    result = Result.TopicTerminated


class TopicNotFound(PulsarException):
    """The topic, its namespace, its tenant or the wanted version of its schema does not exist."""

    result = Result.TopicNotFound
    definite = True


class SubscriptionNotFound(PulsarException):
    """The subscription does not exist."""

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
    """The schema is invalid, or not compatible with the topic's schema."""

    result = Result.IncompatibleSchema
    definite = True


class UnsupportedVersionError(PulsarException):
    """The broker does not support this version of the protocol."""

    result = Result.UnsupportedVersionError
    definite = True


class TooManyLookupRequestException(PulsarException):
    """The broker handles too many requests at the moment."""

    result = Result.TooManyLookupRequestException
    definite = True


class ProducerBlockedQuotaExceededError(PulsarException):
    """The topic's backlog is at its limit, and the topic's policy makes producers wait."""

    result = Result.ProducerBlockedQuotaExceededError
    definite = True


class ProducerBlockedQuotaExceededException(PulsarException):
    """The topic's backlog is at its limit, and the topic's policy lets sends fail."""

    result = Result.ProducerBlockedQuotaExceededException
    definite = True


class TransactionCoordinatorNotFoundError(PulsarException):
    """The broker has no transaction coordinator. This client has no transactions."""

    result = Result.TransactionCoordinatorNotFoundError
    definite = True


class InvalidTxnStatusError(PulsarException):
    """The state of the transaction does not allow the request. This client has no transactions."""

    result = Result.InvalidTxnStatusError
    definite = True


class TransactionConflict(PulsarException):
    """Another transaction holds the message. This client has no transactions."""

    result = Result.TransactionConflict
    definite = True


class TransactionNotFound(PulsarException):
    """The broker does not know the transaction. This client has no transactions."""

    result = Result.TransactionNotFound
    definite = True


# Errors of Apache's client that this client does not raise. Programs name them in `except`.


class ReadError(PulsarException):
    """Apache's client failed to read from a socket. This client raises ConnectError instead."""

    result = Result.ReadError


class NotConnected(PulsarException):
    """Apache's client is not connected. This client waits for a connection, then raises Timeout."""

    result = Result.NotConnected


class ConsumerNotInitialized(PulsarException):
    """Apache's consumer was not created by a client. Here, only clients create consumers."""

    result = Result.ConsumerNotInitialized
    definite = True


class ProducerNotInitialized(PulsarException):
    """Apache's producer was not created by a client. Here, only clients create producers."""

    result = Result.ProducerNotInitialized
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
    pb.TransactionCoordinatorNotFound: TransactionCoordinatorNotFoundError,
    pb.InvalidTxnStatus: InvalidTxnStatusError,
    pb.TransactionConflict: TransactionConflict,
    pb.TransactionNotFound: TransactionNotFound,
}

# Temporary errors: a topic is briefly unavailable whenever it moves between brokers. The client
# repeats a request after such an error until its time limit; any other error ends the request.
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
    """Return the exception for an error that a broker reported."""
    kind = _BY_SERVER_ERROR.get(error, UnknownError)
    return kind(message, topic=topic, subscription=subscription, broker=broker)


def is_retriable(error: PulsarException) -> bool:
    """Return whether this error is temporary, so that the client repeats the request."""
    return type(error) in _RETRIABLE


def without_frames(error: PulsarException) -> PulsarException:
    """Return a stored error, so that the caller raises it again.

    Each raise adds the frames of its calls to the error's traceback. The frames hold the arguments
    of the calls, for example the content of a message. So this function removes the frames of the
    earlier raises. Otherwise they would stay in memory as long as the error.
    """
    return error.with_traceback(None)


def ends_producer(error: PulsarException) -> bool:
    """Return whether this error ends a producer for good: it does not attach again."""
    return isinstance(error, (ProducerFenced, TopicTerminated))
