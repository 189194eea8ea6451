"""Plain SENDs read by hand, against the parsers that know everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import MESSAGE_BYTES_MAX, parse_entry
from magnetar.protos.errors import CommandError, EntryError
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch, encode_message
from magnetar.protos.sends import read_plain_sends


@dataclass(frozen=True, slots=True)
class Sent:
    """What a client sends: a plain message unless something says otherwise."""

    sequence_id: int
    payload: bytes = b"payload"
    producer_id: int = 1
    name: str = "producer"
    time_ms: int = 1_700_000_000_000
    num_messages: int = 1
    highest: int = 0
    key: str | None = None
    batch: bool = False

    def frame(self) -> bytes:
        message = OutgoingMessage(self.payload, self.sequence_id, partition_key=self.key)
        header = EntryHeader(self.name, self.time_ms)
        encode = encode_batch([message], header) if self.batch else encode_message(message, header)
        entry = b"".join(encode)
        head = framing.send_header(
            producer_id=self.producer_id,
            sequence_id=self.sequence_id,
            num_messages=self.num_messages,
            highest_sequence_id=self.highest,
            entry_size=len(entry),
        )
        return head + entry

    @property
    def plain(self) -> bool:
        return not (self.num_messages != 1 or self.highest or self.key or self.batch)


SENT = st.builds(
    Sent,
    st.one_of(st.integers(0, 400), st.integers(0, 2**63 - 1)),
    payload=st.binary(max_size=40),
    producer_id=st.sampled_from([1, 1, 1, 2, 127]),
    name=st.sampled_from(["producer", "p", "", "\N{SNOWMAN}"]),
    time_ms=st.sampled_from([0, 1, 1_700_000_000_000, 1_700_000_000_001, 2**63 - 1]),
    num_messages=st.sampled_from([1, 1, 1, 2]),
    highest=st.sampled_from([0, 0, 0, 5]),
    key=st.sampled_from([None, None, None, "key"]),
    batch=st.sampled_from([False, False, False, True]),
)


def slowly(frame: bytes) -> tuple[int, int, bytes] | None:
    """Producer, sequence id and entry of a SEND that is in order and names nothing besides; None
    for anything else."""
    try:
        command = framing.parse_command(memoryview(frame)[4:])
        body: Any = command.body
        if command.type != pb.BaseCommand.SEND or len(body.ListFields()) != 2:
            return None
        assert command.entry is not None
        view = parse_entry(bytes(command.entry))
    except (CommandError, EntryError):
        return None
    if view.sequence_id != body.sequence_id or view.is_batch or view.partition_key is not None:
        return None
    return body.producer_id, body.sequence_id, bytes(view.data)


def agrees(frames: list[bytes], at: int) -> int:
    """Whatever is read from `frames[at]` on is what the slow way says; returns how many were."""
    buffer = memoryview(b"".join(frames))
    begin = sum(map(len, frames[:at]))
    run = read_plain_sends(buffer, begin)
    if run is None:
        return 0
    count = len(run.entries)
    assert count > 0
    assert run.end == begin + sum(map(len, frames[at : at + count]))
    expected = [slowly(frame) for frame in frames[at : at + count]]
    found = zip(run.sequence_ids, run.entries, strict=True)
    assert [(run.producer_id, *each) for each in found] == expected
    return count


@given(st.lists(SENT, min_size=1, max_size=12))
def test_what_is_plain_is_read_and_nothing_else(sent: list[Sent]) -> None:
    frames = [each.frame() for each in sent]
    at = 0
    while at < len(sent):
        count = agrees(frames, at)
        run = sent[at : at + max(count, 1)]
        assert all(each.plain for each in run) if count else not run[0].plain
        after = at + count
        if count and after < len(sent):  # it is as long as can be
            assert not sent[after].plain or sent[after].producer_id != run[0].producer_id
        at += max(count, 1)


@settings(deadline=None)  # 300 frames each, read twice
@given(st.integers(0, 2**40), st.integers(1, 300))
@example(0, 300)
@example(2**14 - 2, 4)
@example(2**63 - 3, 3)
def test_a_run_goes_on_through_numbers_of_any_size(first: int, count: int) -> None:
    frames = [Sent(first + number, b"x").frame() for number in range(count)]
    assert agrees(frames, 0) == count


@given(
    st.lists(SENT.filter(lambda each: each.plain), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_damage_anywhere_never_gets_through(
    sent: list[Sent], damage: list[tuple[int, int]]
) -> None:
    data = bytearray(b"".join(each.frame() for each in sent))
    for place, byte in damage:
        data[place % len(data)] = byte
    run = read_plain_sends(memoryview(bytes(data)), 0)
    if run is None:
        return
    frames = framing.split_frames(bytes(data[: run.end]))
    expected = [slowly(b"\0\0\0\0" + bytes(frame)) for frame in frames]
    found = zip(run.sequence_ids, run.entries, strict=True)
    assert [(run.producer_id, *each) for each in found] == expected


@given(st.binary(max_size=60))
def test_any_bytes_are_no_plain_send(data: bytes) -> None:
    assert read_plain_sends(memoryview(data), 0) is None


def test_a_truncated_send_is_left_alone() -> None:
    whole = Sent(300).frame()
    for size in range(len(whole)):
        assert read_plain_sends(memoryview(whole[:size]), 0) is None
    run = read_plain_sends(memoryview(whole + whole[:-1]), 0)
    assert run is not None
    assert run.sequence_ids == [300]


def test_a_field_hidden_behind_the_sequence_id_is_seen() -> None:
    """The bytes of number and field could stand for each other in command and metadata."""
    entry = b"".join(encode_message(OutgoingMessage(b"x", 5), EntryHeader("p", 10)))
    body = b"\x08\x01\x10\x05\x18\x0a"  # num_messages 10 behind sequence id 5
    command = b"\x08\x06\x32" + bytes([len(body)]) + body
    sizes = (4 + len(command) + len(entry)).to_bytes(4) + len(command).to_bytes(4)
    frame = sizes + command + entry
    assert read_plain_sends(memoryview(frame), 0) is None
    behind = read_plain_sends(memoryview(Sent(5, name="p", time_ms=10).frame() + frame), 0)
    assert behind is not None
    assert behind.sequence_ids == [5]


def test_a_payload_beyond_the_limit_is_left_to_be_refused() -> None:
    def sent(size: int) -> bytes:
        header = EntryHeader("p", 1)
        front, payload = encode_message(OutgoingMessage(bytes(MESSAGE_BYTES_MAX), 1), header)
        entry = front + payload + bytes(size - MESSAGE_BYTES_MAX)
        head = framing.send_header(producer_id=1, sequence_id=1, entry_size=len(entry))
        return head + entry

    assert read_plain_sends(memoryview(sent(MESSAGE_BYTES_MAX)), 0) is not None
    assert read_plain_sends(memoryview(sent(MESSAGE_BYTES_MAX + 1)), 0) is None
