"""The settings for loading and unloading topics, and for deleting inactive topics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeConfig:
    loads_max: int = 100
    """Topics that one broker loads at once."""
    load_timeout_s: float = 60.0
    idle_unload_s: float = 300.0
    """The time after which a topic without clients and without work is unloaded. 0: never."""
    inactive_check_s: float = 60.0
    """The period of the search for inactive topics."""


LIFE_DEFAULTS: Final = LifeConfig()
