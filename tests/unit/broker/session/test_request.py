"""Pulsar's commands as requests to a topic."""

from __future__ import annotations

from typing import Any

import pytest

from magnetar.broker.dispatch.key_shared_policy import HashRange, KeySharedMode, KeySharedPolicy
from magnetar.broker.errors import NotAllowed
from magnetar.broker.session import request
from magnetar.broker.topic.contract import ClientInfo
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.errors import InvalidTopicName

CLIENT = ClientInfo("127.0.0.1:1", "test")


def subscribe(meta: pb.KeySharedMeta | None) -> KeySharedPolicy | None:
    body = pb.CommandSubscribe(
        topic="t",
        subscription="s",
        subType=pb.CommandSubscribe.Key_Shared,
        consumer_id=1,
        request_id=2,
        keySharedMeta=meta,
    )
    return request.subscribe(pb.CommandSubscribe.FromString(body.SerializeToString()), CLIENT)[
        1
    ].key_shared


def kv(size: int) -> list[pb.KeyValue]:
    """Properties with this many bytes of keys and values."""
    return [pb.KeyValue(key="k" * 10, value="v" * (size - 10))]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"producer_name": "p" * 1_025}, "producer name: it has 1025 bytes; the limit is 1024"),
        ({"initial_subscription_name": "\N{SNOWMAN}" * 342}, "name: it has 1026 bytes"),
        ({"metadata": kv(65_537)}, "values have 65537 bytes; the limit is 65536"),
    ],
)
def test_producer_with_large_values_is_refused_with_the_limit(
    fields: dict[str, Any], text: str
) -> None:
    body = pb.CommandProducer(topic="t", producer_id=1, request_id=1, **fields)
    with pytest.raises(NotAllowed, match=text):
        request.producer(body, CLIENT)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"subscription": "s" * 1_025}, "subscription name: it has 1025 bytes; the limit is 1024"),
        ({"consumer_name": "c" * 5_000_000}, "consumer name: it has 5000000 bytes"),
        ({"metadata": kv(65_537)}, "consumer metadata: keys and values have 65537 bytes"),
        ({"subscription_properties": kv(65_537)}, "subscription properties: keys and values have"),
        ({"topic": "t" * 1_100}, "the full name has 1128 bytes, the limit is 1024"),
    ],
)
def test_subscribe_with_large_values_is_refused_with_the_limit(
    fields: dict[str, Any], text: str
) -> None:
    required = {"topic": "t", "subscription": "s", "subType": 0, "consumer_id": 1, "request_id": 1}
    body = pb.CommandSubscribe(**(required | fields))
    with pytest.raises((NotAllowed, InvalidTopicName), match=text):
        request.subscribe(body, CLIENT)


def test_values_at_the_limits_are_taken() -> None:
    body = pb.CommandProducer(topic="t", producer_id=1, request_id=1)
    body.producer_name, body.initial_subscription_name = "p" * 1_024, "i" * 1_024
    body.metadata.extend(kv(65_536))
    assert request.producer(body, CLIENT)[1].name == "p" * 1_024


def test_subscribe_without_key_shared_metadata_has_no_policy() -> None:
    assert subscribe(None) is None


def test_subscribe_carries_auto_split_with_its_order_option() -> None:
    meta = pb.KeySharedMeta(keySharedMode=pb.AUTO_SPLIT, allowOutOfOrderDelivery=True)
    assert subscribe(meta) == KeySharedPolicy(KeySharedMode.AUTO_SPLIT, (), True)


def test_subscribe_carries_sticky_ranges_in_the_order_of_the_client() -> None:
    ranges = [pb.IntRange(start=100, end=65_535), pb.IntRange(start=0, end=50)]
    meta = pb.KeySharedMeta(keySharedMode=pb.STICKY, hashRanges=ranges)
    expected = (HashRange(100, 65_535), HashRange(0, 50))
    assert subscribe(meta) == KeySharedPolicy(KeySharedMode.STICKY, expected)
