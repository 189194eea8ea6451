"""The ledger settings of a process: one frozen value, validated as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from magnetar.bookie.ledger.quorum import Quorum

MIB = 1 << 20
_MAY_BE_0 = frozenset({"ensemble_change_delay_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """An invalid value raises a ValueError that says what is wrong.

    Memory for entries in flight has three limits. `unconfirmed_bytes_max` is the limit of one
    ledger for entries that are not confirmed. `retained_bytes_max` is the limit of the process. At
    these two limits, callers wait in `wait_room`. `lag_bytes_max` is the limit for entries that are
    kept only for one late bookie. Above it, the bookie counts as failed, if the others are enough
    to confirm.
    """

    ensemble_size: int = 3
    write_quorum: int = 3
    ack_quorum: int = 2
    # The fewest copies of a new ledger when few bookies answer. None: the ack quorum.
    min_write_quorum: int | None = None
    # One bookie stores less than 160 MB/s. At 160 MB/s, 16 MiB is a tenth of a second, which is
    # several round trips.
    unconfirmed_bytes_max: int = 16 * MIB
    # A bookie that lags by more bytes counts as failed. This is half a second of the writes of
    # another bookie.
    lag_bytes_max: int = 64 * MIB
    retained_bytes_max: int = 256 * MIB
    add_timeout_s: float = 5.0  # a sync of an overloaded disk takes a second or two
    quorum_timeout_s: float = 30.0  # a restarting bookie returns sooner
    read_timeout_s: float = 5.0
    # After this time without an answer, the reader asks a second replica, too. This is ten times
    # the duration of a read of a cold range, and far shorter than a pause that a consumer notices.
    speculative_read_s: float = 0.5
    zone: str = ""  # the zone of this process: reads prefer replicas in the zone; "": no preference
    connect_timeout_s: float = 2.0
    metadata_timeout_s: float = 10.0
    # For this time a bookie with a lost connection keeps its seat, if the other bookies suffice to
    # confirm. 0: a spare replaces it at once. A restart takes one or two seconds. 0 is the safer
    # value: with a delay, entries confirmed during the absence have one copy fewer until a repair.
    ensemble_change_delay_s: float = 0.0
    # A bookie that failed once ranks behind bookies without a failure for twice this time, or until
    # the process reaches it again (`health.py`). This is longer than a short fault of disk or
    # network, and too short to overload the other bookies.
    health_half_life_s: float = 10.0
    # The limit of one ledger. Each change costs a round trip to the metadata store. If a ledger
    # needs more changes, failed bookies are not the cause.
    ensemble_changes_max: int = 32

    def __post_init__(self) -> None:
        quorum = self.quorum
        least = self.write_quorum_min
        if not quorum.ack_quorum <= least <= quorum.write_quorum:
            raise ValueError(
                f"min_write_quorum {least} must lie between the ack quorum and the write quorum"
                f" of {quorum}"
            )
        for name in ("unconfirmed_bytes_max", "lag_bytes_max", "retained_bytes_max"):
            if getattr(self, name) < MIB:
                raise ValueError(f"{name} must be at least 1 MiB")
        for name in self.__dataclass_fields__:
            if name.endswith("_s") and getattr(self, name) <= 0 and name not in _MAY_BE_0:
                raise ValueError(f"{name} must be positive")
        if self.ensemble_change_delay_s < 0:
            raise ValueError("ensemble_change_delay_s must not be negative")
        if self.ensemble_changes_max < 0:
            raise ValueError("ensemble_changes_max must not be negative")

    @property
    def quorum(self) -> Quorum:
        return Quorum(self.ensemble_size, self.write_quorum, self.ack_quorum)

    @property
    def write_quorum_min(self) -> int:
        return self.ack_quorum if self.min_write_quorum is None else self.min_write_quorum
