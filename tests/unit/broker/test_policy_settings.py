"""The broker's settings become the policies of topics that set none."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from magnetar.broker.config import BrokerConfig
from magnetar.metadata.policies import (
    BROKER_DEFAULTS,
    AutoTopicCreation,
    BacklogAction,
    BacklogQuota,
    EffectivePolicies,
    Rate,
    Retention,
    SubscriptionType,
)
from magnetar.runtime.config import load_config


def policies(**settings: Any) -> EffectivePolicies:
    config = BrokerConfig(id="b", metadata_url="zk://here", **settings)
    return config.default_policies(ensemble_size=3, write_quorum=3, ack_quorum=2)


def test_the_defaults_are_those_of_the_policies() -> None:
    assert policies() == BROKER_DEFAULTS


@pytest.mark.parametrize("place", ["environment", "flag"])
def test_subscription_types_are_names_with_commas(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    given, flags = "Exclusive, Key_Shared", {"id": "b", "metadata_url": "zk://here"}
    if place == "environment":
        monkeypatch.setenv("MAGNETAR_BROKER_SUBSCRIPTION_TYPES_ENABLED", given)
    else:
        flags["subscription_types_enabled"] = given
    config = load_config(BrokerConfig, file=None, flags=flags)
    assert config.subscription_types_enabled == {
        SubscriptionType.EXCLUSIVE,
        SubscriptionType.KEY_SHARED,
    }


def test_settings_become_policies() -> None:
    found = policies(
        default_retention_time_in_minutes=2,
        default_retention_size_in_mb=-1,
        backlog_quota_default_limit_gb=0.5,
        backlog_quota_default_retention_policy="consumer_backlog_eviction",
        allow_auto_topic_creation_type="partitioned",
        default_num_partitions=4,
        max_publish_rate_per_topic_in_messages=7,
    )
    assert found.retention == Retention(120, -1)
    assert found.backlog_quota_bytes == BacklogQuota(1 << 29, BacklogAction.EVICT_BACKLOG)
    assert found.backlog_quota_age_s == BacklogQuota(-1, BacklogAction.EVICT_BACKLOG)
    assert found.auto_topic_creation == AutoTopicCreation(True, 4)
    assert found.publish_rate == Rate(7, 0, 1)


def test_half_a_retention_is_refused() -> None:
    with pytest.raises(ValidationError, match="default_retention_size_in_mb"):
        policies(default_retention_time_in_minutes=5)
