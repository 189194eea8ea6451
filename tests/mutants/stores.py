"""Bugs in the store: a bookie's use of RocksDB, and the watermark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mutants.plant import Mutant, enter
from rocksdict import DBRecoveryMode
from world.scenarios import SCENARIOS

if TYPE_CHECKING:
    from mutants.plant import Fired

ROCKS = "magnetar.bookie.storage.rocks:"
COMMIT = "magnetar.bookie.storage.commit:GroupCommit."
KILLING = SCENARIOS["T50"]


def _to_the_kernel_alone(right: Any, fired: Fired) -> Any:
    def sync(self: Any) -> None:
        fired()
        self._store.flush_wal(False)

    return sync


enter(
    Mutant(
        name="a sync writes the log to the kernel only",
        breaks="§6.3: flush_wal(True) before any acknowledgement",
        wrong={ROCKS + "RocksStorage.sync": _to_the_kernel_alone},
        caught_by=frozenset({"T50"}),
        scene=KILLING,
        seeds=10,
    )
)


def _notes_what_is_written(right: Any, fired: Fired) -> Any:
    def _write_batch(self: Any, puts: Any, size: int) -> None:
        right(self, puts, size)
        fired()
        self._note_durable(self._storage.sequence())

    return _write_batch


def _notes_nothing(right: Any, fired: Fired) -> Any:
    def _sync(self: Any, *_: Any) -> tuple[bool, float]:
        self._storage.sync()
        return self._pressed(), 0.0

    return _sync


enter(
    Mutant(
        name="the watermark is ahead of the log",
        breaks="watermark.py: a complete store would count as damaged",
        wrong={COMMIT + "_write_batch": _notes_what_is_written, COMMIT + "_sync": _notes_nothing},
        caught_by=frozenset({"T50"}),
        scene=KILLING,
        seeds=10,
    )
)


def _no_torn_end(right: Any, fired: Fired) -> Any:
    def _options(*, create: bool) -> Any:
        options = right(create=create)
        options.set_wal_recovery_mode(DBRecoveryMode.absolute_consistency())
        fired()
        return options

    return _options


enter(
    Mutant(
        name="a log that ends inside a record is refused",
        breaks="§6.3: a power cut leaves such ends; the missing part was never acknowledged",
        wrong={ROCKS + "_options": _no_torn_end},
        caught_by=frozenset({"T50"}),
        scene=KILLING,
        seeds=10,
    )
)
