"""Counts the permits of a consumer: how many more messages the broker may send.

One permit allows the broker to send one message. The broker sends no more messages than it has
permits, except for the rest of a batch. The consumer grants permits again when half of its queue is
free. Thus a busy consumer with the default queue size of 1,000 sends one command for every 500
messages, and its queue does not run empty.
"""

from __future__ import annotations

from typing import Final

QUEUE_BYTES_MAX: Final = 64 << 20
"""Bytes of messages that wait in one consumer's queue. Permits count messages, so the consumer
grants fewer permits if recent messages were large. Before the first message, the consumer does not
know the size of messages. So the first grant is for the whole queue, at worst 1,000 messages of
5 MiB."""


RECENT_MESSAGES: Final = 1000
"""The approximate number of recent messages whose mean size decides the number of permits. Newer
messages weigh more."""


class Permits:
    """A machine: deliveries and taken messages in, grants out.

    1. Granted and queued messages together do not exceed the queue size, except for the rest of a
       batch and returned messages.
    2. When the queue is empty and nothing is granted, a grant is due. With a queue size of 0, the
       grant is due when the user waits for a message.
    """

    def __init__(self, queue_messages_max: int) -> None:
        self._messages_max = queue_messages_max
        self._bytes_max = QUEUE_BYTES_MAX
        self._window = queue_messages_max  # smaller if recent messages were large
        self._granted = 0  # negative: the broker sent the rest of a batch beyond the permits
        self._queued = 0
        self._queued_bytes = 0
        self._returned = 0  # upper bound of the queued messages that the user returned
        self._seen = 0
        self._seen_bytes = 0

    def on_attached(self) -> None:
        """Begin on a new connection: the permits and the queue of the old one are gone."""
        self._granted = self._queued = self._queued_bytes = self._returned = 0

    def on_delivered(self, used: int, queued: int, queued_bytes: int) -> None:
        """Count a delivery: the broker `used` permits, and `queued` messages wait for the user."""
        assert 0 <= queued <= used
        self._granted -= used
        self._queued += queued
        self._queued_bytes += queued_bytes
        self._seen += queued
        self._seen_bytes += queued_bytes
        if self._seen > RECENT_MESSAGES:
            self._seen //= 2
            self._seen_bytes //= 2
        self._set_window()

    def on_taken(self, messages: int, message_bytes: int) -> bool:
        """Count messages that the user took. Returns whether `grant` may have permits to give."""
        self._queued -= messages
        self._queued_bytes -= message_bytes
        if self._returned:
            self._returned = max(0, self._returned - messages)
        return self._window - self._queued - self._granted >= max(1, self._window >> 1)

    def on_returned(self, message_bytes: int) -> None:
        """Count a message that the user put back at the front of the queue.

        The consumer may have granted its permit again. Then the queue exceeds its size by one.
        """
        self._queued += 1
        self._queued_bytes += message_bytes
        self._returned += 1

    def resize(self, queue_messages_max: int, bytes_max: int) -> None:
        """Change the limits of the queue. Messages already granted may still exceed them."""
        self._messages_max = queue_messages_max
        self._bytes_max = bytes_max
        self._window = queue_messages_max
        self._set_window()

    def _set_window(self) -> None:
        if self._seen_bytes:
            by_bytes = self._bytes_max * self._seen // self._seen_bytes
            self._window = min(self._messages_max, max(1, by_bytes))

    def on_dropped(self) -> None:
        """Count the queue as empty. Granted permits stay granted."""
        self._queued = self._queued_bytes = self._returned = 0

    def grant(self, *, waiting: bool) -> int:
        """Return the permits to grant now, or 0. `waiting`: the user waits for a message."""
        window = self._window
        if self._messages_max == 0:
            if not waiting:
                return 0
            window = 1
        free = window - self._queued - self._granted
        if self._queued_bytes >= self._bytes_max or free < max(1, window // 2):
            return 0
        self._granted += free
        return free

    def check(self) -> None:
        assert self._queued >= 0
        assert self._queued_bytes >= 0
        held = self._granted + self._queued - self._returned
        assert held <= max(1, self._messages_max) or self._granted <= 0
