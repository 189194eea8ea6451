"""Checks the ack sets that clients send, before a cursor stores them.

An ack set of a batch of n messages has ceil(n / 64) words at most. Bits beyond the batch have no
meaning. The subscription notes the sizes of the last batches that it read, so the size of a
delivered batch is usually known. A client may acknowledge a batch that it got from the topic's
former owner. The size of this batch is not known here. So ack sets of batches of unknown size have
limits of their own: for the words of one set, and for the words of all such sets. When the batch is
read, its set is cut to the batch (`Cursor.limit_batch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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

UNKNOWN_WORDS_TOTAL_MAX: Final = 1 << 18
"""The limit of words of all ack sets of batches of unknown size in the cursor of a subscription:
2 MB. It is enough for 100,000 sets of two words, or for 16,000 sets of 1,000 messages."""


class AckSets:
    """The ack sets of one subscription."""

    __slots__ = ("_cursor", "_older", "_sizes", "_subscription", "_unknown", "_unknown_words")

    def __init__(self, subscription: str, cursor: Cursor) -> None:
        self._subscription = subscription
        self._cursor = cursor
        # Two generations: when the newer one is full, the older one is forgotten.
        self._sizes: dict[Position, int] = {}
        self._older: dict[Position, int] = {}
        self._unknown: dict[Position, int] = {}  # the words of sets of unknown batch size
        self._unknown_words = 0

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
        # Make room before the first set is admitted. The cursor gets the admitted sets only after
        # this call, so `_forget_settled` in the middle of the call would forget them.
        if self._unknown_words + sum([len(words) for _, words in sets]) > UNKNOWN_WORDS_TOTAL_MAX:
            self._forget_settled()
        return [(position, self._checked(position, words)) for position, words in sets]

    def _checked(self, position: Position, words: Sequence[int]) -> Sequence[int]:
        if not self._cursor.is_open(position):
            return ()  # the cursor ignores it
        size = self._sizes.get(position) or self._older.get(position)
        if size is None:
            self._admit_unknown(position, len(words))
            return words
        limit = -(-size // 64)
        if len(words) > limit:
            why = f"an ack set of {len(words)} words; its batch of {size} messages has {limit}"
            raise InvalidAck(self._subscription, position, why)
        if len(words) == limit and size % 64:
            return (*words[:-1], words[-1] & ((1 << size % 64) - 1))
        return words

    def _admit_unknown(self, position: Position, words: int) -> None:
        if words > UNKNOWN_WORDS_MAX:
            why = (
                f"an ack set of {words} words; at most {UNKNOWN_WORDS_MAX} are accepted before "
                "its batch is delivered"
            )
            raise InvalidAck(self._subscription, position, why)
        before = self._unknown.get(position, 0)
        if self._unknown_words + words - before > UNKNOWN_WORDS_TOTAL_MAX:
            why = (
                f"ack sets of batches that are not delivered yet have {self._unknown_words} words; "
                f"the limit is {UNKNOWN_WORDS_TOTAL_MAX}"
            )
            raise InvalidAck(self._subscription, position, why)
        if words > before:
            self._unknown[position] = words
            self._unknown_words += words - before

    def _forget_settled(self) -> None:
        """Forget the sets that the cursor no longer has, and those whose batch was read since."""
        self._unknown = {
            position: words
            for position, words in self._unknown.items()
            if self._cursor.batch_ack_set(position) is not None
            and position not in self._sizes
            and position not in self._older
        }
        self._unknown_words = sum(self._unknown.values())
