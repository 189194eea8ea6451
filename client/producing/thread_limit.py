"""Lets threads wait for the limit of a producer's pending messages."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from magnetar.client.thread_bridge import LoopThread, interruptible, wait_for

if TYPE_CHECKING:
    from magnetar.client.errors import PulsarException
    from magnetar.client.producing.outgoing import PendingLimit


class ThreadLimit:
    """A PendingLimit for any number of threads. The publisher owns it, and not the producer, so
    that a producer which the program has dropped can be freed."""

    def __init__(self, limit: PendingLimit, thread: LoopThread, *, blocks: bool) -> None:
        self._limit = limit
        self._thread = thread
        self._blocks = blocks
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[object] = deque()  # one ticket for each send over the limit

    # In the user's thread

    def reserve(self, size: int) -> PulsarException | None:
        """Reserve `size` bytes, granted in FIFO order so that small messages cannot overtake a
        large one. Returns None after success, else the error."""
        with self._lock:  # to take it through the condition costs ten times as much
            if not self._waiting and self._limit.maybe_reserve(size):
                return None
            if not self._blocks or self._thread.is_current:
                return self._limit.refusal()
            ticket = object()
            self._waiting.append(ticket)
            try:
                with interruptible():
                    wait_for(
                        self._changed,
                        lambda: self._waiting[0] is ticket and self._limit.maybe_reserve(size),
                    )
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()  # the next ticket may fit
        return None

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
