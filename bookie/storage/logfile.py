"""Reads RocksDB's log format: finds the intact part of a file, and the operations in it.

Write-ahead logs and the MANIFEST have this format. RocksDB silently stops reading where a length
field points past the end of the file. It also does not notice that a log between two other logs is
missing. In both cases a damaged store may open with entries missing. So this module reads the files
too.

    file      blocks of 32 KiB; if 6 bytes or fewer are left in a block, they are padding
    fragment  u32 masked crc32c of type and data | u16 size | u8 type | data      (little-endian)
    type      1: a whole record; 2, 3, 4: a record's first, middle, last fragment
    record    of a write-ahead log: u64 sequence of its first operation | u32 operations | ...
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import google_crc32c

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_BYTES: Final = 32 << 10
_HEADER: Final = struct.Struct("<IHB")
_BATCH: Final = struct.Struct("<QI")
_WHOLE, _FIRST, _MIDDLE, _LAST = range(1, 5)
_MASK_DELTA: Final = 0xA282EAD8
_U32: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class LogFile:
    """The content of one file."""

    records: int
    whole_bytes: int  # the end of the last whole record
    damage: str  # damage after the whole records; "": none, at most zeros follow
    first: int  # sequence of the first operation; 0: no operation
    next: int  # the expected sequence after the last operation; 0: no operation


def read_log(data: bytes, *, batches: bool) -> LogFile:
    """Read a file from its start. `batches`: the file is a write-ahead log, whose records have
    consecutive sequences."""
    at = records = whole = first = following = 0
    head = b""  # the start of the current record
    inside = False
    damage = ""
    while at < len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < _HEADER.size:
            at += left
            continue
        kind, end, damage = _fragment(data, at, at + left)
        if not damage and inside != (kind in (_MIDDLE, _LAST)):
            damage = f"fragment of type {kind} out of place at {at}"
        if damage or end < 0:
            break
        if kind in (_WHOLE, _FIRST):
            head = b""
        if len(head) < _BATCH.size:
            head += data[at + _HEADER.size : min(end, at + _HEADER.size + _BATCH.size)]
        at = end
        inside = kind in (_FIRST, _MIDDLE)
        if inside:
            continue
        if batches:
            if len(head) < _BATCH.size:
                damage = f"record of {len(head)} bytes before {at}"
                break
            sequence, count = _BATCH.unpack_from(head)
            if following and sequence != following:
                damage = f"operation {sequence} follows {following - 1} before {at}"
                break
            first = first or sequence
            following = sequence + count
        records += 1
        whole = at
    if inside and not damage:
        damage = f"record torn at {at}"
    if not damage and data[whole:].strip(b"\0"):
        damage = f"no record at {whole}"
    return LogFile(records, whole, damage, first, following)


def _fragment(data: bytes, at: int, block_end: int) -> tuple[int, int, str]:
    """Return type, end and damage of the fragment at `at`. End -1: no fragment, only zeros."""
    if len(data) - at < _HEADER.size:
        return 0, -1, "" if not data[at:].strip(b"\0") else f"header torn at {at}"
    crc, size, kind = _HEADER.unpack_from(data, at)
    if crc == size == kind == 0:
        return 0, -1, ""
    end = at + _HEADER.size + size
    if end > min(block_end, len(data)):
        return kind, end, f"fragment at {at} ends at {end}, past its block or the file"
    value = google_crc32c.value(data[at + _HEADER.size - 1 : end])
    if ((value >> 15 | value << 17) + _MASK_DELTA) & _U32 != crc:
        return kind, end, f"checksum mismatch at {at}"
    if not _WHOLE <= kind <= _LAST:
        return kind, end, f"unknown type {kind} at {at}"
    return kind, end, ""


def log_damage(logs: Mapping[int, LogFile], *, flushed: int, durable: int) -> str:
    """Return a text that says which operations the write-ahead logs lack; "": none. `logs` is keyed
    by the number of the log.

    Operations up to `flushed` are in tables; operations up to `durable` were on disk. RocksDB may
    leave unneeded logs, so only the unbroken sequence of logs up to the newest log counts.
    """
    first = end = 0
    for number in sorted(logs, reverse=True):
        log = logs[number]
        if not log.records:
            continue
        if not end:
            end = log.next
        elif log.next != first:
            break
        first = log.first
    if durable <= flushed:
        return ""
    if not end or first > flushed + 1:
        return f"operations {flushed + 1} to {min(durable, (first or durable + 1) - 1)} are missing"
    if end <= durable:
        return f"operations {end} to {durable} are missing"
    return ""
