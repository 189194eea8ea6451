"""Decodes payloads to values of a schema, a batch of rows at a time.

A decoder converts a whole array or raises ValueError. If a decoder refuses an array,
`decode_values` halves the array until the bad records are alone. So a few bad records cost little
and never change their neighbours. `decode_values` also refuses dates and timestamps that Spark does
not support: PySpark raises an error for them when the rows are collected.

JSON: each payload is wrapped as `{"i":<row>,"v":<payload>}`, and one call parses all lines. A
payload could close its wrapper and begin another one. Then the rows are not 0, 1, 2, ..., and the
decoder refuses the array. A payload could also add fields to its wrapper (`{"a":1},"x":2`). So each
payload must be `null` or one object that ends where the payload ends. If the only closing brace of
a payload is its last byte, the object ends there. Otherwise the decoder counts the brackets.

Fields that the schema does not name are ignored. A missing field is null. A number is not accepted
for a string, nor a string for a number.

Pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

ERROR_CHARACTERS_MAX: Final = 200  # the length of a bad record's reason
# 0001-01-01 and 9999-12-31, in days since 1970. Spark and Python support these years.
DAY_MIN: Final = -719_162
DAY_MAX: Final = 2_932_896
TIME_US_MIN: Final = DAY_MIN * 86_400_000_000
TIME_US_MAX: Final = (DAY_MAX + 1) * 86_400_000_000 - 1
# The rows of one call of the parser. The prefixes of this many rows are cached.
JSON_ROWS_MAX: Final = 16_384


def decode_values(
    values: pa.Array, decode: Callable[[pa.Array], pa.Array], kind: pa.DataType
) -> tuple[pa.Array, dict[int, str]]:
    """Return the decoded values, and the reason for each row that is bad. Bad rows are null."""
    bad: dict[int, str] = {}
    parts: list[pa.Array] = []
    pending = [(0, len(values))] if len(values) else []
    while pending:
        first, end = pending.pop()
        try:
            part = decode(values.slice(first, end - first))
            _require_supported_times(part)
        except ValueError as error:
            if end - first > 1:
                middle = (first + end) // 2
                pending += [(middle, end), (first, middle)]
                continue
            bad[first] = str(error).partition("\n")[0][:ERROR_CHARACTERS_MAX]
            part = pa.nulls(1, kind)
        parts.append(part)
    return pa.concat_arrays(parts) if parts else pa.array([], kind), bad


def _require_supported_times(values: pa.Array) -> None:
    """Raise ValueError if a date or timestamp in these values is not in the years 1 to 9999."""
    kind = values.type
    if not _has_times(kind):
        return
    if pa.types.is_nested(kind):
        for part in _parts(values):
            _require_supported_times(part)
        return
    if pa.types.is_date32(kind):
        found, least, most = values.cast(pa.int32()), DAY_MIN, DAY_MAX
    else:
        found, least, most = values.cast(pa.int64()), TIME_US_MIN, TIME_US_MAX
    bounds = pc.min_max(found).as_py()
    if bounds["min"] is not None and not least <= bounds["min"] <= bounds["max"] <= most:
        raise ValueError("a date or timestamp is outside of the years 1 to 9999")


def _parts(values: pa.Array) -> list[pa.Array]:
    """The fields of structs, the items of lists, or the keys and values of maps."""
    kind = values.type
    if pa.types.is_struct(kind):
        return values.flatten()  # type: ignore[no-any-return]
    if not pa.types.is_map(kind):
        return [values.flatten()]
    ends = values.offsets
    first, end = ends[0].as_py(), ends[-1].as_py()
    return [part.slice(first, end - first) for part in (values.keys, values.items)]


def _has_times(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_times(kind.field(at).type) for at in range(kind.num_fields))
    return bool(pa.types.is_date32(kind) or pa.types.is_timestamp(kind))


def text_decoder() -> Callable[[pa.Array], pa.Array]:
    """A decoder of UTF-8."""
    return lambda values: values.cast(pa.string())


def json_decoder(kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    """A decoder of JSON objects with the fields of `kind`, a struct."""
    options = pj.ParseOptions(
        explicit_schema=pa.schema([("i", pa.int64()), ("v", kind)]),
        unexpected_field_behavior="ignore",
    )

    def decode_some(values: pa.Array) -> pa.Array:
        _require_whole(values.cast(pa.string()))  # the parser does not check UTF-8
        lines = _lines(values)
        whole = pj.ReadOptions(use_threads=False, block_size=len(lines) + 1)
        table = pj.read_json(pa.BufferReader(lines), read_options=whole, parse_options=options)
        rows = table.column("i").to_numpy()
        if len(rows) != len(values) or not np.array_equal(rows, np.arange(len(values))):
            raise ValueError("the payload is not one JSON value")
        found = table.column("v").combine_chunks()
        return found if isinstance(found, pa.Array) else found.chunk(0)

    def decode(values: pa.Array) -> pa.Array:
        parts = [
            decode_some(values.slice(first, JSON_ROWS_MAX))
            for first in range(0, len(values), JSON_ROWS_MAX)
        ]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    return decode


def _lines(values: pa.Array) -> pa.Buffer:
    """The wrapped payloads. A line feed in JSON is white space, unless the JSON is bad."""
    plain = pc.replace_substring(pc.fill_null(values, b"null"), pattern=b"\n", replacement=b" ")
    lines = pc.binary_join_element_wise(
        _prefixes().slice(0, len(values)), plain, pa.scalar(b"}\n", pa.binary()), _NOTHING
    )
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)
    return data.slice(int(ends[lines.offset]), int(ends[lines.offset + len(lines)]))


_NOTHING = pa.scalar(b"", pa.binary())
_SPACE: Final = " \t\r\n"  # the white space of JSON


def _require_whole(texts: pa.Array) -> None:
    """Raise ValueError unless each text is `null`, or an object with nothing after it."""
    texts = texts.drop_null()
    if not len(texts):
        return
    ends, data = _bytes_of(texts)
    if not _are_in_braces(ends, data):
        texts = pc.utf8_trim(texts, _SPACE)
        texts = texts.filter(pc.not_equal(texts, "null"))
        if not len(texts):
            return
        ends, data = _bytes_of(texts)
        if not _are_in_braces(ends, data):
            raise ValueError("JSON: the payload is not an object")
    if np.count_nonzero(data == _CLOSING) == len(texts):
        return  # one row has one closing brace: the last byte
    # Brackets in strings do not count. So remove the escapes first. Then the quotes show the begin
    # and the end of each string.
    if np.any(data == ord("\\")):
        for escape in ("\\\\", '\\"'):
            texts = pc.replace_substring(texts, escape, "__")
        ends, data = _bytes_of(texts)
    places = np.flatnonzero(_IS_SIGN[data])
    signs = data[places]
    quotes = np.cumsum(signs == ord('"'), dtype=np.int32)
    steps = _STEPS[signs]
    depth = np.cumsum(np.where(quotes & 1, 0, steps), dtype=np.int32)
    # Depth is 0 at the last byte of each text, and not before.
    closed = places[(depth == 0) & (quotes & 1 == 0)]
    if not np.array_equal(closed, ends - 1):
        raise ValueError("JSON: the payload is not one object")


def _are_in_braces(ends: NDArray[np.int64], data: NDArray[np.uint8]) -> bool:
    """Return whether each text begins with an opening brace and ends with a closing brace."""
    begins = np.concatenate([[0], ends[:-1]])
    return bool(
        np.all(ends > begins)
        and np.all(data[begins] == _OPENING)
        and np.all(data[ends - 1] == _CLOSING)
    )


def _bytes_of(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The end of each text, and the bytes of all texts in a row. No text is null."""
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[texts.offset :][: len(texts) + 1]
    every = np.frombuffer(data or b"", dtype=np.uint8)[bounds[0] : bounds[-1]]
    return (bounds[1:] - bounds[0]).astype(np.int64), every


_OPENING, _CLOSING = ord("{"), ord("}")
_STEPS: Final = np.zeros(256, dtype=np.int8)
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1
_IS_SIGN: Final = _STEPS != 0
_IS_SIGN[ord('"')] = True


@lru_cache(maxsize=1)
def _prefixes() -> pa.Array:
    return pa.array([b'{"i":%d,"v":' % row for row in range(JSON_ROWS_MAX)], pa.binary())
