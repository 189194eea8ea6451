"""Key_Shared without storage: an entry is delivered to the consumer of its key at once, or dropped.

Theory of operation. As in live.py no entry is stored, so no key drains: when a slot moves, its next
entry goes to the new consumer. If the slot has no consumer, or its consumer has no permits or a
connection that is not writable, the entry is dropped and counted.

Invariants (`check`): no consumer has pending entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.dispatch.assignment import require_same, selector_of
from magnetar.broker.dispatch.dispatcher import Deliver
from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
from magnetar.broker.dispatch.ring import Ring
from magnetar.broker.dispatch.sticky_hash import hash_of, sticky_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.dispatch.dispatcher import Activate
    from magnetar.broker.dispatch.key_shared_policy import HashRange
    from magnetar.broker.dispatch.permits import Consumer
    from magnetar.broker.dispatch.selector import Selector
    from magnetar.broker.key_shared_settings import KeySharedSettings
    from magnetar.broker.log.entry import StoredEntry


class KeyedLive:
    """The dispatcher of a Key_Shared subscription of a non-persistent topic. It has the methods of
    `Live`."""

    def __init__(self, subscription: str, settings: KeySharedSettings) -> None:
        self._subscription = subscription
        self._settings = settings
        self.policy = KeySharedPolicy()
        self._selector: Selector = Ring()
        self._consumers: list[Consumer] = []

    def add_consumer(self, consumer: Consumer) -> list[Activate]:
        """A consumer joins. Returns []: a Key_Shared subscription has no active consumer. Raises
        ConsumerRefused before any change."""
        policy = (consumer.key_shared or KeySharedPolicy()).of_all
        selector = self._selector
        if not self._consumers:
            selector = selector_of(policy, self._settings, self._subscription)
        else:
            require_same(policy, self.policy, self._subscription)
        selector.add(consumer)
        self._selector, self.policy = selector, policy
        self._consumers.append(consumer)
        return []

    def remove_consumer(self, consumer: Consumer) -> list[Activate]:
        self._consumers.remove(consumer)
        self._selector.remove(consumer)
        return []

    def on_leaving(self, consumer: Consumer) -> list[Activate]:
        """The consumer will leave. Returns []: its slots move when it has left."""
        return []

    def on_flow(self, consumer: Consumer, permits: int) -> None:
        """The consumer grants permits for this many more messages."""
        consumer.permits += permits

    def on_entries(self, entries: Sequence[StoredEntry]) -> tuple[list[Deliver], int]:
        """Distribute the entries. Returns a delivery for each consumer that gets some, and the
        number of dropped messages."""
        given: dict[Consumer, Deliver] = {}
        dropped = 0
        for entry in entries:
            key = sticky_key(entry.view, spread_keyless=self._settings.spread_keyless)
            consumer = self._selector.select(self._selector.slot_of(hash_of(key)))
            if consumer is None or not consumer.available:
                dropped += entry.messages
                continue
            consumer.on_given(1, entry.messages)
            delivery = given.get(consumer)
            if delivery is None:
                delivery = given[consumer] = Deliver(consumer, [], {}, 0)
            delivery.entries.append(entry)
            delivery.messages += entry.messages
        return list(given.values()), dropped

    def ranges(self, consumer: Consumer) -> list[HashRange]:
        """The slots that the consumer has."""
        return self._selector.ranges(consumer)

    def check(self) -> None:
        """Assert the invariants of the module's docstring."""
        self._selector.check()
        assert all(consumer.unacked == 0 for consumer in self._consumers)
