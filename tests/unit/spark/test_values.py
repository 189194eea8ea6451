from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.spark.values import (
    DAY_MAX,
    DAY_MIN,
    TIME_US_MAX,
    TIME_US_MIN,
    decode_values,
    json_decoder,
    text_decoder,
)

KIND = pa.struct([("id", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", "UTC"))])
DECODE = json_decoder(KIND)

GOOD = [
    (b'{"id":1}', 1),
    (b' {"id": 2, "other": {"deep": [1]}}\n', 2),
    (b'{"id":\n3}', 3),
    (b'{"name":"\xc3\xa9\\n","id":4}', 4),
    (b'{"at":"2013-01-01T05:15:00Z","id":5}', 5),
    (b"{}", None),
    (b'{"other":[{},"]}{",{"a":"\\\\"}],"id":6}', 6),
    (b'\t{"other":{"}":"\\"}"},"id":7} ', 7),
    (b'{"name":"}","id":8}', 8),
]
BAD = [
    b"",
    b"{",
    b'{"id":1}{"id":2}',
    b'{"id":1}}\n{"i":1,"v":{"id":666}',
    b'{"id":1}}{"i":1,"v":{"id":666}',
    b'{"id":1},"v":{"id":2}',
    b'{"id":1},"x":2',
    b'{"id":1},"x":{"y":2}',
    b'{"id":1} , "x":[{}]',
    b'null,"x":2',
    b'{"id":1,"other":{"deep":"}"}},"x":{"y":"{"}',
    b'{"id":1,"other":"\\\\"},"x":{"y":"\\""}',
    b'{"id":[1}',
    b'{"name":"}',
    b'{"id":1,"id":2}',
    b'{"id":99999999999999999999}',
    b'{"id":1.5}',
    b'{"id":"1"}',
    b'{"name":"\xff"}',
    b'{"name":5}',
    b'{"other":"\xff"}',
    b"[1]",
    b'"text"',
    b"\xef\xbb\xbf{}",
    b'{"id":1} garbage',
]


@given(st.lists(st.sampled_from([*GOOD, *((payload, "bad") for payload in BAD)]), max_size=40))
def test_bad_json_never_changes_its_neighbours(rows: list[tuple[bytes, int | str | None]]) -> None:
    payloads = pa.array([payload for payload, _ in rows], pa.binary())
    values, bad = decode_values(payloads, DECODE, KIND)
    assert len(values) == len(rows)
    assert values.type == KIND
    for at, (_, expected) in enumerate(rows):
        if expected == "bad":
            assert at in bad
            assert not values[at].is_valid
        else:
            assert at not in bad
            assert values[at].as_py()["id"] == expected


def test_null_payloads_and_json_nulls_are_null() -> None:
    values, bad = decode_values(
        pa.array([None, b"null", b'{"id":null}'], pa.binary()), DECODE, KIND
    )
    assert not bad
    assert [value is None for value in values.to_pylist()] == [True, True, False]


TIME = pa.timestamp("us", "UTC")
NESTED = pa.struct(
    [
        ("id", pa.int64()),
        ("days", pa.map_(pa.string(), pa.list_(pa.date32()))),
        ("inner", pa.struct([("at", TIME)])),
    ]
)


@pytest.mark.parametrize(
    ("kind", "values", "bad"),
    [
        (pa.date32(), [DAY_MIN - 1, DAY_MIN, None, DAY_MAX, DAY_MAX + 1], [0, 4]),
        (TIME, [TIME_US_MIN - 1, TIME_US_MIN, None, TIME_US_MAX, TIME_US_MAX + 1], [0, 4]),
        (
            NESTED,
            [
                {"id": TIME_US_MAX + 1, "days": [], "inner": {"at": TIME_US_MIN}},
                {"id": 5, "days": [("a", [0, DAY_MIN - 1])], "inner": {"at": 0}},
                None,
                {"id": 5, "days": [("a", None), ("b", [DAY_MAX + 1])], "inner": None},
                {"id": 5, "days": [("a", [DAY_MIN, DAY_MAX])], "inner": {"at": TIME_US_MAX}},
                {"id": 5, "days": None, "inner": {"at": TIME_US_MAX + 1}},
                {"id": 5, "days": None, "inner": {"at": None}},
            ],
            [1, 3, 5],
        ),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_times_outside_of_the_years_of_spark_are_bad(
    kind: pa.DataType, values: list[Any], bad: list[int], together: bool
) -> None:
    """`together`: the decoded arrays are slices of one array."""
    whole = pa.array(values, kind)

    def decode(numbers: pa.Array) -> pa.Array:
        found = [number.as_py() for number in numbers]
        if together:
            return whole.slice(found[0], len(found))
        return pa.array([values[number] for number in found], kind)

    decoded, reasons = decode_values(pa.array(range(len(values))), decode, kind)
    assert reasons == dict.fromkeys(bad, "a date or timestamp is outside of the years 1 to 9999")
    assert decoded.is_valid().to_pylist() == [
        value is not None and row not in bad for row, value in enumerate(values)
    ]
    assert not decode_values(pa.array([], pa.int64()), decode, kind)[1]


@pytest.mark.parametrize("at", ["0000-12-31T23:59:59Z", "9999-12-31T23:59:59-01:00"])
def test_json_times_outside_of_the_years_of_spark_are_bad(at: str) -> None:
    payloads = [b'{"id":1,"at":"2013-01-01T05:15:00Z"}', b'{"at":"%s"}' % at.encode(), b"{}"]
    values, bad = decode_values(pa.array(payloads, pa.binary()), DECODE, KIND)
    assert list(bad) == [1]
    assert values.is_valid().to_pylist() == [True, False, True]


def test_many_rows_and_large_and_deep_payloads_are_parsed() -> None:
    payloads = [b'{"id":%d}' % row for row in range(40_000)]
    payloads[7] = b'{"name":"' + b"x" * 5_000_000 + b'","id":7}'
    payloads[9] = b'{"id":9,"z":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    values, bad = decode_values(pa.array(payloads, pa.binary()), DECODE, KIND)
    assert not bad
    assert values.field("id").to_pylist() == list(range(40_000))


def test_text_that_is_not_utf_8_is_bad() -> None:
    payloads = pa.array([b"plain", "é".encode(), b"\xff", None, b""], pa.binary())
    values, bad = decode_values(payloads, text_decoder(), pa.string())
    assert values.to_pylist() == ["plain", "é", None, None, ""]
    assert list(bad) == [2]


def test_no_rows_are_no_values() -> None:
    values, bad = decode_values(pa.array([], pa.binary()), DECODE, KIND)
    assert (len(values), values.type, bad) == (0, KIND, {})


@pytest.mark.parametrize("bad_at", [0, 1, 12, 24])
def test_one_bad_row_needs_few_decoding_calls(bad_at: int) -> None:
    calls = 0

    def decode(values: pa.Array) -> pa.Array:
        nonlocal calls
        calls += 1
        return DECODE(values)

    payloads = [b'{"id":1}'] * 25
    payloads[bad_at] = b"{"
    _, bad = decode_values(pa.array(payloads, pa.binary()), decode, KIND)
    assert list(bad) == [bad_at]
    assert calls <= 12
