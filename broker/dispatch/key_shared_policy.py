"""How a Key_Shared consumer wants keys to be assigned, as its SUBSCRIBE command says it, and what
the broker's settings say about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class KeySharedMode(IntEnum):
    """How hash ranges are assigned to consumers. The numbers are those of Pulsar's protocol."""

    AUTO_SPLIT = 0  # the broker assigns the ranges
    STICKY = 1  # each consumer brings its own ranges


@dataclass(frozen=True, slots=True)
class HashRange:
    """Hash slots first..last, both ends included. Not validated: the dispatcher accepts or refuses
    the ranges of a consumer."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class KeySharedPolicy:
    """The Key_Shared attributes of one consumer."""

    mode: KeySharedMode = KeySharedMode.AUTO_SPLIT
    ranges: tuple[HashRange, ...] = ()  # STICKY only
    allow_out_of_order: bool = False

    def __str__(self) -> str:
        order = "out of order allowed" if self.allow_out_of_order else "ordered by key"
        return f"{self.mode.name}, {order}"


@dataclass(frozen=True, slots=True)
class KeySharedSettings:
    """The broker's settings for Key_Shared subscriptions; the values here are Pulsar's defaults."""

    # AUTO_SPLIT: points of each consumer on the ring; 0: auto-split hash ranges, without a ring.
    ring_points: int = 100
    # An unblocked key waits so long, so that one read serves many of them.
    unblocking_interval_s: float = 0.010
    # Entries without a key: each has one of its own. False: they share NONE_KEY.
    spread_keyless: bool = True
    # Entries that wait for their consumer while the dispatcher reads on for the others: about 200
    # bytes each, 8 MB for a subscription.
    look_ahead_per_consumer: int = 4_000
    look_ahead_per_subscription: int = 40_000

    def __post_init__(self) -> None:
        assert self.ring_points >= 0
        assert self.unblocking_interval_s >= 0
        assert self.look_ahead_per_consumer > 0
        assert self.look_ahead_per_subscription > 0
