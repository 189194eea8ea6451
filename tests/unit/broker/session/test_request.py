"""Pulsar's commands as requests to a topic."""

from __future__ import annotations

from magnetar.broker.dispatch.key_shared_policy import HashRange, KeySharedMode, KeySharedPolicy
from magnetar.broker.session import request
from magnetar.broker.topic.contract import ClientInfo
from magnetar.protos import pulsar_pb2 as pb

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
