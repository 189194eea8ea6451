"""The settings that a broker of a cluster and a standalone server share.

Most settings that Pulsar has keep Pulsar's name, in snake case. Each field here is a setting in
flags, the environment and the file. `broker/main.py` passes its value on.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from magnetar.broker.key_shared_settings import KEY_SHARED_DEFAULTS, KeySharedSettings
from magnetar.broker.life import LIFE_DEFAULTS, LifeConfig
from magnetar.broker.policy_settings import PolicySettings
from magnetar.metadata.model import BUNDLES_DEFAULT
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.runtime.listener import is_wildcard


class BrokerSettings(PolicySettings):
    # ---- ports ----
    host: str = Field(default="127.0.0.1", description="address to listen on")
    advertised_host: str = Field(default="", description="address that clients use; empty: host")
    grpc_port: int = Field(default=6660, ge=0, le=65535, description="port for Magnetar's clients")
    pulsar_port: int = Field(
        default=6650, ge=0, le=65535, description="port for Apache Pulsar's clients"
    )
    http_port: int = Field(
        default=8080, ge=0, le=65535, description="port for /health, /metrics and the admin API"
    )

    # ---- memory ----
    cache_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="bytes of entries kept in memory for tailing consumers",
    )
    max_message_publish_buffer_size_in_mb: int = Field(
        default=256,
        ge=1,
        description="bytes held for all producers; at the limit the broker stops reading from them",
    )

    broker_publisher_throttling_max_message_rate: int = Field(
        default=0,
        ge=0,
        le=(1 << 31) - 1,
        description="messages per second that the broker accepts for all topics; 0: no limit",
    )
    broker_publisher_throttling_max_byte_rate: int = Field(
        default=0,
        ge=0,
        le=1 << 53,
        description="bytes per second that the broker accepts for all topics; 0: no limit",
    )

    # ---- connections ----
    broker_max_connections: int = Field(
        default=0, ge=0, description="connections of all clients; 0: no limit"
    )
    broker_max_connections_per_ip: int = Field(
        default=0, ge=0, description="connections of clients from one address; 0: no limit"
    )

    # ---- messages ----
    max_message_size: int = Field(
        default=MESSAGE_BYTES_MAX,
        ge=1 << 10,
        le=MESSAGE_BYTES_MAX,
        description="bytes of a message, batch or chunk after compression",
    )

    is_delayed_delivery_deliver_at_time_strict: bool = Field(
        default=False,
        description="true: a delayed message is up to a tick late; false: up to a tick early",
    )
    # Pulsar's default is 50,000. The default here is 0: otherwise an undelayed message would wait
    # for the delayed messages, and an entry of the index takes only 19 bytes.
    delayed_delivery_fixed_delay_detection_lookahead: int = Field(
        default=0,
        ge=0,
        le=2_000_000,  # INDEX_ENTRIES_MAX
        description="number of delayed messages with the same delay at which a subscription stops "
        "reading until the first of them is due; 0: it never stops",
    )
    message_expiry_check_interval_in_minutes: float = Field(
        default=5.0,
        gt=0,
        description="time between two checks of messages against their time to live",
    )

    # ---- ledgers ----
    managed_ledger_max_entries_per_ledger: int = Field(
        default=50_000, ge=1, description="entries after which a topic begins a new ledger"
    )
    managed_ledger_max_size_per_ledger_mbytes: int = Field(
        default=2048, ge=1, description="size after which a topic begins a new ledger, at any age"
    )
    managed_ledger_min_ledger_rollover_time_minutes: float = Field(
        default=10,
        ge=0,
        description="age of a ledger before which its number of entries does not matter",
    )
    managed_ledger_max_ledger_rollover_time_minutes: float = Field(
        default=240, gt=0, description="age after which a topic begins a new ledger"
    )
    degraded_ledger_min_age_in_seconds: float = Field(
        default=30,
        ge=0,
        description="age before which a topic does not replace a ledger that has too few copies, "
        "or one with a bookie that gets no new ledgers (`bookies drain`)",
    )
    open_ledger_check_interval_in_seconds: float = Field(
        default=10,
        gt=0,
        description="time between two checks of open ledgers for their age and their copies",
    )
    retention_check_interval_in_seconds: float = Field(
        default=120, gt=0, description="time between two checks for ledgers that can be deleted"
    )
    orphaned_ledger_check_interval_in_minutes: float = Field(
        default=360,
        gt=0,
        description="time between two searches for orphaned ledgers in the cluster",
    )
    orphaned_ledger_grace_period_in_minutes: float = Field(
        default=1440, ge=10, description="age before which a ledger never counts as orphaned"
    )
    auto_skip_non_recoverable_data: bool = Field(
        default=False,
        description="skip entries that all bookies have lost, instead of waiting for them",
    )

    # ---- namespaces ----
    enable_non_persistent_topics: bool = Field(
        default=True, description="serve topics whose messages are not stored"
    )
    max_concurrent_non_persistent_message_per_connection: int = Field(
        default=1_000,
        ge=1,
        le=1_000_000,
        description="unanswered non-persistent messages of a connection; further ones are dropped",
    )
    max_num_partitions_per_partitioned_topic: int = Field(
        default=0, ge=0, le=10_000, description="the most partitions of a topic; 0: 10,000"
    )
    default_number_of_namespace_bundles: int = Field(
        default=BUNDLES_DEFAULT,
        ge=1,
        le=128,
        description="bundles of a namespace that this broker creates",
    )

    # ---- topics ----
    max_concurrent_topic_load_request: int = Field(
        default=LIFE_DEFAULTS.loads_max, ge=1, description="topics loaded at once; others wait"
    )
    topic_load_timeout_seconds: float = Field(
        default=LIFE_DEFAULTS.load_timeout_s, gt=0, description="time limit to load one topic"
    )
    idle_topic_unload_seconds: float = Field(
        default=LIFE_DEFAULTS.idle_unload_s,
        ge=0,
        description="time after which the broker unloads a topic from memory that has no clients, "
        "no backlog, nothing that retention will delete, and no policy that deletes it when it is "
        "inactive; 0: never",
    )
    broker_delete_inactive_topics_frequency_seconds: float = Field(
        default=LIFE_DEFAULTS.inactive_check_s,
        gt=0,
        description="time between two searches for inactive topics to delete",
    )

    # ---- subscriptions ----
    active_consumer_failover_delay_time_millis: int = Field(
        default=1_000,
        ge=0,
        le=600_000,
        description="time for a replaced active consumer to acknowledge its pending messages",
    )
    failover_non_partitioned: Literal["subscribe_order", "hash"] = Field(
        default="subscribe_order",
        description="how the active consumer of a topic without partitions is chosen: "
        "subscribe_order, or hash (of the names of topic and consumers)",
    )

    # ---- Key_Shared subscriptions ----
    subscription_key_shared_enable: bool = Field(
        default=True, description="serve subscriptions of type Key_Shared"
    )
    subscription_key_shared_use_consistent_hashing: bool = Field(
        default=True, description="assign keys by a hash ring; false: by splitting hash ranges"
    )
    subscription_key_shared_consistent_hashing_replica_points: int = Field(
        default=KEY_SHARED_DEFAULTS.ring_points,
        ge=1,
        le=1_000,
        description="points of each consumer on the hash ring",
    )
    subscription_key_shared_spread_keyless: bool = Field(
        default=KEY_SHARED_DEFAULTS.spread_keyless,
        description="spread messages without a key over all consumers; false: send all to one",
    )
    key_shared_unblocking_interval_ms: float = Field(
        default=1_000 * KEY_SHARED_DEFAULTS.unblocking_interval_s,
        ge=0,
        le=60_000,
        description="time for which drained keys are collected before their messages are delivered",
    )
    key_shared_look_ahead_msg_in_replay_threshold_per_consumer: int = Field(
        default=KEY_SHARED_DEFAULTS.look_ahead_per_consumer,
        ge=1,
        le=1_000_000,
        description="waiting entries, for each connected consumer, at which reading stops",
    )
    key_shared_look_ahead_msg_in_replay_threshold_per_subscription: int = Field(
        default=KEY_SHARED_DEFAULTS.look_ahead_per_subscription,
        ge=1,
        le=1_000_000,
        description="the most waiting entries of a subscription, with any number of consumers",
    )

    # ---- metrics ----
    expose_topic_level_metrics_in_prometheus: bool = Field(
        default=True,
        description="expose metrics of each topic; false: only sums for each namespace",
    )

    # ---- deduplication and backlog quotas ----
    broker_deduplication_entries_interval: int = Field(
        default=1_000, ge=1, description="entries after which a topic's sequence ids are written"
    )
    broker_deduplication_snapshot_interval_seconds: int = Field(
        default=120, ge=1, description="time after which a topic's new sequence ids are written"
    )
    broker_deduplication_max_number_of_producers: int = Field(
        default=10_000, ge=1, description="producers of a topic whose sequence ids are kept"
    )
    broker_deduplication_producer_inactivity_timeout_minutes: int = Field(
        default=360, ge=1, description="time after which an inactive producer is forgotten"
    )
    backlog_quota_check_interval_in_seconds: int = Field(
        default=60, ge=1, description="time between two comparisons of backlogs with their quotas"
    )

    @model_validator(mode="after")
    def rollover_times(self) -> Self:
        """Check that the minimum age is below the maximum age."""
        least = self.managed_ledger_min_ledger_rollover_time_minutes
        most = self.managed_ledger_max_ledger_rollover_time_minutes
        if least >= most:
            raise ValueError(
                f"managed_ledger_min_ledger_rollover_time_minutes {least:g} must be below"
                f" managed_ledger_max_ledger_rollover_time_minutes {most:g}"
            )
        return self

    @model_validator(mode="after")
    def advertised_is_reachable(self) -> Self:
        if is_wildcard(self.host) and not self.advertised_host:
            raise ValueError(
                f"host {self.host} is every address of this machine: set advertised_host to the "
                "address that clients use"
            )
        return self

    @property
    def key_shared(self) -> KeySharedSettings:
        ring = self.subscription_key_shared_use_consistent_hashing
        points = self.subscription_key_shared_consistent_hashing_replica_points
        return KeySharedSettings(
            enabled=self.subscription_key_shared_enable,
            ring_points=points if ring else 0,
            unblocking_interval_s=self.key_shared_unblocking_interval_ms / 1_000,
            spread_keyless=self.subscription_key_shared_spread_keyless,
            look_ahead_per_consumer=(
                self.key_shared_look_ahead_msg_in_replay_threshold_per_consumer
            ),
            look_ahead_per_subscription=(
                self.key_shared_look_ahead_msg_in_replay_threshold_per_subscription
            ),
        )

    @property
    def life(self) -> LifeConfig:
        return LifeConfig(
            loads_max=self.max_concurrent_topic_load_request,
            load_timeout_s=self.topic_load_timeout_seconds,
            idle_unload_s=self.idle_topic_unload_seconds,
            inactive_check_s=self.broker_delete_inactive_topics_frequency_seconds,
        )

    @property
    def advertised(self) -> str:
        return self.advertised_host or self.host

    @property
    def shared(self) -> dict[str, Any]:
        """The values of this class's settings, keyed by name."""
        return {name: getattr(self, name) for name in BrokerSettings.model_fields}

    @property
    def shown(self) -> dict[str, str]:
        """The values of all settings, keyed by Pulsar's names, for administrators."""
        values = self.model_dump(mode="json")
        return {to_camel(name): _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(sorted(map(str, value))) if isinstance(value, list) else str(value)
