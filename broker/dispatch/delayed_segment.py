"""The encoding of a segment of an index of delayed entries: DELAYED_FORMAT.md. Pure.

A segment has positions of delayed entries of the log, and their delivery times. An entry never
changes, so a segment is never wrong: recovery may read a segment twice, or do without it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION: Final = 1

_HEADER: Final = struct.Struct("<BH")  # version, size of the name
_GROUP: Final = struct.Struct("<qI")  # ledger, number of entries
_ENTRY_BYTES: Final = 4
_TIME_BYTES: Final = 8

ITEMS_MAX: Final = 65_536
"""The limit of entries in one segment. A segment stores one run of the index, which has at most as
many entries."""


class InvalidDelayedSegment(ValueError):
    """The bytes are no segment of this version."""


@dataclass(frozen=True, slots=True)
class Segment:
    subscription: str
    items: list[tuple[Position, int]]  # positions, ascending, and delivery times in milliseconds


def encode_segment(subscription: str, items: Iterable[tuple[Position, int]]) -> bytes:
    """Encode a segment. `items`: positions, ascending, and delivery times in milliseconds."""
    name = subscription.encode()
    parts = [_HEADER.pack(VERSION, len(name)), name]
    for ledger, group in groupby(items, key=lambda item: item[0].ledger):
        found = list(group)
        parts.append(_GROUP.pack(ledger, len(found)))
        parts.append(_bytes_of(array("I", [at.entry for at, _ in found])))
        parts.append(_bytes_of(array("Q", [due_ms for _, due_ms in found])))
    return b"".join(parts)


def subscription_of(data: bytes | memoryview) -> str:
    """The subscription of the segment. Raises InvalidDelayedSegment."""
    return _read_name(memoryview(data))[0]


def decode_segment(data: bytes | memoryview) -> Segment:
    """Decode a segment. Raises InvalidDelayedSegment."""
    view = memoryview(data)
    name, at = _read_name(view)
    items: list[tuple[Position, int]] = []
    while at < len(view):
        if at + _GROUP.size > len(view):
            raise InvalidDelayedSegment("a group of entries is cut off")
        ledger, count = _GROUP.unpack_from(view, at)
        at += _GROUP.size
        middle = at + count * _ENTRY_BYTES
        end = middle + count * _TIME_BYTES
        if count > ITEMS_MAX - len(items) or end > len(view):
            raise InvalidDelayedSegment(f"{count} entries do not fit into it")
        entries, times = _array("I", view[at:middle]), _array("Q", view[middle:end])
        items += [
            (Position(ledger, entry), due_ms) for entry, due_ms in zip(entries, times, strict=True)
        ]
        at = end
    if any(one[0] >= other[0] for one, other in pairwise(items)):
        raise InvalidDelayedSegment("its entries are not in the order of the log")
    return Segment(name, items)


def _read_name(view: memoryview) -> tuple[str, int]:
    if len(view) < _HEADER.size:
        raise InvalidDelayedSegment("its header is cut off")
    version, size = _HEADER.unpack_from(view)
    if version != VERSION:
        raise InvalidDelayedSegment(f"version {version}, expected {VERSION}")
    end = _HEADER.size + size
    if end > len(view):
        raise InvalidDelayedSegment("its name is cut off")
    try:
        return bytes(view[_HEADER.size : end]).decode(), end
    except UnicodeDecodeError as error:
        raise InvalidDelayedSegment(f"its name is no UTF-8: {error}") from None


def _array(code: str, data: memoryview) -> array[int]:
    found = array(code)
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _bytes_of(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
