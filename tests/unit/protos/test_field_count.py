"""Metadata with very many fields is refused before protobuf parses it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.claims import parse_sent
from magnetar.protos.entry import METADATA_FIELDS_MAX
from magnetar.protos.errors import MalformedEntry
from magnetar.protos.field_count import has_more_fields

SEND = pb.CommandSend(producer_id=1, sequence_id=5)
KIND = pb.MessageMetadata.DESCRIPTOR


def plain() -> pb.MessageMetadata:
    return pb.MessageMetadata(producer_name="p", sequence_id=5, publish_time=1)


def entry_of(metadata: bytes) -> bytes:
    return len(metadata).to_bytes(4, "big") + metadata + b"x"


def strings() -> bytes:
    metadata = plain()
    metadata.replicate_to.extend([""] * 2_500_000)
    return metadata.SerializeToString()


def properties() -> bytes:
    metadata = plain()
    for _ in range(800_000):
        metadata.properties.add(key="", value="")
    return metadata.SerializeToString()


def unknown_inside_a_property() -> bytes:
    inner = b"\x0a\x00\x12\x00" + b"\x98\x06\x00" * 1_600_000
    size = bytes([len(inner) & 0x7F | 0x80, len(inner) >> 7 & 0x7F | 0x80])
    size += bytes([len(inner) >> 14 & 0x7F | 0x80, len(inner) >> 21])
    return plain().SerializeToString() + b"\x22" + size + inner


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("make", [strings, properties, unknown_inside_a_property])
def test_five_megabytes_of_tiny_fields_are_refused_within_50_ms(make) -> None:
    entry = entry_of(make())
    began = time.thread_time()
    with pytest.raises(MalformedEntry, match=f"more than {METADATA_FIELDS_MAX} fields"):
        parse_sent(SEND, entry)
    assert time.thread_time() - began < 0.05


def test_one_large_property_is_accepted() -> None:
    metadata = plain()
    metadata.properties.add(key="k", value="v" * 5_000_000)
    assert parse_sent(SEND, entry_of(metadata.SerializeToString())).payload_bytes == 1


def test_the_limit_counts_the_fields_of_inner_messages() -> None:
    metadata = plain()
    metadata.properties.add(key="k", value="v")
    encoded = metadata.SerializeToString()
    assert not has_more_fields(encoded, KIND, 6)
    assert has_more_fields(encoded, KIND, 5)


@given(st.binary(max_size=200))
def test_any_bytes_are_counted(data: bytes) -> None:
    assert not has_more_fields(data, KIND, 200)
