"""The client's part of key-ordered negative acknowledgements (Key_Shared).

Theory of operation. The broker withholds the later messages of a negatively acknowledged message's
key. Some of them may be on their way or in the client's queue already: they must not reach the
application either. The client gives the later messages in its queue back to the broker at once, and
*guards* the key until the broker answers. While a key is guarded, the client also gives back later
messages that arrive. When the broker answers, it already withholds the later messages, so the
answer ends the guard. Deliveries and the answer arrive in the order in which the broker sent them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.client.message import ChunkedMessageId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.client.ids import Key
    from magnetar.client.message import Message

    Place = tuple[int, int, int]  # ledger, entry, index in the batch (-1: not a batch)


class NackOrder:
    """The guarded keys. An instance is false if no key is guarded."""

    def __init__(self) -> None:
        # key -> number of the guard -> place
        self._guards: dict[str, dict[int, Place]] = {}
        self._keys: dict[int, str] = {}  # number of the guard -> key
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._guards)

    @staticmethod
    def has_key(message: Message) -> bool:
        """Return whether the client can keep the order of the message's key: the message has a key,
        and is not in chunks."""
        return bool(_key(message)) and not isinstance(message.message_id(), ChunkedMessageId)

    def guard(self, message: Message) -> int:
        """Withhold the later messages of the message's key. Returns the number of the guard."""
        self._count += 1
        key = self._keys[self._count] = _key(message)
        self._guards.setdefault(key, {})[self._count] = _place(message)
        return self._count

    def release(self, guard: int) -> None:
        """End a guard: the broker withholds the later messages now, or the connection is lost."""
        key = self._keys.pop(guard, None)
        if key is None:  # `clear` has ended the guard
            return
        del self._guards[key][guard]
        if not self._guards[key]:
            del self._guards[key]

    def clear(self) -> None:
        self._guards.clear()
        self._keys.clear()

    def withholds(self, message: Message) -> bool:
        """Return whether a guard of the message's key withholds the message."""
        guards = self._guards.get(_key(message))
        if guards is None:
            return False
        place = _place(message)
        return any(at < place for at in guards.values())


def entries_of(messages: Sequence[Message]) -> tuple[list[Key], list[Key]]:
    """Return the entries of messages that the user has not seen, in two lists.

    The first list has the entries of which the user has seen no message. The second list has the
    batches of which the user has seen some messages.
    """
    first: dict[Key, int] = {}
    for message in messages:
        ledger, entry, index = _place(message)
        first[ledger, entry] = min(index, first.get((ledger, entry), index))
    whole = [key for key, index in first.items() if index <= 0]
    return whole, [key for key, index in first.items() if index > 0]


def _key(message: Message) -> str:
    """Return "o" and the ordering key, else "k" and the key. "": the message has no key."""
    if message.ordering_key():
        return f"o{message.ordering_key()}"
    return f"k{message.partition_key()}" if message.partition_key() else ""


def _place(message: Message) -> Place:
    at = message.message_id()
    return at.ledger_id(), at.entry_id(), at.batch_index()
