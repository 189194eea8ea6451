"""Reads the messages out of a batch that the program decrypted itself."""

from __future__ import annotations

from typing import Self

from magnetar.client.errors import InvalidMessage, WrongType
from magnetar.client.message import Delivery, Message, MessageId
from magnetar.protos.batch import open_batch
from magnetar.protos.errors import EntryError


class MessageBatch:
    """Reads the messages of a batch that the program decrypted itself.

    With ConsumerCryptoFailureAction.CONSUME, a consumer receives an encrypted batch as one message.
    The program decrypts and decompresses the payload of this message, then calls `parse_from`.
    """

    def __init__(self) -> None:
        self._message_id = MessageId()

    def with_message_id(self, msg_id: MessageId) -> Self:
        """Set the id of the received message. The parsed messages get this id with their index in
        the batch. Returns this MessageBatch."""
        _expect("msg_id", msg_id, MessageId)
        self._message_id = msg_id
        return self

    def parse_from(self, data: bytes, size: int) -> list[Message]:
        """Return the messages of a batch.

        `data`: the batch. `size`: the number of its messages. Raises InvalidMessage if the batch
        does not consist of this many messages.
        """
        _expect("data", data, bytes)
        _expect("size", size, int)
        if not 0 < size <= len(data):
            raise InvalidMessage(f"{size} messages cannot be in a batch of {len(data)} bytes")
        at = self._message_id
        try:
            batch = open_batch(data, 0, size, sequence_id=0)
        except EntryError as error:
            raise InvalidMessage(str(error)) from None
        delivery = Delivery(at.topic_name(), at.partition(), "", 0, b"", 0, None, 0)
        place = at.partition(), at.ledger_id(), at.entry_id()
        return [
            Message(batch.message(index), MessageId(*place, index, size, at.topic_name()), delivery)
            for index in range(size)
        ]


def _expect(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise WrongType(f"{name} must be {kind.__name__}, not {type(value).__name__}")
