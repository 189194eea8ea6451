"""Passes the calls that user threads make for a consumer's messages to the event loop, in runs.

A thread takes and acknowledges messages one by one. Each call extends the step that waits for the
loop. So a batch becomes one run, not one step for each message and each acknowledgement.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from magnetar.client.thread_bridge import ThreadBridge

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from magnetar.client.message import Delivery, Message

Run = tuple["Delivery", int, int]
"""Consecutive messages of one delivery: the first index in the batch, and the index after the last
message. The only message of an entry without a batch has the index -1: its run is from -1 to 0."""

YIELD_QUEUE_MIN: Final = 200
"""The least queue size, in messages, with which threads let the loop run. With a shorter queue they
do not: changing threads costs some 20 microseconds, as much as taking ten messages."""

YIELD_S_MAX: Final = 0.001
"""The maximal time in seconds for which a thread lets the loop run. The loop needs some 100
microseconds; the limit is for a loop that is busy with something else."""


@dataclass(slots=True)
class Call:
    """A function to call on the loop."""

    function: Callable[[Any], None]
    argument: Any


@dataclass(slots=True)
class Progress:
    """The messages that were taken and those that were acknowledged, each list in its own order.

    The loop counts the taken messages first. This is correct: a message is taken before it is
    acknowledged, and the order between taking one message and acknowledging another does not
    matter.
    """

    taken: list[Run] = field(default_factory=list)
    acknowledged: list[Run] = field(default_factory=list)


Step = Call | Progress


class Steps(ThreadBridge[Step]):
    """The bridge of a consumer.

    `on_taken` and `on_acknowledged` are called for each message. For speed, they repeat a few lines
    and call no function for them.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, carry_out: Callable[[deque[Step]], None]
    ) -> None:
        super().__init__(loop, self._carry_out)
        self._do = carry_out
        # The locks of threads that let the loop run.
        self._yielding: deque[threading.Lock] = deque()

    def on_taken(self, message: Message) -> bool:
        """Note that the program took a message. Returns whether the message begins a new run.

        Raises AlreadyClosed after the loop's end.
        """
        delivery, place = message.delivery, message.place
        with self._lock:
            step = self._items[-1] if self._items else None
            if isinstance(step, Progress):
                runs = step.taken
                if runs:
                    known, first, end = runs[-1]
                    if known is delivery and end == place:
                        runs[-1] = delivery, first, place + 1
                        return False
                runs.append((delivery, place, place + 1))
                return True
        self.put(Progress([(delivery, place, place + 1)]))
        return True

    def on_acknowledged(self, message: Message) -> None:
        """Note that the program acknowledged a message.

        Raises AlreadyClosed after the loop's end.
        """
        delivery, place = message.delivery, message.place
        with self._lock:
            step = self._items[-1] if self._items else None
            if isinstance(step, Progress):
                runs = step.acknowledged
                if runs:
                    known, first, end = runs[-1]
                    if known is delivery and end == place:
                        runs[-1] = delivery, first, place + 1
                        return
                runs.append((delivery, place, place + 1))
                return
        self.put(Progress(acknowledged=[(delivery, place, place + 1)]))

    def let_loop_run(self) -> None:
        """Wait until the loop has carried out the waiting steps, but at most YIELD_S_MAX.

        The interpreter runs one thread at a time and switches threads every 5 ms. A thread that
        does not wait would empty its queue before the loop can ask the broker for more messages.
        """
        turn = threading.Lock()
        turn.acquire()
        with self._lock:
            if not self._items:
                return
            self._yielding.append(turn)
        turn.acquire(timeout=YIELD_S_MAX)

    def _carry_out(self, steps: deque[Step]) -> None:
        try:
            self._do(steps)
        finally:
            while self._yielding:
                self._yielding.popleft().release()
