"""All scenarios: the import of a module adds its scenarios to the list."""

from world.scenario import SCENARIOS
from world.scenarios import (
    balancing,
    changing,
    cluster,
    disks,
    fencing,
    killing,
    leaving,
    living,
    reading,
    recovering,
    repairing,
    rotting,
    sessions,
    silencing,
    subscribing,
    upgrading,
)

__all__ = [
    "SCENARIOS",
    "balancing",
    "changing",
    "cluster",
    "disks",
    "fencing",
    "killing",
    "leaving",
    "living",
    "reading",
    "recovering",
    "repairing",
    "rotting",
    "sessions",
    "silencing",
    "subscribing",
    "upgrading",
]
