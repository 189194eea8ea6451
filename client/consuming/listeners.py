"""The threads that call message listeners."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Final

from magnetar.client.callbacks import call

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.client.message import Message
    from magnetar.client.thread_bridge import Mailbox

BURST_MESSAGES_MAX: Final = 100
"""Messages that one listener gets before the next listener of the same thread has its turn."""


class Listener:
    """Calls a user's function for each message of one mailbox, on one thread, in order."""

    def __init__(
        self, mailbox: Mailbox, deliver: Callable[[Message], None], thread: ListenerThread
    ) -> None:
        self._mailbox = mailbox
        self._deliver = deliver
        self._thread = thread
        self._lock = threading.Lock()
        self._scheduled = False
        self._paused = False
        self.on_closed: Callable[[], object] = lambda: None
        mailbox.on_put = self.wake
        self.wake()

    def wake(self) -> None:
        """Schedule a burst: there may be messages."""
        with self._lock:
            if self._scheduled or self._paused:
                return
            self._scheduled = True
        self._thread.schedule(self)

    def pause(self) -> None:
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._paused = False
        self.wake()

    def close(self) -> None:
        """Stop the calls and report it to `on_closed`: the consumer or reader was closed."""
        self.pause()
        self.on_closed()

    def run_burst(self) -> None:
        """Call the user's function for at most BURST_MESSAGES_MAX messages, on the listener thread.

        If there may be more messages, schedule the next burst.
        """
        with self._lock:
            self._scheduled = False
        for _ in range(BURST_MESSAGES_MAX):
            with self._lock:  # take no message after a pause
                if self._paused:
                    return
                message = self._mailbox.maybe_take()
            if message is None:
                self._mailbox.on_waiting()
                return
            call(self._deliver, message)
        self.wake()


class ListenerThread:
    """One thread that serves any number of listeners in turn."""

    def __init__(self, name: str) -> None:
        self._due: queue.SimpleQueue[Listener | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def schedule(self, listener: Listener) -> None:
        self._due.put(listener)

    def stop(self, timeout_s: float) -> None:
        """End the thread after the scheduled bursts. Waits for it for at most `timeout_s`.

        A call from a listener does not wait.
        """
        self._due.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def stop_soon(self) -> None:
        """Tell the thread to end after the scheduled bursts. Returns at once."""
        self._due.put(None)

    def _run(self) -> None:
        while (listener := self._due.get()) is not None:
            listener.run_burst()
