"""The outcome of a message that is sent in chunks. Each chunk is an entry with its own receipt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.client.message import ChunkedMessageId, MessageId

if TYPE_CHECKING:
    from magnetar.client.errors import PulsarException
    from magnetar.client.producing.batching import Done


class ChunkedSend:
    """Gathers the outcomes of the chunks of one message, and reports the message's outcome once.

    The message is stored when all its chunks are stored. It fails when a chunk fails.
    """

    def __init__(self, done: Done) -> None:
        self._done: Done | None = done  # None: reported
        self._missing = 0
        self._first: MessageId | None = None  # None: no chunk is stored

    def add(self) -> Done:
        """Return the callback for the outcome of one more chunk. Receipts come in order."""
        self._missing += 1
        return self._on_chunk

    def _on_chunk(self, error: PulsarException | None, message_id: MessageId | None) -> None:
        self._missing -= 1
        if self._done is None:
            return
        if error is not None:
            done, self._done = self._done, None
            done(error, None)
            return
        assert message_id is not None
        if self._first is None:
            self._first = message_id
        if not self._missing:
            done, self._done = self._done, None
            done(None, ChunkedMessageId(self._first, message_id))
