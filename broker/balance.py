"""The settings for spreading bundles over brokers (ownership/balancer.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRules:
    enabled: bool = True
    """False: the broker counts bundles for takeovers only, and moves none."""
    period_s: float = 60.0
    """The time from the end of a round to the beginning of the next."""
    grace_s: float = 1_800.0
    """The minimum time between two moves of the same bundle by one broker."""


BALANCE_DEFAULTS: Final = BalanceRules()
