"""Finds the messages of an uncompressed batch with numpy, without Python work for each message.

A batch is a chain: `u32 size | SingleMessageMetadata | payload`, and only the metadata says where
the next message begins. The scan guesses and then proves:

1. A message can begin where three zero bytes and a size below 128 stand before a tag that
   SingleMessageMetadata can begin with. The scan finds all these places in one step. Payloads with
   the same bytes give wrong places, which do no harm.
2. The metadata of all places is parsed at once, field by field.
3. Place 0 is right. The sizes at each place give the next place. The chain must have exactly as
   many messages as the batch, and end where the batch ends. So every place of the chain is proved.

`scan` returns None for metadata with 128 or more bytes or more than FIELDS_MAX fields, for unknown
wire types, and for damaged batches. The plain decoder then decodes the batch.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

MESSAGES_MIN: Final = 256  # for fewer messages, the plain decoder is as fast as a scan
FIELDS_MAX: Final = 16  # the fields of one message's metadata; a repeated field counts each time
VARINT_BYTES_MAX: Final = 10

PROPERTIES, KEY, PAYLOAD_SIZE, EVENT_TIME, KEY_IS_BASE64, NULL_VALUE = 1, 2, 3, 5, 6, 9


@dataclass(slots=True)
class Scan:
    """The messages of a batch: one element each, in order. Starts are offsets in the batch."""

    value_start: NDArray[np.int64]
    value_size: NDArray[np.int64]
    null_value: NDArray[np.int64]  # 0 or 1
    key_start: NDArray[np.int64]  # -1: there is no key
    key_size: NDArray[np.int64]
    key_is_base64: NDArray[np.int64]  # 0 or 1
    event_time: NDArray[np.int64]  # 0: there is none
    properties: NDArray[np.int64]  # the number of properties of each message

    def sliced(self, first: int, end: int) -> Scan:
        """The messages first..end-1."""
        return Scan(*(getattr(self, field.name)[first:end] for field in fields(self)))

    def taken(self, chain: NDArray[np.int64]) -> Scan:
        return Scan(*(getattr(self, field.name)[chain] for field in fields(self)))


def scan(batch: bytes | memoryview, count: int) -> Scan | None:
    """Find the `count` messages of a batch. None: the plain decoder must decode the batch."""
    data = np.frombuffer(batch, dtype=np.uint8)
    places = _places(data)
    if not len(places) or places[0] != 0 or len(places) < count:
        return None
    found, sound = _parse(data, places + 4, places + 4 + data[places + 3])
    following = found.value_start + found.value_size
    if len(places) == count:  # the usual case: there are no wrong places
        are_chain = following[-1] == len(data) and np.array_equal(following[:-1], places[1:])
        return found if are_chain and sound.all() else None
    chain = _chain(places, following, count, len(data))
    if chain is None or not sound[chain].all():
        return None
    return found.taken(chain)


def slices(
    batch: bytes | memoryview | NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    *,
    null: NDArray[np.bool_],
) -> pa.Array:
    """A binary array of slices of a batch. `null`: the rows that are null, not slices.

    The slices that are not empty must ascend, and must not overlap. The function builds an array of
    the slices and the gaps between them. Arrow copies the slices out of this array.
    """
    count = len(starts)
    if not count:
        return pa.array([], pa.binary())
    filled = sizes > 0
    reached = np.maximum.accumulate(np.where(filled, starts + sizes, 0))
    bounds = np.empty(2 * count, dtype=np.int32)  # begin and end of each slice
    bounds[::2] = np.where(filled, starts, reached)
    bounds[1::2] = bounds[::2] + sizes
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(batch)]
    every = pa.Array.from_buffers(pa.binary(), 2 * count - 1, buffers)
    places = np.arange(0, 2 * count, 2, dtype=np.int32)
    return every.take(pa.array(places, mask=null if null.any() else None))


def _places(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The places where a message can begin."""
    zero = data[:-4] == 0
    zero &= data[1:-3] == 0
    zero &= data[2:-2] == 0
    zero &= data[3:-1] < 128
    # Most wrong places are gone before `flatnonzero`, which is slow if it finds many: payloads can
    # consist of zeros. Unsigned bytes wrap, so this is 0x0A <= tag <= 0x18.
    zero &= data[4:] - 0x0A <= 0x18 - 0x0A
    places = np.flatnonzero(zero)
    tags = data[places + 4]
    found: NDArray[np.int64] = places[(tags == 0x0A) | (tags == 0x12) | (tags == 0x18)]
    return found


def _parse(
    data: NDArray[np.uint8], at: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[Scan, NDArray[np.bool_]]:
    """Parse the metadata that begins at each place. Also returns which places are sound."""
    zeros = np.zeros(len(at), dtype=np.int64)
    sound = end <= len(data)
    by_field = {
        field: zeros.copy()
        for field in (PAYLOAD_SIZE, EVENT_TIME, KEY_IS_BASE64, NULL_VALUE, PROPERTIES)
    }
    key_start, key_size = zeros - 1, zeros.copy()
    sized = np.zeros(len(at), dtype=np.bool_)
    at = at.copy()
    last = len(data) - 1
    for _ in range(FIELDS_MAX):
        active = np.flatnonzero(sound & (at < end))
        if not len(active):
            break
        tags = data[at[active]]
        value, after, good = _varints(data, at[active] + 1, last)
        wire = tags & 7
        good &= (wire == 0) | (wire == 2)
        good &= (tags < 0x80) & (value >= 0)
        following = np.where(wire == 2, after + value, after)
        good &= following <= end[active]
        for tag in np.unique(tags):
            field, kind, mine = int(tag) >> 3, int(tag) & 7, tags == tag
            rows = active[mine]
            # As in protobuf, a field with another wire type than its own is an unknown field.
            if kind == 2 and field == KEY:
                key_start[rows] = after[mine]
                key_size[rows] = value[mine]
            elif kind == 2 and field == PROPERTIES:
                by_field[PROPERTIES][rows] += 1
            elif kind == 0 and field in by_field and field != PROPERTIES:
                by_field[field][rows] = value[mine]
                if field == PAYLOAD_SIZE:
                    sized[rows] = True
        sound[active] = good
        at[active] = following
    sound &= (at == end) & sized
    parsed = Scan(
        value_start=end,
        value_size=by_field[PAYLOAD_SIZE],
        null_value=by_field[NULL_VALUE],
        key_start=key_start,
        key_size=key_size,
        key_is_base64=by_field[KEY_IS_BASE64],
        event_time=by_field[EVENT_TIME],
        properties=by_field[PROPERTIES],
    )
    return parsed, sound


def _varints(
    data: NDArray[np.uint8], at: NDArray[np.int64], last: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Read a varint at each place.

    Returns the values, the places after the varints, and which varints are sound.
    """
    value = np.zeros(len(at), dtype=np.int64)
    after = at.copy()
    going = np.ones(len(at), dtype=np.bool_)
    for shift in range(0, 7 * VARINT_BYTES_MAX, 7):
        byte = data[np.minimum(after, last)].astype(np.int64)
        value |= np.where(going, (byte & 0x7F) << shift, 0)
        after += going
        going &= byte >= 0x80
        if not going.any():
            break
    return value, after, ~going & (after <= last + 1)


def _chain(
    places: NDArray[np.int64], following: NDArray[np.int64], count: int, size: int
) -> NDArray[np.int64] | None:
    """The places that form the chain from place 0 to the end. None: there is no such chain."""
    at = np.searchsorted(places, following)
    known = places[np.minimum(at, len(places) - 1)] == following
    steps: list[int] = np.where(known, at, -1).tolist()
    chain, place = [0], 0
    for _ in range(count - 1):
        place = steps[place]
        if place < 0:
            return None
        chain.append(place)
    return np.array(chain) if following[chain[-1]] == size else None
