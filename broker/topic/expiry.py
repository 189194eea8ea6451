"""The expiry of messages that are older than their time to live, and of subscriptions that no
consumer has used for a long time. Also the reads for the backlog ages in the metrics.

All are chores (`broker/chores.py`). An expiry destroys data, so it does nothing while the policies
of the topic are not up to date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import PoliciesUnavailable, ReadFailed, SubscriptionFenced
from magnetar.broker.topic.topic import PersistentTopic, TopicState
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.broker.topic.protocol import Topic
    from magnetar.metadata.policies import EffectivePolicies

SUBSCRIPTION_EXPIRY_CHECK_INTERVAL_S: Final = 300.0
"""Pulsar's subscriptionExpiryCheckIntervalInMinutes: 5."""

BACKLOG_AGE_CHECK_INTERVAL_S: Final = 60.0
"""The interval in seconds at which the broker updates the backlog ages in the metrics. An update
costs at most one read for each subscription."""

log = get_logger(__name__)


async def expire_messages(topic: Topic) -> None:
    """Acknowledge in every subscription the entries that are older than the topic's time to live.
    Raises LogError. If a read fails, visits the other subscriptions and then raises ReadFailed."""
    policies = _fresh_policies(topic)
    if policies is None or policies.message_ttl_s <= 0:
        return
    assert isinstance(topic, PersistentTopic)
    failure: ReadFailed | None = None
    for subscription in topic.all_subscriptions:
        try:
            expired = await topic.expire(subscription, older_than_s=policies.message_ttl_s)
        except SubscriptionFenced:
            continue  # a seek moves it, or it is being deleted: the next round looks again
        except ReadFailed as error:
            failure = error
            continue
        if expired:
            log.info(
                "messages expired",
                topic=str(topic.name),
                subscription=subscription.name,
                entries=expired,
            )
    if failure is not None:
        raise failure


async def expire_subscriptions(topic: Topic) -> None:
    """Delete durable subscriptions that have had no consumer for longer than the policy allows. The
    time begins again when the topic is opened, for example by its next owner. Raises LogError."""
    policies = _fresh_policies(topic)
    minutes = 0 if policies is None else policies.subscription_expiration_time_minutes
    if minutes <= 0:
        return
    assert isinstance(topic, PersistentTopic)
    for subscription in topic.all_subscriptions:
        if not subscription.cursor.durable or subscription.idle_s <= 60 * minutes:
            continue
        try:
            await subscription.unsubscribe(None, force=False)
        except SubscriptionFenced:
            continue  # a seek moves it, or it is being deleted: the next round looks again
        log.info("subscription expired", topic=str(topic.name), subscription=subscription.name)


async def look_up_backlog_ages(topic: Topic) -> None:
    """Read the times of the oldest unacknowledged entry of each subscription, for the metrics. If a
    read fails, visits the other subscriptions and then raises ReadFailed."""
    if not isinstance(topic, PersistentTopic) or topic.state is not TopicState.OPEN:
        return
    failure: ReadFailed | None = None
    for subscription in topic.all_subscriptions:
        try:
            await subscription.oldest.find()
        except ReadFailed as error:
            failure = error
    if failure is not None:
        raise failure


def _fresh_policies(topic: Topic) -> EffectivePolicies | None:
    """The policies of the topic. None: the topic is closing or is not persistent, or its policies
    are not up to date."""
    if not isinstance(topic, PersistentTopic) or topic.state is not TopicState.OPEN:
        return None
    try:
        return topic.policies.effective if topic.policies.is_fresh else None
    except PoliciesUnavailable:
        return None
