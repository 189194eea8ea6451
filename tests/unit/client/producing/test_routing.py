"""Hashes and routers: golden values of Apache's clients, and the turns of round robin."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from support import ManualClock

from magnetar.client.errors import InvalidConfiguration, UnknownError
from magnetar.client.options import HashingScheme, PartitionsRoutingMode, ProducerOptions
from magnetar.client.producing.hashing import boost_hash, java_string_hash, murmur3_32_hash
from magnetar.client.producing.outgoing import outgoing_message
from magnetar.client.producing.routing import Router, router_of

if TYPE_CHECKING:
    from magnetar.client.message import Message

SINGLE = PartitionsRoutingMode.UseSinglePartition


def test_hashes_of_the_java_client() -> None:
    keys = ("Order-3459134", "hello", "key-1")
    assert [java_string_hash(key) for key in keys] == [1082638286, 99162322, 101943363]
    assert java_string_hash("😀") == (31 * 0xD83D + 0xDE00) & 0x7FFFFFFF  # UTF-16 units
    assert murmur3_32_hash("Order-3459134") == 964695987
    mods = [[murmur3_32_hash(key) % count for count in (3, 5, 9)] for key in keys]
    assert mods == [[0, 2, 0], [1, 1, 1], [1, 2, 4]]


def test_hash_of_the_python_client() -> None:
    """Measured: the partitions, of 64, to which pulsar-client 3.13 sent these keys."""
    partitions = {
        "a": 28,
        "b": 24,
        "ab": 54,
        "abc": 61,
        "abcdefg": 38,
        "abcdefgh": 14,
        "abcdefghi": 46,
        "Order-3459134": 2,
        "0123456789abcdef": 44,
        "0123456789abcdef0": 56,
        "é": 9,
        "x" * 40: 19,
    }
    assert {key: boost_hash(key) % 64 for key in partitions} == partitions


def routed(router: Router, count: int, *keys: str | None, now: float = 0.0) -> list[int]:
    made = [outgoing_message(ManualClock(), b"x", partition_key=key) for key in keys]
    return [router.partition(message, size, count, now) for message, size in made]


@pytest.mark.parametrize("scheme", list(HashingScheme))
@pytest.mark.parametrize("mode", [SINGLE, PartitionsRoutingMode.RoundRobinDistribution])
def test_key_decides_the_partition(mode: PartitionsRoutingMode, scheme: HashingScheme) -> None:
    options = ProducerOptions("t", message_routing_mode=mode, hashing_scheme=scheme)
    one, other = (router_of(options, "t", random.Random(seed)) for seed in (1, 2))
    keys = [f"key-{number}" for number in range(50)]
    assert routed(one, 4, *keys) == routed(other, 4, *keys)
    assert set(routed(one, 4, *keys)) == {0, 1, 2, 3}


def test_round_robin_gives_each_partition_a_batch() -> None:
    options = ProducerOptions("t", batching_max_messages=3)
    router = router_of(options, "t", random.Random(1))
    first = routed(router, 4, *[None] * 12)
    assert [first[at : at + 3] for at in (0, 3, 6, 9)] == [[first[at]] * 3 for at in (0, 3, 6, 9)]
    assert sorted(first[::3]) == [0, 1, 2, 3]
    (before,) = routed(router, 4, None, now=1.0)
    (after,) = routed(router, 4, None, now=1.0 + 0.001)  # the delay of the batch has passed
    assert after == (before + 1) % 4


def test_round_robin_without_batching_changes_with_every_message() -> None:
    router = router_of(ProducerOptions("t", batching_enabled=False), "t", random.Random(1))
    found = routed(router, 3, *[None] * 6)
    assert found == [(found[0] + number) % 3 for number in range(6)]


def test_single_partition_stays_when_partitions_are_added() -> None:
    options = ProducerOptions("t", message_routing_mode=SINGLE)
    router = router_of(options, "t", random.Random(1))
    assert len(set(routed(router, 3, *[None] * 5) + routed(router, 9, *[None] * 5))) == 1


def test_custom_router_chooses() -> None:
    seen: list[tuple[bytes, str, int]] = []

    def choose(message: Message, partitions: int) -> int:
        seen.append((message.data(), message.partition_key(), partitions))
        return 2

    router = router_of(ProducerOptions("t", message_router=choose), "t", random.Random(1))
    assert routed(router, 3, "k") == [2]
    assert seen == [(b"x", "k", 3)]
    with pytest.raises(UnknownError, match="partition 2; the topic has 2"):
        routed(router, 2, "k")


def test_custom_router_is_checked() -> None:
    with pytest.raises(InvalidConfiguration, match="message_router"):
        ProducerOptions("t", message_router=5)  # type: ignore[arg-type]
    custom = ProducerOptions("t", message_routing_mode=PartitionsRoutingMode.CustomPartition)
    with pytest.raises(InvalidConfiguration, match="needs message_router"):
        router_of(custom, "t", random.Random(1))
    failing = router_of(
        ProducerOptions("t", message_router=lambda *_: 1 // 0), "t", random.Random()
    )
    with pytest.raises(UnknownError, match="ZeroDivisionError"):
        routed(failing, 2, None)
