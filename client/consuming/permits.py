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


RECENT_MESSAGES: Final = 1000
"""About so many messages are taken into account for their usual size, later ones more."""


class Permits:
    """A machine: deliveries and what the user takes in, grants out.

    1. Granted and queued messages together do not exceed the queue, but for the rest of a batch and
       what was returned.
    2. When the queue is empty and nothing is granted, a grant is due (with a queue of 0: when
       somebody waits).
    """

    def __init__(self, queue_messages_max: int) -> None:
        self._messages_max = queue_messages_max
        self._window = queue_messages_max  # fewer if the messages seen so far are large
        self._granted = 0  # negative: the broker sent the rest of a batch beyond it
        self._queued = 0
        self._queued_bytes = 0
        self._returned = 0  # of the queued ones, at most
        self._seen = 0
        self._seen_bytes = 0

    def on_attached(self) -> None:
        """A new connection: permits and queue of the old one are gone."""
        self._granted = self._queued = self._queued_bytes = self._returned = 0

    def on_delivered(self, used: int, queued: int, queued_bytes: int) -> None:
        """The broker used up permits; of those messages `queued` wait for the user."""
        assert 0 <= queued <= used
        self._granted -= used
        self._queued += queued
        self._queued_bytes += queued_bytes
        self._seen += queued
        self._seen_bytes += queued_bytes
        if self._seen > RECENT_MESSAGES:
            self._seen //= 2
            self._seen_bytes //= 2
        if self._seen_bytes:
            by_bytes = QUEUE_BYTES_MAX * self._seen // self._seen_bytes
            self._window = min(self._messages_max, max(1, by_bytes))

    def on_taken(self, message_bytes: int) -> bool:
        """The user took a message out of the queue. Whether `grant` has something to give."""
        self._queued -= 1
        self._queued_bytes -= message_bytes
        if self._returned:
            self._returned -= 1
        return self._window - self._queued - self._granted >= max(1, self._window >> 1)

    def on_returned(self, message_bytes: int) -> None:
        """The user gave a message back, to take it again before the others. Its permit may have
        been granted anew: then the queue is that much fuller for a while."""
        self._queued += 1
        self._queued_bytes += message_bytes
        self._returned += 1

    def on_dropped(self) -> None:
        """The queue was emptied; what is granted stays granted."""
        self._queued = self._queued_bytes = self._returned = 0

    def grant(self, *, waiting: bool) -> int:
        """Permits to grant now; 0 if it is not time. `waiting`: the user waits for a message."""
        window = self._window
        if self._messages_max == 0:
            if not waiting:
                return 0
            window = 1
        room = window - self._queued - self._granted
        if self._queued_bytes >= QUEUE_BYTES_MAX or room < max(1, window // 2):
            return 0
        self._granted += room
        return room

    def check(self) -> None:
        assert self._queued >= 0
        assert self._queued_bytes >= 0
        held = self._granted + self._queued - self._returned
        assert held <= max(1, self._messages_max) or self._granted <= 0
