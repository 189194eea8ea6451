"""The rules for unloading and for deleting a topic that is not used.

Unloading only frees memory. A topic stays loaded while time alone may change it: a subscription has
a backlog (its metrics and its expiry need the topic), retention will delete ledgers, or a policy
deletes the topic when it is inactive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.metadata.policies import UNLIMITED, InactiveMode

if TYPE_CHECKING:
    from magnetar.broker.topic.protocol import Topic


async def tend_ledger(topic: Topic) -> None:
    """See Log.tend, CursorJournal.tend and DelayedStore.tend."""
    topic.log.tend()
    topic.cursors.tend()
    topic.delayed.tend()


def may_unload(topic: Topic, idle_s: float, now: float) -> bool:
    idle_since = topic.idle_since
    if idle_since is None or now - idle_since < idle_s:
        return False
    policies = topic.policies.effective
    retention = policies.retention
    trims = topic.log.chain.entry_count > 0 and not (
        retention.time_s == UNLIMITED and retention.size_bytes == UNLIMITED
    )
    waits = trims and (retention.time_s > 0 or retention.size_bytes > 0)
    return not (waits or policies.inactive_topic_deletion.enabled or _has_backlog(topic))


def may_delete(topic: Topic, now: float, now_ms: int) -> bool:
    """Return True if the policy for inactive topics deletes this topic now. Return False if the
    policies may have changed since the broker read them."""
    idle_since = topic.idle_since
    if idle_since is None or not topic.policies.is_fresh:
        return False
    policies = topic.policies.effective
    inactive = policies.inactive_topic_deletion
    if not inactive.enabled or now - idle_since < inactive.after_s:
        return False
    match inactive.mode:
        case InactiveMode.NO_SUBSCRIPTIONS:
            is_unused = not topic.subscriptions
        case InactiveMode.SUBSCRIPTIONS_CAUGHT_UP:
            is_unused = not _has_backlog(topic)
    return is_unused and not _is_retained(topic, now, now_ms)


def _has_backlog(topic: Topic) -> bool:
    return any(it.cursor.backlog_entries > 0 for it in topic.subscriptions.values())


def _is_retained(topic: Topic, now: float, now_ms: int) -> bool:
    """Return True if retention keeps the topic. As in Pulsar, the size limit does not count, only
    the age of the last message. The time since the topic became idle stands for this age if a
    ledger is open; otherwise the time since the last ledger with entries was closed."""
    retention_s = topic.policies.effective.retention.time_s
    if retention_s == 0 or topic.log.chain.entry_count == 0:
        return False
    if retention_s == UNLIMITED:
        return True
    closed_ms = [part.closed_ms for part in topic.log.chain.records if part.entries > 0]
    if topic.log.has_open_ledger:
        idle_since = topic.idle_since
        return idle_since is None or now - idle_since < retention_s
    return bool(closed_ms) and now_ms - closed_ms[-1] < retention_s * 1_000
