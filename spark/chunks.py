"""Joins the chunks of large messages within a range of entries.

A chunked message is a row of the range that holds its last chunk. A range can begin in the middle
of a message. Then the executor searches backwards through the entries before the range, up to chunk
0. The search decides whether the message exists and what its payload is. A range keeps pieces of
messages in memory only to save searches. The search has three rules:

1. If a chunk has several entries, the newest one before the last chunk counts. A producer without a
   receipt sends chunks again.
2. If the search finds an older last chunk of the message while other chunks are missing, the
   message ended at the older one. The newer one is a copy and does not become a row.
3. If the search reaches the first stored entry before it has all chunks, a part of the message was
   deleted: the message is lost. The search passes over entries that cannot be read.

So the rows of a topic do not depend on its division into ranges. A message whose last chunk is not
stored is no row of any range.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.protos.errors import EntryError, MalformedEntry
from magnetar.protos.message import read_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.protos.entry import Chunk
    from magnetar.protos.message import ReceivedEntry

PENDING_BYTES_MAX: Final = 256 << 20
"""Bytes of the pieces of incomplete messages that one range keeps. Beyond this limit, the range
drops the pieces of the oldest messages. It never drops the message that the newest piece belongs
to. If the last chunk of a dropped message arrives, a search reads its pieces again."""

MESSAGE_BYTES_MAX: Final = 1 << 30
"""The maximum bytes of all chunks of one message, before decompression. A row of Spark has at most
2 GiB."""

SEARCH_ENTRIES_MAX: Final = 100_000
"""Entries that one search reads for the chunks of a message."""

ENDED_MAX: Final = 1_000  # ended messages that a range remembers: their later copies need no search

_Id = tuple[str, str]  # producer, uuid


class Earlier(Protocol):
    """The entries before a range."""

    def before(self, ledger: int, entry: int) -> Iterator[tuple[int, int, bytes | memoryview]]:
        """Yield the stored entries (ledger, entry, bytes) before this one, the newest first."""

    def on_lost(self, ledger: int, entry: int, what: str) -> None:
        """Report that the message whose last chunk is this entry is lost. May raise DataLost."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A whole message, as it was sent."""

    first: tuple[int, int]  # ledger and entry of chunk 0
    payload: bytes


@dataclass(slots=True)
class _Begun:
    first: tuple[int, int]
    pieces: list[bytes] = field(default_factory=list)  # the payloads from chunk 0 on, without a gap
    size: int = 0


class Chunks:
    """A machine: chunks in, whole messages out. For the entries of one topic, in order."""

    def __init__(self, earlier: Earlier, *, pending_bytes_max: int = PENDING_BYTES_MAX) -> None:
        self._earlier = earlier
        self._pending_bytes_max = pending_bytes_max
        self._begun: dict[_Id, _Begun] = {}  # the oldest first
        self._ended: dict[_Id, None] = {}  # the oldest first
        self._bytes = 0

    def on_chunk(self, ledger: int, entry: int, received: ReceivedEntry) -> Joined | None:
        """Add a chunk. Returns the message if this is its last chunk.

        Raises MalformedEntry, and the errors of `Earlier`.
        """
        chunk = received.chunk
        assert chunk is not None
        if chunk.total_bytes > MESSAGE_BYTES_MAX:
            raise MalformedEntry(
                f"a chunked message has {chunk.total_bytes} bytes; the limit is {MESSAGE_BYTES_MAX}"
            )
        message = received.producer_name, chunk.uuid
        if chunk.index == 0:
            self._drop(message)
            self._ended.pop(message, None)
            self._begun[message] = _Begun((ledger, entry))
        begun = self._begun.get(message)
        if begun is not None:
            if chunk.index == len(begun.pieces):
                piece = received.payload
                begun.pieces.append(piece)
                begun.size += len(piece)
                self._bytes += len(piece)
                self._keep_to_limit(message)
            elif chunk.index > len(begun.pieces):
                self._drop(message)
        if chunk.index < chunk.count - 1 or message in self._ended:
            return None
        if begun is not None and len(begun.pieces) == chunk.count:
            joined: Joined | None = Joined(begun.first, b"".join(begun.pieces))
            self._drop(message)
        else:
            joined = self._searched(ledger, entry, received, chunk)
        self._ended[message] = None
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        if joined is not None and len(joined.payload) != chunk.total_bytes:
            raise MalformedEntry(
                f"the chunks of a message have {len(joined.payload)} bytes, not"
                f" {chunk.total_bytes} as its last chunk says"
            )
        return joined

    def check(self) -> None:
        assert self._bytes == sum(begun.size for begun in self._begun.values())
        assert self._bytes <= self._pending_bytes_max or len(self._begun) == 1
        assert len(self._ended) <= ENDED_MAX
        for begun in self._begun.values():
            assert begun.size == sum(map(len, begun.pieces))

    def _searched(
        self, ledger: int, entry: int, received: ReceivedEntry, chunk: Chunk
    ) -> Joined | None:
        """Look for the other chunks before this one, the last of its message."""
        pieces = {chunk.index: received.payload}
        size = len(pieces[chunk.index])
        earlier = self._earlier.before(ledger, entry)
        for number, (at_ledger, at_entry, stored) in enumerate(earlier):
            if number >= SEARCH_ENTRIES_MAX:
                raise MalformedEntry(
                    "the other chunks of the message are more than"
                    f" {SEARCH_ENTRIES_MAX} entries before its last chunk"
                )
            try:
                found = read_entry(stored)
            except EntryError:  # corrupt or encrypted: no chunk of this message can be read here
                continue
            other = found.chunk
            if other is None or other.uuid != chunk.uuid:
                continue
            if found.producer_name != received.producer_name:
                continue
            if other.index == chunk.count - 1:
                return None
            if other.index not in pieces:
                pieces[other.index] = found.payload
                size += len(pieces[other.index])
                if size > chunk.total_bytes:
                    raise MalformedEntry(
                        f"the chunks of a message have more than {chunk.total_bytes} bytes"
                    )
            if len(pieces) == chunk.count:
                whole = b"".join(pieces[index] for index in range(chunk.count))
                return Joined((at_ledger, at_entry), whole)
        missing = chunk.count - len(pieces)
        self._earlier.on_lost(
            ledger, entry, f"{missing} of {chunk.count} chunks were deleted or cannot be read"
        )
        return None

    def _drop(self, message: _Id) -> None:
        begun = self._begun.pop(message, None)
        if begun is not None:
            self._bytes -= begun.size

    def _keep_to_limit(self, newest: _Id) -> None:
        while self._bytes > self._pending_bytes_max and len(self._begun) > 1:
            self._drop(next(message for message in self._begun if message != newest))
