"""Segments of delayed-delivery indexes as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.dispatch.delayed_segment import (
    InvalidDelayedSegment,
    decode_segment,
    encode_segment,
    subscription_of,
)
from magnetar.broker.log.position import Position

ITEMS = st.dictionaries(
    st.builds(Position, st.integers(0, 5), st.integers(0, (1 << 32) - 1)),
    st.integers(0, 253_402_300_799_999),
    max_size=50,
).map(lambda found: sorted(found.items()))


@given(name=st.text(max_size=20), items=ITEMS)
def test_a_decoded_segment_equals_the_encoded_one(
    name: str, items: list[tuple[Position, int]]
) -> None:
    data = encode_segment(name, items)
    found = decode_segment(data)
    assert (found.subscription, found.items) == (name, items)
    assert subscription_of(data) == name


@given(data=st.binary(max_size=60) | st.binary(max_size=60).map(lambda it: b"\x01\x01\x00s" + it))
def test_any_bytes_are_a_segment_or_refused(data: bytes) -> None:
    try:
        decode_segment(data)
    except InvalidDelayedSegment:
        return


def test_a_message_takes_twelve_bytes() -> None:
    items = [(Position(7, entry), 1_700_000_000_000 + entry) for entry in range(1_024)]
    assert len(encode_segment("s", items)) < 12.1 * 1_024


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x02\x00\x00", "version 2"),
        (b"\x01", "header is cut off"),
        (b"\x01\x05\x00ab", "name is cut off"),
        (b"\x01\x01\x00\xff", "no UTF-8"),
        (encode_segment("s", [(Position(1, 1), 5)])[:-1], "do not fit"),
        (encode_segment("s", [(Position(2, 1), 5), (Position(1, 1), 5)]), "order of the log"),
    ],
)
def test_damage_is_named(data: bytes, why: str) -> None:
    with pytest.raises(InvalidDelayedSegment, match=why):
        decode_segment(data)
