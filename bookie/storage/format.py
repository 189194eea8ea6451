"""What a bookie keeps on disk, as bytes. FORMAT.md describes every layout in this file.

Keys sort as their ids do: ids are never negative, and big-endian.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from typing import Final

import google_crc32c

IDENTITY_KEY: Final = b"I"
ENTRY_KEY: Final = struct.Struct(">cqq")
LEDGER_KEY: Final = struct.Struct(">cq")
ID_MAX: Final = 2**63 - 1

LEDGER_RECORD_VERSION: Final = 1
IDENTITY_VERSION: Final = 1
WATERMARK_VERSION: Final = 1

WATERMARK_SLOT_BYTES: Final = 4096  # so that the two slots never share a sector or a page
WATERMARK_SLOTS: Final = 2

_LEDGER_RECORD: Final = struct.Struct(">IBBQQ")  # crc, version, flags, master key, created
_FENCED: Final = 1
_WATERMARK: Final = struct.Struct(">IBBQQ")  # crc, version, flags, boot epoch, sequence
_CLOSED: Final = 1
_CRC: Final = struct.Struct(">I")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_INCARNATION: Final = re.compile(r"[0-9a-f]{32}")
_IDENTITY: Final = re.compile(
    rb"magnetar bookie (?P<version>\d{1,9})\n"
    rb"(?P<body>(?:[a-z_]+ = [A-Za-z0-9._-]+\n)+)"
    rb"crc32c = (?P<crc>[0-9a-f]{8})\n"
)
_IDENTITY_BYTES_MAX: Final = 4096


class FormatDamaged(ValueError):
    """Bytes that are not what they should be: `reason` says how one can see it."""

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
    """Sorts after the ledger's key and before the next one's; -1: before all of them."""
    return ledger_key(ledger) + b"\0" if ledger >= 0 else b"L"


def key_entry(key: bytes) -> tuple[int, int]:
    """(ledger, entry) of an entry key."""
    kind, ledger, entry = ENTRY_KEY.unpack(key)
    assert kind == b"E"
    return ledger, entry


def key_ledger(key: bytes) -> int:
    kind, ledger = LEDGER_KEY.unpack(key)
    assert kind == b"L"
    return int(ledger)


# -- The record of a ledger --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """What a bookie knows about a ledger besides its entries."""

    master_key: int
    fenced: bool
    created_ms: int  # by this bookie's wall clock; informative

    def fence(self) -> LedgerRecord:
        return replace(self, fenced=True)


def encode_ledger_record(record: LedgerRecord) -> bytes:
    flags = _FENCED if record.fenced else 0
    sealed = _LEDGER_RECORD.pack(
        0, LEDGER_RECORD_VERSION, flags, record.master_key, record.created_ms
    )
    return _seal(sealed)


def decode_ledger_record(value: bytes) -> LedgerRecord:
    """Raises FormatDamaged."""
    flags, master_key, created_ms = _open(value, _LEDGER_RECORD, LEDGER_RECORD_VERSION, _FENCED)
    return LedgerRecord(master_key, bool(flags & _FENCED), created_ms)


# -- The watermark -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Watermark:
    """Every operation up to `sequence` was on disk when this was written."""

    boot_epoch: int
    sequence: int
    closed: bool = False  # the store was closed in good order, and nothing was written since


def encode_watermark(watermark: Watermark) -> bytes:
    flags = _CLOSED if watermark.closed else 0
    return _seal(
        _WATERMARK.pack(0, WATERMARK_VERSION, flags, watermark.boot_epoch, watermark.sequence)
    )


def decode_watermark(slots: bytes) -> Watermark:
    """The later of the two slots; one of them may be torn. Raises FormatDamaged when both are."""
    found: list[Watermark] = []
    reasons: list[str] = []
    for at in range(0, WATERMARK_SLOTS * WATERMARK_SLOT_BYTES, WATERMARK_SLOT_BYTES):
        try:
            flags, boot_epoch, sequence = _open(
                slots[at : at + _WATERMARK.size], _WATERMARK, WATERMARK_VERSION, _CLOSED
            )
        except FormatDamaged as damage:
            reasons.append(damage.reason)
        else:
            found.append(Watermark(boot_epoch, sequence, bool(flags & _CLOSED)))
    if not found:
        raise FormatDamaged(f"neither slot is whole ({'; '.join(reasons)})")
    return max(found, key=lambda mark: (mark.boot_epoch, mark.sequence, mark.closed))


def _seal(packed: bytes) -> bytes:
    covered = packed[_CRC.size :]
    return _CRC.pack(google_crc32c.value(covered)) + covered


def _open(
    value: bytes, layout: struct.Struct, version_known: int, flags_known: int
) -> tuple[int, int, int]:
    """(flags, two numbers) of a sealed record."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose directory it is."""

    bookie: str
    cluster: str
    incarnation: str  # 32 hex digits, made when the directory was formatted
    boot_epoch: int  # of the last start, or of the one that is under way
    ready: bool  # False: formatting was begun and not yet finished, nothing was ever acknowledged


def is_name(name: str) -> bool:
    """Whether `name` can be a bookie's or a cluster's: 1 to 128 letters, digits, '.', '_', '-'."""
    return _NAME.fullmatch(name) is not None


def encode_identity(identity: Identity) -> bytes:
    """Lines of text, for people to read; the checksum covers all lines before it."""
    assert is_name(identity.bookie)
    assert is_name(identity.cluster)
    assert _INCARNATION.fullmatch(identity.incarnation)
    text = (
        f"magnetar bookie {IDENTITY_VERSION}\n"
        f"bookie = {identity.bookie}\n"
        f"cluster = {identity.cluster}\n"
        f"incarnation = {identity.incarnation}\n"
        f"boot_epoch = {identity.boot_epoch}\n"
        f"state = {'ready' if identity.ready else 'formatting'}\n"
    ).encode()
    return text + f"crc32c = {google_crc32c.value(text):08x}\n".encode()


def decode_identity(text: bytes) -> Identity:
    """Raises FormatDamaged."""
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
    if sorted(fields) != ["bookie", "boot_epoch", "cluster", "incarnation", "state"]:
        raise FormatDamaged(f"unexpected fields {sorted(fields)}")
    if not _INCARNATION.fullmatch(fields["incarnation"]):
        raise FormatDamaged("the incarnation is not 32 hex digits")
    if not fields["boot_epoch"].isdecimal() or fields["state"] not in ("ready", "formatting"):
        raise FormatDamaged("the boot epoch or the state makes no sense")
    return Identity(
        bookie=fields["bookie"],
        cluster=fields["cluster"],
        incarnation=fields["incarnation"],
        boot_epoch=int(fields["boot_epoch"]),
        ready=fields["state"] == "ready",
    )
