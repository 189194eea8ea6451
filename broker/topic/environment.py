"""The environment that the topics of a broker share: stores, budgets, settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from magnetar.broker.dispatch.active import FAILOVER_DEFAULTS, FailoverRules
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from magnetar.broker.dispatch.permits import Limits
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.key_shared_settings import KeySharedSettings
    from magnetar.broker.log.budget import PublishBudget
    from magnetar.broker.log.cache import EntryCache
    from magnetar.broker.log.latency import LatencyHistogram
    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.broker.log.log import LogConfig
    from magnetar.broker.topic.deduplication import DeduplicationConfig
    from magnetar.broker.topic.producer_admission import ProducerNames
    from magnetar.broker.topic.protocol import Topic
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicEnvironment:
    store: MetadataStore
    ledgers: LedgerStore
    log_config: LogConfig
    cache: EntryCache
    clock: Clock
    names: ProducerNames
    tasks: asyncio.TaskGroup  # it must outlive the topics
    on_failed: Callable[[Topic, BrokerError], None]
    limits: Limits | None = None  # None: each topic has the limits of its policies
    message_bytes_max: int = MESSAGE_BYTES_MAX
    strict_delays: bool = False
    fixed_delay_look_ahead: int = 0  # see DelayPolicy
    latency: LatencyHistogram | None = None  # the publish latency; None: each topic has its own
    # The budget for the bytes that the broker holds for producers. None: each topic has its own.
    budget: PublishBudget | None = None
    deduplication: DeduplicationConfig | None = None  # None: the defaults
    failover: FailoverRules = FAILOVER_DEFAULTS
    key_shared: KeySharedSettings | None = None  # None: the defaults
    turns: Turns = field(default_factory=Turns)  # the turns of long computations
