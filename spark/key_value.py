"""Splits the payloads of Pulsar's KeyValue schema with the encoding INLINE.

A payload is `i32 size | key | i32 size | value`, big-endian. The size -1 means that the part is
null. With the encoding SEPARATED, the payload is the value, and the message's key is the key.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from magnetar.spark.batch_scan import slices

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

_SIZE_BYTES: Final = 4


def split(payloads: pa.Array) -> tuple[pa.Array, pa.Array, dict[int, str]]:
    """Return keys, values, and the reason for each row that is bad. A null payload gives nulls."""
    offsets = np.frombuffer(payloads.buffers()[1], dtype=np.int32)[payloads.offset :]
    bounds = offsets[: len(payloads) + 1].astype(np.int64)
    starts, ends = bounds[:-1], bounds[1:]
    data = np.frombuffer(payloads.buffers()[2] or b"", dtype=np.uint8)
    given = payloads.is_valid().to_numpy(zero_copy_only=False)
    key_size, sound = _sizes(data, starts, ends, given)
    key_start = starts + _SIZE_BYTES
    value_at = key_start + np.maximum(key_size, 0)
    value_size, sound = _sizes(data, value_at, ends, sound)
    value_start = value_at + _SIZE_BYTES
    sound &= value_start + np.maximum(value_size, 0) == ends
    bad = dict.fromkeys(
        np.flatnonzero(given & ~sound).tolist(),
        "the payload is not a key and a value, each after its size",
    )
    keys = _part(data, key_start, key_size, sound)
    return keys, _part(data, value_start, value_size, sound), bad


def _sizes(
    data: NDArray[np.uint8],
    at: NDArray[np.int64],
    ends: NDArray[np.int64],
    sound: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The size of the part at each place, and which parts fit into their payloads."""
    sound = sound & (at + _SIZE_BYTES <= ends)
    sizes = np.full(len(at), -1, dtype=np.int64)
    heads = data[at[sound][:, None] + np.arange(_SIZE_BYTES)]
    sizes[sound] = np.ascontiguousarray(heads).view(">i4").ravel()
    fits = (sizes >= -1) & (at + _SIZE_BYTES + np.maximum(sizes, 0) <= ends)
    return np.where(fits, sizes, -1), sound & fits


def _part(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    sound: NDArray[np.bool_],
) -> pa.Array:
    null = ~sound | (sizes < 0)
    return slices(data, np.where(null, 0, starts), np.where(null, 0, sizes), null=null)
