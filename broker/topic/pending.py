"""Pages of the pending entries of a subscription: those that consumers have received and not
acknowledged. A page has the metadata of their messages.

If an entry cannot be read, the page lists it with the error. Operators look at pending entries most
often when something is wrong.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.pending import PendingEntry, ledgers_of, pending_in
from magnetar.broker.errors import LogError, NotAllowed
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.topic.subscription import Subscription

T = TypeVar("T")

PAGE_ENTRIES_MAX: Final = 100
"""The limit of entries in a page. The broker reads them one after the other: 100 take some 0.1 s if
they are not in the cache."""


@dataclass(frozen=True, slots=True)
class PendingMessage:
    pending: PendingEntry
    redeliveries: int
    entry: StoredEntry | None  # None: see `problem`
    problem: str = ""


async def pending_page(
    subscription: Subscription,
    *,
    consumer: str | None,
    slot: int | None,
    after: Position,
    limit: int,
    show: Callable[[PendingMessage], T],
) -> tuple[list[T], Position | None]:
    """Up to `limit` pending entries after a position, and the `after` of the next page (None: this
    was the last page). `consumer`: only entries of consumers with this name. `slot`: only entries
    of this Key_Shared hash. `show` converts each entry for the caller before the next one is read,
    because a page of large entries may take 500 MB. Raises NotAllowed for a hash of a subscription
    that is not Key_Shared."""
    assert 0 < limit <= PAGE_ENTRIES_MAX
    found = await _find(subscription, consumer, slot, after, limit + 1)
    page, more = found[:limit], len(found) > limit
    messages = [show(await _opened(subscription, pending)) for pending in page]
    return messages, page[-1].position if more else None


async def _find(
    subscription: Subscription, consumer: str | None, slot: int | None, after: Position, count: int
) -> list[PendingEntry]:
    machine = subscription.dispatcher
    if slot is not None and not isinstance(machine, KeyShared):
        raise NotAllowed("a hash", f"subscription {subscription.name!r} is not Key_Shared")
    consumers = [it for it in subscription.consumers if consumer in (None, it.name)]
    if (active := subscription.delivered_to_active()) is not None:
        name, position, end = active
        if consumer not in (None, name):
            return []
        return _of_active(subscription, name, max(position, after), end, count)
    found: list[PendingEntry] = []
    for ledger in ledgers_of(consumers, after):
        # Read the slots and the pending entries in one step: during an await, both may change.
        slots = machine.slots.ledgers() if isinstance(machine, KeyShared) else {}
        found += pending_in(ledger, consumers, slots, after=after, slot=slot)
        if len(found) >= count:
            break
        await asyncio.sleep(0)
    return found[:count]


def _of_active(
    subscription: Subscription, name: str, after: Position, end: Position, count: int
) -> list[PendingEntry]:
    """The pending entries of a single-active type, which does not track them: the unacknowledged
    entries before `end`, where the deliveries end."""
    cursor = subscription.cursor
    found: list[PendingEntry] = []
    position = cursor.first_unacked(Position(after.ledger, after.entry + 1))
    while position < end and len(found) < count:
        found.append(PendingEntry(position, name, 0, 0))
        position = cursor.first_unacked(Position(position.ledger, position.entry + 1))
    return found


async def _opened(subscription: Subscription, pending: PendingEntry) -> PendingMessage:
    redeliveries = subscription.cursor.redeliveries.get(pending.position)
    try:
        entry = await subscription.read_entry(pending.position)
    except LogError as error:
        return PendingMessage(pending, redeliveries, None, str(error))
    if entry is None:
        return PendingMessage(pending, redeliveries, None, "it does not exist any more")
    return PendingMessage(pending, redeliveries, entry)
