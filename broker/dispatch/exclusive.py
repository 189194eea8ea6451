"""Dispatch to the one consumer of an Exclusive subscription: in order, from the cursor.

The machine refuses a second consumer and names the first, so that the shell can probe its
connection.

Invariant (see `check`): there is at most one consumer; see also single_active.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.dispatch.dispatcher import Activate, ConsumerRefused
from magnetar.broker.dispatch.single_active import SingleActive
from magnetar.broker.errors import ConsumerBusy

if TYPE_CHECKING:
    from magnetar.broker.dispatch.dispatcher import Action
    from magnetar.broker.dispatch.permits import Consumer


class Exclusive(SingleActive):
    """A `Dispatcher`."""

    def add_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        if self._active is not None:
            busy = ConsumerBusy(self._subscription, "its only consumer is connected")
            raise ConsumerRefused(busy, [self._active])
        self._active = consumer
        return [Activate(consumer, True)]

    def remove_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        assert self._active is consumer
        self._active = None
        self._rewind()
        return []
