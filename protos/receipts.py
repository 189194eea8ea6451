"""Runs of SEND_RECEIPTs, written and read without protobuf: a broker sends one for every entry.

Consecutive receipts of messages that were sent singly differ only in the lowest seven bits of the
sequence id and of the entry id. The bytes around them stay the same for tens of receipts. So this
module encodes them once, and compares them, as three pieces:

    before | low byte of the sequence id | between | low byte of the entry id | behind
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import varint
from magnetar.protos.errors import MalformedCommand
from magnetar.protos.framing import first_frame, parse_command


@dataclass(slots=True)
class ReceiptRun:
    """Receipts of one producer for entries of one ledger, in order."""

    producer_id: int
    ledger_id: int  # -1: not stored: a duplicate, or dropped by a non-persistent topic
    sequence_ids: list[int]
    entry_ids: list[int]
    end: int  # the beginning of the frame after the last receipt


def send_receipt_frames(
    *, producer_id: int, ledger_id: int, receipts: Iterable[tuple[int, int, int]]
) -> bytes:
    """Return the whole frames of SEND_RECEIPTs, as protobuf would write them. `receipts`: the
    sequence id, highest sequence id and entry id of each. Ids may be negative: -1 is 2^64-1 on the
    wire."""
    frames: list[bytes] = []
    shape, shaped_for = _NO_SHAPE, None
    for sequence_id, highest, entry_id in receipts:
        numbers = (sequence_id >> 7, highest, entry_id >> 7)
        if numbers != shaped_for:
            shape = _shape(producer_id, ledger_id, sequence_id, highest, entry_id)
            shaped_for = numbers
        before, sequences, between, entries, behind = shape
        frames += (
            before,
            sequences[sequence_id & 0x7F],
            between,
            entries[entry_id & 0x7F],
            behind,
        )
    return b"".join(frames)


def is_receipt(buffer: bytes | memoryview, at: int) -> bool:
    """Return whether the frame that begins at `at` is a SEND_RECEIPT as clients and brokers encode
    it, with type and body only."""
    return buffer[at + 8 : at + 11] == _RECEIPT


def read_receipts(buffer: bytes, at: int) -> ReceiptRun:
    """Read the run of receipts from `at` on, where a receipt must begin (`is_receipt`). Raises
    CommandError and FrameError for a receipt that cannot be read."""
    run: ReceiptRun | None = None
    while run is None or is_receipt(buffer, at):
        frame, end = first_frame(memoryview(buffer), at)
        body: Any = parse_command(frame).body
        if not isinstance(body, pb.CommandSendReceipt):  # the type was given twice
            raise MalformedCommand("SEND_RECEIPT", "it is of another type as well")
        message_id = body.message_id
        producer_id, sequence_id = body.producer_id, body.sequence_id
        ledger_id, entry_id = _signed(message_id.ledgerId), _signed(message_id.entryId)
        if run is None:
            run = ReceiptRun(producer_id, ledger_id, [], [], end)
        elif (producer_id, ledger_id) != (run.producer_id, run.ledger_id):
            break
        run.sequence_ids.append(sequence_id)
        run.entry_ids.append(entry_id)
        highest = body.highest_sequence_id
        shape = _shape(producer_id, ledger_id, sequence_id, highest, entry_id)
        at = run.end = _read_alike(buffer, end, shape, run)
    return run


# Mechanics

_RECEIPT: Final = b"\x08\x07\x3a"
_HEAD: Final = struct.Struct(">IIBBBB")  # both sizes, type, tag and size of the body
_U64: Final = 2**64 - 1
_ONE_BYTE: Final = tuple(bytes([number]) for number in range(0x80))
_MORE: Final = tuple(bytes([number | 0x80]) for number in range(0x80))  # another byte follows


class _Shape(NamedTuple):
    """The bytes that receipts have in common, and the encodings of the low bytes between them."""

    before: bytes
    sequences: tuple[bytes, ...]
    between: bytes
    entries: tuple[bytes, ...]
    behind: bytes


_NO_SHAPE: Final = _Shape(b"", (), b"", (), b"")


def _shape(
    producer_id: int, ledger_id: int, sequence_id: int, highest: int, entry_id: int
) -> _Shape:
    sequences, sequence_rest = _above_low(sequence_id)
    entries, entry_rest = _above_low(entry_id)
    producer = b"\x08" + varint(producer_id) + b"\x10"
    ledger = b"\x08" + varint(ledger_id) + b"\x10"
    # All sizes are single bytes: a receipt has five varints of at most ten bytes.
    between = sequence_rest + b"\x1a" + _ONE_BYTE[len(ledger) + 1 + len(entry_rest)] + ledger
    behind = entry_rest + b"\x20" + varint(highest)
    size = len(producer) + 1 + len(between) + 1 + len(behind)
    before = _HEAD.pack(8 + size, 4 + size, 8, 7, 0x3A, size) + producer
    return _Shape(before, sequences, between, entries, behind)


def _above_low(number: int) -> tuple[tuple[bytes, ...], bytes]:
    """Return the encodings of the low byte of a varint, and the bytes after the low byte."""
    number &= _U64
    return (_MORE, varint(number >> 7)) if number > 0x7F else (_ONE_BYTE, b"")


def _read_alike(buffer: bytes, at: int, shape: _Shape, run: ReceiptRun) -> int:
    """Read on from `at` while the receipts differ from the last one of `run` in the low bytes only.
    Returns the place of the first other frame."""
    before, sequences, between, entries, behind = shape
    sequence_from, between_from = len(before), len(before) + 1
    entry_from = between_from + len(between)
    behind_from, size = entry_from + 1, entry_from + 1 + len(behind)
    sequence_high, entry_high = run.sequence_ids[-1] & ~0x7F, run.entry_ids[-1] & ~0x7F
    sequence_carry, entry_carry = sequences[0][0] & 0x80, entries[0][0] & 0x80
    while (
        buffer[at : at + sequence_from] == before
        and buffer[at + between_from : at + entry_from] == between
        and buffer[at + behind_from : at + size] == behind
    ):
        sequence, entry = buffer[at + sequence_from], buffer[at + entry_from]
        if sequence & 0x80 != sequence_carry or entry & 0x80 != entry_carry:
            break
        run.sequence_ids.append(sequence_high | sequence & 0x7F)
        run.entry_ids.append(entry_high | entry & 0x7F)
        at += size
    return at


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
