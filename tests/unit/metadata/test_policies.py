"""Policies are resolved topic first, then namespace, then broker; invalid values are refused."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.policies import (
    BROKER_DEFAULTS,
    UNLIMITED,
    AutoTopicCreation,
    BacklogAction,
    BacklogQuota,
    DelayedDelivery,
    EffectivePolicies,
    InactiveMode,
    InactiveTopicDeletion,
    Persistence,
    Policies,
    Rate,
    Retention,
    SchemaCompatibility,
    SubscribeRate,
    SubscriptionType,
    effective,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = [field.name for field in fields(EffectivePolicies)]
OF_NAMESPACE: dict[str, Any] = {
    "retention": Retention(1, 1),
    "message_ttl_s": 1,
    "backlog_quota_bytes": BacklogQuota(1, BacklogAction.EVICT_BACKLOG),
    "backlog_quota_age_s": BacklogQuota(1, BacklogAction.EVICT_BACKLOG),
    "persistence": Persistence(1, 1, 1, 1.0),
    "deduplication": True,
    "delayed_delivery": DelayedDelivery(enabled=False, tick_ms=1, delay_ms_max=1),
    "auto_topic_creation": AutoTopicCreation(enabled=False, partitions=1),
    "auto_subscription_creation": False,
    "publish_rate": Rate(1, 1, 1),
    "dispatch_rate": Rate(1, 1, 1),
    "subscription_dispatch_rate": Rate(1, 1, 1),
    "subscribe_rate": SubscribeRate(1, 1),
    "subscription_types": frozenset({SubscriptionType.EXCLUSIVE}),
    "inactive_topic_deletion": InactiveTopicDeletion(
        enabled=True, mode=InactiveMode.SUBSCRIPTIONS_CAUGHT_UP, after_s=1
    ),
    "schema_compatibility": SchemaCompatibility.FORWARD,
    "schema_auto_update": False,
    "schema_validation": True,
}
OF_NAMESPACE |= {name: 1 for name in NAMES if name not in OF_NAMESPACE}
# A value that is false must override one that is true.
OF_TOPIC: dict[str, Any] = {name: getattr(BROKER_DEFAULTS, name) for name in NAMES}


def test_every_policy_that_can_be_set_has_a_broker_default() -> None:
    assert {field.name for field in fields(Policies)} - {"version", "unknown"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_topic_overrides_the_namespace_and_the_namespace_the_broker(name: str) -> None:
    unset = Policies()
    namespace, topic = Policies(**{name: OF_NAMESPACE[name]}), Policies(**{name: OF_TOPIC[name]})
    default = getattr(BROKER_DEFAULTS, name)
    assert default != OF_NAMESPACE[name]
    expected = {
        (unset, unset): default,
        (namespace, unset): OF_NAMESPACE[name],
        (unset, topic): OF_TOPIC[name],
        (namespace, topic): OF_TOPIC[name],
    }
    for levels in product((unset, namespace), (unset, topic)):
        found = effective(BROKER_DEFAULTS, *levels)
        assert getattr(found, name) == expected[levels]
        others = set(NAMES) - {name}
        assert all(getattr(found, one) == getattr(BROKER_DEFAULTS, one) for one in others)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retention(UNLIMITED - 1, 0),
        lambda: Retention(0, 1 << 63),
        lambda: BacklogQuota(-2, BacklogAction.HOLD_PRODUCERS),
        lambda: Persistence(3, 2, 3, 1.0),
        lambda: Persistence(2, 3, 2, 1.0),
        lambda: Persistence(3, 3, 0, 1.0),
        lambda: Persistence(3, 3, 2, float("nan")),
        lambda: Persistence(3, 3, 2, -1.0),
        lambda: DelayedDelivery(enabled=True, tick_ms=0, delay_ms_max=0),
        lambda: AutoTopicCreation(enabled=True, partitions=-1),
        lambda: Rate(0, 0, 0),
        lambda: Rate(-1, 0, 1),
        lambda: SubscribeRate(1, 0),
        lambda: InactiveTopicDeletion(enabled=True, mode=InactiveMode.NO_SUBSCRIPTIONS, after_s=0),
        lambda: Policies(version=-1),
        lambda: Policies(message_ttl_s=-1),
        lambda: Policies(producers_max=-1),
        lambda: Policies(subscription_types=frozenset()),
    ],
)
def test_a_policy_out_of_range_is_an_invalid_record(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRecord):
        make()
