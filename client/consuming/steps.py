"""Passes the calls of user threads on a consumer's messages to the event loop, in runs.

A thread that takes and acknowledges a batch message by message adds one step for the batch, not one
for each message and each acknowledgement: while a step waits for the loop, it grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magnetar.client.thread_bridge import ThreadBridge

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.client.message import Delivery, Message


@dataclass(slots=True)
class Call:
    """A function to call on the loop."""

    function: Callable[[Any], None]
    argument: Any


@dataclass(slots=True)
class Progress:
    """Consecutive messages of one delivery that were taken, and others, or the same, that were
    acknowledged after they were taken. The indexes are those in the batch; -1 to 0: the message of
    an entry that is none.

    The loop counts what was taken first. This is the order of the calls, except that a message may
    be taken after another one was acknowledged; the two do not depend on each other.
    """

    taken: Delivery | None = None  # None: no message was taken
    taken_first: int = 0
    taken_end: int = 0
    acked: Delivery | None = None  # None: no message was acknowledged
    acked_first: int = 0
    acked_end: int = 0


Step = Call | Progress


class Steps(ThreadBridge[Step]):
    """The bridge of a consumer. `on_taken` and `on_acknowledged` are called for each message."""

    def on_taken(self, message: Message) -> None:
        """The program took a message. Raises AlreadyClosed after the loop's end."""
        delivery, place = message.delivery, message.place
        with self._lock:
            last = self._items[-1] if self._items else None
            if isinstance(last, Progress) and last.taken is delivery and last.taken_end == place:
                last.taken_end = place + 1
                return
        self.put(Progress(delivery, place, place + 1))

    def on_acknowledged(self, message: Message) -> None:
        """The program acknowledged a message. Raises AlreadyClosed after the loop's end."""
        delivery, place = message.delivery, message.place
        with self._lock:
            last = self._items[-1] if self._items else None
            if isinstance(last, Progress):
                if last.acked is None:
                    last.acked_first = place
                    last.acked_end = place + 1
                    last.acked = delivery  # after the numbers: a Ctrl-C may come in between
                    return
                if last.acked is delivery and last.acked_end == place:
                    last.acked_end = place + 1
                    return
        self.put(Progress(acked=delivery, acked_first=place, acked_end=place + 1))
