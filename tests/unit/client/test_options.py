"""Options: Apache's parameters, order and defaults; errors name unsupported parameters."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pulsar
import pytest

from magnetar.client import producer, sync
from magnetar.client.errors import InvalidConfiguration, NotAllowedError
from magnetar.client.message import MessageId
from magnetar.client.options import (
    AsyncConsumerOptions,
    ClientOptions,
    CompressionType,
    ConsumerBatchReceivePolicy,
    ConsumerOptions,
    ConsumerType,
    ProducerAccessMode,
    ProducerOptions,
    ReaderOptions,
)
from magnetar.client.sync import Client

DIFFERENT = {
    "batching_enabled",  # True in our client
    "batching_max_publish_delay_ms",  # 1 in our client
    "batch_index_ack_enabled",  # True in our client
    "schema",  # in our client, None means bytes
    "crypto_failure_action",  # in our reader, None means fail
    "tls_validate_hostname",  # True in our client
}
OURS = {
    "priority_level",
    "hashing_scheme",
    "initial_subscription_name",
    "negative_ack_redelivery_backoff",
    "ack_timeout_redelivery_backoff",
    "ack_timeout_tick_ms",
    "expire_time_of_incomplete_chunked_message_ms",
    "enable_retry",
    "decode_failure_action",
    "encryption_keys",
    "interceptors",
    "stops_at_refusal",  # an option of Spark's sink
}
"""The options that Apache's Python client does not have."""


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (ClientOptions, pulsar.Client.__init__),
        (ProducerOptions, pulsar.Client.create_producer),
        (ConsumerOptions, pulsar.Client.subscribe),
        (ReaderOptions, pulsar.Client.create_reader),
    ],
)
def test_parameters_equal_those_of_apaches_client(options: type, method: Any) -> None:
    ours = inspect.signature(options).parameters
    theirs = dict(inspect.signature(method).parameters)
    del theirs["self"]
    assert [name for name in ours if name not in OURS] == list(theirs)
    for name, parameter in theirs.items():
        if name in DIFFERENT:
            continue
        default = parameter.default
        if default is not inspect.Parameter.empty and hasattr(default, "name"):
            assert ours[name].default.name == default.name
        else:
            assert ours[name].default == default, name


def test_both_clients_show_the_parameters() -> None:
    shown = list(inspect.signature(Client.create_producer).parameters)
    assert shown == ["self", *inspect.signature(ProducerOptions).parameters]


@pytest.mark.parametrize("face", [sync.Producer, producer.Producer])
@pytest.mark.parametrize("name", ["send", "send_async"])
def test_both_producers_take_apaches_parameters(face: type, name: str) -> None:
    ours = inspect.signature(getattr(face, name)).parameters
    theirs = inspect.signature(getattr(pulsar.Producer, name)).parameters
    assert list(ours) == list(theirs)
    required = [key for key, one in ours.items() if one.default is inspect.Parameter.empty]
    assert inspect.iscoroutinefunction(getattr(face, name)) == (
        face is producer.Producer and name == "send"
    )
    assert required == ["self", "content", *(["callback"] if name == "send_async" else [])]


def test_enums_equal_those_of_apaches_client() -> None:
    for ours in (CompressionType, ConsumerType, ProducerAccessMode):
        theirs = getattr(pulsar, ours.__name__).__members__
        assert {one.name: one.value for one in ours} == {
            name: int(value) for name, value in theirs.items()
        }


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (ConsumerOptions, {"is_read_compacted": True}),
        (ConsumerOptions, {"replicate_subscription_state_enabled": True}),
        (ReaderOptions, {"is_read_compacted": True}),
    ],
)
def test_unsupported_parameter_is_refused_by_name(options: Any, given: dict[str, Any]) -> None:
    with pytest.raises(NotAllowedError, match=next(iter(given))):
        make(options, **given)


def test_topics_are_a_name_a_list_or_a_pattern() -> None:
    for topic in ("a", ["a", "b"], re.compile("a.*")):
        assert ConsumerOptions(topic, "s").topic == topic
    wrong: Any
    for wrong in (5, b"a", [], [5], ["a"] * 10_001, re.compile(b"a"), ("a", "b")):
        with pytest.raises(InvalidConfiguration, match="topic"):
            ConsumerOptions(wrong, "s")


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (ProducerOptions, {"producer_name": 3}),
        (ProducerOptions, {"compression_type": "LZ4"}),
        (ProducerOptions, {"send_timeout_millis": -1}),
        (ProducerOptions, {"max_pending_messages": 1.5}),
        (ProducerOptions, {"max_pending_messages": True}),
        (ProducerOptions, {"batching_max_messages": 0}),
        (ProducerOptions, {"properties": {"a": 1}}),
        (ConsumerOptions, {"unacked_messages_timeout_ms": 9999}),
        (ConsumerOptions, {"unacked_messages_timeout_ms": ""}),
        (ConsumerOptions, {"unacked_messages_timeout_ms": False}),
        (ConsumerOptions, {"receiver_queue_size": -1}),
        (ConsumerOptions, {"consumer_type": 1}),
        (ConsumerOptions, {"subscription_name": ""}),
        (ConsumerOptions, {"dead_letter_policy": object()}),
        (ConsumerOptions, {"negative_ack_redelivery_backoff": 3}),
        (ConsumerOptions, {"ack_timeout_tick_ms": 99}),
        (ConsumerOptions, {"max_pending_chunked_message": -1}),
        (ProducerOptions, {"chunking_enabled": True, "batching_enabled": True}),
        (ReaderOptions, {"start_message_id": "earliest"}),
        (ClientOptions, {"operation_timeout_seconds": 0}),
        (ClientOptions, {"message_listener_threads": 0}),
        (ClientOptions, {"logger": object()}),
        (ProducerOptions, {"batching_enabled": "x"}),
        (ProducerOptions, {"properties": 5}),
        (ProducerOptions, {"block_if_queue_full": 1}),
        (ConsumerOptions, {"message_listener": 5}),
        (ConsumerOptions, {"properties": 5}),
        (ConsumerOptions, {"start_message_id_inclusive": "x"}),
        (ReaderOptions, {"reader_listener": "x"}),
        (ProducerOptions, {"encryption_key": "without a reader"}),
        (ConsumerOptions, {"crypto_key_reader": object()}),
    ],
)
def test_invalid_value_is_refused_by_name(options: Any, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfiguration, match=next(iter(given))) as caught:
        make(options, **given)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "given"),
    [(ProducerOptions, {"topic": 5}), (ClientOptions, {"operation_timeout_seconds": "x"})],
)
def test_a_wrong_type_raises_type_error_and_value_error(
    options: Any, given: dict[str, Any]
) -> None:
    with pytest.raises(TypeError) as caught:
        make(options, **given)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, InvalidConfiguration)


def test_asyncio_takes_a_pattern_as_text() -> None:
    options = AsyncConsumerOptions("a.*", "s", is_pattern_topic=True)
    assert options.topic == re.compile("a.*")
    with pytest.raises(InvalidConfiguration, match="topic"):
        AsyncConsumerOptions("(", "s", is_pattern_topic=True)


def test_limits_across_partitions_bound_producers_and_consumers() -> None:
    assert ProducerOptions("t").pending_messages_max() == 1000
    assert (
        make(ProducerOptions, max_pending_messages_across_partitions=7).pending_messages_max() == 7
    )
    assert make(ProducerOptions, max_pending_messages=0).pending_messages_max() == 50000
    size = "max_total_receiver_queue_size_across_partitions"
    assert make(ConsumerOptions, **{size: 10}).queue_messages_max == 10


def test_a_batch_receive_policy_without_limits_is_refused() -> None:
    with pytest.raises(InvalidConfiguration):
        ConsumerBatchReceivePolicy(-1, -1, -1)
    policy = ConsumerBatchReceivePolicy(10, 0, 250)
    assert (policy.messages_max, policy.timeout_s) == (10, 0.25)


def make(options: Any, **given: Any) -> Any:
    required = {
        ClientOptions: {"service_url": "grpc://a"},
        ProducerOptions: {"topic": "t"},
        ConsumerOptions: {"topic": "t", "subscription_name": "s"},
        ReaderOptions: {"topic": "t", "start_message_id": MessageId.earliest},
    }[options]
    return options(**{**required, **given})
