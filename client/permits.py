"""How much more a broker may send to a consumer.

A consumer grants permits, one for each message; the broker sends as many and no more (but for the
rest of a batch). Granted anew when half of the queue is used up, so that a busy consumer costs one
command for every 500 messages and never runs dry.
"""

from __future__ import annotations

from typing import Final

QUEUE_BYTES_MAX: Final = 64 << 20
"""Bytes of messages that wait in one consumer's queue. Permits count messages, so this is held by
granting fewer of them, judged by the size of the messages seen so far. The first grant is blind: it
is the whole queue, at worst 1,000 messages of 5 MiB."""


class Permits:
    """A machine: deliveries and what the user takes in, grants out.

    1. Granted and queued messages together do not exceed the queue, but for the rest of a batch.
    2. When the queue is empty and nothing is granted, a grant is due (with a queue of 0: when
       somebody waits).
    """

    def __init__(self, queue_messages_max: int) -> None:
        self._messages_max = queue_messages_max
        self._granted = 0  # negative: the broker sent the rest of a batch beyond it
        self._queued = 0
        self._queued_bytes = 0
        self._seen = 0
        self._seen_bytes = 0

    def on_attached(self) -> None:
        """A new connection: permits and queue of the old one are gone."""
        self._granted = self._queued = self._queued_bytes = 0

    def on_delivered(self, used: int, queued: int, queued_bytes: int) -> None:
        """The broker used up permits; of those messages `queued` wait for the user."""
        assert 0 <= queued <= used
        self._granted -= used
        self._queued += queued
        self._queued_bytes += queued_bytes
        self._seen += queued
        self._seen_bytes += queued_bytes

    def on_taken(self, messages: int, message_bytes: int) -> None:
        """The user took messages out of the queue."""
        self._queued -= messages
        self._queued_bytes -= message_bytes
        assert self._queued >= 0
        assert self._queued_bytes >= 0

    def on_dropped(self) -> None:
        """The queue was emptied; what is granted stays granted."""
        self._queued = self._queued_bytes = 0

    def grant(self, *, waiting: bool) -> int:
        """Permits to grant now; 0 if it is not time. `waiting`: the user waits for a message."""
        window = min(self._messages_max, self._messages_by_bytes())
        if self._messages_max == 0:
            if not waiting:
                return 0
            window = 1
        room = window - self._queued - self._granted
        if self._queued_bytes >= QUEUE_BYTES_MAX or room < max(1, window // 2):
            return 0
        self._granted += room
        return room

    def _messages_by_bytes(self) -> int:
        """How many messages of the size seen so far fill the queue's bytes."""
        if self._seen_bytes == 0:
            return self._messages_max
        return max(1, QUEUE_BYTES_MAX * self._seen // self._seen_bytes)

    def check(self) -> None:
        assert self._queued >= 0
        assert self._queued_bytes >= 0
        assert self._granted + self._queued <= max(1, self._messages_max) or self._granted <= 0
