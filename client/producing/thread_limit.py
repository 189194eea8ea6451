"""Lets threads wait for the limit of a producer's pending messages."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from magnetar.client.thread_bridge import LoopThread, interruptible, wait_for

if TYPE_CHECKING:
    from magnetar.client.errors import PulsarException
    from magnetar.client.producing.outgoing import PendingLimit


class ThreadLimit:
    """A PendingLimit for any number of threads.

    The publisher refers to this object, and not to the producer. So Python can free a producer that
    the program has dropped.
    """

    def __init__(self, limit: PendingLimit, thread: LoopThread, *, blocks: bool) -> None:
        self._limit = limit
        self._thread = thread
        self._blocks = blocks
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[object] = deque()  # one ticket for each send over the limit

    # In the user's thread

    def reserve(self, size: int) -> PulsarException | None:
        """Reserve a place for a message of `size` bytes. Returns None, or the error at the limit.
        With `blocks`, any thread but the loop's waits at the limit instead.

        Waiting messages get their places in FIFO order, so that small messages do not overtake a
        large one. If the call raises an interrupt (Ctrl-C), nothing is reserved. The interpreter
        handles a signal only at the beginning of a Python function, after a call of a C function,
        or in a loop. So no interrupt comes between a reservation and the assignment that notes it.
        """
        reserved = False
        try:
            with self._lock:  # faster than through the condition
                if not self._waiting and self._limit.maybe_reserve(size):
                    reserved = True
                    return None
                if not self._blocks or self._thread.is_current:
                    return self._limit.refusal()
                self._wait(size)
                reserved = True
                return None
        except BaseException:
            if reserved:
                self.take_back(size)
            raise

    def take_back(self, size: int) -> None:
        """Release the reservation of a message that was not passed on."""
        self.on_released(1, size)
        self.on_burst_end()

    def _wait(self, size: int) -> None:
        """Wait for a reservation. The caller holds the lock."""
        ticket = object()
        reserved = False

        def is_granted() -> bool:
            nonlocal reserved
            if self._waiting[0] is ticket and self._limit.maybe_reserve(size):
                reserved = True
            return reserved

        try:
            try:
                self._waiting.append(ticket)
                with interruptible():
                    wait_for(self._changed, is_granted)
            finally:
                with suppress(ValueError):  # an interrupt came before the ticket was added
                    self._waiting.remove(ticket)
                self._changed.notify_all()  # the next ticket may fit
        except BaseException:
            if reserved:
                self._limit.release(1, size)
                self._changed.notify_all()
            raise

    # On the loop

    def on_released(self, messages: int, message_bytes: int) -> None:
        """Release messages from the limit: their outcome is known."""
        with self._lock:
            self._limit.release(messages, message_bytes)

    def on_burst_end(self) -> None:
        """Wake sends that wait for the limit."""
        if self._waiting:
            with self._changed:
                self._changed.notify_all()
