"""Payloads of Pulsar's primitive schemas, encoded as Apache's Java client does."""

from __future__ import annotations

import struct
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type

from magnetar.spark.primitives import PRIMITIVES, primitive_decoder
from magnetar.spark.values import decode_values

MOMENT_MS = 1_700_000_000_123
MOMENT = datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)


def decoded(name: str, payloads: list[bytes | None]) -> tuple[list[Any], dict[int, str]]:
    kind = to_arrow_type(PRIMITIVES[name].spark, timezone="UTC")
    values, bad = decode_values(
        pa.array(payloads, pa.binary()), primitive_decoder(name, kind), kind
    )
    assert values.type == kind
    return values.to_pylist(), bad


@pytest.mark.parametrize(
    ("name", "encoding", "stored", "shown"),
    [
        ("int8", ">b", -128, -128),
        ("int16", ">h", -2, -2),
        ("int32", ">i", -(1 << 31), -(1 << 31)),
        ("int64", ">q", (1 << 63) - 1, (1 << 63) - 1),
        ("float", ">f", 0.5, 0.5),
        ("double", ">d", -1e300, -1e300),
        ("boolean", ">B", 1, True),
        ("boolean", ">B", 0, False),
        ("date", ">q", MOMENT_MS, date(2023, 11, 14)),
        ("date", ">q", -1, date(1969, 12, 31)),
        ("date", ">q", -62_135_596_800_000, date(1, 1, 1)),
        ("date", ">q", 253_402_300_799_999, date(9999, 12, 31)),
        ("time", ">q", 80_000_123, 80_000_123),
        ("timestamp", ">q", MOMENT_MS, MOMENT),
        ("timestamp", ">q", -62_135_596_800_000, datetime(1, 1, 1, tzinfo=UTC)),
        (
            *("timestamp", ">q", 253_402_300_799_999),
            datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),
        ),
    ],
)
def test_a_payload_is_the_value_that_its_producer_sent(
    name: str, encoding: str, stored: Any, shown: Any
) -> None:
    payload = struct.pack(encoding, stored)
    assert decoded(name, [payload, None, payload]) == ([shown, None, shown], {})


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_payload_of_another_size_is_bad_and_its_neighbours_are_not(name: str) -> None:
    good = b"\0" * {"int8": 1, "boolean": 1, "int16": 2, "int32": 4, "float": 4}.get(name, 8)
    values, bad = decoded(name, [good, b"", good + b"\0", good])
    assert list(bad) == [1, 2]
    assert bad[2] == f"the payload has {len(good) + 1} bytes, the type has {len(good)}"
    assert values[1] is values[2] is None
    assert None not in (values[0], values[3])


@given(st.lists(st.none() | st.binary(max_size=9), max_size=12), st.sampled_from(list(PRIMITIVES)))
def test_any_bytes_are_a_value_or_a_bad_record(payloads: list[bytes | None], name: str) -> None:
    values, bad = decoded(name, payloads)
    for row, (payload, value) in enumerate(zip(payloads, values, strict=True)):
        assert (value is None) == (payload is None or row in bad)


def test_a_number_that_is_no_boolean_is_bad() -> None:
    assert decoded("boolean", [b"\2"])[1] == {0: "2 is not a boolean"}


@pytest.mark.parametrize("name", ["date", "timestamp"])
def test_a_time_outside_of_the_years_of_spark_is_bad(name: str) -> None:
    """PySpark raises ValueError when it collects such a date."""
    times_ms = [-62_135_596_800_001, 253_402_300_800_000, -(1 << 63), (1 << 63) - 1, 1 << 60]
    values, bad = decoded(name, [struct.pack(">q", at) for at in [0, *times_ms, 0]])
    assert list(bad) == [1, 2, 3, 4, 5]
    assert [value is None for value in values] == [False, *[True] * 5, False]
