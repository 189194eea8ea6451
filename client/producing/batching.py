"""Gathers messages into batches.

A batch is one entry: it has one receipt, one place in the ledger, and is compressed as a whole.
The producer seals a batch when it is full (by messages or bytes), when its first message has waited
for the batching delay, when a caller waits for receipts, or before a message that becomes an entry
of its own. Key-based batching keeps one batch open for each key, and seals all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from magnetar.client.errors import PulsarException
from magnetar.client.message import MessageId

if TYPE_CHECKING:
    from magnetar.protos.message import OutgoingMessage

Done = Callable[[PulsarException | None, MessageId | None], None]
"""Called with the outcome of one message: an error or an id. The other argument is None."""


@dataclass(slots=True)
class Batch:
    """Messages that become one entry, in order, and the function to call for each."""

    messages: list[OutgoingMessage] = field(default_factory=list)
    dones: list[Done] = field(default_factory=list)
    message_bytes: int = 0


class BatchBuilder:
    """A machine that gathers messages into batches, and returns the sealed batches.

    1. Every message is in exactly one batch, open or sealed.
    2. The open batches together have at most `messages_max` messages and `bytes_max` bytes. Each
       has at most `batch_bytes_max` bytes. One message alone may have more bytes.
    3. Sealed batches come in the order of their first messages. A batch keeps its messages' order.
    4. With `by_key` all messages of a batch have the same key.
    """

    def __init__(
        self,
        *,
        messages_max: int,
        bytes_max: int,
        batch_bytes_max: int,
        delay_s: float,
        by_key: bool = False,
    ) -> None:
        assert messages_max > 0
        assert bytes_max > 0
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._batch_bytes_max = batch_bytes_max
        self._delay_s = delay_s
        self.by_key = by_key
        self._open: dict[str | bytes | None, Batch] = {}
        self._messages = 0
        self._bytes = 0
        self._since: float | None = None  # when the oldest open message was added; None: no batch

    def add(
        self, message: OutgoingMessage, message_bytes: int, done: Done, now: float
    ) -> list[Batch]:
        """Add a message. Returns the batches that this call seals."""
        sealed: list[Batch] = []
        key = _key_of(message) if self.by_key else None
        batch = self._open.get(key)
        batch_bytes = message_bytes if batch is None else batch.message_bytes + message_bytes
        is_over = self._bytes + message_bytes > self._bytes_max
        if (is_over or batch_bytes > self._batch_bytes_max) and self._since is not None:
            sealed, batch = self.seal(), None
        if self._since is None:
            self._since = now
        if batch is None:
            batch = self._open[key] = Batch()
        batch.messages.append(message)
        batch.dones.append(done)
        batch.message_bytes += message_bytes
        self._messages += 1
        self._bytes += message_bytes
        is_full = self._messages >= self._messages_max or self._bytes >= self._bytes_max
        if is_full or batch.message_bytes >= self._batch_bytes_max:
            sealed += self.seal()
        return sealed

    def seal(self) -> list[Batch]:
        """Close and return all open batches."""
        batches = list(self._open.values())
        self._open = {}
        self._messages = self._bytes = 0
        self._since = None
        return batches

    def limit(self, batch_bytes_max: int) -> list[Batch]:
        """Set the maximum size of a batch in bytes. Returns the batches that this call seals."""
        self._batch_bytes_max = batch_bytes_max
        is_full = any(batch.message_bytes >= batch_bytes_max for batch in self._open.values())
        return self.seal() if is_full else []

    def timer_at(self) -> float | None:
        """Return the time at which to seal the open batches. None: no batch is open."""
        return None if self._since is None else self._since + self._delay_s

    def check(self) -> None:
        batches = self._open.values()
        assert self._messages == sum(len(batch.messages) for batch in batches)
        assert self._bytes == sum(batch.message_bytes for batch in batches)
        assert (self._since is None) == (self._messages == 0)
        assert self._messages < self._messages_max
        assert self._bytes < self._bytes_max
        for key, batch in self._open.items():
            assert len(batch.messages) == len(batch.dones)
            assert batch.message_bytes < self._batch_bytes_max
            assert not self.by_key or all(_key_of(m) == key for m in batch.messages)


def _key_of(message: OutgoingMessage) -> str | bytes | None:
    return message.partition_key if message.ordering_key is None else message.ordering_key
