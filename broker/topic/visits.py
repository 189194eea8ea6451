"""Periodic checks of a topic: its backlog quotas, and the sequence ids of deduplication."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.topic.topic import PersistentTopic

if TYPE_CHECKING:
    from magnetar.broker.topic.protocol import Topic


async def check_backlog_quotas(topic: Topic) -> None:
    """Apply the backlog quotas of a persistent topic. Raises LogError, PoliciesUnavailable."""
    if isinstance(topic, PersistentTopic):
        await topic.quotas.check()


async def tend_deduplication(topic: Topic) -> None:
    """Journal sequence ids of a persistent topic if that is due. See Deduplication.visit. Raises
    LogError, PoliciesUnavailable."""
    if isinstance(topic, PersistentTopic):
        await topic.deduplication.visit(topic.producers)
