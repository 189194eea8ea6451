"""The policies of one topic, as the topic sees them while it is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.policies.cache import PolicyCache
    from magnetar.metadata.policies import EffectivePolicies
    from magnetar.protos.names import TopicName


class PolicySource(Protocol):
    @property
    def effective(self) -> EffectivePolicies:
        """The present policies, combined from all levels. Raises PoliciesUnavailable."""

    @property
    def is_fresh(self) -> bool:
        """True when `effective` is up to date: since the last read, the metadata store has reported
        no change, and its connection was not lost. Code that deletes data (trimming, expiry,
        deletion) checks this first. Raises PoliciesUnavailable."""

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the policies may have changed. It runs on the loop and must be
        short. Returns the function that ends these calls."""


class FollowedPolicies:
    """The `PolicySource` of a topic that the cache follows."""

    __slots__ = ("_cache", "_topic")

    def __init__(self, cache: PolicyCache, topic: TopicName) -> None:
        self._cache = cache
        self._topic = topic

    @property
    def effective(self) -> EffectivePolicies:
        return self._cache.policies_of(self._topic)

    @property
    def is_fresh(self) -> bool:
        return self._cache.is_fresh(self._topic)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._cache.subscribe(self._topic, callback)
