"""Runs of SENDs, compared with protobuf's parsers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from magnetar.protos import framing, sends
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.claims import parse_sent
from magnetar.protos.compression import Compression
from magnetar.protos.entry import (
    MESSAGE_BYTES_MAX,
    NO_CHECKSUM,
    EntryView,
    checksum_in,
    checksums_of,
    varint,
)
from magnetar.protos.errors import CommandError, EntryError
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch, encode_message
from magnetar.protos.sends import RUN_ENTRIES_MAX, SendRun, read_sends, run_of

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True, slots=True)
class Sent:
    """A client's SEND: a plain message unless a field says otherwise."""

    sequence_id: int
    payload: bytes = b"payload"
    producer_id: int = 1
    name: str = "producer"
    time_ms: int = 1_700_000_000_000
    num_messages: int = 0  # 0: the field is absent
    highest: int = 0
    key: str | None = None
    is_base64: bool | None = None  # None: absent; Apache's Java client sets it with each key
    batch: bool = False
    uncompressed: int = 0  # Apache's Java client adds it to every message
    schema: bytes | None = None  # Apache's Java client adds it to every message
    unchecked: bool = False  # without a checksum

    def entry(self) -> bytes:
        message = OutgoingMessage(self.payload, self.sequence_id, partition_key=self.key)
        header = EntryHeader(self.name, self.time_ms)
        encode = encode_batch([message], header) if self.batch else encode_message(message, header)
        entry = b"".join(encode)
        if self.uncompressed or self.schema is not None or self.is_base64 is not None:
            size = int.from_bytes(entry[6:10])
            metadata = pb.MessageMetadata.FromString(entry[10 : 10 + size])
            metadata.uncompressed_size = self.uncompressed
            if self.is_base64 is not None:
                metadata.partition_key_b64_encoded = self.is_base64
            if self.schema is not None:
                metadata.schema_version = self.schema
            front = metadata.SerializeToString()
            body = len(front).to_bytes(4) + front + entry[10 + size :]
            entry = b"\x0e\x01" + checksums_of([bytes(6) + body])[0].to_bytes(4) + body
        return entry[6:] if self.unchecked else entry

    def frame(self) -> bytes:
        entry = self.entry()
        body = b"\x08" + varint(self.producer_id) + b"\x10" + varint(self.sequence_id)
        if self.num_messages:
            body += b"\x18" + varint(self.num_messages)
        if self.highest:
            body += b"\x30" + varint(self.highest)
        command = b"\x08\x06\x32" + varint(len(body)) + body
        total = 4 + len(command) + len(entry)
        return total.to_bytes(4) + len(command).to_bytes(4) + command + entry

    @property
    def plain(self) -> bool:
        has_plain_key = (
            self.key is not None
            and len(self.key) < 40
            and not self.is_base64
            and 2**35 <= self.time_ms < 2**42
        )
        unusual = self.highest or self.batch or self.unchecked
        if not has_plain_key:
            unusual = unusual or self.key is not None or self.is_base64 is not None
        return not unusual and self.num_messages in (0, 1) and self.producer_id < 2**63


SENT = st.builds(
    Sent,
    st.one_of(st.integers(0, 400), st.integers(0, 2**63 - 1)),
    payload=st.binary(max_size=40),
    producer_id=st.sampled_from(
        [1, 1, 1, 1, 1, 2, 127, 128, 300, 300, 2**14, 2**63 - 1, 2**63, 2**64 - 1]
    ),
    name=st.sampled_from(["producer", "p", "", "\N{SNOWMAN}"]),
    time_ms=st.sampled_from([0, 1, 1_700_000_000_000, 1_700_000_000_001, 2**63 - 1]),
    num_messages=st.sampled_from([0, 0, 0, 1, 1, 2]),
    highest=st.sampled_from([0, 0, 0, 5]),
    key=st.sampled_from([None, None, None, "key", "", "\N{SNOWMAN}", "k" * 127, "k" * 128]),
    is_base64=st.sampled_from([None, None, None, False, True]),
    batch=st.sampled_from([False, False, False, True]),
    uncompressed=st.sampled_from([0, 0, 1, 1024, 2**32 - 1]),
    schema=st.sampled_from([None, None, b"", b"\0\0\0\0\0\0\0\7", b"long" * 9]),
    unchecked=st.sampled_from([False, False, False, True]),
)


def slowly(frame: bytes) -> tuple[int, int, int, bytes] | None:
    """Producer, sequence id, highest sequence id and entry of a SEND. None: another command."""
    try:
        command = framing.parse_command(memoryview(frame)[4:])
    except CommandError:
        return None
    body: Any = command.body
    if command.type != pb.BaseCommand.SEND:
        return None
    assert command.entry is not None
    entry = bytes(command.entry)
    return body.producer_id, body.sequence_id, body.highest_sequence_id, entry


def holds(run: SendRun, frames: list[bytes]) -> None:
    """Check that the run consists of these frames, with all their fields."""
    expected = [slowly(frame) for frame in frames]
    numbers = zip(run.sequence_ids, run.highest_sequence_ids, run.entries, strict=True)
    assert [(run.producer_id, *each) for each in numbers] == expected
    assert run.checksums == [checksum_in(entry) for entry in run.entries]
    for place, entry in enumerate(run.entries):
        view, error = parsed(frames[place], entry)
        assert repr(run.errors.get(place)) == repr(error)
        if view is not None and place not in run.views:
            # An entry without a view counts as one whole message; it may have a key.
            plain = (view.is_batch, view.chunk, view.compression, view.deliver_at_ms)
            assert plain == (False, None, Compression.NONE, None)
            assert view.num_messages == 1
        else:
            assert run.views.get(place) == view


def parsed(frame: bytes, entry: bytes) -> tuple[EntryView | None, EntryError | None]:
    send: Any = framing.parse_command(memoryview(frame)[4:]).body
    try:
        return parse_sent(send, entry), None
    except EntryError as error:
        return None, error


@given(st.lists(SENT, min_size=1, max_size=12))
def test_a_run_holds_all_consecutive_sends_of_a_producer(sent: list[Sent]) -> None:
    frames = [each.frame() for each in sent]
    buffer = memoryview(b"".join(frames))
    at = begin = 0
    while at < len(sent):
        run = read_sends(buffer, begin)
        assert run is not None
        same = [each.producer_id == sent[at].producer_id for each in sent[at:]]
        assert len(run) == [*same, False].index(False)
        assert run.end == begin + sum(map(len, frames[at : at + len(run)]))
        holds(run, frames[at : at + len(run)])
        at, begin = at + len(run), run.end


@given(st.lists(SENT.filter(lambda each: each.plain), min_size=1, max_size=12))
def test_a_plain_message_needs_no_view(sent: list[Sent]) -> None:
    """The messages of Apache's Java client are plain. A message with a long schema version or an
    impossible size is not plain."""
    run = read_sends(memoryview(b"".join(each.frame() for each in sent)), 0)
    assert run is not None
    assert set(run.views) == {
        place
        for place in range(len(run))
        if len(sent[place].schema or b"") > 16 or sent[place].uncompressed > MESSAGE_BYTES_MAX
    }


@given(st.lists(SENT.map(lambda s: s), min_size=2, max_size=8), st.data())
def test_a_part_of_a_run_holds_its_frames(sent: list[Sent], data: st.DataObject) -> None:
    frames = [each.frame() for each in sent]
    run = read_sends(memoryview(b"".join(frames)), 0)
    assert run is not None
    start = data.draw(st.integers(0, len(run) - 1))
    stop = data.draw(st.integers(start + 1, len(run)))
    part = run.part(start, stop)
    holds(part, frames[start:stop])
    assert set(part.views) == {place - start for place in run.views if start <= place < stop}


@settings(deadline=None)  # 300 frames each, read twice
@given(st.integers(0, 2**40), st.integers(1, 300), st.sampled_from([0, 1]))
@example(0, 300, 0)
@example(2**14 - 2, 4, 1)
@example(2**63 - 3, 3, 0)
def test_a_run_continues_through_numbers_of_any_size(first: int, count: int, said: int) -> None:
    frames = [Sent(first + n, b"x", num_messages=said).frame() for n in range(count)]
    run = read_sends(memoryview(b"".join(frames)), 0)
    assert run is not None
    holds(run, frames[:RUN_ENTRIES_MAX])
    assert len(run) == min(count, RUN_ENTRIES_MAX)
    assert run.views == {}


@given(
    st.lists(SENT, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_damage_anywhere_is_seen(sent: list[Sent], damage: list[tuple[int, int]]) -> None:
    """A run holds the fields of the damaged frames. The topic compares checksums later."""
    data = bytearray(b"".join(each.frame() for each in sent))
    for place, byte in damage:
        data[place % len(data)] = byte
    run = read_sends(memoryview(bytes(data)), 0)
    if run is not None:
        frames = framing.split_frames(bytes(data[: run.end]))
        holds(run, [b"\0\0\0\0" + bytes(frame) for frame in frames])


@given(st.binary(max_size=60))
def test_any_bytes_are_no_send(data: bytes) -> None:
    assert read_sends(memoryview(data), 0) is None


def test_a_truncated_send_is_not_part_of_a_run() -> None:
    whole = Sent(300).frame()
    for size in range(len(whole)):
        assert read_sends(memoryview(whole[:size]), 0) is None
    run = read_sends(memoryview(whole + whole[:-1]), 0)
    assert run is not None
    assert run.sequence_ids == [300]
    assert run.end == len(whole)


def test_another_command_ends_the_run() -> None:
    ping = framing.encode_command(pb.CommandPing())
    run = read_sends(memoryview(Sent(1).frame() + ping + Sent(2).frame()), 0)
    assert run is not None
    assert run.sequence_ids == [1]
    assert read_sends(memoryview(ping), 0) is None


def test_sends_of_many_producers_are_compared_and_not_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A topic with a run of one costs twice as much if the next producer's SEND is parsed to find
    the end of the run."""
    ids = [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**21, 2**63 - 1]
    frames = [Sent(5, producer_id=producer).frame() for producer in ids]
    monkeypatch.setattr(sends, "parse_command", None)
    buffer, at = memoryview(b"".join(frames)), 0
    for producer in ids:
        run = read_sends(buffer, at)
        assert run is not None
        assert (run.producer_id, run.sequence_ids) == (producer, [5])
        at = run.end
    assert at == len(buffer)


def test_the_last_of_two_producer_ids_counts() -> None:
    entry = Sent(6).entry()
    body = b"\x08\x02\x10\x06\x08\x01"  # producer 2, sequence id 6, producer 1
    command = b"\x08\x06\x32" + bytes([len(body)]) + body
    sizes = (4 + len(command) + len(entry)).to_bytes(4) + len(command).to_bytes(4)
    buffer = memoryview(Sent(5).frame() + sizes + command + entry)
    first = read_sends(buffer, 0)
    assert first is not None
    second = read_sends(buffer, first.end)
    assert second is not None
    assert [(run.producer_id, run.sequence_ids) for run in (first, second)] == [(1, [5]), (1, [6])]


def test_a_send_that_is_written_in_another_order_is_a_run_of_one() -> None:
    entry = Sent(5).entry()
    body = pb.CommandSend(producer_id=1, sequence_id=5, highest_sequence_id=6).SerializeToString()
    command = b"\x32" + bytes([len(body)]) + body + b"\x08\x06"  # the type comes last
    total = 4 + len(command) + len(entry)
    frame = total.to_bytes(4) + len(command).to_bytes(4) + command + entry
    assert read_sends(memoryview(frame), 0) is None
    holds(run_of(framing.parse_command(memoryview(frame)[4:])), [frame])


def test_a_field_hidden_behind_the_sequence_id_is_seen() -> None:
    """The bytes of number and field could stand for each other in command and metadata."""
    entry = b"".join(encode_message(OutgoingMessage(b"x", 5), EntryHeader("p", 10)))
    body = b"\x08\x01\x10\x05\x18\x0a"  # num_messages 10 behind sequence id 5
    command = b"\x08\x06\x32" + bytes([len(body)]) + body
    sizes = (4 + len(command) + len(entry)).to_bytes(4) + len(command).to_bytes(4)
    frame = sizes + command + entry
    run = read_sends(memoryview(Sent(5, name="p", time_ms=10).frame() + frame), 0)
    assert run is not None
    assert run.sequence_ids == [5, 5]
    assert list(run.views) == [1]


def test_an_entry_that_cannot_be_parsed_is_in_the_run_with_its_error() -> None:
    batch = bytearray(Sent(2, batch=True).entry())
    broken = bytes(batch[:-13])  # the payload is too short for the batch in the metadata
    head = framing.send_header(producer_id=1, sequence_id=2, entry_size=len(broken))
    run = read_sends(memoryview(Sent(1).frame() + head + broken + Sent(3).frame()), 0)
    assert run is not None
    assert run.sequence_ids == [1, 2, 3]
    assert set(run.errors) == {1}
    assert run.checksums[1] != NO_CHECKSUM


def test_a_run_takes_entries_of_every_size() -> None:
    """A later stage of the topic refuses an entry that is too large."""
    entry = Sent(1).entry() + bytes(MESSAGE_BYTES_MAX)
    head = framing.send_header(producer_id=1, sequence_id=1, entry_size=len(entry))
    run = read_sends(memoryview(head + entry), 0)
    assert run is not None
    assert run.entries == [entry]
