"""The stored state of cursors as bytes: FORMAT.md. Pure.

Every record adds to the state: acknowledgements, or higher redelivery counts and sequence ids. So a
snapshot needs no record kind of its own: it is a run of records that holds the whole state, and it
may be cut between any two records.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import InvalidCursorRecord
from magnetar.broker.log.bitmap import run_count, runs
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from magnetar.broker.cursor.acks import AckState

VERSION: Final = 2

OLDEST_READABLE: Final = 1
"""Version 1 has no REDELIVERIES. A broker writes only the newest version."""

ENTRY_BYTES_MAX: Final = 1 << 20
"""A run of records is cut into entries of at most this size. It is well below the limit of a stored
entry (5,253,120 bytes)."""

BODY_BYTES_MAX: Final = 1 << 18
"""A longer list or bitmap is cut into several records, so that each record fits into an entry."""

_HEADER: Final = struct.Struct("<Bq")  # version, replay_from
_RECORD: Final = struct.Struct("<BII")  # kind, subscription, size of the body
_POSITION: Final = struct.Struct("<qq")  # ledger, entry
_LEDGER: Final = struct.Struct("<q")
_BITS: Final = struct.Struct("<qI")  # ledger, first entry
_BATCH: Final = struct.Struct("<qI")  # ledger, entry
_PRODUCER: Final = struct.Struct("<Hqq")  # size of the name, sequence id, milliseconds since 1970


class Kind(IntEnum):
    MARKED = 1
    ENTRIES = 2
    RANGES = 3
    BITS = 4
    BATCH = 5
    REDELIVERIES = 6
    PRODUCERS = 7


@dataclass(frozen=True, slots=True)
class Marked:
    """Everything up to `mark` is acknowledged."""

    subscription: int
    mark: Position


@dataclass(frozen=True, slots=True)
class Entries:
    subscription: int
    ledger: int
    entries: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ranges:
    subscription: int
    ledger: int
    ranges: Sequence[tuple[int, int]]  # both ends included


@dataclass(frozen=True, slots=True)
class Bits:
    """Entry `first + i` is acknowledged if bit i is set. Bit 0 is the lowest bit of the first
    byte."""

    subscription: int
    ledger: int
    first: int  # a multiple of 8
    bits: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """All messages of this batch are acknowledged, except those whose bit is set."""

    subscription: int
    position: Position
    remaining: int  # never 0


@dataclass(frozen=True, slots=True)
class Redelivered:
    """The redelivery counts of entries. The count of an acknowledged entry has no meaning."""

    subscription: int
    ledger: int
    counts: Mapping[int, int]  # keyed by entry


@dataclass(frozen=True, slots=True)
class Producers:
    """The highest stored sequence id of each of these producers, and when its last entry was
    stored.

    This record and the Producers records before it cover all entries up to `through`.
    """

    subscription: int
    through: Position
    producers: Sequence[tuple[str, int, int]]  # name, sequence id, milliseconds since 1970


Record = Marked | Entries | Ranges | Bits | Batch | Redelivered | Producers


# ---- writing -------------------------------------------------------------------------------------


def snapshot(
    subscription: int, state: AckState, redeliveries: Mapping[int, Mapping[int, int]] | None = None
) -> list[bytes]:
    """Records of the whole state of one subscription. `redeliveries`: counts by ledger and entry;
    None: there are none."""
    records = [_record(Kind.MARKED, subscription, _POSITION.pack(*state.mark_delete))]
    for ledger, first, bits in state.bitmap_slices():
        if 8 * run_count(bits) <= len(bits):
            ends = _numbers(first + end for run in runs(bits) for end in run)
            records += _number_records(Kind.RANGES, subscription, ledger, ends)
        else:
            records += _bit_records(subscription, ledger, first, bits)
    records += [_batch(subscription, *batch) for batch in sorted(state.partial.items())]
    return records + _redeliveries(subscription, redeliveries or {})


def delta(
    subscription: int,
    *,
    mark: Position | None,
    acked: Mapping[int, array[int]],
    batches: Iterable[tuple[Position, int]],
    redeliveries: Mapping[int, Mapping[int, int]] | None = None,
) -> list[bytes]:
    """Records of changes: the mark (None: it did not move), acknowledged entries by ledger without
    duplicates, batches with the bits of their unacknowledged messages, and the new redelivery
    counts by ledger and entry."""
    records = []
    if mark is not None:
        records.append(_record(Kind.MARKED, subscription, _POSITION.pack(*mark)))
    for ledger, entries in acked.items():
        first, last = min(entries), max(entries)
        if last - first + 1 == len(entries):
            ends = _numbers((first, last))
            records += _number_records(Kind.RANGES, subscription, ledger, ends)
        else:
            records += _number_records(Kind.ENTRIES, subscription, ledger, entries)
    records += [_batch(subscription, *batch) for batch in batches]
    return records + _redeliveries(subscription, redeliveries or {})


def producers(
    subscription: int,
    producers: Iterable[tuple[str, int, int]],
    *,
    before: Position,
    through: Position,
) -> list[bytes]:
    """Records of the highest stored sequence ids. Only the last record covers the entries up to
    `through`; the other records cover those up to `before`, like the records written earlier."""
    bodies = [bytearray()]
    for name, sequence_id, seen_ms in producers:
        if len(bodies[-1]) >= BODY_BYTES_MAX:
            bodies.append(bytearray())
        encoded = name.encode()
        bodies[-1] += _PRODUCER.pack(len(encoded), sequence_id, seen_ms) + encoded
    positions = [before] * (len(bodies) - 1) + [through]
    return [
        _record(Kind.PRODUCERS, subscription, _POSITION.pack(*position) + body)
        for position, body in zip(positions, bodies, strict=True)
    ]


def entries_of(records: Iterable[bytes]) -> list[list[bytes]]:
    """Cut a run of records into groups, one for each ledger entry."""
    groups: list[list[bytes]] = []
    room = 0
    for record in records:
        if len(record) > room:
            groups.append([])
            room = ENTRY_BYTES_MAX - _HEADER.size
        groups[-1].append(record)
        room -= len(record)
    return groups


def header(*, replay_from: int) -> bytes:
    """The first bytes of an entry. `replay_from` is the first entry of the cursor ledger that a
    recovery needs once this entry is stored."""
    return _HEADER.pack(VERSION, replay_from)


def inline(records: Iterable[bytes]) -> bytes:
    """The inline value of a subscription for the topic's record: one entry."""
    return header(replay_from=0) + b"".join(records)


def _numbers(values: Iterable[int] = ()) -> array[int]:
    numbers = array("I", values)
    assert numbers.itemsize == 4
    return numbers


def _record(kind: Kind, subscription: int, body: bytes) -> bytes:
    return _RECORD.pack(kind, subscription, len(body)) + body


def _number_records(
    kind: Kind, subscription: int, ledger: int, numbers: array[int]
) -> Iterator[bytes]:
    if sys.byteorder != "little":
        numbers = array("I", numbers)
        numbers.byteswap()
    body = numbers.tobytes()
    for start in range(0, len(body), BODY_BYTES_MAX):
        part = body[start : start + BODY_BYTES_MAX]
        yield _record(kind, subscription, _LEDGER.pack(ledger) + part)


def _bit_records(subscription: int, ledger: int, first: int, bits: bytes) -> Iterator[bytes]:
    for start in range(0, len(bits), BODY_BYTES_MAX):
        part = bits[start : start + BODY_BYTES_MAX]
        yield _record(Kind.BITS, subscription, _BITS.pack(ledger, first + 8 * start) + part)


def _batch(subscription: int, position: Position, remaining: int) -> bytes:
    bits = remaining.to_bytes((remaining.bit_length() + 7) >> 3, "little")
    return _record(Kind.BATCH, subscription, _BATCH.pack(*position) + bits)


def _redeliveries(subscription: int, counts: Mapping[int, Mapping[int, int]]) -> list[bytes]:
    records: list[bytes] = []
    for ledger, of_ledger in counts.items():
        pairs = _numbers(chain.from_iterable(of_ledger.items()))
        records += _number_records(Kind.REDELIVERIES, subscription, ledger, pairs)
    return records


# ---- reading -------------------------------------------------------------------------------------


def read_header(entry: bytes | memoryview) -> int:
    """The `replay_from` of an entry. Raises InvalidCursorRecord."""
    if len(entry) < _HEADER.size:
        raise InvalidCursorRecord(f"an entry has only {len(entry)} bytes")
    version, replay_from = _HEADER.unpack_from(entry)
    if not OLDEST_READABLE <= version <= VERSION:
        readable = f"this broker reads versions {OLDEST_READABLE} to {VERSION}"
        raise InvalidCursorRecord(f"format version {version} is not known; {readable}")
    assert isinstance(replay_from, int)
    return replay_from


def read_records(entry: bytes | memoryview) -> Iterator[Record]:
    """The records of an entry, in order. Raises InvalidCursorRecord."""
    read_header(entry)
    view = memoryview(entry)
    at = _HEADER.size
    while at < len(view):
        if at + _RECORD.size > len(view):
            raise InvalidCursorRecord(f"a record is cut off at byte {at}")
        kind, subscription, size = _RECORD.unpack_from(view, at)
        at += _RECORD.size
        if at + size > len(view):
            raise InvalidCursorRecord(f"a record of kind {kind} exceeds its entry at byte {at}")
        try:
            yield _read_record(kind, subscription, bytes(view[at : at + size]))
        except (struct.error, ValueError) as error:
            raise InvalidCursorRecord(f"a record of kind {kind}: {error}") from None
        at += size


def _read_record(kind: int, subscription: int, body: bytes) -> Record:
    match kind:
        case Kind.MARKED:
            return Marked(subscription, Position(*_POSITION.unpack(body)))
        case Kind.ENTRIES:
            return Entries(subscription, *_read_numbers(body))
        case Kind.RANGES:
            ledger, numbers = _read_numbers(body)
            ends = zip(numbers[::2], numbers[1::2], strict=True)
            ranges = tuple((first, last) for first, last in ends)
            if any(first > last for first, last in ranges):
                raise ValueError("a range ends before it begins")
            return Ranges(subscription, ledger, ranges)
        case Kind.BITS:
            ledger, first = _BITS.unpack_from(body)
            if first % 8 != 0:
                raise ValueError(f"bits begin at entry {first}")
            return Bits(subscription, ledger, first, body[_BITS.size :])
        case Kind.BATCH:
            ledger, entry = _BATCH.unpack_from(body)
            remaining = int.from_bytes(body[_BATCH.size :], "little")
            if remaining == 0:
                raise ValueError("an empty ack set")
            return Batch(subscription, Position(ledger, entry), remaining)
        case Kind.REDELIVERIES:
            ledger, numbers = _read_numbers(body)
            counts = dict(zip(numbers[::2], numbers[1::2], strict=True))
            if 2 * len(counts) < len(numbers):
                # The largest count of an entry is valid. No broker writes several in one record.
                counts = dict(sorted(zip(numbers[::2], numbers[1::2], strict=True)))
            return Redelivered(subscription, ledger, counts)
        case Kind.PRODUCERS:
            through = Position(*_POSITION.unpack_from(body))
            return Producers(subscription, through, tuple(_read_producers(body, _POSITION.size)))
        case _:
            raise ValueError("not known")


def _read_producers(body: bytes, at: int) -> Iterator[tuple[str, int, int]]:
    while at < len(body):
        size, sequence_id, seen_ms = _PRODUCER.unpack_from(body, at)
        at += _PRODUCER.size
        if at + size > len(body):
            raise ValueError("a producer's name is cut off")
        yield body[at : at + size].decode(), sequence_id, seen_ms
        at += size


def _read_numbers(body: bytes) -> tuple[int, array[int]]:
    (ledger,) = _LEDGER.unpack_from(body)
    numbers = _numbers()
    numbers.frombytes(body[_LEDGER.size :])
    if sys.byteorder != "little":
        numbers.byteswap()
    return ledger, numbers
