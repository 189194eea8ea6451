"""The error codes of Pulsar that a client gets for each operating error.

Apache's Python client wraps the C++ client. That client gives up on some codes, and retries the
others until its operation times out. So a temporary condition (a moving bundle, bookies that do not
answer) must have a code that the C++ client retries.
"""

from __future__ import annotations

from typing import Final

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.broker import errors
from magnetar.metadata.errors import MetadataError
from magnetar.protos import errors as protocol
from magnetar.protos import pulsar_pb2 as pb

# The first row whose class matches the error decides, so base classes come last.
_CODES: Final[tuple[tuple[type[Exception], pb.ServerError.ValueType], ...]] = (
    (protocol.InvalidTopicName, pb.InvalidTopicName),
    (protocol.InvalidNamespaceName, pb.InvalidTopicName),
    (protocol.ChecksumMismatch, pb.ChecksumError),
    (protocol.ProtocolError, pb.NotAllowedError),
    (errors.TenantNotFound, pb.TopicNotFound),
    (errors.NamespaceNotFound, pb.TopicNotFound),
    (errors.TopicNotFound, pb.TopicNotFound),
    (errors.NoSchema, pb.TopicNotFound),
    (errors.InvalidSchema, pb.IncompatibleSchema),
    (errors.IncompatibleSchema, pb.IncompatibleSchema),
    (errors.TooManySchemas, pb.NotAllowedError),
    (errors.TooManyRequests, pb.TooManyRequests),
    (errors.ConsumerNotFound, pb.ConsumerNotFound),
    (errors.SubscriptionNotFound, pb.SubscriptionNotFound),
    (errors.ProducerBusy, pb.ProducerBusy),
    (errors.ProducerFenced, pb.ProducerFenced),
    (errors.StraddlingBatch, pb.NotAllowedError),
    (errors.BacklogQuotaHeld, pb.ProducerBlockedQuotaExceededError),
    (errors.BacklogQuotaRefused, pb.ProducerBlockedQuotaExceededException),
    (errors.ConsumerBusy, pb.ConsumerBusy),
    (errors.ConsumerAssignFailed, pb.ConsumerAssignError),
    (errors.NonPersistentInUse, pb.NotAllowedError),
    (errors.ReservedName, pb.NotAllowedError),
    (errors.IsPartitioned, pb.NotAllowedError),
    (errors.InvalidPartitionCount, pb.NotAllowedError),
    (errors.UnsupportedPattern, pb.NotAllowedError),
    (errors.ListUnavailable, pb.MetadataError),
    (errors.TooManyWatchers, pb.NotAllowedError),
    (errors.NotAuthenticated, pb.AuthenticationError),
    (errors.NotAuthorized, pb.AuthorizationError),
    (errors.NotAllowed, pb.NotAllowedError),
    (errors.TopicFull, pb.NotAllowedError),
    (errors.TopicTerminated, pb.TopicTerminatedError),
    (errors.InvalidPermits, pb.NotAllowedError),
    (errors.InvalidAck, pb.NotAllowedError),
    (errors.BundleUnavailable, pb.MetadataError),
    (errors.PoliciesUnavailable, pb.MetadataError),
    (errors.NotOwner, pb.ServiceNotReady),
    (errors.TopicClosing, pb.ServiceNotReady),
    (errors.TopicFailed, pb.ServiceNotReady),
    (errors.TopicQuarantined, pb.ServiceNotReady),
    (errors.TooManyAnswers, pb.TooManyRequests),
    (errors.SubscriptionFenced, pb.ServiceNotReady),
    (errors.ConsumersConnected, pb.MetadataError),
    (errors.TopicDeleted, pb.ServiceNotReady),
    (errors.LogError, pb.PersistenceError),
    (errors.BrokerError, pb.UnknownError),
    (LedgerError, pb.PersistenceError),
    (MetadataError, pb.MetadataError),
    (TimeoutError, pb.ServiceNotReady),
)
OPERATING_ERRORS: Final = (
    errors.BrokerError,
    protocol.ProtocolError,
    LedgerError,
    MetadataError,
    TimeoutError,
)
"""The errors that a command may raise. Any other exception is a bug, and ends the connection."""


def code_of(error: Exception) -> pb.ServerError.ValueType:
    """Return the code for one of `OPERATING_ERRORS`."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    raise AssertionError(f"no code for {error!r}")
