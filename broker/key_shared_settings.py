"""The settings of a broker for Key_Shared subscriptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class KeySharedSettings:
    """The broker's settings for Key_Shared subscriptions. The defaults are Pulsar's; Pulsar does
    not have `withheld_max` and `part_entries`."""

    enabled: bool = True
    # AUTO_SPLIT: points of each consumer on the ring; 0: auto-split hash ranges, without a ring.
    ring_points: int = 100
    # The time that an unblocked key waits, so that one read serves many keys.
    unblocking_interval_s: float = 0.010
    # Each entry without a key gets a key of its own. False: they share NONE_KEY.
    spread_keyless: bool = True
    # Entries that wait for their consumer while the dispatcher reads on for other consumers: about
    # 200 bytes each, 8 MB for a subscription.
    look_ahead_per_consumer: int = 4_000
    look_ahead_per_subscription: int = 40_000
    # With `ordered_nacks`: negatively acknowledged entries that are not acknowledged yet, about 200
    # bytes each, 10 MB for a subscription. The broker disconnects a consumer that exceeds the
    # limit.
    withheld_max: int = 50_000
    # The limit of one step of the dispatcher. It applies to the pending entries of departed
    # consumers that the step returns, to the slots that it queues, and to the acknowledged or
    # outdated items that it drops from the queues. Such a step takes at most 5 ms, in which the
    # event loop does nothing else. A step that removes expired pending entries may take longer: it
    # handles whole consumers, and a consumer with 50,000 entries takes 30 ms.
    part_entries: int = 2_000

    def __post_init__(self) -> None:
        assert self.ring_points >= 0
        assert self.unblocking_interval_s >= 0
        assert self.look_ahead_per_consumer > 0
        assert self.look_ahead_per_subscription > 0
        assert self.withheld_max > 0
        assert self.part_entries > 0


KEY_SHARED_DEFAULTS: Final = KeySharedSettings()
