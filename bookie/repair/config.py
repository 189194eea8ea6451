"""How copies are restored: one frozen value, validated whole."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairConfig:
    """Raises ValueError, naming the field."""

    # A restart, an upgrade, a reboot: none takes longer, and copying a disk takes hours.
    lost_bookie_delay_s: float = 600.0
    # More missing at once is a network or a metadata store in trouble rather than so many broken
    # disks. One: what an ack quorum of two survives.
    lost_at_once_max: int = 1
    # A look at each ledger's metadata, besides whenever bookies come or go.
    audit_period_s: float = 3600.0
    # In which every closed ledger's copies are compared with what they should be.
    check_period_s: float = 7 * 86400.0
    # Of the metadata store: a million ledgers are looked at within a quarter of an hour.
    scan_ledgers_per_s: int = 1000
    # Of one process: a bookie's disk of 1 TB is copied in two hours, and half of a 2 Gbit/s link
    # stays free.
    copy_bytes_per_s: int = 128 * MIB
    # Side by side: each has up to 1 MiB on its way, and twice 2 MiB that were or are being read.
    ledgers_at_once: int = 4
    # For the writer of a ledger to replace a lost bookie by itself, before the ledger is taken from
    # it as from a dead one.
    open_grace_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("audit_period_s", "check_period_s", "scan_ledgers_per_s", "ledgers_at_once"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        for name in ("lost_bookie_delay_s", "lost_at_once_max", "open_grace_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.copy_bytes_per_s < MIB:
            raise ValueError("copy_bytes_per_s must be at least 1 MiB")
