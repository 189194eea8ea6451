"""Checks the ack sets that clients send, before a cursor stores them.

An ack set of a batch of n messages has ceil(n / 64) words at most. Bits beyond the batch have no
meaning. The subscription notes the sizes of the last batches that it read, so the size of a
delivered batch is usually known. A client may acknowledge a batch that it got from the topic's
former owner. The size of this batch is not known here, so its ack set has a limit of its own. When
the batch is read, its set is cut to the batch (`Cursor.limit_batch`). All ack sets of a
subscription together have a limit, too. A client whose ack set is refused loses nothing: it gets
the batch again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.cursor.acks import partial_bytes
from magnetar.broker.errors import InvalidAck

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from magnetar.broker.cursor.cursor import Cursor
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position

    _AckSet = tuple[Position, Sequence[int]]

SIZES_MAX: Final = 20_000
"""The limit of batches whose sizes a subscription remembers: the batches that it read last. About
200 bytes each, 4 MB. By Pulsar's default, the receiver queue of a consumer holds 1,000 messages,
from at most 1,000 batches."""

UNKNOWN_WORDS_MAX: Final = 1_024
"""The limit of words of one ack set of a batch of unknown size: 65,536 messages. Pulsar's clients
close a batch at 1,000 messages by default."""

PARTIAL_BYTES_MAX: Final = 32 << 20
"""The limit of the memory of all ack sets of a subscription, in bytes (`Cursor.partial_bytes`). It
is enough for 150,000 batches of 100 messages, or for 100,000 batches of 1,000 messages. A producer
can claim a million messages for a batch of a few bytes, and then one ack set has 128 KiB."""


class AckSets:
    """The ack sets of one subscription."""

    __slots__ = ("_cursor", "_older", "_sizes", "_subscription")

    def __init__(self, subscription: str, cursor: Cursor) -> None:
        self._subscription = subscription
        self._cursor = cursor
        # Two generations: when the newer one is full, the older one is forgotten.
        self._sizes: dict[Position, int] = {}
        self._older: dict[Position, int] = {}

    def on_read(self, entries: Iterable[StoredEntry]) -> None:
        """The dispatcher gets these entries next. An entry that is no batch costs little here."""
        limited = self._cursor.has_partial
        for entry in entries:
            view = entry.view
            if limited:
                self._cursor.limit_batch(entry.position, view.num_messages)
            if view.is_batch:
                self._sizes[entry.position] = view.num_messages
        if len(self._sizes) >= SIZES_MAX // 2:
            self._older, self._sizes = self._sizes, {}

    def checked(self, sets: Sequence[_AckSet]) -> list[_AckSet]:
        """Return the ack sets of one acknowledgement. Bits beyond a batch of known size are cut
        off. An empty set: the entry is acknowledged already, or the log does not have it. Raises
        InvalidAck."""
        checked = [(position, self._checked(position, words)) for position, words in sets]
        self._admit(checked)
        return checked

    def _checked(self, position: Position, words: Sequence[int]) -> Sequence[int]:
        if not self._cursor.is_open(position):
            return ()  # the cursor ignores it
        size = self._sizes.get(position) or self._older.get(position)
        if size is None:
            if len(words) > UNKNOWN_WORDS_MAX:
                why = (
                    f"an ack set of {len(words)} words; at most {UNKNOWN_WORDS_MAX} are accepted "
                    "before its batch is delivered"
                )
                raise InvalidAck(self._subscription, position, why)
            return words
        limit = -(-size // 64)
        if len(words) > limit:
            why = f"an ack set of {len(words)} words; its batch of {size} messages has {limit}"
            raise InvalidAck(self._subscription, position, why)
        if len(words) == limit and size % 64:
            return (*words[:-1], words[-1] & ((1 << size % 64) - 1))
        return words

    def _admit(self, sets: Sequence[_AckSet]) -> None:
        """Raise InvalidAck if the cursor would hold too much with these ack sets. A set of a batch
        that has one already is no addition: two sets merge by AND."""
        cursor, added = self._cursor, 0
        for position, words in sets:
            if words and not cursor.is_partly_acked(position):
                added += partial_bytes(1, 64 * len(words))
                if cursor.partial_bytes + added > PARTIAL_BYTES_MAX:
                    why = (
                        f"the subscription's ack sets take {cursor.partial_bytes:,} bytes, and "
                        f"those of this request at least {added:,}; "
                        f"the limit is {PARTIAL_BYTES_MAX:,}"
                    )
                    raise InvalidAck(self._subscription, position, why)
