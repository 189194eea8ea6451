"""From which message on a user wants to see messages.

A broker positions a subscription at an entry. Where in its batch to begin, and whether the message
itself is wanted, only the client knows, so it skips what comes too early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.client.message import MessageId

if TYPE_CHECKING:
    from magnetar.client.ids import Key


@dataclass(frozen=True, slots=True)
class Start:
    """A message, and whether it is wanted itself."""

    message_id: MessageId
    inclusive: bool

    @property
    def key(self) -> Key:
        return self.message_id.ledger_id(), self.message_id.entry_id()

    @property
    def is_sentinel(self) -> bool:
        """Whether it is an end of the topic and no message; then nothing is skipped."""
        return self.message_id in (MessageId.earliest, MessageId.latest)

    def is_before(self, last: MessageId) -> bool:
        """Whether `last`, a message of the topic, is wanted. Not for the end of the topic."""
        if self.message_id.batch_index() < 0:
            last = MessageId(-1, last.ledger_id(), last.entry_id())
        return last > self.message_id or (self.inclusive and last == self.message_id)

    def skipped(self, key: Key, batch_size: int) -> int:
        """The bits of the messages of this entry (1: not a batch) that come too early.

        An id without a place in the batch means the whole entry.
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
