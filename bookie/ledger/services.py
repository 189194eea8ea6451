"""The services that the ledgers of a process share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magnetar.bookie.ledger.writer import WriterLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from random import Random

    from magnetar.bookie.ledger.bad_copies import BadCopies
    from magnetar.bookie.ledger.bookie_registry import BookieRegistry
    from magnetar.bookie.ledger.budget import ByteBudget
    from magnetar.bookie.ledger.config import LedgerConfig
    from magnetar.bookie.ledger.ensembles import Ensembles
    from magnetar.bookie.ledger.health import BookieHealth
    from magnetar.bookie.ledger.pool import PeerPool
    from magnetar.bookie.ledger.records import LedgerRecords


@dataclass(frozen=True, slots=True)
class Services:
    config: LedgerConfig
    records: LedgerRecords
    directory: BookieRegistry
    pool: PeerPool
    health: BookieHealth
    bad_copies: BadCopies
    ensembles: Ensembles
    budget: ByteBudget
    random: Random
    spawn: Callable[[Coroutine[Any, Any, None]], None]  # starts a task in `Ledgers.run`'s group

    @property
    def limits(self) -> WriterLimits:
        return WriterLimits(
            add_timeout_s=self.config.add_timeout_s,
            quorum_timeout_s=self.config.quorum_timeout_s,
            changes_max=self.config.ensemble_changes_max,
            change_delay_s=self.config.ensemble_change_delay_s,
        )
