"""Decodes payloads to values of a schema, a batch of rows at a time.

A decoder converts a whole array or raises ValueError. `decode_values` halves an array that a
decoder refuses until the bad records are alone, so a few bad records cost little and never change
their neighbours.

JSON: each payload is wrapped as `{"i":<row>,"v":<payload>}` and one call parses all lines. A
payload could close its wrapper and begin another one; then the rows are not 0, 1, 2, ..., and the
call is refused. Fields that the schema does not name are ignored; a missing field is null; a number
is no string and a string no number.

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

ERROR_CHARACTERS_MAX: Final = 200  # of a bad record's reason
JSON_ROWS_MAX: Final = 16_384  # of one call of the parser: prefixes are cached for so many


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
        except ValueError as error:
            if end - first > 1:
                middle = (first + end) // 2
                pending += [(middle, end), (first, middle)]
                continue
            bad[first] = str(error).partition("\n")[0][:ERROR_CHARACTERS_MAX]
            part = pa.nulls(1, kind)
        parts.append(part)
    return pa.concat_arrays(parts) if parts else pa.array([], kind), bad


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
        lines = _lines(values)
        whole = pj.ReadOptions(use_threads=False, block_size=len(lines) + 1)
        table = pj.read_json(pa.BufferReader(lines), read_options=whole, parse_options=options)
        rows = table.column("i").to_numpy()
        if len(rows) != len(values) or not np.array_equal(rows, np.arange(len(values))):
            raise ValueError("the payload is not one JSON value")
        found = table.column("v").combine_chunks()
        return found if isinstance(found, pa.Array) else found.chunk(0)

    def decode(values: pa.Array) -> pa.Array:
        values.cast(pa.string())  # the parser does not check UTF-8
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


@lru_cache(maxsize=1)
def _prefixes() -> pa.Array:
    return pa.array([b'{"i":%d,"v":' % row for row in range(JSON_ROWS_MAX)], pa.binary())
