"""The admission of consumers to a topic, by the limits of its policies. Pure.

The limits are checked at each SUBSCRIBE, so a changed policy applies from the next SUBSCRIBE on.
Consumers that are connected stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from magnetar.broker.errors import ConsumerBusy, NotAllowed, SubscriptionNotFound
from magnetar.metadata.policies import SubscriptionType as Allowed

if TYPE_CHECKING:
    from collections.abc import Collection, Sized

    from magnetar.broker.topic.contract import SubscribeRequest
    from magnetar.metadata.policies import EffectivePolicies, SubscribeRate

SUBSCRIBERS_MAX: Final = 10_000
"""A topic whose policies limit the rate of subscribing remembers the rates of at most this many
consumers. They take 2 MB. At the limit the topic forgets the consumer that subscribed longest
ago."""

_Key = tuple[str, str, int]  # host of the client, name and id of the consumer


class SubscribeRates:
    """The rate at which each consumer may subscribe: a bucket of tokens for each, full at first."""

    __slots__ = "_tokens"

    def __init__(self) -> None:
        # The tokens of each consumer, and the time of that count; oldest first.
        self._tokens: dict[_Key, tuple[float, float]] = {}

    def take(self, key: _Key, rate: SubscribeRate, now: float) -> bool:
        """Take a token of this consumer. Returns True if the consumer may subscribe now: it had a
        token, or the rate has no limit."""
        if rate.subscribes_max == 0:
            self._tokens.clear()
            return True
        limit = float(rate.subscribes_max)
        tokens, since = self._tokens.pop(key, (limit, now))
        tokens = min(limit, tokens + (now - since) * limit / rate.period_s)
        may = tokens >= 1.0
        self._tokens[key] = (tokens - 1.0 if may else tokens), now
        if len(self._tokens) > SUBSCRIBERS_MAX:
            del self._tokens[next(iter(self._tokens))]
        return may

    def __len__(self) -> int:
        return len(self._tokens)


class Joined(Protocol):
    """A subscription of a persistent or a non-persistent topic."""

    @property
    def name(self) -> str: ...

    @property
    def consumers(self) -> Sized: ...


class ConsumerAdmission:
    """Admits the consumers of one topic."""

    __slots__ = (
        "_rates",
        "_topic",
    )

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._rates = SubscribeRates()

    def require_rate(
        self, request: SubscribeRequest, policies: EffectivePolicies, now: float
    ) -> None:
        """Raise NotAllowed if the consumer subscribes too often."""
        rate = policies.subscribe_rate
        host = request.client.address.rpartition(":")[0]
        key = host, request.consumer_name, request.consumer_id
        if not self._rates.take(key, rate, now):
            raise NotAllowed(
                f"consumer {request.consumer_name!r}",
                f"it subscribes more than {rate.subscribes_max} times in {rate.period_s} s",
            )

    def require_type(self, request: SubscribeRequest, policies: EffectivePolicies) -> None:
        """Raise NotAllowed if the policies do not allow the subscription type."""
        if Allowed(request.type.title) not in policies.subscription_types:
            allowed = ", ".join(sorted(policies.subscription_types))
            raise NotAllowed(
                f"subscription type {request.type.title}",
                f"the policies of {self._topic} allow only {allowed}",
            )

    def require_room(
        self,
        subscription: Joined,
        present: Collection[Joined],
        policies: EffectivePolicies,
    ) -> None:
        """Raise ConsumerBusy unless one more consumer may join."""
        limit, count = policies.consumers_per_subscription_max, len(subscription.consumers)
        if limit and count >= limit:
            why = f"it has {count} consumers, and the policies allow {limit}"
            raise ConsumerBusy(subscription.name, why)
        limit = policies.consumers_max
        if limit and (count := sum(len(each.consumers) for each in present)) >= limit:
            why = f"its topic has {count} consumers, and the policies allow {limit}"
            raise ConsumerBusy(subscription.name, why)

    def require_new(self, name: str, present: int, policies: EffectivePolicies) -> None:
        """Raise NotAllowed unless one more subscription may be created beside `present` others."""
        limit = policies.subscriptions_max
        if limit and present >= limit:
            raise NotAllowed(
                f"subscription {name!r}",
                f"{self._topic} has {present} subscriptions, and the policies allow {limit}",
            )

    def require_auto_creation(self, request: SubscribeRequest, policies: EffectivePolicies) -> None:
        """Raise SubscriptionNotFound unless a consumer may create the durable subscription that it
        names."""
        if request.durable and not policies.auto_subscription_creation:
            raise SubscriptionNotFound(request.subscription)


def require_name(subscription: str) -> None:
    """Raise NotAllowed for an empty or blank name. Administrators could not name the subscription,
    so they could not delete it."""
    if not subscription or subscription.isspace():
        raise NotAllowed("a subscription", "it needs a name that is not blank")
