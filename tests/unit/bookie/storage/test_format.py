from __future__ import annotations

from dataclasses import replace

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.storage.format import (
    ID_MAX,
    INTENTS_MAX,
    WATERMARK_SLOT_BYTES,
    DirectoryState,
    FormatDamaged,
    Identity,
    LedgerRecord,
    ManifestState,
    Watermark,
    decode_identity,
    decode_ledger_record,
    decode_watermark,
    encode_identity,
    encode_ledger_record,
    encode_watermark,
    entry_key,
    is_name,
    key_after_ledger,
    key_entry,
    key_ledger,
    ledger_key,
)

IDS = st.integers(0, ID_MAX)
U64 = st.integers(0, 2**64 - 1)
IDENTITY = Identity(
    bookie="bookie-1.example",
    cluster="c0ffee",
    incarnation="0123456789abcdef" * 2,
    former="f" * 32,
    boot_epoch=12,
    start="0" * 32,
    state=DirectoryState.READY,
)
IDENTITY_TEXT = b"""\
magnetar bookie 1
bookie = bookie-1.example
cluster = c0ffee
incarnation = 0123456789abcdef0123456789abcdef
former = ffffffffffffffffffffffffffffffff
boot_epoch = 12
start = 00000000000000000000000000000000
state = ready
crc32c = d2f69997
"""


@given(st.tuples(IDS, IDS), st.tuples(IDS, IDS))
def test_keys_sort_like_their_ids(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (entry_key(*one) < entry_key(*other)) == (one < other)
    assert key_entry(entry_key(*one)) == one
    assert (ledger_key(one[0]) < ledger_key(other[0])) == (one[0] < other[0])
    assert key_ledger(ledger_key(one[0])) == one[0]
    assert entry_key(*one) < ledger_key(other[0])  # entries and records do not mix


@given(st.integers(-1, ID_MAX), IDS)
def test_the_key_after_a_ledger_lies_between_it_and_the_next(ledger: int, other: int) -> None:
    assert (key_after_ledger(ledger) <= ledger_key(other)) == (other > ledger)


@given(U64, st.booleans(), U64)
def test_ledger_records_round_trip(master_key: int, fenced: bool, created_ms: int) -> None:
    record = LedgerRecord(master_key, fenced, created_ms, verified=created_ms % 2 == 0)
    assert decode_ledger_record(encode_ledger_record(record)) == record


def test_a_ledger_record_has_the_documented_bytes() -> None:
    encoded = encode_ledger_record(LedgerRecord(0xA1, True, 0xB2))
    assert encoded[4:] == bytes.fromhex("01 01 00000000000000a1 00000000000000b2")


def test_a_ledger_record_with_any_flipped_bit_is_damaged() -> None:
    encoded = encode_ledger_record(LedgerRecord(1, False, 2))
    for at in range(len(encoded) * 8):
        flipped = bytearray(encoded)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(FormatDamaged):
            decode_ledger_record(bytes(flipped))
    for size in range(len(encoded)):
        with pytest.raises(FormatDamaged):
            decode_ledger_record(encoded[:size])


def slots(first: bytes, second: bytes) -> bytes:
    return first.ljust(WATERMARK_SLOT_BYTES, b"\0") + second.ljust(WATERMARK_SLOT_BYTES, b"\0")


@given(st.tuples(U64, U64, st.booleans()), st.tuples(U64, U64, st.booleans()))
def test_the_later_watermark_counts(
    one: tuple[int, int, bool], other: tuple[int, int, bool]
) -> None:
    stored = slots(encode_watermark(Watermark(*one)), encode_watermark(Watermark(*other)))
    assert decode_watermark(stored) == Watermark(*max(one, other))


@pytest.mark.parametrize("torn", [b"", b"\0" * 22, b"torn", encode_watermark(Watermark(9, 9))[:21]])
def test_the_other_slot_counts_if_one_is_torn(torn: bytes) -> None:
    whole = encode_watermark(Watermark(3, 700))
    assert decode_watermark(slots(whole, torn)) == Watermark(3, 700)
    assert decode_watermark(slots(torn, whole)) == Watermark(3, 700)
    with pytest.raises(FormatDamaged, match="neither slot is whole"):
        decode_watermark(slots(torn, torn))


@given(U64, U64, st.booleans(), st.builds(ManifestState, U64, U64, U64), st.integers(0, 49))
def test_a_watermark_may_name_a_manifest(
    epoch: int, sequence: int, closed: bool, manifest: ManifestState, at: int
) -> None:
    noted = Watermark(epoch, sequence, closed, manifest)
    whole = encode_watermark(noted)
    assert decode_watermark(slots(whole, b"")) == noted
    torn = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
    with pytest.raises(FormatDamaged):
        decode_watermark(slots(torn, b""))


def test_an_identity_file_has_the_documented_text() -> None:
    assert encode_identity(IDENTITY) == IDENTITY_TEXT
    assert decode_identity(IDENTITY_TEXT) == IDENTITY


@given(
    U64,
    st.sampled_from(DirectoryState),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True),
    st.none() | st.just("b" * 32),
    st.sampled_from(["", "c" * 32]),
    st.lists(st.sampled_from(["d" * 32, "e" * 32]), max_size=INTENTS_MAX).map(tuple),
)
def test_identities_round_trip(
    boot_epoch: int,
    state: DirectoryState,
    name: str,
    former: str | None,
    start: str,
    intents: tuple[str, ...],
) -> None:
    identity = Identity(
        bookie=name,
        cluster=name,
        incarnation="a" * 32,
        former=former,
        boot_epoch=boot_epoch,
        start=start,
        state=state,
        intents=intents,
    )
    assert decode_identity(encode_identity(identity)) == identity


def test_the_longest_identity_file_is_read() -> None:
    identity = replace(
        IDENTITY,
        bookie="b" * 128,
        cluster="c" * 128,
        boot_epoch=2**64 - 1,
        intents=("d" * 32,) * INTENTS_MAX,
    )
    assert decode_identity(encode_identity(identity)) == identity


def test_an_identity_file_with_any_changed_byte_is_damaged() -> None:
    for at in range(len(IDENTITY_TEXT)):
        for change in (0x01, 0x10):
            changed = bytearray(IDENTITY_TEXT)
            changed[at] ^= change
            with pytest.raises(FormatDamaged):
                decode_identity(bytes(changed))
    for size in range(len(IDENTITY_TEXT)):
        with pytest.raises(FormatDamaged):
            decode_identity(IDENTITY_TEXT[:size])


def test_an_identity_file_without_former_and_start_is_read() -> None:
    text = b"".join(
        line
        for line in IDENTITY_TEXT.splitlines(keepends=True)
        if not line.startswith((b"former", b"start", b"crc32c"))
    )
    decoded = decode_identity(text + b"crc32c = %08x\n" % google_crc32c.value(text))
    assert decoded == replace(IDENTITY, former=None, start="")


@pytest.mark.parametrize(
    "body",
    [
        b"magnetar bookie 2\nbookie = b\n",  # a later version
        b"magnetar bookie 1\nbookie = b\n",  # fields are missing
        IDENTITY_TEXT[:-18].replace(b"state = ready", b"state = odd"),
        IDENTITY_TEXT[:-18].replace(b"incarnation = 0", b"incarnation = x"),
        IDENTITY_TEXT[:-18].replace(b"former = f", b"former = x"),
        IDENTITY_TEXT[:-18].replace(b"start = 0", b"start = x"),
        IDENTITY_TEXT[:-18].replace(b"state", b"intents = 0." + b"d" * 32 + b"\nstate"),
        IDENTITY_TEXT[:-18].replace(b"state", b"intents = " + b"d" * 32 + b".\nstate"),
        IDENTITY_TEXT[:-18].replace(b"former", b"formula"),
        IDENTITY_TEXT[:-18].replace(b"epoch = 12", b"epoch = -1"),
    ],
)
def test_an_identity_file_with_a_right_checksum_and_wrong_content_is_damaged(body: bytes) -> None:
    with pytest.raises(FormatDamaged):
        decode_identity(body + b"crc32c = %08x\n" % google_crc32c.value(body))


@pytest.mark.parametrize("name", ["a", "bookie-1", "10.0.0.1_3181", "x" * 128])
def test_valid_names_are_accepted(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", ["", "x" * 129, "-a", ".a", "a b", "a\n", "a/b", "ä", "a=b"])
def test_invalid_names_are_refused(name: str) -> None:
    assert not is_name(name)
