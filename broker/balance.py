"""The settings of how bundles are spread over brokers (ownership/balancer.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRules:
    enabled: bool = True
    """False: bundles are counted for takeovers, and none is moved."""
    period_s: float = 60.0
    """The time from the end of a round to the beginning of the next."""
    grace_s: float = 1_800.0
    """The time before a broker moves the same bundle again."""


BALANCE_DEFAULTS: Final = BalanceRules()
