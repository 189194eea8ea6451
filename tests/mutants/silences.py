"""A bug that must show when two brokers serve one topic at the same time."""

from __future__ import annotations

from dataclasses import replace

from mutants import bookies
from mutants.plant import MUTANTS, enter
from world.scenarios import SCENARIOS

__all__ = ["bookies"]

enter(
    replace(
        MUTANTS["a fenced ledger takes adds"],
        name="a fenced ledger takes the adds of an owner that was wrongly replaced",
        scene=SCENARIOS["silent"],
        seeds=12,
    )
)
