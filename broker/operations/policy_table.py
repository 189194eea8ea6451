"""The table of all policies: one row for each, with its levels, its paths and its JSON form.

A new policy needs its field in `metadata/policies.py` (and its codec), and a row here. The REST
paths, their documentation, and the validation follow from the row. The verbs of the command line
are rows of `cli/policy_table.py`.

Backlog quotas have a table of their own: Pulsar has two quotas, by size and by age, on one path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.operations import policy_model as model
from magnetar.metadata.policies import SchemaCompatibility

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.metadata.policies import BacklogQuota


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy. A path here is the last part of Pulsar's path, after the namespace or the
    topic."""

    field: str  # the name of a field of `Policies`
    title: str  # the title in texts for people
    namespace_path: str  # "": namespaces do not set it
    topic_path: str  # "": topics do not set it
    body: Any  # the type of the JSON: a model or a plain type
    namespace_key: str  # the key in Pulsar's JSON of a namespace's policies; "": that JSON lacks it
    by_cluster: bool = False  # True: that JSON has the body below the name of the cluster
    topic_parameter: str = ""  # the query parameter that carries the value; "": the body does

    def record(self, body: Any) -> Any:
        """Return the value to store, from a validated body."""
        if hasattr(self.body, "record"):
            return body.record()
        return frozenset(body) if isinstance(body, list) else body

    def shown(self, value: Any) -> Any:
        """Return the body, from a stored value."""
        if hasattr(self.body, "of"):
            return self.body.of(value)
        return sorted(value) if isinstance(value, frozenset) else value


class QuotaType(StrEnum):
    """The quantity that a backlog quota limits."""

    SIZE = "destination_storage"
    AGE = "message_age"


@dataclass(frozen=True, slots=True)
class QuotaRow:
    field: str  # the name of a field of `Policies`
    record: Callable[[model.BacklogQuotaBody], BacklogQuota | None]  # None: the body has no quota
    shown: Callable[[BacklogQuota], model.BacklogQuotaBody]
    expected: str  # the expected form of the body


QUOTAS: Final = {
    QuotaType.SIZE: QuotaRow(
        "backlog_quota_bytes",
        model.BacklogQuotaBody.size_record,
        model.BacklogQuotaBody.of_size,
        "limitSize, in bytes",
    ),
    QuotaType.AGE: QuotaRow(
        "backlog_quota_age_s",
        model.BacklogQuotaBody.age_record,
        model.BacklogQuotaBody.of_age,
        "limitTime, in seconds",
    ),
}


def _limit(field: str, title: str, namespace: str, topic: str, key: str) -> PolicyRow:
    return PolicyRow(field, title, namespace, topic, model.Count, key)


ROWS: Final = (
    PolicyRow(
        "retention",
        "retention",
        "retention",
        "retention",
        model.RetentionBody,
        "retention_policies",
    ),
    PolicyRow(
        "message_ttl_s",
        "time to live of unacknowledged messages, in seconds; 0: no limit",
        "messageTTL",
        "messageTTL",
        model.Count,
        "message_ttl_in_seconds",
        topic_parameter="messageTTL",
    ),
    PolicyRow(
        "persistence",
        "quorums of new ledgers",
        "persistence",
        "persistence",
        model.PersistenceBody,
        "persistence",
    ),
    PolicyRow(
        "deduplication",
        "deduplication",
        "deduplication",
        "deduplicationEnabled",
        bool,
        "deduplicationEnabled",
    ),
    PolicyRow(
        "delayed_delivery",
        "delayed delivery",
        "delayedDelivery",
        "delayedDelivery",
        model.DelayedDeliveryBody,
        "delayed_delivery_policies",
    ),
    PolicyRow(
        "auto_topic_creation",
        "automatic creation of topics",
        "autoTopicCreation",
        "",
        model.AutoTopicCreationBody,
        "autoTopicCreationOverride",
    ),
    PolicyRow(
        "auto_subscription_creation",
        "automatic creation of subscriptions",
        "autoSubscriptionCreation",
        "autoSubscriptionCreation",
        model.AutoSubscriptionCreationBody,
        "autoSubscriptionCreationOverride",
    ),
    _limit(
        "producers_max",
        "largest number of producers of a topic",
        "maxProducersPerTopic",
        "maxProducers",
        "max_producers_per_topic",
    ),
    _limit(
        "consumers_max",
        "largest number of consumers of a topic",
        "maxConsumersPerTopic",
        "maxConsumers",
        "max_consumers_per_topic",
    ),
    _limit(
        "consumers_per_subscription_max",
        "largest number of consumers of a subscription",
        "maxConsumersPerSubscription",
        "maxConsumersPerSubscription",
        "max_consumers_per_subscription",
    ),
    _limit(
        "subscriptions_max",
        "largest number of subscriptions of a topic",
        "maxSubscriptionsPerTopic",
        "maxSubscriptionsPerTopic",
        "max_subscriptions_per_topic",
    ),
    _limit(
        "unacked_per_consumer_max",
        "largest number of unacknowledged messages of a consumer",
        "maxUnackedMessagesPerConsumer",
        "maxUnackedMessagesOnConsumer",
        "max_unacked_messages_per_consumer",
    ),
    _limit(
        "unacked_per_subscription_max",
        "largest number of unacknowledged messages of a subscription",
        "maxUnackedMessagesPerSubscription",
        "maxUnackedMessagesOnSubscription",
        "max_unacked_messages_per_subscription",
    ),
    PolicyRow(
        "publish_rate",
        "publish rate of a topic",
        "publishRate",
        "publishRate",
        model.PublishRateBody,
        "publishMaxMessageRate",
        by_cluster=True,
    ),
    PolicyRow(
        "dispatch_rate",
        "dispatch rate of a topic",
        "dispatchRate",
        "dispatchRate",
        model.DispatchRateBody,
        "topicDispatchRate",
        by_cluster=True,
    ),
    PolicyRow(
        "subscription_dispatch_rate",
        "dispatch rate of a subscription",
        "subscriptionDispatchRate",
        "subscriptionDispatchRate",
        model.DispatchRateBody,
        "subscriptionDispatchRate",
        by_cluster=True,
    ),
    PolicyRow(
        "subscribe_rate",
        "subscribe rate of a consumer",
        "subscribeRate",
        "subscribeRate",
        model.SubscribeRateBody,
        "clusterSubscribeRate",
        by_cluster=True,
    ),
    PolicyRow(
        "subscription_types",
        "allowed subscription types",
        "subscriptionTypesEnabled",
        "subscriptionTypesEnabled",
        model.Types,
        "subscription_types_enabled",
    ),
    PolicyRow(
        "inactive_topic_deletion",
        "deletion of inactive topics",
        "inactiveTopicPolicies",
        "inactiveTopicPolicies",
        model.InactiveTopicBody,
        "inactive_topic_policies",
    ),
    PolicyRow(
        "subscription_expiration_time_minutes",
        "time in minutes after which unused subscriptions are deleted; 0: never",
        "subscriptionExpirationTime",
        "",
        model.Count,
        "subscription_expiration_time_minutes",
    ),
    PolicyRow(
        "schema_compatibility",
        "compatibility rule for new versions of a schema",
        "schemaCompatibilityStrategy",
        "schemaCompatibilityStrategy",
        SchemaCompatibility,
        "schema_compatibility_strategy",
    ),
    PolicyRow(
        "schema_auto_update",
        "permission of clients to add versions of a schema",
        "isAllowAutoUpdateSchema",
        "",
        bool,
        "is_allow_auto_update_schema",
    ),
    PolicyRow(
        "schema_validation",
        "schema validation: a topic with a schema refuses producers without one",
        "schemaValidationEnforced",
        "schemaValidationEnforced",
        bool,
        "schema_validation_enforced",
    ),
    PolicyRow(
        "max_message_bytes",
        "largest message, in bytes; 0: the broker's limit",
        "",
        "maxMessageSize",
        model.MessageSize,
        "",
    ),
)
