"""The acknowledgements of one consumer: a consumer that was behind goes on, and waits end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from support import settle

from magnetar.client.consuming.acknowledger import Acknowledger
from magnetar.client.consuming.acks import PENDING_IDS_MAX, AckTracker

if TYPE_CHECKING:
    from magnetar.client.session.connection import Connection


class Unanswered:
    """A connection whose broker answers nothing."""

    def ask(self, command: Any, done: Any) -> None:
        pass


def acknowledger(caught_up: list[bool]) -> Acknowledger:
    owner = cast("Any", SimpleNamespace(topic="t", shut_down=lambda error: None))
    one = Acknowledger(owner, AckTracker(batch_indexes=True), lambda: caught_up.append(True))
    one.on_attached(cast("Connection", Unanswered()), 1)
    return one


async def test_a_cumulative_acknowledgement_lets_a_consumer_go_on_that_was_behind() -> None:
    caught_up: list[bool] = []
    acks = acknowledger(caught_up)
    for entry in range(8):  # as many groups as may be in flight
        acks.acknowledge_entries([(1, entry)])
        acks.send()
    last = PENDING_IDS_MAX + 100
    acks.acknowledge_entries((1, entry) for entry in range(8, last))
    assert acks.is_behind
    acks.acknowledge_cumulative((1, last), -1, 0)
    assert not acks.is_behind
    assert caught_up == [True]


async def test_the_end_of_the_subscription_ends_the_wait_for_acknowledgements() -> None:
    acks = acknowledger([])
    acks.acknowledge_entries([(1, 1)])
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(acks.settle())
        await settle()
        acks.on_unsubscribed()


async def test_a_seek_lets_a_consumer_go_on_that_was_behind() -> None:
    """The seek drops the pending acknowledgements, so no answer will let the consumer go on."""
    caught_up: list[bool] = []
    acks = acknowledger(caught_up)
    acks.on_seek()
    acks.acknowledge_entries((1, entry) for entry in range(PENDING_IDS_MAX))
    assert acks.is_behind
    acks.on_seek_end(moved=True)
    assert not acks.is_behind
    assert caught_up == [True]
