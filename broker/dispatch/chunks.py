"""The choice of the consumer of a Shared subscription that gets all chunks of a message.

Theory of operation. A client can assemble a message only if one consumer gets all its chunks, in
order. The consumer that gets the first delivered chunk becomes the *owner* of the message; the
later chunks go to the owner, too. When a consumer gives a chunk back (it left, or asked for a
redelivery), it gives back all chunks of the message that it has. The message then has no owner, and
the consumer that gets its lowest chunk becomes the new owner.

For each unfinished message, ChunkRoutes keeps the positions that the owner has (`out`), and the
positions that were read or given back, and must be delivered (`waiting`). A chunk must not overtake
an earlier chunk that waits. ChunkRoutes forgets a message when its last chunk was read and no chunk
is out or waiting.

NOTE: unfinished messages count toward the limits of unacknowledged messages. A consumer whose limit
is used up by unfinished messages does not get their other chunks until it gives some chunks back.
Apache's clients give chunks back: they keep ten unfinished messages, each for a minute.

At the limit of MESSAGES_MAX, ChunkRoutes forgets the oldest message. Its chunks then go to any
consumer.

Invariants (`check`):
    1. A position is out or waiting in at most one message, which `_messages_by_position` names.
    2. Only a message with an owner has a chunk out.
    3. A waiting position is in the message's `lowest`, unless it is acknowledged.
    4. There are at most MESSAGES_MAX messages.
    5. A message whose last chunk was read has a chunk that is out or waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from magnetar.broker.dispatch.acks import Acks
    from magnetar.broker.dispatch.permits import Consumer
    from magnetar.broker.log.position import Position
    from magnetar.protos.entry import Chunk

MESSAGES_MAX: Final = 1_000
"""The limit of unfinished chunked messages per subscription. A client assembles 10 at once by
default; a message of 100 chunks takes about 20 KB here."""


@dataclass(slots=True)
class _Message:
    owner: Consumer | None = None  # None: the consumer of its next chunk becomes the owner
    out: set[Position] = field(default_factory=set)
    waiting: set[Position] = field(default_factory=set)
    # A heap of the positions in `waiting`, and of some that were in it before.
    lowest: list[Position] = field(default_factory=list)
    last: Position | None = None  # the last chunk; None: it was not read yet

    @property
    def ended(self) -> bool:
        """True when the last chunk is out, or acknowledged."""
        return self.last is not None and self.last not in self.waiting

    @property
    def is_over(self) -> bool:
        return self.last is not None and not self.out and not self.waiting


class ChunkRoutes:
    """The owners and the positions of the unfinished chunked messages of one subscription."""

    def __init__(self) -> None:
        self._messages: dict[str, _Message] = {}  # keyed by uuid, oldest first
        self._messages_by_position: dict[Position, str] = {}

    def __bool__(self) -> bool:
        return bool(self._messages)

    def owner(self, chunk: Chunk) -> Consumer | None:
        """The consumer that must get the chunk. None: any consumer may."""
        message = self._messages.get(chunk.uuid)
        return None if message is None else message.owner

    def begun(self, uuid: str) -> Consumer | None:
        """The consumer that has chunks of the message. None: no consumer has a chunk, or the last
        chunk is delivered or acknowledged."""
        message = self._messages.get(uuid)
        return None if message is None or message.ended or not message.out else message.owner

    def must_wait(self, chunk: Chunk, position: Position, acks: Acks) -> bool:
        """Returns True when an earlier chunk of the message waits, too, and must be delivered
        first."""
        first = self.first_waiting(chunk.uuid, acks)
        return first is not None and first < position

    def first_waiting(self, uuid: str, acks: Acks) -> Position | None:
        """The lowest position at which a chunk of the message waits. None: there is none."""
        message = self._messages.get(uuid)
        if message is None:
            return None
        waiting, lowest = message.waiting, message.lowest
        while lowest and (lowest[0] not in waiting or acks.is_acked(lowest[0])):
            heappop(lowest)
        return lowest[0] if lowest else None

    def on_given(self, chunk: Chunk, position: Position, consumer: Consumer) -> None:
        """The consumer gets the chunk. If the message has no owner, the consumer becomes the
        owner."""
        message = self._messages.get(chunk.uuid)
        if message is None:
            if len(self._messages) >= MESSAGES_MAX:
                self._forget(next(iter(self._messages)))
            message = self._messages[chunk.uuid] = _Message()
        assert message.owner in (None, consumer), "two consumers with chunks of one message"
        message.owner = consumer
        message.waiting.discard(position)
        message.out.add(position)
        _note_last(message, chunk, position)
        self._messages_by_position[position] = chunk.uuid

    def on_deferred(self, chunk: Chunk, position: Position) -> None:
        """The chunk was read, and is not delivered yet."""
        message = self._messages.get(chunk.uuid)
        if message is not None:
            if position not in message.waiting:
                message.waiting.add(position)
                heappush(message.lowest, position)
            _note_last(message, chunk, position)
            self._messages_by_position[position] = chunk.uuid

    def on_gone(self, position: Position) -> None:
        """The entry is acknowledged, or does not exist any more."""
        uuid = self._messages_by_position.pop(position, None)
        if uuid is None:
            return
        message = self._messages[uuid]
        message.out.discard(position)
        message.waiting.discard(position)
        if message.is_over:
            del self._messages[uuid]

    def on_gone_through(self, position: Position) -> None:
        """Like `on_gone`, for every entry up to this one."""
        for gone in [it for it in self._messages_by_position if it <= position]:
            self.on_gone(gone)

    def with_whole_messages(self, positions: Iterable[Position]) -> list[Position]:
        """The positions that a consumer gives back, and all other chunks of their messages that
        it has. Their messages have no owner any more."""
        found = dict.fromkeys(positions)
        for position in list(found):
            uuid = self._messages_by_position.get(position)
            message = None if uuid is None else self._messages[uuid]
            if message is not None and position in message.out:
                found |= dict.fromkeys(sorted(message.out))
                self._give_back(message)
        return list(found)

    def on_all_returned(self, consumer: Consumer) -> None:
        """The consumer gives back all that it has. The effect is that of `with_whole_messages` with
        all its positions."""
        for message in self._messages.values():
            if message.owner is consumer and message.out:
                self._give_back(message)

    def on_left(self, consumer: Consumer) -> None:
        """The consumer has left. Its chunks are delivered to other consumers."""
        for uuid, message in list(self._messages.items()):
            if message.owner is consumer:
                self._give_back(message)
                if not message.waiting:
                    del self._messages[uuid]

    @staticmethod
    def _give_back(message: _Message) -> None:
        message.owner = None
        message.waiting |= message.out
        message.out = set()
        message.lowest = list(message.waiting)
        heapify(message.lowest)

    def _forget(self, uuid: str) -> None:
        message = self._messages.pop(uuid)
        for position in message.out | message.waiting:
            del self._messages_by_position[position]

    def check(self, acks: Acks) -> None:
        """Assert the invariants of the module's docstring."""
        assert len(self._messages) <= MESSAGES_MAX, "4"
        known: dict[Position, str] = {}
        for uuid, message in self._messages.items():
            assert message.owner is not None or not message.out, "2"
            assert not message.is_over, "5"
            for position in (*message.out, *message.waiting):
                assert position not in known, "1: a position twice"
                known[position] = uuid
            for position in message.waiting.difference(message.lowest):
                assert acks.is_acked(position), "3: a chunk that waits is not in the heap"
        assert known == self._messages_by_position, "1: the positions"


def _note_last(message: _Message, chunk: Chunk, position: Position) -> None:
    if chunk.index == chunk.count - 1:
        message.last = position
