"""Cuts the messages of a task into entries.

The cut depends on the messages alone: not on time, receipts, or what is stored already. So a task
that is repeated produces the same entries, and the broker's deduplication knows each of them. An
entry is cut when

1. the entry holds MESSAGES_MAX messages or BYTES_MAX bytes, or would hold more than BYTES_MAX bytes
   with the next message,
2. all open entries together hold `open_bytes_max` bytes, or there are OPEN_MAX open entries: then
   all are cut, in the order of their first messages,
3. the task ends.

A message gets its sequence id when its entry is cut. So sequence ids rise from entry to entry, also
if each entry holds one key only and several entries are open.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from magnetar.protos.message import OutgoingMessage
    from magnetar.spark.sink.columns import Target

MESSAGES_MAX: Final = 1_000
BYTES_MAX: Final = 128 << 10
OPEN_MAX: Final = 1_000


@dataclass(slots=True, eq=False)
class Entry:
    """Messages that are stored together."""

    target: Target
    first_row: int  # the row of the first message, by its number in the task
    messages: list[OutgoingMessage] = field(default_factory=list)
    last_row: int = -1  # the row of the last message; rows between them may be in other entries
    bytes: int = 0

    @property
    def first_sequence_id(self) -> int:
        return self.messages[0].sequence_id

    @property
    def last_sequence_id(self) -> int:
        return self.messages[-1].sequence_id


class Cutter:
    """A machine: messages in, entries out.

    1. Each message is in exactly one entry, open or cut.
    2. Messages of one target and key keep their order.
    3. Sequence ids rise by 1 from message to message of the cut entries, from `first_sequence_id`.
    """

    def __init__(self, *, first_sequence_id: int | None, by_key: bool, open_bytes_max: int) -> None:
        """`first_sequence_id` None: the messages keep the sequence ids that they have."""
        assert open_bytes_max > 0
        self._next = first_sequence_id
        self._by_key = by_key
        self._open_bytes_max = open_bytes_max
        self._open: dict[object, Entry] = {}  # keyed by target, or by target and key
        self.open_bytes = 0

    def add(self, target: Target, message: OutgoingMessage, size: int, row: int) -> list[Entry]:
        """Add a message of `size` bytes. Returns the entries that are cut now."""
        cut: list[Entry] = []
        place = (target, _key_of(message)) if self._by_key else target
        entry = self._open.get(place)
        if entry is not None and entry.bytes + size > BYTES_MAX:
            cut.append(self._cut(place))
            entry = None
        if entry is None:
            entry = self._open[place] = Entry(target, row)
        entry.messages.append(message)
        entry.last_row = row
        entry.bytes += size
        self.open_bytes += size
        if entry.bytes >= BYTES_MAX or len(entry.messages) >= MESSAGES_MAX:
            cut.append(self._cut(place))
        if self.open_bytes >= self._open_bytes_max or len(self._open) >= OPEN_MAX:
            cut += self.cut_all()
        return cut

    def cut_all(self) -> list[Entry]:
        """Cut all open entries."""
        return [self._cut(place) for place in list(self._open)]

    def _cut(self, place: object) -> Entry:
        entry = self._open.pop(place)
        self.open_bytes -= entry.bytes
        if self._next is not None:
            for message in entry.messages:
                message.sequence_id = self._next
                self._next += 1
        return entry

    def check(self) -> None:
        assert self.open_bytes == sum(entry.bytes for entry in self._open.values())
        for entry in self._open.values():
            assert 0 < len(entry.messages) < MESSAGES_MAX
            assert entry.first_row + len(entry.messages) <= entry.last_row + 1
            assert entry.bytes < BYTES_MAX


def _key_of(message: OutgoingMessage) -> object:
    return message.partition_key if message.ordering_key is None else message.ordering_key
