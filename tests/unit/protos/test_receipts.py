"""Receipts in runs, compared with protobuf's parser."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.errors import CommandError, FrameError, MalformedCommand
from magnetar.protos.receipts import is_receipt, read_receipts, send_receipt_frames

NUMBER = st.integers(0, 300) | st.integers(0, 2**63 - 1)
RUN = st.tuples(
    st.integers(1, 2) | st.integers(0, 2**64 - 1),
    st.integers(-1, 1) | st.integers(-1, 2**63 - 1),
    st.lists(st.tuples(NUMBER, st.just(0) | NUMBER, NUMBER | st.just(-1)), max_size=5),
)


def slowly(data: bytes) -> list[tuple[int, int, int, int]]:
    """Producer id, ledger, sequence id and entry of each receipt."""
    found = []
    for frame in framing.split_frames(data):
        body: Any = framing.parse_command(frame).body
        ids = (body.message_id.ledgerId, body.message_id.entryId)
        ledger, entry = (each - 2**64 if each >= 2**63 else each for each in ids)
        found.append((body.producer_id, ledger, body.sequence_id, entry))
    return found


def quickly(data: bytes) -> list[tuple[int, int, int, int]]:
    found, at = [], 0
    while at < len(data):
        assert is_receipt(data, at)
        run = read_receipts(data, at)
        assert run.end > at
        found += [
            (run.producer_id, run.ledger_id, *ids)
            for ids in zip(run.sequence_ids, run.entry_ids, strict=True)
        ]
        at = run.end
    return found


@given(st.lists(RUN, max_size=4))
def test_receipts_round_trip(runs: list[tuple[int, int, list[Any]]]) -> None:
    data = b"".join(
        send_receipt_frames(producer_id=producer, ledger_id=ledger, receipts=receipts)
        for producer, ledger, receipts in runs
    )
    sent = [(p, ledger, s, e) for p, ledger, receipts in runs for s, _, e in receipts]
    assert slowly(data) == quickly(data) == sent


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 150))
def test_consecutive_receipts_form_one_run(sequence: int, entry: int, count: int) -> None:
    receipts = [(sequence + number, 0, entry + number) for number in range(count)]
    data = send_receipt_frames(producer_id=1, ledger_id=5, receipts=receipts)
    run = read_receipts(data, 0)
    assert (run.producer_id, run.ledger_id, run.end) == (1, 5, len(data))
    assert run.sequence_ids == [number for number, _, _ in receipts]
    assert run.entry_ids == [number for _, _, number in receipts]


@given(
    st.lists(st.tuples(NUMBER, st.just(0), NUMBER), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_changed_bytes_are_read_as_protobuf_reads_them(
    receipts: list[tuple[int, int, int]], changes: list[tuple[int, int]]
) -> None:
    data = bytearray(send_receipt_frames(producer_id=1, ledger_id=5, receipts=receipts))
    for place, byte in changes:
        data[place % len(data)] = byte
    changed = bytes(data)
    if not is_receipt(changed, 0):
        return
    try:
        run = read_receipts(changed, 0)
    except (FrameError, CommandError):
        with pytest.raises((FrameError, CommandError)):
            slowly(changed)
        return
    ids = zip(run.sequence_ids, run.entry_ids, strict=True)
    read = [(run.producer_id, run.ledger_id, *each) for each in ids]
    assert read == slowly(changed[: run.end])


def test_receipts_with_other_fields_are_read() -> None:
    body = pb.CommandSendReceipt(
        producer_id=1, sequence_id=7, message_id=pb.MessageIdData(ledgerId=3, entryId=9)
    )
    short = framing.encode_command(body)
    assert quickly(short * 3) == [(1, 3, 7, 9)] * 3
    ping = framing.encode_command(pb.CommandPing())
    assert not is_receipt(ping, 0)
    assert read_receipts(short + ping, 0).end == len(short)
    with pytest.raises(MalformedCommand):
        read_receipts(short.replace(b"\x08\x01", b"\x38\x01", 1), 0)


def test_a_receipt_with_the_fields_of_another_command_is_refused() -> None:
    receipt = pb.CommandSendReceipt(producer_id=1, sequence_id=7).SerializeToString()
    position = pb.MessageIdData(ledgerId=3, entryId=9)
    delivery = pb.CommandMessage(consumer_id=1, message_id=position).SerializeToString()
    command = b"\x08\x07\x3a%c%b\x08\x09\x4a%c%b" % (len(receipt), receipt, len(delivery), delivery)
    data = struct.pack(">II", 4 + len(command) + 3, len(command)) + command + b"xyz"
    assert is_receipt(data, 0)
    with pytest.raises(MalformedCommand):
        read_receipts(data, 0)
