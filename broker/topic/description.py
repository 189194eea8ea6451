"""The statistics of all subscriptions of a topic, in slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from magnetar.broker.topic.meter import CLIENTS_PER_TURN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sized

    from magnetar.runtime.turns import Turns

CLIENTS_OF_SUBSCRIPTION: Final = 3
"""The statistics of a subscription without consumers take as long as those of this number of
consumers."""


class Described(Protocol):
    """A subscription of a persistent or a non-persistent topic."""

    @property
    def consumers(self) -> Sized: ...

    async def describe(self, turns: Turns) -> dict[str, Any]: ...


async def describe_all(
    subscriptions: Mapping[str, Described], turns: Turns
) -> dict[str, dict[str, Any]]:
    """Return the statistics by name. A topic may have thousands of subscriptions, at 60 us each. A
    slice takes about as long as the statistics of CLIENTS_PER_TURN consumers. If all subscriptions
    fit into one slice, no turn is taken. Raises ReadFailed."""
    found: dict[str, dict[str, Any]] = {}
    left = CLIENTS_PER_TURN
    for name, each in list(subscriptions.items()):
        if left <= 0:
            await turns.take()
            left = CLIENTS_PER_TURN
        left -= CLIENTS_OF_SUBSCRIPTION + len(each.consumers)
        found[name] = await each.describe(turns)
    return found
