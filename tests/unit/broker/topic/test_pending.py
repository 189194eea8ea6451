"""Pages of pending entries. The tests of the admin requests test the content of the pages."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from fakes.cluster_state import ClusterState
from fakes.topics import opened_topic
from support import wait_until

from magnetar.broker.log.entry import StoredEntry
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.topic.contract import SubscriptionType
from magnetar.broker.topic.pending import pending_page

if TYPE_CHECKING:
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.pending import PendingMessage


def entries_in_memory() -> int:
    gc.collect()
    return sum([isinstance(each, StoredEntry) for each in gc.get_objects()])


async def test_a_page_keeps_no_entry_after_it_was_shown() -> None:
    """A page of a hundred entries of 5 MB would hold 500 MB."""
    async with opened_topic(ClusterState(), cache_bytes=1) as it:
        _, session = await it.subscribe(kind=SubscriptionType.SHARED)
        positions = await it.publish(*"abcdef")
        await wait_until(lambda: len(session.entries) == 6, what="the deliveries")
        session.entries.clear()
        before, alive = entries_in_memory(), list[int]()

        def show(message: PendingMessage) -> Position:
            assert message.entry is not None
            alive.append(entries_in_memory())
            return message.pending.position

        shown, following = await pending_page(
            it.topic.subscriptions["s"],
            consumer=None,
            slot=None,
            after=EARLIEST,
            limit=5,
            show=show,
        )
        assert (shown, following) == (positions[:5], positions[4])
        assert max(alive) - before <= 1
