"""Decodes the payloads of Pulsar's primitive schemas, a whole array in one step.

Numbers are big-endian, of fixed size. A boolean is one byte, 0 or 1. DATE, TIME and TIMESTAMP are
milliseconds in 8 bytes. A DATE becomes the day in UTC. A TIME stays a number of milliseconds,
because Spark has no type for a time of day in Python. The source of the encodings is Apache's Java
client (IntSchema, DateSchema, ...).

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    TimestampType,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True)
class Primitive:
    """A primitive type: its type in Spark, and its stored form."""

    spark: DataType
    stored: str  # numpy's name of the stored number
    is_time: bool = False  # the number is ms since 1970, and becomes a date or timestamp


PRIMITIVES: Final = {
    "int8": Primitive(ByteType(), ">i1"),
    "int16": Primitive(ShortType(), ">i2"),
    "int32": Primitive(IntegerType(), ">i4"),
    "int64": Primitive(LongType(), ">i8"),
    "float": Primitive(FloatType(), ">f4"),
    "double": Primitive(DoubleType(), ">f8"),
    "boolean": Primitive(BooleanType(), ">u1"),
    "date": Primitive(DateType(), ">i8", is_time=True),
    "time": Primitive(LongType(), ">i8"),
    "timestamp": Primitive(TimestampType(), ">i8", is_time=True),
}


def primitive_decoder(name: str, kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    """A decoder for `values.decode_values`. It decodes a null payload to null."""
    primitive = PRIMITIVES[name]
    size = np.dtype(primitive.stored).itemsize

    def decode(values: pa.Array) -> pa.Array:
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        found = np.zeros(len(values), dtype=primitive.stored)
        found[valid] = np.frombuffer(_joined(values.drop_null(), size), dtype=primitive.stored)
        return _converted(found, primitive, mask=~valid).cast(kind)

    return decode


def _joined(values: pa.Array, size: int) -> pa.Buffer | bytes:
    """The bytes of values that must all have this size."""
    if not len(values):
        return b""
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[values.offset :][: len(values) + 1]
    wrong = np.flatnonzero(np.diff(bounds) != size)
    if len(wrong):
        found = int(np.diff(bounds)[wrong[0]])
        raise ValueError(f"the payload has {found} bytes, the type has {size}")
    return data.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))


def _converted(
    found: NDArray[np.generic], primitive: Primitive, *, mask: NDArray[np.bool_]
) -> pa.Array:
    numbers = found.astype(found.dtype.newbyteorder("="))
    if isinstance(primitive.spark, BooleanType):
        if np.any(numbers > 1):
            raise ValueError(f"{int(numbers.max())} is not a boolean")
        return pa.array(numbers.astype(np.bool_), pa.bool_(), mask=mask)
    if not primitive.is_time:
        return pa.array(numbers, mask=mask)
    # The casts of Arrow raise ValueError for a number that is too large.
    if isinstance(primitive.spark, DateType):
        return pa.array(numbers // DAY_MS, mask=mask).cast(pa.int32()).cast(pa.date32())
    return pa.array(numbers, pa.timestamp("ms", "UTC"), mask=mask).cast(pa.timestamp("us", "UTC"))
