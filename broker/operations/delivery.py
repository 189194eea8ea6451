"""Administration of deliveries: why a subscription does not deliver, its pending entries, and the
consumer of a key.

Operations raise ServedElsewhere, BundleUnavailable, TopicNotFound and SubscriptionNotFound.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.errors import NotAllowed, SubscriptionNotFound
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.operations.delivery_model import (
    Explanation,
    KeyShown,
    PendingPage,
    PendingShown,
    ReasonShown,
)
from magnetar.broker.operations.topics import open_topic, require_owner
from magnetar.broker.topic.explanation import Snapshot, explain
from magnetar.broker.topic.pending import PAGE_ENTRIES_MAX, pending_page
from magnetar.metadata.store import SessionState

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker
    from magnetar.broker.dispatch.explain import Reason
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.pending import PendingMessage
    from magnetar.broker.topic.protocol import Topic
    from magnetar.broker.topic.subscription import Subscription
    from magnetar.protos.names import TopicName

OLDEST_SHOWN: Final = 10

KEY_BYTES_MAX: Final = 4_096
"""The limit of a key in a request. The key is part of the request line."""

__all__ = ["KEY_BYTES_MAX", "PAGE_ENTRIES_MAX", "explanation", "key_holder", "pending"]


async def explanation(broker: Broker, name: TopicName, subscription: str) -> Explanation:
    """Return every reason why the subscription delivers nothing now. If the topic is quarantined,
    the quarantine is the only reason in the answer, and the topic is not opened."""
    refusal = broker.quarantine.refusal(name, asyncio.get_running_loop().time())
    if refusal is not None and _open_here(broker, name) is None:
        await require_owner(broker, name)
        why, ends_in_s = refusal
        reasons = explain(Snapshot(quarantine=why, quarantine_s=ends_in_s))
        return _explained(name, subscription, reasons, None)
    found = _found(await _served(broker, name), subscription)
    session = broker.metadata.session_state
    budget = broker.publish_budget
    snapshot = replace(
        found.snapshot(),
        budget_waiting=budget.waiting,
        budget_used=budget.used,
        budget_max=budget.bytes_max,
        metadata_session="" if session is SessionState.CONNECTED else session.value,
    )
    return _explained(name, subscription, explain(snapshot), found)


async def pending(
    broker: Broker,
    name: TopicName,
    subscription: str,
    *,
    consumer: str | None,
    slot: int | None,
    after: Position,
    limit: int,
) -> PendingPage:
    """Return a page of pending entries. See `pending_page`. Raises NotAllowed."""
    topic = await _served(broker, name)
    shown, following = await pending_page(
        _found(topic, subscription),
        consumer=consumer,
        slot=slot,
        after=after,
        limit=limit,
        show=partial(_pending_shown, now_ms=topic.now_ms()),
    )
    return PendingPage(
        entries=shown,
        next_after=None if following is None else str(following),
    )


async def key_holder(
    broker: Broker, name: TopicName, subscription: str, key: bytes, *, shown: str
) -> KeyShown:
    """Return the hash of a key, the consumer of the key, and the reasons why its messages wait.
    `shown`: the key in readable form. Raises NotAllowed if the type is not Key_Shared."""
    topic = await _served(broker, name)
    found = _found(topic, subscription)
    machine = found.dispatcher
    if not isinstance(machine, KeyShared):
        kind = "no consumers" if found.type is None else f"type {found.type.title}"
        why = f"subscription {subscription!r} has {kind}; a key has a consumer on Key_Shared only"
        raise NotAllowed("the consumer of a key", why)
    slot = machine.slot_of_key(key)
    target, draining = machine.holder(slot)
    reasons = machine.explain_slot(slot, asyncio.get_running_loop().time())
    waiting, pending_entries = machine.waiting_in(slot), machine.pending_in(slot)
    oldest, _ = await pending_page(
        found,
        consumer=None,
        slot=slot,
        after=EARLIEST,
        limit=OLDEST_SHOWN,
        show=partial(_pending_shown, now_ms=topic.now_ms()),
    )
    return KeyShown(
        key=shown,
        hash=slot,
        consumer=None if target is None else target.name,
        draining_consumer=None if draining is None else draining.name,
        pending=pending_entries,
        waiting=waiting,
        blocked=bool(reasons),
        blocked_by=[_reason_shown(reason) for reason in reasons],
        oldest_pending=oldest,
    )


def _open_here(broker: Broker, name: TopicName) -> Topic | None:
    return next((topic for topic in broker.topics if topic.name == name), None)


async def _served(broker: Broker, name: TopicName) -> Topic:
    """Return the topic. For a topic that is open here, this makes no request to the metadata store:
    operators need these answers most while the store is down. Raises NotAllowed for a
    non-persistent topic."""
    return _open_here(broker, name) or await open_topic(broker, name)


def _found(topic: Topic, subscription: str) -> Subscription:
    found = topic.subscriptions.get(subscription)
    if found is None:
        raise SubscriptionNotFound(subscription)
    return found


def _explained(
    name: TopicName, subscription: str, reasons: list[Reason], found: Subscription | None
) -> Explanation:
    times = [reason.next_s for reason in reasons if reason.next_s is not None]
    reads_at = None if found is None else found.read_position
    return Explanation(
        topic=str(name),
        subscription=subscription,
        type="None" if found is None or found.type is None else found.type.title,
        consumers=0 if found is None else len(found.consumers),
        backlog=0 if found is None else found.cursor.backlog_entries,
        unacked_messages=0 if found is None else found.unacked,
        mark_delete_position=None if found is None else str(found.cursor.mark_delete),
        read_position=None if reads_at is None else str(reads_at),
        reasons=[_reason_shown(reason) for reason in reasons],
        next_change_ms=_ms(min(times)) if times else None,
    )


def _reason_shown(reason: Reason) -> ReasonShown:
    return ReasonShown(
        why=reason.why.value,
        consumer=reason.consumer,
        sentence=reason.detail,
        facts=dict(reason.facts),
        next_change_ms=None if reason.next_s is None else _ms(reason.next_s),
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1_000)


def _pending_shown(message: PendingMessage, now_ms: int) -> PendingShown:
    at, entry = message.pending, message.entry
    view = None if entry is None else entry.view
    ordering_key = None if view is None else view.ordering_key
    return PendingShown(
        message_id=str(at.position),
        consumer=at.consumer,
        hash=at.slot or None,
        unacked_messages=at.messages or None,
        redelivery_count=message.redeliveries,
        key=None if view is None else view.partition_key,
        key_is_base64=view is not None and view.partition_key_b64,
        ordering_key=None if ordering_key is None else b64encode(ordering_key).decode(),
        producer_name=None if view is None else view.producer_name,
        publish_time=None if view is None else view.publish_time_ms,
        age_ms=None if entry is None else max(0, now_ms - entry.broker_timestamp_ms),
        problem=message.problem or None,
    )
