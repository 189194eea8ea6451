"""The first message that a user wants to receive.

A broker positions a subscription at an entry. Only the client knows where in the batch to begin,
and whether the start message is included. So the client skips the messages before the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.client.message import MessageId

if TYPE_CHECKING:
    from magnetar.client.ids import Key


@dataclass(frozen=True, slots=True)
class Start:
    """A message id, and whether that message is included."""

    message_id: MessageId
    inclusive: bool
    # The first chunk of a message that begins before the start and ends after it. None: there is no
    # such message.
    chunks_from: Key | None = None

    @property
    def key(self) -> Key:
        return self.message_id.ledger_id(), self.message_id.entry_id()

    @property
    def broker_key(self) -> Key:
        """The entry with which the broker begins."""
        return self.key if self.chunks_from is None else self.chunks_from

    def admits_chunk(self, key: Key) -> bool:
        """Return whether a chunk before the start may belong to a message that ends after the
        start."""
        return self.chunks_from is not None and self.chunks_from <= key <= self.key

    @property
    def is_sentinel(self) -> bool:
        """Return whether the id is `earliest` or `latest`; then the client skips nothing."""
        return self.message_id in (MessageId.earliest, MessageId.latest)

    def is_before(self, last: MessageId) -> bool:
        """Return whether the topic's last message, `last`, is one that the user wants to receive.

        Not valid for `latest`.
        """
        index = self.message_id.batch_index()
        place = (*self.key, index)
        end = (last.ledger_id(), last.entry_id(), last.batch_index() if index >= 0 else -1)
        return end > place or (self.inclusive and end == place)

    def skipped(self, key: Key, batch_size: int) -> int:
        """Return the bits of the messages of an entry that lie before the start.

        `batch_size` is 1 for an entry that is not a batch. A start id without a batch index means
        the whole entry.
        """
        if self.is_sentinel or key > self.key:
            return 0
        everything = (1 << batch_size) - 1
        if key < self.key:
            return everything
        index = self.message_id.batch_index()
        if index < 0 or batch_size == 1:
            return 0 if self.inclusive else everything
        return everything & ((1 << index + (not self.inclusive)) - 1)
