"""Records of tenants and namespaces, and the policies that namespaces and topics set.

Values only, like `model.py`. A policy is set at one of three levels: the broker's configuration
gives the default, a namespace overrides it, a topic overrides both (`effective`).

Policies follow Pulsar's conventions. UNLIMITED (-1) means no limit where 0 is a value of its own
(retention, backlog quotas). Elsewhere 0 means no limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from math import isfinite
from typing import Any, Final

from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.model import NamespaceBundles

UNLIMITED: Final = -1

_I64_MAX: Final = (1 << 63) - 1


def _check_range(kind: str, record: object, lowest: int, *names: str) -> None:
    for name in names:
        number = getattr(record, name)
        if number is not None and not lowest <= number <= _I64_MAX:
            raise InvalidRecord(kind, f"{name} {number}")


# ---- policies ------------------------------------------------------------------------------------


class BacklogAction(StrEnum):
    """The broker's action for a topic whose backlog exceeds its quota."""

    HOLD_PRODUCERS = "producer_request_hold"
    REFUSE_PRODUCERS = "producer_exception"
    EVICT_BACKLOG = "consumer_backlog_eviction"


class InactiveMode(StrEnum):
    """The rule by which a topic without producers and consumers is inactive."""

    NO_SUBSCRIPTIONS = "delete_when_no_subscriptions"
    SUBSCRIPTIONS_CAUGHT_UP = "delete_when_subscriptions_caught_up"


class SubscriptionType(StrEnum):
    EXCLUSIVE = "Exclusive"
    SHARED = "Shared"
    FAILOVER = "Failover"
    KEY_SHARED = "Key_Shared"


class SchemaCompatibility(StrEnum):
    """The rule between a new version of a schema and the newest earlier version. With TRANSITIVE,
    the rule holds for all earlier versions. BACKWARD: consumers with the new version can read
    messages of the earlier version. FORWARD: the reverse. FULL: both."""

    ALWAYS_INCOMPATIBLE = "ALWAYS_INCOMPATIBLE"
    ALWAYS_COMPATIBLE = "ALWAYS_COMPATIBLE"
    BACKWARD = "BACKWARD"
    FORWARD = "FORWARD"
    FULL = "FULL"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"


@dataclass(frozen=True, slots=True)
class Retention:
    """Fully acknowledged messages are kept until they are older than `time_s`, or until the log
    without them still has `size_bytes`: the limit that is reached first decides. 0 for either: none
    are kept. UNLIMITED: this limit is never reached."""

    time_s: int
    size_bytes: int
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_range("retention", self, UNLIMITED, "time_s", "size_bytes")


@dataclass(frozen=True, slots=True)
class BacklogQuota:
    limit: int  # bytes for `backlog_quota_bytes`, seconds for `backlog_quota_age_s`; or UNLIMITED
    action: BacklogAction
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_range("backlog quota", self, UNLIMITED, "limit")


@dataclass(frozen=True, slots=True)
class Persistence:
    """The quorums of new ledgers, and Pulsar's limit for the writes of cursors."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    mark_delete_rate: float  # stored for tools of Pulsar; the broker does not apply it
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        kind = "persistence policy"
        if not 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size <= _I64_MAX:
            quorums = f"{self.ensemble_size}/{self.write_quorum}/{self.ack_quorum}"
            raise InvalidRecord(kind, f"quorums {quorums}")
        if not isfinite(self.mark_delete_rate) or self.mark_delete_rate < 0:
            raise InvalidRecord(kind, f"mark_delete_rate {self.mark_delete_rate}")


@dataclass(frozen=True, slots=True)
class DelayedDelivery:
    enabled: bool
    tick_ms: int  # precision of the delay
    delay_ms_max: int  # 0: no limit
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_range("delayed delivery policy", self, 1, "tick_ms")
        _check_range("delayed delivery policy", self, 0, "delay_ms_max")


@dataclass(frozen=True, slots=True)
class AutoTopicCreation:
    """The rule by which a producer or consumer creates the topic that it names."""

    enabled: bool
    partitions: int  # 0: the topic is not partitioned
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_range("topic creation policy", self, 0, "partitions")


@dataclass(frozen=True, slots=True)
class Rate:
    """At most this many messages and this many bytes in each period. 0: no limit."""

    messages_max: int
    bytes_max: int
    period_s: int
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_range("rate", self, 0, "messages_max", "bytes_max")
        _check_range("rate", self, 1, "period_s")


@dataclass(frozen=True, slots=True)
class SubscribeRate:
    """At most this many SUBSCRIBE commands of one consumer in each period. 0: no limit."""

    subscribes_max: int
    period_s: int
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_range("subscribe rate", self, 0, "subscribes_max")
        _check_range("subscribe rate", self, 1, "period_s")


@dataclass(frozen=True, slots=True)
class InactiveTopicDeletion:
    enabled: bool
    mode: InactiveMode
    after_s: int  # a topic is deleted after it was inactive for this time
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_range("inactive topic policy", self, 1, "after_s")


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies that one namespace or one topic sets. None: not set at this level."""

    # The broker adds one with each change of the policies. A namespace that an administrator has
    # created begins with 1.
    version: int = 0
    retention: Retention | None = None
    message_ttl_s: int | None = None  # 0: messages do not expire
    backlog_quota_bytes: BacklogQuota | None = None
    backlog_quota_age_s: BacklogQuota | None = None
    persistence: Persistence | None = None
    deduplication: bool | None = None
    delayed_delivery: DelayedDelivery | None = None
    auto_topic_creation: AutoTopicCreation | None = None
    auto_subscription_creation: bool | None = None
    producers_max: int | None = None  # for this limit and the next five, 0 means no limit
    consumers_max: int | None = None
    consumers_per_subscription_max: int | None = None
    subscriptions_max: int | None = None
    unacked_per_consumer_max: int | None = None
    unacked_per_subscription_max: int | None = None
    publish_rate: Rate | None = None
    dispatch_rate: Rate | None = None
    subscription_dispatch_rate: Rate | None = None
    subscribe_rate: SubscribeRate | None = None
    subscription_types: frozenset[SubscriptionType] | None = None
    inactive_topic_deletion: InactiveTopicDeletion | None = None
    subscription_expiration_time_minutes: int | None = None  # 0: subscriptions do not expire
    max_message_bytes: int | None = None  # the limit of a payload; 0: as the broker allows
    schema_compatibility: SchemaCompatibility | None = None
    schema_auto_update: bool | None = None  # clients may add versions of a schema
    schema_validation: bool | None = None  # producers of a topic with a schema need one
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_range("policies", self, 0, "version", "message_ttl_s", *_LIMITS)
        if self.subscription_types is not None and not self.subscription_types:
            raise InvalidRecord("policies", "no subscription type is allowed")


@dataclass(frozen=True, slots=True)
class EffectivePolicies:
    """The policies in effect for one topic; see `Policies` for each. The values here are the
    broker's defaults."""

    retention: Retention = Retention(0, 0)
    message_ttl_s: int = 0
    backlog_quota_bytes: BacklogQuota = BacklogQuota(UNLIMITED, BacklogAction.HOLD_PRODUCERS)
    backlog_quota_age_s: BacklogQuota = BacklogQuota(UNLIMITED, BacklogAction.HOLD_PRODUCERS)
    persistence: Persistence = Persistence(3, 3, 2, 1.0)
    deduplication: bool = False
    delayed_delivery: DelayedDelivery = DelayedDelivery(enabled=True, tick_ms=1_000, delay_ms_max=0)
    auto_topic_creation: AutoTopicCreation = AutoTopicCreation(enabled=True, partitions=0)
    auto_subscription_creation: bool = True
    producers_max: int = 0
    consumers_max: int = 0
    consumers_per_subscription_max: int = 0
    subscriptions_max: int = 0
    unacked_per_consumer_max: int = 50_000
    unacked_per_subscription_max: int = 200_000
    publish_rate: Rate = Rate(0, 0, 1)
    dispatch_rate: Rate = Rate(0, 0, 1)
    subscription_dispatch_rate: Rate = Rate(0, 0, 1)
    subscribe_rate: SubscribeRate = SubscribeRate(0, 30)
    subscription_types: frozenset[SubscriptionType] = frozenset(SubscriptionType)
    inactive_topic_deletion: InactiveTopicDeletion = InactiveTopicDeletion(
        enabled=False, mode=InactiveMode.NO_SUBSCRIPTIONS, after_s=60
    )
    subscription_expiration_time_minutes: int = 0
    max_message_bytes: int = 0
    schema_compatibility: SchemaCompatibility = SchemaCompatibility.FULL
    schema_auto_update: bool = True
    schema_validation: bool = False


BROKER_DEFAULTS: Final = EffectivePolicies()


def effective(
    broker_defaults: EffectivePolicies, namespace: Policies, topic: Policies
) -> EffectivePolicies:
    """The policies that apply to a topic. Each policy comes from the topic if the topic sets it,
    else from the namespace, else from the broker."""
    return replace(broker_defaults, **{**_set(namespace), **_set(topic)})


def _set(policies: Policies) -> Mapping[str, Any]:
    """The policies that this level sets, keyed by name."""
    values = {name: getattr(policies, name) for name in _NAMES}
    return {name: value for name, value in values.items() if value is not None}


_NAMES: Final = tuple(policy.name for policy in fields(EffectivePolicies))
_LIMITS: Final = (
    "producers_max",
    "consumers_max",
    "consumers_per_subscription_max",
    "subscriptions_max",
    "unacked_per_consumer_max",
    "unacked_per_subscription_max",
    "subscription_expiration_time_minutes",
    "max_message_bytes",
)


# ---- records -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """An owner of namespaces."""

    allowed_clusters: frozenset[str] = frozenset()  # empty: every cluster
    admin_roles: frozenset[str] = frozenset()
    unknown: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """The division of the namespace's topics into bundles, and the policies of the namespace."""

    bundles: NamespaceBundles = field(default_factory=NamespaceBundles)
    policies: Policies = field(default_factory=Policies)
    unknown: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TopicPolicies:
    """The policies that one topic sets. All partitions of a topic share them. A topic that sets no
    policy has no record of this kind."""

    policies: Policies = field(default_factory=Policies)
    unknown: bytes = field(default=b"", compare=False, repr=False)
