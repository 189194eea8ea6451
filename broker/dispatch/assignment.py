"""The choice of the selector that assigns the hash slots of a Key_Shared subscription."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.dispatch.dispatcher import ConsumerRefused
from magnetar.broker.dispatch.halving import Halving
from magnetar.broker.dispatch.key_shared_policy import KeySharedMode
from magnetar.broker.dispatch.ring import Ring
from magnetar.broker.dispatch.sticky_ranges import StickyRanges
from magnetar.broker.errors import ConsumerBusy, NotAllowed

if TYPE_CHECKING:
    from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
    from magnetar.broker.dispatch.selector import Selector
    from magnetar.broker.key_shared_settings import KeySharedSettings


def selector_of(
    policy: KeySharedPolicy, settings: KeySharedSettings, subscription: str
) -> Selector:
    """The selector of a subscription, by the policy of its first consumer. Raises ConsumerRefused
    if Key_Shared is disabled."""
    if not settings.enabled:
        what = f"subscription {subscription!r}"
        why = "the broker's setting subscription_key_shared_enable is off"
        raise ConsumerRefused(NotAllowed(what, why))
    if policy.mode is KeySharedMode.STICKY:
        return StickyRanges(subscription)
    return Ring(settings.ring_points) if settings.ring_points else Halving(subscription)


def require_same(policy: KeySharedPolicy, connected: KeySharedPolicy, subscription: str) -> None:
    """Raises ConsumerRefused if the two policies differ in the mode, or if only one of them keeps
    the order of a key's messages after negative acknowledgements."""
    if not policy.agrees(connected):
        why = f"its consumers use the Key_Shared policy {connected}, not {policy}"
        raise ConsumerRefused(ConsumerBusy(subscription, why))
