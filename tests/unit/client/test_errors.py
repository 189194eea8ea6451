"""Errors: Apache's names and numbers, and which of them are temporary."""

from __future__ import annotations

import pulsar
import pytest

from magnetar.client import errors
from magnetar.client.errors import (
    PulsarException,
    Result,
    ends_producer,
    from_server_error,
    is_retriable,
)
from magnetar.protos import pulsar_pb2 as pb

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, PulsarException)
]
OWN = {errors.ClosedDuringCall, errors.InterruptedByUser, errors.WrongType}
"""Our own errors: each derives from an error of Apache and is more precise."""


def test_names_and_numbers_are_apaches() -> None:
    theirs = pulsar.Result.__members__
    assert {name: int(result) for name, result in theirs.items()} == {
        result.name: result.value for result in Result
    }
    for kind in CLASSES:
        if kind is not PulsarException and kind not in OWN:
            assert kind.result.name == kind.__name__
            assert hasattr(pulsar, kind.__name__)
            assert type(kind.definite) is bool


def test_every_answer_of_a_broker_has_an_exception() -> None:
    for number in pb.ServerError.values():
        error = from_server_error(number, "because", topic="t")
        assert error.reason == "because"
        assert error.topic == "t"
        assert "because" in str(error)
    assert type(from_server_error(999, "new")) is errors.UnknownError


# Errors after which Apache's C++ client does not try again.
FATAL = {
    pb.AuthenticationError,
    pb.AuthorizationError,
    pb.IncompatibleSchema,
    pb.TopicNotFound,
    pb.TopicTerminatedError,
    pb.NotAllowedError,
    pb.ChecksumError,
    pb.ConsumerAssignError,
    pb.ProducerBusy,
    pb.ConsumerBusy,
    pb.TooManyRequests,
    pb.ProducerBlockedQuotaExceededError,
    pb.ProducerBlockedQuotaExceededException,
    pb.ProducerFenced,
}
RETRIED = {pb.UnknownError, pb.MetadataError, pb.PersistenceError, pb.ServiceNotReady}


@pytest.mark.parametrize("number", sorted(FATAL))
def test_final_errors_are_not_retriable(number: int) -> None:
    assert not is_retriable(from_server_error(number, ""))


@pytest.mark.parametrize("number", sorted(RETRIED))
def test_temporary_errors_are_retriable(number: int) -> None:
    assert is_retriable(from_server_error(number, ""))


def test_errors_that_end_a_producer() -> None:
    ending = {
        number for number in pb.ServerError.values() if ends_producer(from_server_error(number, ""))
    }
    assert ending == {pb.ProducerFenced, pb.TopicTerminatedError}


def test_error_text_names_topic_subscription_and_broker() -> None:
    error = errors.ConsumerBusy("taken", topic="t", subscription="s")
    assert str(error) == "taken (topic t, subscription s)"
    assert str(errors.Timeout()) == ""
    assert str(errors.Timeout(topic="t")) == "topic t"
    big = errors.MessageTooBig(10, 9)
    assert (big.size_bytes, big.limit_bytes, big.error()) == (10, 9, Result.MessageTooBig)
    assert isinstance(errors.InvalidConfiguration(), ValueError)
