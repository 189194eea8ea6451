from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from fakes.dispatch_rig import View

from magnetar.broker.dispatch.sticky_hash import hash_of, range_slot, ring_slot, sticky_key
from magnetar.protos.entry import Chunk


def key_of(*, spread_keyless: bool = True, **fields: Any) -> bytes:
    view: Any = View(1, False, **fields)
    return sticky_key(view, spread_keyless=spread_keyless)


def test_the_documented_key_gets_the_documented_slot() -> None:
    hashed = hash_of("Order-3459134")
    assert hashed == 3112179635 & 0x7FFFFFFF == 964695987
    assert range_slot(hashed) == 6067  # Pulsar's documentation
    assert ring_slot(hashed) == 20788


@pytest.mark.parametrize(
    ("key", "on_ring", "in_range"),
    [
        ("NONE_KEY", 56505, 48803),
        ("NON_KEY", 34330, 17380),
        ("", 1, 1),
        ("key-1", 11858, 5536),
        ("a", 42456, 27058),
        ("你好", 48704, 43556),
    ],
)
def test_known_keys_get_the_slots_of_pulsar(key: str, on_ring: int, in_range: int) -> None:
    assert ring_slot(hash_of(key)) == on_ring
    assert range_slot(hash_of(key)) == in_range


@pytest.mark.parametrize("hashed", [0, 1, 65_534, 65_535, 65_536, 0x7FFFFFFF])
def test_slot_zero_is_never_used(hashed: int) -> None:
    assert 1 <= ring_slot(hashed) <= 65_535
    assert 1 <= range_slot(hashed) <= 65_535


def test_ordering_key_goes_before_partition_key() -> None:
    assert key_of(ordering_key=b"o", partition_key="p") == b"o"
    assert key_of(ordering_key=b"", partition_key="p") == b""
    assert key_of(partition_key="p") == b"p"


def test_base64_partition_key_is_decoded() -> None:
    encoded = b64encode(b"\xff\0").decode()
    assert key_of(partition_key=encoded, partition_key_b64=True) == b"\xff\0"
    assert key_of(partition_key=encoded) == encoded.encode()


def test_partition_key_with_a_wrong_base64_flag_is_used_as_it_is() -> None:
    assert key_of(partition_key="not base64!", partition_key_b64=True) == b"not base64!"


def test_entries_without_a_key_are_spread_or_share_one_slot() -> None:
    assert key_of(producer_name="p", sequence_id=7) == b"p-7"
    assert key_of(spread_keyless=False) == b"NONE_KEY"


def test_chunks_without_a_key_share_one_slot() -> None:
    chunks = [Chunk("u-1", index, 3, 30) for index in range(3)]
    assert {key_of(chunk=it, sequence_id=it.index) for it in chunks} == {b"u-1"}
