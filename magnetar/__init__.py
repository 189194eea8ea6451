"""Magnetar: publish-subscribe and queueing on replicated storage, for Python.

    import magnetar

    with magnetar.Client("grpc://localhost:6660") as client:
        producer = client.create_producer("greetings")
        producer.send(b"hello")

The names are those of Apache Pulsar's Python client. A name is loaded when it is first used, so
that importing a part of Magnetar does not import all of it. __init__.pyi declares the names for
type checkers.
"""

from __future__ import annotations

import importlib

_HOMES = (
    "magnetar.client.message",
    "magnetar.client.options",
    "magnetar.client.errors",
    "magnetar.client.sync",  # last: it takes the longest to load
)


def __getattr__(name: str) -> object:
    if name in __all__:
        for home in map(importlib.import_module, _HOMES):
            if hasattr(home, name):
                value = globals()[name] = getattr(home, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Client",
    "Producer",
    "Consumer",
    "Reader",
    "Message",
    "MessageId",
    "BatchingType",
    "CompressionType",
    "ConsumerBatchReceivePolicy",
    "ConsumerType",
    "InitialPosition",
    "PartitionsRoutingMode",
    "ProducerAccessMode",
    "RegexSubscriptionMode",
    "Result",
    "PulsarException",
    "AlreadyClosed",
    "AuthenticationError",
    "AuthorizationError",
    "BrokerMetadataError",
    "BrokerPersistenceError",
    "ChecksumError",
    "ConnectError",
    "ConsumerAssignError",
    "ConsumerBusy",
    "ConsumerNotFound",
    "CumulativeAcknowledgementNotAllowedError",
    "IncompatibleSchema",
    "Interrupted",
    "InvalidConfiguration",
    "InvalidMessage",
    "InvalidTopicName",
    "InvalidUrl",
    "LookupError",
    "MemoryBufferIsFull",
    "MessageTooBig",
    "NotAllowedError",
    "OperationNotSupported",
    "ProducerBlockedQuotaExceededError",
    "ProducerBlockedQuotaExceededException",
    "ProducerBusy",
    "ProducerFenced",
    "ProducerQueueIsFull",
    "ServiceUnitNotReady",
    "SubscriptionNotFound",
    "Timeout",
    "TooManyLookupRequestException",
    "TopicNotFound",
    "TopicTerminated",
    "UnknownError",
    "UnsupportedVersionError",
]
