"""How a process keeps its ledgers: one frozen value, validated whole."""

from __future__ import annotations

from dataclasses import dataclass

from magnetar.bookie.ledger.quorum import Quorum

MIB = 1 << 20
_MAY_BE_0 = frozenset({"ensemble_change_delay_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """Raises ValueError, naming the field.

    Memory for entries in flight: `unconfirmed_bytes_max` of each ledger until enough bookies
    answered, `lag_bytes_max` of each bookie that answers later than the others, and
    `retained_bytes_max` of the process in all. Whoever appends waits in `wait_room`.
    """

    ensemble_size: int = 3
    write_quorum: int = 3
    ack_quorum: int = 2
    # A new ledger is content with so few bookies when no more answer. None: the ack quorum.
    min_write_quorum: int | None = None
    # 16 MiB is a tenth of a second at 160 MB/s: more than any bookie takes, several round trips.
    unconfirmed_bytes_max: int = 16 * MIB
    # A bookie that lags by more counts as failed: half a second of what the others have stored.
    lag_bytes_max: int = 64 * MIB
    retained_bytes_max: int = 256 * MIB
    add_timeout_s: float = 5.0  # a sync of an overloaded disk takes a second or two
    quorum_timeout_s: float = 30.0  # a restarting bookie is back sooner
    read_timeout_s: float = 5.0
    # A second replica is asked beside a silent one: ten times what a read of a cold range takes,
    # and far less than a consumer would call a pause.
    speculative_read_s: float = 0.5
    zone: str = ""  # where this process is: replicas of its zone are read first; "": all are equal
    connect_timeout_s: float = 2.0
    metadata_timeout_s: float = 10.0
    # How long the seat of a bookie whose connection was lost is kept for it, while the others
    # suffice for confirming. 0: a spare takes it at once. A restart takes a bookie a second or two;
    # what is confirmed meanwhile it lacks until it is repaired, so the default is the safer one.
    ensemble_change_delay_s: float = 0.0
    # For about as long a bookie that failed once is chosen after the others (`health.py`): longer
    # than a hiccup of disk or network, too short to wear out the others.
    health_half_life_s: float = 10.0
    # Of one ledger; whoever needs more has another problem, and each costs a round to the store.
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
