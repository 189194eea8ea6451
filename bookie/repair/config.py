"""The settings of repair: one frozen value, validated as a whole."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairConfig:
    """An invalid value raises a ValueError that names the field."""

    # Delay before a missing bookie is declared lost. It is longer than a restart, an upgrade or a
    # reboot, because copying a disk takes hours.
    lost_bookie_delay_s: float = 600.0
    # If more bookies than this, or more than a third, are missing at once, none is declared lost:
    # the network or the metadata store is a likelier cause than broken disks. An ack quorum of two
    # survives the loss of one bookie.
    lost_at_once_max: int = 1
    # Period of audits, besides those after a change of the bookies.
    audit_period_s: float = 3600.0
    # Period in which every closed ledger's copies are compared with the expected ones.
    check_period_s: float = 7 * 86400.0
    # The rate of reads from the metadata store: a million ledgers take about a quarter of an hour.
    scan_ledgers_per_s: int = 1000
    # The rate at which one process reads entries to copy them: a bookie's disk of 1 TB is copied in
    # two hours, and half of a 2 Gbit/s link stays free. With E > Qw, the process reads some entries
    # that it does not copy.
    copy_bytes_per_s: int = 128 * MIB
    # Concurrent ledgers: each has up to 1 MiB in flight, and two reads of 2 MiB.
    ledgers_at_once: int = 4
    # Time for a ledger's writer to replace a lost bookie, before the replicator recovers the
    # ledger.
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
