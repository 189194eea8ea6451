from __future__ import annotations

import pytest

from magnetar.protos.murmur3 import murmur3_32


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("Order-3459134", 3112179635),
        ("orders-aggregator-pod-2345-consumer1", 1003084738),
        ("orders-aggregator-pod-2345-consumer2", 373317202),
        ("orders-aggregator-pod-2345-consumer100", 320276078),
        ("orders-aggregator-pod-2345-consumer\x000\x001", 3067335090),
        ("", 0),
    ],
)
def test_hashes_equal_pulsars(key: str, expected: int) -> None:
    assert murmur3_32(key.encode()) == expected


def test_known_slots_of_short_and_long_keys() -> None:
    slots = {"key-1": 5536, "a": 27058, "你好": 43556, "NONE_KEY": 48803}
    assert {key: (murmur3_32(key.encode()) & 0x7FFFFFFF) % 65536 for key in slots} == slots
