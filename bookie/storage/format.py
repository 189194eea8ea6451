"""The bookie's data on disk, as bytes. FORMAT.md describes every layout in this file.

Keys sort like their ids, because ids are never negative and are encoded in big-endian order.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import google_crc32c

IDENTITY_KEY: Final = b"I"
ENTRY_KEY: Final = struct.Struct(">cqq")
LEDGER_KEY: Final = struct.Struct(">cq")  # also the layout of tombstone keys
ID_MAX: Final = 2**63 - 1

LEDGER_RECORD_VERSION: Final = 1
TOMBSTONE_VERSION: Final = 1
IDENTITY_VERSION: Final = 1
WATERMARK_VERSION: Final = 1

WATERMARK_SLOT_BYTES: Final = 4096  # the two slots never share a sector or a page
WATERMARK_SLOTS: Final = 2

_LEDGER_RECORD: Final = struct.Struct(">IBBQQ")  # crc, version, flags, master key, created
_FENCED: Final = 1
_VERIFIED: Final = 2
_RECLAIMED: Final = 1
_WATERMARK: Final = struct.Struct(">IBBQQ")  # crc, version, flags, boot epoch, sequence
_CLOSED: Final = 1
_NAMES_MANIFEST: Final = 2
_MANIFEST_STATE: Final = struct.Struct(">IQQQ")  # crc, number, bytes, flushed
_CRC: Final = struct.Struct(">I")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HEX: Final = re.compile(r"[0-9a-f]{32}")
_IDENTITY: Final = re.compile(
    rb"magnetar bookie (?P<version>\d{1,9})\n"
    rb"(?P<body>(?:[a-z_]+ = [A-Za-z0-9._-]+\n)+)"
    rb"crc32c = (?P<crc>[0-9a-f]{8})\n"
)
_IDENTITY_BYTES_MAX: Final = 4096
# Each start of a bookie draws a token and writes it to the cookie. An intent is the token of a
# start that ended before it knew the outcome of this write. An intent takes 33 bytes, so all
# intents take 2,112 of the 4,096 bytes. The other lines take less than 700 bytes.
INTENTS_MAX: Final = 64
_IDENTITY_FIELDS: Final = frozenset({"bookie", "cluster", "incarnation", "boot_epoch", "state"})
_IDENTITY_FIELDS_LATER: Final = frozenset({"former", "start", "intents"})  # may be absent
_NONE: Final = "none"


class FormatDamaged(ValueError):
    """Stored bytes do not have the expected format; `reason` says why."""

    definite = False

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# -- Keys --------------------------------------------------------------------------------------


def entry_key(ledger: int, entry: int) -> bytes:
    return ENTRY_KEY.pack(b"E", ledger, entry)


def ledger_key(ledger: int) -> bytes:
    return LEDGER_KEY.pack(b"L", ledger)


def key_after_ledger(ledger: int) -> bytes:
    """Return a key between this ledger's key and the next ledger's key. For -1, the key is before
    the keys of all ledgers."""
    return ledger_key(ledger) + b"\0" if ledger >= 0 else b"L"


def tombstone_key(ledger: int) -> bytes:
    return LEDGER_KEY.pack(b"T", ledger)


def key_tombstone(key: bytes) -> int:
    kind, ledger = LEDGER_KEY.unpack(key)
    assert kind == b"T"
    return int(ledger)


def key_entry(key: bytes) -> tuple[int, int]:
    """Return the ledger and the entry of an entry key."""
    kind, ledger, entry = ENTRY_KEY.unpack(key)
    assert kind == b"E"
    return ledger, entry


def key_ledger(key: bytes) -> int:
    kind, ledger = LEDGER_KEY.unpack(key)
    assert kind == b"L"
    return int(ledger)


# -- The ledger record --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """The stored state of a ledger on a bookie besides its entries."""

    master_key: int
    fenced: bool
    created_ms: int  # the time of this bookie's wall clock; for information only
    verified: bool = False  # the metadata once confirmed that this bookie takes ordinary adds

    def fence(self) -> LedgerRecord:
        return replace(self, fenced=True)

    def verify(self) -> LedgerRecord:
        return replace(self, verified=True)


def encode_ledger_record(record: LedgerRecord) -> bytes:
    flags = (_FENCED if record.fenced else 0) | (_VERIFIED if record.verified else 0)
    sealed = _LEDGER_RECORD.pack(
        0, LEDGER_RECORD_VERSION, flags, record.master_key, record.created_ms
    )
    return _seal(sealed)


def decode_ledger_record(value: bytes) -> LedgerRecord:
    """Decode a ledger record. Raises FormatDamaged."""
    flags, master_key, created_ms = _open(
        value, _LEDGER_RECORD, LEDGER_RECORD_VERSION, _FENCED | _VERIFIED
    )
    return LedgerRecord(master_key, bool(flags & _FENCED), created_ms, bool(flags & _VERIFIED))


# -- The tombstone of a deleted ledger ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tombstone:
    deleted_ms: int  # the time of this bookie's wall clock
    reclaimed: bool = False  # the ledger's space was reclaimed


def encode_tombstone(stone: Tombstone) -> bytes:
    flags = _RECLAIMED if stone.reclaimed else 0
    return _seal(_LEDGER_RECORD.pack(0, TOMBSTONE_VERSION, flags, 0, stone.deleted_ms))


def decode_tombstone(value: bytes) -> Tombstone:
    """Decode a tombstone. Raises FormatDamaged."""
    flags, _, deleted_ms = _open(value, _LEDGER_RECORD, TOMBSTONE_VERSION, _RECLAIMED)
    return Tombstone(deleted_ms, bool(flags & _RECLAIMED))


# -- The watermark -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ManifestState:
    """A past state of RocksDB's MANIFEST file, which lists the tables of the store."""

    number: int  # the number of the file
    size_bytes: int  # the file had at least this many bytes, all of them intact
    flushed: int  # every operation up to this number was in tables that the file names


@dataclass(frozen=True, slots=True)
class Watermark:
    """Every operation up to `sequence` was on disk when the watermark was written."""

    boot_epoch: int
    sequence: int
    closed: bool = False  # True: the store was closed cleanly, and not written to since then
    manifest: ManifestState | None = None  # None: not recorded


def encode_watermark(watermark: Watermark) -> bytes:
    manifest = watermark.manifest
    flags = (_CLOSED if watermark.closed else 0) | (0 if manifest is None else _NAMES_MANIFEST)
    slot = _seal(
        _WATERMARK.pack(0, WATERMARK_VERSION, flags, watermark.boot_epoch, watermark.sequence)
    )
    if manifest is None:
        return slot
    return slot + _seal(
        _MANIFEST_STATE.pack(0, manifest.number, manifest.size_bytes, manifest.flushed)
    )


def decode_watermark(slots: bytes) -> Watermark:
    """Return the later watermark of the two slots. One slot may be torn. Raises FormatDamaged when
    both slots are torn.

    In an idle store both slots have the same sequence. Then the slot with a clean close counts as
    later. If both slots or no slot has a clean close, the slot with the later MANIFEST counts.
    """
    found: list[Watermark] = []
    reasons: list[str] = []
    for at in range(0, WATERMARK_SLOTS * WATERMARK_SLOT_BYTES, WATERMARK_SLOT_BYTES):
        try:
            found.append(_decode_slot(slots[at : at + WATERMARK_SLOT_BYTES]))
        except FormatDamaged as damage:
            reasons.append(damage.reason)
    if not found:
        raise FormatDamaged(f"neither slot is whole ({'; '.join(reasons)})")
    return max(found, key=_age)


def _age(watermark: Watermark) -> tuple[int, int, bool, int, int]:
    manifest = watermark.manifest or ManifestState(0, 0, 0)
    return (
        watermark.boot_epoch,
        watermark.sequence,
        watermark.closed,
        manifest.number,
        manifest.size_bytes,
    )


def _decode_slot(slot: bytes) -> Watermark:
    flags, boot_epoch, sequence = _open(
        slot[: _WATERMARK.size], _WATERMARK, WATERMARK_VERSION, _CLOSED | _NAMES_MANIFEST
    )
    manifest = None
    if flags & _NAMES_MANIFEST:
        value = slot[_WATERMARK.size : _WATERMARK.size + _MANIFEST_STATE.size]
        crc, *fields = _MANIFEST_STATE.unpack(value)
        if google_crc32c.value(value[_CRC.size :]) != crc:
            raise FormatDamaged("checksum mismatch")
        manifest = ManifestState(*fields)
    return Watermark(boot_epoch, sequence, bool(flags & _CLOSED), manifest)


def _seal(packed: bytes) -> bytes:
    covered = packed[_CRC.size :]
    return _CRC.pack(google_crc32c.value(covered)) + covered


def _open(
    value: bytes, layout: struct.Struct, version_known: int, flags_known: int
) -> tuple[int, int, int]:
    """Check a record of `_seal`, and return its flags and two numbers. Raises FormatDamaged."""
    if len(value) != layout.size:
        raise FormatDamaged(f"{len(value)} bytes instead of {layout.size}")
    crc, version, flags, first, second = layout.unpack(value)
    if google_crc32c.value(value[_CRC.size :]) != crc:
        raise FormatDamaged("checksum mismatch")
    if version != version_known:
        raise FormatDamaged(f"format version {version}, this program knows {version_known}")
    if flags & ~flags_known:
        raise FormatDamaged(f"unknown flags {flags:#x}")
    return flags, first, second


# -- The identity file -------------------------------------------------------------------------


class DirectoryState(StrEnum):
    """The state of a bookie's directory."""

    # The store and the watermark belong to the former incarnation. The bookie will move them away.
    REPLACING = "replacing"
    FORMATTING = "formatting"  # the bookie is making the store and the watermark; both are empty
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The content of the identity file, which names the bookie that owns a directory."""

    bookie: str
    cluster: str
    incarnation: str  # 32 hex digits, made with the store
    former: str | None  # the incarnation that this one replaced. None: this is the first one
    # The boot epoch of the running start, or of the last start if the bookie does not run. A new
    # incarnation continues the count of its predecessor.
    boot_epoch: int
    # The token of the same start, 32 hex digits: it tells two copies of a directory apart. "": the
    # start has no token.
    start: str
    state: DirectoryState
    # The tokens of earlier starts with the same boot epoch, oldest first. A cookie write of such a
    # start may still reach the metadata store.
    intents: tuple[str, ...] = ()


def is_name(name: str) -> bool:
    """Return whether `name` is a valid name of a bookie or cluster. A name has 1 to 128 characters:
    letters, digits, '.', '_' and '-'. The first character is a letter or a digit."""
    return _NAME.fullmatch(name) is not None


def is_incarnation(text: str) -> bool:
    return _HEX.fullmatch(text) is not None


def encode_identity(identity: Identity) -> bytes:
    """Encode the identity as lines of readable text. The last line is the checksum of all lines
    before it."""
    assert is_name(identity.bookie)
    assert is_name(identity.cluster)
    assert is_incarnation(identity.incarnation)
    assert identity.former is None or is_incarnation(identity.former)
    assert not identity.start or is_incarnation(identity.start)
    assert all(is_incarnation(intent) for intent in identity.intents)
    assert len(identity.intents) <= INTENTS_MAX
    intents = f"intents = {'.'.join(identity.intents)}\n" if identity.intents else ""
    text = (
        f"magnetar bookie {IDENTITY_VERSION}\n"
        f"bookie = {identity.bookie}\n"
        f"cluster = {identity.cluster}\n"
        f"incarnation = {identity.incarnation}\n"
        f"former = {identity.former or _NONE}\n"
        f"boot_epoch = {identity.boot_epoch}\n"
        f"start = {identity.start or _NONE}\n"
        f"{intents}"
        f"state = {identity.state}\n"
    ).encode()
    return text + f"crc32c = {google_crc32c.value(text):08x}\n".encode()


def decode_identity(text: bytes) -> Identity:
    """Decode an identity file. Raises FormatDamaged."""
    match = _IDENTITY.fullmatch(text) if len(text) <= _IDENTITY_BYTES_MAX else None
    if match is None:
        raise FormatDamaged("not an identity file")
    if google_crc32c.value(text[: match.start("crc") - len(b"crc32c = ")]) != int(match["crc"], 16):
        raise FormatDamaged("checksum mismatch")
    if int(match["version"]) != IDENTITY_VERSION:
        raise FormatDamaged(
            f"format version {int(match['version'])}, this program knows {IDENTITY_VERSION}"
        )
    fields = dict(line.split(" = ", 1) for line in match["body"].decode().splitlines())
    return _identity_of(fields)


def _identity_of(fields: dict[str, str]) -> Identity:
    if fields.keys() - _IDENTITY_FIELDS_LATER != _IDENTITY_FIELDS:
        raise FormatDamaged(f"unexpected fields {sorted(fields)}")
    incarnation, former, start = (
        fields.get(name, _NONE) for name in ("incarnation", "former", "start")
    )
    for name, value in (("former", former), ("start", start)):
        if value != _NONE and not is_incarnation(value):
            raise FormatDamaged(f"the field {name} is not 32 hex digits")
    intents = tuple(fields["intents"].split(".")) if "intents" in fields else ()
    if len(intents) > INTENTS_MAX or not all(is_incarnation(intent) for intent in intents):
        raise FormatDamaged(
            f"the field intents is not a list of up to {INTENTS_MAX} ids of 32 hex digits"
        )
    if not is_incarnation(incarnation):
        raise FormatDamaged("the incarnation is not 32 hex digits")
    if not fields["boot_epoch"].isdecimal() or fields["state"] not in set(DirectoryState):
        raise FormatDamaged("the boot epoch or the state is invalid")
    return Identity(
        bookie=fields["bookie"],
        cluster=fields["cluster"],
        incarnation=incarnation,
        former=None if former == _NONE else former,
        boot_epoch=int(fields["boot_epoch"]),
        start="" if start == _NONE else start,
        state=DirectoryState(fields["state"]),
        intents=intents,
    )
