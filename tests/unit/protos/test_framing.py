"""Frames and commands: compared with protobuf, golden bytes, limits, and every kind of malformed
frame."""

import itertools
import struct
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import ENTRY_BYTES_MAX
from magnetar.protos.errors import (
    CommandError,
    FrameTooLarge,
    MalformedCommand,
    MalformedFrame,
    ProtocolError,
    UnknownCommand,
)
from magnetar.protos.framing import (
    COMMAND_FRAME_BYTES_MAX,
    FrameDecoder,
    encode_command,
    encode_payload_command,
    first_delivery,
    message_header,
    parse_command,
    send_header,
    split_frames,
)
from magnetar.protos.receipts import send_receipt_frames

U64_MAX = 2**64 - 1
uint64 = st.integers(0, U64_MAX)
ids = uint64 | st.just(-1)
BODIES = {field.number: field for field in pb.BaseCommand.DESCRIPTOR.fields if field.message_type}


def frame_of(command: bytes, entry: bytes = b"") -> bytes:
    """A frame, built by the test's own code."""
    return struct.pack(">II", 4 + len(command) + len(entry), len(command)) + command + entry


def parse_whole(whole: bytes) -> framing.Command:
    (frame,) = split_frames(whole)
    return parse_command(frame)


def filled(descriptor: Any, text: str = "text") -> Any:
    """A message with every required field set."""
    message = descriptor._concrete_class()
    for field in descriptor.fields:
        if not field.is_required:
            continue
        if field.message_type:
            getattr(message, field.name).CopyFrom(filled(field.message_type, text))
        elif field.enum_type:
            setattr(message, field.name, field.enum_type.values[-1].number)
        else:
            kinds = {field.TYPE_STRING: text, field.TYPE_BYTES: b"bytes"}
            setattr(message, field.name, kinds.get(field.type, 7))
    return message


def entry_for(number: int) -> bytes:
    return b"the entry" if number in (pb.BaseCommand.SEND, pb.BaseCommand.MESSAGE) else b""


def base_of(number: int, body: Message) -> pb.BaseCommand:
    command = pb.BaseCommand(type=number)  # type: ignore[arg-type]
    part = getattr(command, BODIES[number].name)
    part.SetInParent()
    part.CopyFrom(body)
    return command


# Every command


def test_each_command_has_a_body() -> None:
    assert set(BODIES) == set(pb.BaseCommand.Type.values())


@pytest.mark.parametrize("number", sorted(BODIES))
def test_a_command_is_written_as_protobuf_does_and_read_back(number: int) -> None:
    body = filled(BODIES[number].message_type)
    entry = entry_for(number)
    twin = frame_of(base_of(number, body).SerializeToString(), entry)
    if entry:
        assert b"".join(encode_payload_command(body, [entry[:3], entry[3:]])) == twin
    else:
        assert encode_command(body) == twin
    command = parse_whole(twin)
    assert command.type == number
    assert command.body == body
    assert command.entry == (entry or None)


def required_names(number: int) -> list[str]:
    return [field.name for field in BODIES[number].message_type.fields if field.is_required]


@pytest.mark.parametrize(
    ("number", "missing"),
    [(number, name) for number in sorted(BODIES) for name in required_names(number)],
)
def test_every_required_field_is_required(number: int, missing: str) -> None:
    body = filled(BODIES[number].message_type)
    body.ClearField(missing)
    encoded = base_of(number, body).SerializePartialToString()
    with pytest.raises(MalformedCommand, match=f"missing .*{missing}") as caught:
        parse_whole(frame_of(encoded, entry_for(number)))
    assert caught.value.command == pb.BaseCommand.Type.Name(number)  # type: ignore[arg-type]
    carries_request_id = "request_id" in required_names(number) and missing != "request_id"
    assert caught.value.request_id == (7 if carries_request_id else None)


@pytest.mark.parametrize("number", sorted(BODIES))
def test_text_must_be_utf8(number: int) -> None:
    body = filled(BODIES[number].message_type, text="$mark$")
    encoded = base_of(number, body).SerializeToString()
    damaged = encoded.replace(b"$mark$", b"$m\xffrk$", 1)
    whole = frame_of(damaged, entry_for(number))
    if damaged == encoded:
        assert parse_whole(whole).type == number
    else:
        with pytest.raises(MalformedCommand, match="is not UTF-8") as caught:
            parse_whole(whole)
        assert caught.value.request_id == (7 if "request_id" in required_names(number) else None)


@pytest.mark.parametrize(
    "body",
    [
        pb.CommandProducer(topic="t", producer_id=1, request_id=2, producer_name="$mark$"),
        pb.CommandProducer(
            topic="t",
            producer_id=1,
            request_id=2,
            metadata=[pb.KeyValue(key="a", value="b"), pb.KeyValue(key="c", value="$mark$")],
        ),
        pb.CommandGetTopicsOfNamespaceResponse(request_id=1, topics=["a", "$mark$"]),
        pb.CommandSuccess(
            request_id=1, schema=pb.Schema(name="$mark$", schema_data=b"", type=pb.Schema.Json)
        ),
        pb.CommandAck(
            consumer_id=1,
            ack_type=pb.CommandAck.Individual,
            properties=[pb.KeyLongValue(key="$mark$", value=1)],
        ),
    ],
)
def test_optional_repeated_and_nested_text_must_be_utf8(body: Message) -> None:
    whole = encode_command(body)
    assert parse_whole(whole).body == body
    with pytest.raises(MalformedCommand, match="is not UTF-8"):
        parse_whole(whole.replace(b"$mark$", b"$m\xffrk$"))


# Hot commands by hand


@given(ids, ids, st.lists(st.tuples(ids, ids, ids), max_size=4))
def test_encoded_receipts_equal_those_of_protobuf(
    producer: int, ledger: int, receipts: list[tuple[int, int, int]]
) -> None:
    twins = [
        pb.CommandSendReceipt(
            producer_id=producer & U64_MAX,
            sequence_id=seq & U64_MAX,
            highest_sequence_id=highest & U64_MAX,
            message_id=pb.MessageIdData(ledgerId=ledger & U64_MAX, entryId=entry & U64_MAX),
        )
        for seq, highest, entry in receipts
    ]
    by_hand = send_receipt_frames(producer_id=producer, ledger_id=ledger, receipts=receipts)
    assert by_hand == b"".join(map(encode_command, twins))
    assert [parse_command(frame).body for frame in split_frames(by_hand)] == twins


@given(
    ids,
    ids,
    ids,
    st.integers(-1, 2**31 - 1),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.binary(min_size=1, max_size=20),
)
def test_encoded_messages_equal_those_of_protobuf(
    consumer: int,
    ledger: int,
    entry: int,
    partition: int,
    redeliveries: int,
    ack_set: list[int],
    payload: bytes,
) -> None:
    message_id = pb.MessageIdData(ledgerId=ledger & U64_MAX, entryId=entry & U64_MAX)
    if partition >= 0:
        message_id.partition = partition
    twin = pb.CommandMessage(consumer_id=consumer & U64_MAX, message_id=message_id, ack_set=ack_set)
    if redeliveries:
        twin.redelivery_count = redeliveries
    by_hand = message_header(
        consumer_id=consumer,
        ledger_id=ledger,
        entry_id=entry,
        partition=partition,
        redelivery_count=redeliveries,
        ack_set=ack_set,
        entry_size=len(payload),
    )
    assert by_hand + payload == b"".join(encode_payload_command(twin, [payload]))
    command = parse_whole(by_hand + payload)
    assert (command.body, command.entry) == (twin, payload)
    found = first_delivery(memoryview(b"before" + by_hand + payload + b"after"), 6)
    if twin.ByteSize() <= 127:
        assert found == (twin, payload, 6 + len(by_hand + payload))
    else:
        assert found is None
    assert first_delivery(memoryview(by_hand + payload[:-1]), 0) is None
    assert first_delivery(memoryview(by_hand + payload), 0, bytes_max=len(by_hand)) is None


@given(ids, ids, st.integers(1, 2**31 - 1), uint64, st.booleans())
def test_encoded_sends_equal_those_of_protobuf(
    producer: int, seq: int, num_messages: int, highest: int, is_chunk: bool
) -> None:
    twin = pb.CommandSend(producer_id=producer & U64_MAX, sequence_id=seq & U64_MAX)
    if num_messages != 1:
        twin.num_messages = num_messages
    if highest:
        twin.highest_sequence_id = highest
    if is_chunk:
        twin.is_chunk = True
    by_hand = send_header(
        producer_id=producer,
        sequence_id=seq,
        num_messages=num_messages,
        highest_sequence_id=highest,
        is_chunk=is_chunk,
        entry_size=3,
    )
    assert by_hand + b"abc" == b"".join(encode_payload_command(twin, [b"a", b"bc"]))
    assert parse_whole(by_hand + b"abc").body == twin


@given(st.binary(max_size=40), st.sampled_from([6, 7, 9, 10, 11]), st.booleans())
def test_hot_body_equals_the_general_parser(noise: bytes, number: int, honest: bool) -> None:
    """If the parser of hot commands accepts a body, protobuf must read the same from it."""
    size = len(noise) if honest else 127
    command = bytes([8, number, number << 3 | 2, size]) + noise
    frame = memoryview(frame_of(command, b"entry"))[4:]
    short = framing._hot_body(frame)
    if short is not None:
        assert short == framing._body(frame)
    whole = memoryview(frame_of(command, b"entry"))
    for view in (whole, memoryview(frame_of(command))):
        delivery = first_delivery(view, 0)
        if delivery is not None:
            assert delivery == (parse_command(view[4:]).body, b"entry", len(whole))


def test_size_of_two_bytes_uses_the_general_parser() -> None:
    # As one byte, the size is valid; protobuf reads it together with the next byte.
    body = b"\x08\x01\x10\x02" + b"\x7a\x7c" + bytes(124)
    whole = frame_of(bytes([8, 11, 11 << 3 | 2, len(body)]) + body)
    with pytest.raises(MalformedCommand, match="cannot be parsed"):
        parse_whole(whole)
    command = parse_whole(frame_of(bytes([8, 11, 11 << 3 | 2, len(body), 1]) + body))
    assert isinstance(command.body, pb.CommandFlow)


# Golden bytes of each layout


def test_a_simple_command_has_the_golden_bytes() -> None:
    golden = bytes.fromhex("0000000a 00000006 080d 6a02 0807")
    assert encode_command(pb.CommandSuccess(request_id=7)) == golden
    golden = bytes.fromhex("00000009 00000005 0812 920100")
    assert encode_command(pb.CommandPing()) == golden


def test_a_payload_command_has_the_golden_bytes() -> None:
    golden = bytes.fromhex("0000000f 00000008 0806 3204 0801 1002 616263")
    assert send_header(producer_id=1, sequence_id=2, entry_size=3) + b"abc" == golden


def test_negative_ids_have_the_golden_bytes() -> None:
    minus_one = "ffffffffffffffffff01"
    golden = bytes.fromhex(
        f"00000026 00000022 0807 3a1e 0801 1002 1a16 08{minus_one} 10{minus_one} 2003"
    )
    assert golden == send_receipt_frames(producer_id=1, ledger_id=-1, receipts=[(2, 3, -1)])


# Streams


whole_frames = st.lists(
    st.builds(frame_of, st.binary(max_size=20), st.binary(max_size=40)), max_size=6
)


@given(whole_frames, st.lists(st.integers(1, 30), min_size=1), st.binary(max_size=3))
def test_a_stream_in_any_pieces_gives_the_same_frames(
    wholes: list[bytes], sizes: list[int], rest: bytes
) -> None:
    stream = b"".join(wholes) + rest
    decoder = FrameDecoder()
    found: list[memoryview] = []
    pieces = itertools.cycle(sizes)
    at = 0
    while at < len(stream):
        piece = stream[at : at + next(pieces)]
        found += decoder.feed(piece)
        at += len(piece)
    assert found == [whole[4:] for whole in wholes]
    assert decoder.pending_bytes == len(rest)
    if rest:
        with pytest.raises(MalformedFrame, match=f"truncated after {len(rest)} bytes"):
            split_frames(stream)
    else:
        assert split_frames(stream) == found


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_noise_in_a_stream_is_kept_or_refused_with_a_typed_error(pieces: list[bytes]) -> None:
    decoder = FrameDecoder()
    try:
        for piece in pieces:
            for frame in decoder.feed(piece):
                parse_command(frame)
    except ProtocolError as error:
        assert error.definite  # noqa: PT017 - both outcomes are right
    assert decoder.pending_bytes <= sum(map(len, pieces))


def test_frames_are_views_and_pieces_are_copied_once() -> None:
    stream = frame_of(b"abc") + frame_of(b"defg")[:5]
    decoder = FrameDecoder()
    (first,) = decoder.feed(stream)
    assert first.obj is stream
    (second,) = decoder.feed(frame_of(b"defg")[5:])
    assert bytes(second) == frame_of(b"defg")[4:]
    assert decoder.pending_bytes == 0


def test_a_large_frame_in_many_pieces_is_not_copied_with_each() -> None:
    decoder = FrameDecoder()
    decoder.feed(frame_of(bytes(2_000))[:1_000])
    buffer = decoder._pending
    assert decoder.feed(bytes(1_000)) == []
    assert decoder._pending is buffer


@pytest.mark.parametrize("total", [0, 1, 3])
def test_a_frame_too_small_for_a_command_is_refused(total: int) -> None:
    bad = struct.pack(">I", total) + bytes(total)
    with pytest.raises(MalformedFrame, match="too short for its command"):
        FrameDecoder().feed(frame_of(b"good") + bad)
    with pytest.raises(MalformedFrame, match="too short for its command"):
        split_frames(frame_of(b"good") + bad)


def test_a_frame_at_the_limit_is_read_and_a_larger_one_refused() -> None:
    assert COMMAND_FRAME_BYTES_MAX > ENTRY_BYTES_MAX
    largest = struct.pack(">I", COMMAND_FRAME_BYTES_MAX - 4) + bytes(COMMAND_FRAME_BYTES_MAX - 4)
    decoder = FrameDecoder()
    assert decoder.feed(largest[:-1]) == []
    assert decoder.pending_bytes == COMMAND_FRAME_BYTES_MAX - 1
    (frame,) = decoder.feed(largest[-1:])
    assert len(frame) == COMMAND_FRAME_BYTES_MAX - 4
    too_large = struct.pack(">I", COMMAND_FRAME_BYTES_MAX - 3)
    for refuse in (FrameDecoder().feed, split_frames):
        # The decoder refuses the frame before the whole frame has arrived.
        with pytest.raises(FrameTooLarge) as caught:
            refuse(too_large)
        assert caught.value.size == COMMAND_FRAME_BYTES_MAX + 1
        assert caught.value.limit == COMMAND_FRAME_BYTES_MAX


def test_a_command_at_the_limit_is_written_and_a_larger_one_refused() -> None:
    header = send_header(producer_id=1, sequence_id=2, entry_size=0)
    room = COMMAND_FRAME_BYTES_MAX - len(header)
    send = pb.CommandSend(producer_id=1, sequence_id=2)
    assert len(b"".join(encode_payload_command(send, [bytes(room)]))) == COMMAND_FRAME_BYTES_MAX
    with pytest.raises(FrameTooLarge):
        encode_payload_command(send, [bytes(room + 1)])
    with pytest.raises(FrameTooLarge):
        send_header(producer_id=1, sequence_id=2, entry_size=room + 1)
    with pytest.raises(FrameTooLarge):
        encode_command(pb.CommandSendError(
            producer_id=1, sequence_id=2, error=pb.UnknownError, message="x" * room
        ))  # fmt: skip


# Malformed commands


SEND = base_of(6, pb.CommandSend(producer_id=1, sequence_id=2)).SerializeToString()
FLOW = base_of(11, pb.CommandFlow(consumer_id=1, messagePermits=2)).SerializeToString()


@pytest.mark.parametrize(
    ("whole", "command", "reason"),
    [
        (frame_of(b""), "unknown", "the type is missing"),
        (frame_of(SEND[2:], b"entry"), "unknown", "the type is missing"),
        (frame_of(b"\x08"), "unknown", "cannot be parsed"),
        (frame_of(SEND[:-1], b"entry"), "unknown", "cannot be parsed"),
        (frame_of(b"\x08\x06"), "SEND", "the field send is missing"),
        (frame_of(b"\x08\x06" + FLOW[2:], b"e"), "SEND", "the field send is missing"),
        (frame_of(SEND), "SEND", "the entry is missing"),
        (frame_of(FLOW, b"entry"), "FLOW", "an entry is not allowed"),
        (struct.pack(">II", 6, 3) + b"ab", "unknown", "exceed"),
        (struct.pack(">II", 4, 2**32 - 1), "unknown", "exceed"),
    ],
)
def test_malformed_commands_are_refused_with_a_reason(
    whole: bytes, command: str, reason: str
) -> None:
    with pytest.raises(MalformedCommand, match=reason) as caught:
        parse_whole(whole)
    assert caught.value.command == command


@pytest.mark.parametrize("number", [0, 1, 41, 49, 69, 70, 81, 1_000, 2**31 - 1])
def test_unknown_commands_are_refused_by_number(number: int) -> None:
    encoded = b"\x08" + framing.varint(number) + b"\x12\x00"
    with pytest.raises(UnknownCommand) as caught:
        parse_whole(frame_of(encoded))
    assert caught.value.number == number


@pytest.mark.parametrize("number", sorted(BODIES))
def test_a_command_truncated_anywhere_is_refused(number: int) -> None:
    encoded = base_of(number, filled(BODIES[number].message_type)).SerializeToString()
    for end in range(len(encoded)):
        with pytest.raises(CommandError):
            parse_whole(frame_of(encoded[:end], entry_for(number)))


@pytest.mark.parametrize("number", [6, 7, 9, 10, 11])
def test_flipped_bits_are_refused_or_another_whole_command(number: int) -> None:
    encoded = base_of(number, filled(BODIES[number].message_type)).SerializeToString()
    whole = frame_of(encoded, entry_for(number))
    for position in range(32, len(whole) * 8):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        try:
            command = parse_whole(bytes(damaged))
        except CommandError as error:
            assert error.definite  # noqa: PT017 - both outcomes are right
        else:
            assert command.body.IsInitialized()
