from __future__ import annotations

import struct

import google_crc32c
import pytest
from fakes.adds import encode_add
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.protos.envelope import (
    ACK,
    ACK_ENTRIES_MAX,
    ADD,
    CLIENT_NAME_BYTES_MAX,
    COPY,
    ENTRY_BYTES_MAX,
    ENVELOPE,
    HELLO,
    HELLO_REPLY,
    READ,
    RECOVERY,
    Add,
    BookieCode,
    EnvelopeDamaged,
    FrameDamaged,
    Hello,
    HelloReply,
    ReadAnswer,
    add_envelope,
    decode_ack_runs,
    decode_acks,
    decode_adds,
    decode_envelope,
    decode_hello,
    decode_hello_reply,
    decode_read_answers,
    decode_run,
    encode_ack,
    encode_adds,
    encode_envelope,
    encode_hello,
    encode_hello_reply,
    encode_read_answer,
    encode_run,
)

INCARNATION = "0123456789abcdef" * 2
I64 = st.integers(min_value=0, max_value=2**63 - 1)
U64 = st.integers(min_value=0, max_value=2**64 - 1)
PAYLOAD = st.binary(max_size=200)


def add_frame(
    *,
    ledger: int = 7,
    entry: int = 3,
    confirmed: int = 1,
    length: int = 100,
    payload: bytes = b"payload",
    master_key: int = 9,
    flags: int = 0,
) -> bytes:
    return b"".join(
        encode_add(
            ledger=ledger,
            entry=entry,
            confirmed=confirmed,
            length=length,
            payload=[payload],
            master_key=master_key,
            flags=flags,
        )
    )


def only(frame: bytes) -> Add:
    (add,) = decode_adds(frame)
    return add


def test_the_sizes_that_the_format_states() -> None:
    assert (ENVELOPE.size, ADD.size, ACK.size, READ.size) == (36, 13, 21, 13)
    assert (HELLO.size, HELLO_REPLY.size) == (35, 42)
    assert ENTRY_BYTES_MAX == 5_253_120


def test_an_encoded_add_has_the_documented_bytes() -> None:
    covered = bytes.fromhex("00000000000000070000000000000003ffffffffffffffff0000000000000010")
    covered += b"abc"
    crc = struct.pack(">I", google_crc32c.value(covered))
    frame = add_frame(confirmed=-1, length=16, payload=b"abc", master_key=0xA1, flags=RECOVERY)
    assert frame == bytes.fromhex("010000002700000000000000a1") + crc + covered


def test_an_envelope_byte_for_byte_by_hand() -> None:
    # The checksum was computed bit by bit with the polynomial 0x82F63B78.
    envelope = encode_envelope(ledger=1, entry=2, confirmed=1, length=3, payload=[b"x"])
    assert envelope == bytes.fromhex(
        "acd2005e000000000000000100000000000000020000000000000001000000000000000378"
    )


@given(
    adds=st.lists(
        st.tuples(I64, I64, U64, PAYLOAD, st.sampled_from([0, RECOVERY, COPY]), st.data()),
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_adds_survive_the_wire(adds: list[tuple[int, int, int, bytes, int, st.DataObject]]) -> None:
    frame, expected = b"", []
    for ledger, entry, master_key, payload, flags, data in adds:
        confirmed = data.draw(st.integers(min_value=-1, max_value=entry - 1))
        length = data.draw(st.integers(min_value=len(payload), max_value=2**64 - 1))
        halves = [payload[: len(payload) // 2], memoryview(payload)[len(payload) // 2 :]]
        parts = encode_add(
            ledger=ledger,
            entry=entry,
            confirmed=confirmed,
            length=length,
            payload=halves,
            master_key=master_key,
            flags=flags,
        )
        envelope = encode_envelope(
            ledger=ledger, entry=entry, confirmed=confirmed, length=length, payload=[payload]
        )
        assert add_envelope(parts) == envelope
        assert decode_envelope(envelope) == (ledger, entry, confirmed, length, payload)
        frame += b"".join(parts)
        expected.append(Add(ledger, entry, flags, master_key, envelope, None))
    assert decode_adds(memoryview(frame)) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"ledger": -1},
        {"entry": -1, "confirmed": -1},
        {"entry": 3, "confirmed": 3},
        {"confirmed": -2},
        {"length": 6},  # the payload has 7 bytes
        {"flags": 4},
        {"flags": 0x80 | RECOVERY},
    ],
)
def test_a_field_out_of_range_is_a_bad_request_for_that_add_only(fields: dict[str, int]) -> None:
    good = add_frame()
    first, bad, last = decode_adds(good + add_frame(**fields) + good)
    assert bad.fault is BookieCode.BAD_REQUEST
    assert (bad.ledger, bad.entry) == (fields.get("ledger", 7), fields.get("entry", 3))
    assert first == last == only(good)
    assert first.fault is None


@pytest.mark.parametrize("at", range(ADD.size, ADD.size + ENVELOPE.size + 7))
def test_a_flipped_bit_anywhere_in_the_envelope_is_corrupt(at: int) -> None:
    frame = bytearray(add_frame())
    frame[at] ^= 0x10
    add = only(bytes(frame))
    assert add.fault is BookieCode.CORRUPT
    assert add.envelope == b""


def test_the_largest_payload_passes_and_one_byte_more_is_too_large() -> None:
    largest = add_frame(payload=bytes(ENTRY_BYTES_MAX), length=ENTRY_BYTES_MAX)
    larger = add_frame(payload=bytes(ENTRY_BYTES_MAX + 1), length=ENTRY_BYTES_MAX + 1)
    faults = [add.fault for add in decode_adds(largest + larger + add_frame())]
    assert faults == [None, BookieCode.TOO_LARGE, None]


@pytest.mark.parametrize("cut", range(1, ADD.size + ENVELOPE.size + 7))
def test_a_frame_cut_anywhere_is_damaged_whole(cut: int) -> None:
    frame = add_frame()
    with pytest.raises(FrameDamaged):
        decode_adds(frame + frame[:cut])


@pytest.mark.parametrize("size", [0, ENVELOPE.size - 1, 2**32 - 1])
def test_an_envelope_size_that_cannot_be_damages_the_frame(size: int) -> None:
    frame = bytearray(add_frame() + add_frame())
    struct.pack_into(">I", frame, 1, size)
    with pytest.raises(FrameDamaged):
        decode_adds(bytes(frame))


@pytest.mark.parametrize("size", [0, 3, ENVELOPE.size - 1])
def test_a_short_envelope_is_damaged(size: int) -> None:
    with pytest.raises(EnvelopeDamaged):
        decode_envelope(bytes(size))


def test_an_envelope_with_a_flipped_bit_is_damaged() -> None:
    envelope = bytearray(encode_envelope(ledger=1, entry=2, confirmed=1, length=3, payload=[b"x"]))
    for at in range(len(envelope)):
        envelope[at] ^= 1
        with pytest.raises(EnvelopeDamaged):
            decode_envelope(bytes(envelope))
        envelope[at] ^= 1
    assert decode_envelope(bytes(envelope)).payload == b"x"


@given(st.lists(st.tuples(I64, I64, st.sampled_from(BookieCode)), max_size=5))
def test_acks_survive_the_wire(acks: list[tuple[int, int, BookieCode]]) -> None:
    frame = b"".join(encode_ack(*ack) for ack in acks)
    assert list(decode_acks(memoryview(frame))) == acks


@given(
    st.lists(
        st.tuples(I64, st.integers(0, 2**40), st.integers(1, 5), st.sampled_from(BookieCode)),
        max_size=5,
    )
)
def test_an_ack_of_many_is_as_many_acks(runs: list[tuple[int, int, int, BookieCode]]) -> None:
    together = b"".join(encode_ack(a, first, code, count=n) for a, first, n, code in runs)
    one_by_one = b"".join(
        encode_ack(ledger, entry, code)
        for ledger, first, count, code in runs
        for entry in range(first, first + count)
    )
    assert list(decode_acks(together)) == list(decode_acks(one_by_one))
    assert [(a, r.start, len(r), code) for a, r, code in decode_ack_runs(together)] == runs


@pytest.mark.parametrize("count", [0, ACK_ENTRIES_MAX + 1, 2**32 - 1])
def test_an_ack_of_a_count_that_cannot_be_is_damaged(count: int) -> None:
    with pytest.raises(FrameDamaged):
        list(decode_acks(ACK.pack(1, 2, count, 1)))


@pytest.mark.parametrize("frame", [b"x", bytes(ACK.size - 1), ACK.pack(1, 2, 3, 1) + b"x"])
def test_acks_that_do_not_divide_are_damaged(frame: bytes) -> None:
    with pytest.raises(FrameDamaged):
        list(decode_acks(frame))


@given(st.lists(st.tuples(I64, st.sampled_from(BookieCode), PAYLOAD.filter(len)), max_size=5))
def test_read_answers_survive_the_wire(
    answers: list[tuple[int, BookieCode, bytes]],
) -> None:
    expected = [
        ReadAnswer(entry, code, envelope if code is BookieCode.OK else b"")
        for entry, code, envelope in answers
    ]
    frame = b"".join(part for answer in expected for part in encode_read_answer(*answer))
    assert list(decode_read_answers(memoryview(frame))) == expected


@pytest.mark.parametrize(
    "frame",
    [
        READ.pack(1, BookieCode.OK, 4) + b"abc",  # cut
        READ.pack(1, BookieCode.OK, 0),  # OK, and nothing there
        READ.pack(1, BookieCode.NO_SUCH_ENTRY, 1) + b"x",
        READ.pack(1, 0, 0),
        bytes(READ.size - 1),
    ],
)
def test_read_answers_that_contradict_themselves_are_damaged(frame: bytes) -> None:
    with pytest.raises(FrameDamaged):
        list(decode_read_answers(frame))


def run_by_steps(frame: bytes, ledger: int, first: int) -> tuple[list[bytes], BookieCode]:
    """The expected result of `decode_run`, computed one answer at a time."""
    found: list[bytes] = []
    for answer in decode_read_answers(frame):
        expected = first + len(found)
        if answer.entry == expected and answer.code is not BookieCode.OK:
            return found, answer.code
        try:
            envelope = decode_envelope(answer.envelope)
        except EnvelopeDamaged:
            return found, BookieCode.CORRUPT
        if (answer.entry, envelope.entry, envelope.ledger) != (expected, expected, ledger):
            return found, BookieCode.CORRUPT
        found.append(answer.envelope)
    return found, BookieCode.OK


@given(
    answers=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 3),
            st.sampled_from([7, 7, 7, 8]),
            st.sampled_from(
                [BookieCode.OK] * 5 + [BookieCode.NO_SUCH_ENTRY, BookieCode.DAMAGED_STORE]
            ),
            st.binary(max_size=3),
        ),
        max_size=5,
    ),
    straight=st.booleans(),
    damage=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 255)), max_size=1),
    cut=st.integers(0, 20),
)
@settings(max_examples=400, deadline=None)
def test_a_decoded_run_equals_its_single_answers(
    answers: list[tuple[int, int, int, BookieCode, bytes]],
    *,
    straight: bool,
    damage: list[tuple[int, int]],
    cut: int,
) -> None:
    frame = bytearray()
    for at, (entry, inner, ledger, code, payload) in enumerate(answers):
        numbers = (at, at) if straight else (entry, inner)
        envelope = encode_envelope(
            ledger=ledger, entry=numbers[1], confirmed=-1, length=9, payload=[payload]
        )
        given = envelope if code is BookieCode.OK else b""
        frame += b"".join(encode_read_answer(numbers[0], code, given))
    for at, bits in damage:
        if at < len(frame):
            frame[at] ^= bits
    damaged = bytes(frame[: len(frame) - cut] if cut > 12 else frame)
    try:
        expected, code = run_by_steps(damaged, 7, 0)
    except FrameDamaged:  # answers before the damage may have been returned already
        expected, code = [], BookieCode.CORRUPT
    try:
        found, got = decode_run(memoryview(damaged), ledger=7, first=0)
    except FrameDamaged:
        found, got = [], BookieCode.CORRUPT
    if code is BookieCode.CORRUPT:
        assert got is BookieCode.CORRUPT
        assert found[: len(expected)] == expected[: len(found)]
    else:
        assert (found, got) == (expected, code)


def test_a_run_has_memory_of_its_own() -> None:
    envelopes = [
        encode_envelope(ledger=1, entry=e, confirmed=-1, length=e * 2, payload=[b"ab"])
        for e in (5, 6)
    ]
    frame = bytearray(b"".join(encode_run(5, envelopes)))
    found, code = decode_run(memoryview(frame), ledger=1, first=5)
    frame[:] = bytes(len(frame))
    assert code is BookieCode.OK
    assert found == envelopes


@pytest.mark.parametrize("code", [0, 11, 99, 109, 255])
def test_an_unknown_code_is_damage_and_never_taken_for_an_answer(code: int) -> None:
    with pytest.raises(FrameDamaged, match=f"unknown code {code}"):
        list(decode_acks(ACK.pack(1, 2, 1, code)))


def test_codes_from_1_to_99_are_definite() -> None:
    definite = {code for code in BookieCode if code.definite}
    assert definite == {code for code in BookieCode if 1 <= code <= 99}
    assert BookieCode.NO_SUCH_ENTRY in definite
    assert not {BookieCode.IO_ERROR, BookieCode.WRONG_INCARNATION, BookieCode.CORRUPT} & definite


@given(st.text(max_size=CLIENT_NAME_BYTES_MAX // 4))
def test_hellos_survive_the_wire(name: str) -> None:
    assert decode_hello(memoryview(encode_hello(INCARNATION, name))) == Hello(INCARNATION, name)


def test_hello_replies_survive_the_wire() -> None:
    for code in BookieCode:
        reply = encode_hello_reply(code, INCARNATION, 2**64 - 1)
        assert decode_hello_reply(reply) == HelloReply(code, INCARNATION, 2**64 - 1)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        encode_hello(INCARNATION, "n")[:-1],
        encode_hello(INCARNATION, "n") + b"x",
        b"\x02" + encode_hello(INCARNATION, "n")[1:],  # a later version
        HELLO.pack(1, b"G" * 32, 0),  # not hexadecimal
        HELLO.pack(1, b"\xff" * 32, 0),
        HELLO.pack(1, INCARNATION.encode(), 1) + b"\xff",  # not UTF-8
        HELLO.pack(1, INCARNATION.encode(), CLIENT_NAME_BYTES_MAX + 1)
        + b"n" * (CLIENT_NAME_BYTES_MAX + 1),
    ],
)
def test_an_invalid_hello_is_damaged(frame: bytes) -> None:
    with pytest.raises(FrameDamaged):
        decode_hello(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        encode_hello_reply(BookieCode.OK, INCARNATION, 1)[:-1],
        encode_hello_reply(BookieCode.OK, INCARNATION, 1) + b"x",
        HELLO_REPLY.pack(2, 1, INCARNATION.encode(), 1),
        HELLO_REPLY.pack(1, 0, INCARNATION.encode(), 1),
    ],
)
def test_an_invalid_hello_reply_is_damaged(frame: bytes) -> None:
    with pytest.raises(FrameDamaged):
        decode_hello_reply(frame)


@given(st.lists(st.lists(PAYLOAD, max_size=3), max_size=5), st.integers(0, 2**40))
def test_adds_of_a_run_equal_single_adds(payloads: list[list[bytes]], length: int) -> None:
    expected, before = [], length
    for entry, payload in enumerate(payloads, 8):
        length += sum(map(len, payload))
        expected.append(
            encode_add(
                ledger=7, entry=entry, confirmed=5, length=length, payload=payload, master_key=9
            )
        )
    assert expected == encode_adds(
        ledger=7, first_entry=8, confirmed=5, length=before, payloads=payloads, master_key=9
    )
