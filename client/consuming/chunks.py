"""Joins the chunks of large messages.

Theory of operation. A producer sends the chunks of a message in order. Chunks of other producers
may lie between them. The buffer keeps the payloads (*pieces*) of each begun message by its uuid.
The last chunk completes the message. A redelivery begins again with chunk 0. A producer that lost a
receipt sends chunks again, as new entries. The buffer remembers the keys of all these entries (the
ids of ledger and entry), and the client acknowledges them with the message.

A chunk whose predecessor is missing makes its message *broken*: the buffer drops the pieces and
keeps the keys. The buffer gives a message up if none of its chunks arrived for `expire_s`. The
client then acknowledges its chunks, because the broker would otherwise redeliver them without end.
Each arriving chunk restarts this time, so a large message of a slow producer is not given up while
it arrives. Beyond the limit of begun messages, the buffer gives the oldest message up. Its chunks
are acknowledged or redelivered later, as the user chose. In the second case, chunks of the message
that arrive before its redelivered chunk 0 are redelivered once, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from magnetar.client.ids import Key
    from magnetar.protos.entry import Chunk

CHUNKED_BYTES_MAX: Final = 256 << 20
"""Bytes of incomplete messages of one consumer. Beyond this limit, the oldest message is given up,
unless it is the only one: a single message may be larger."""

CHUNKED_MESSAGE_BYTES_MAX: Final = 1 << 30
"""Bytes of one chunked message before decompression. The consumer gives up a larger message at its
first chunk."""

RETURNED_MAX: Final = 1_000
"""The maximum number of messages given up for redelivery that the buffer remembers. Later chunks of
these messages are redelivered, too."""

ENDED_MAX: Final = 1_000
"""The maximum number of invalid messages that the buffer remembers, for their later chunks."""

CHUNKS_MAX: Final = 100_000
"""Entries of one chunked message, including those that its producer sent twice. Beyond this limit,
the buffer gives the message up."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """All chunks have arrived. `keys`: all entries of the message, the last chunk at the end."""

    keys: tuple[Key, ...]
    first: Key  # the key of chunk 0
    payload: bytes


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An incomplete message was dropped."""

    uuid: str
    keys: tuple[Key, ...]
    reason: str
    acknowledge: bool  # False: request the chunks again later


@dataclass(frozen=True, slots=True)
class Returned:
    """A chunk arrived after its message was given up for redelivery. The client must request the
    chunk again, too."""

    key: Key


@dataclass(frozen=True, slots=True)
class Late:
    """A chunk arrived after its message was given up because the message is invalid. The client
    does with the chunk what it did with the message's earlier chunks."""

    key: Key


Outcome = Assembled | GivenUp | Returned | Late


@dataclass(slots=True)
class _Begun:
    """A message of which some chunks have arrived."""

    chunk: Chunk
    keys: dict[Key, None] = field(default_factory=dict)  # the keys in the order of their arrival
    last: Key | None = None  # the newest of the keys
    pieces: list[bytes] = field(default_factory=list)
    first: Key = (-1, -1)
    size: int = 0
    is_broken: bool = False


class ChunkBuffer:
    """A machine: chunks in; assembled and given-up messages out.

    1. The begun messages are within the limits of number and bytes. A single message may exceed
       the limit of bytes.
    2. A broken message holds no pieces.
    """

    def __init__(self, *, messages_max: int, expire_s: float, acknowledge_oldest: bool) -> None:
        """`messages_max` 0: no limit. `expire_s` 0: incomplete messages do not expire."""
        self._messages_max = messages_max or 2**31
        self._expire_s = expire_s
        self._acknowledge_oldest = acknowledge_oldest
        self._begun: dict[str, _Begun] = {}  # keyed by uuid, the oldest first
        # uuid -> the time at which its latest chunk arrived, in ascending order of the times
        self._heard_at: dict[str, float] = {}
        # uuid of a message that was given up for redelivery -> its later chunks so far
        self._returned: dict[str, set[Key]] = {}
        self._ended: dict[str, None] = {}  # uuids of invalid messages, which were given up
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._begun)

    def __contains__(self, uuid: str) -> bool:
        """Return whether a chunk of this message has arrived and the message is incomplete."""
        return uuid in self._begun

    @property
    def firsts(self) -> list[Key]:
        """The first chunks of the begun messages that are not broken."""
        return [begun.first for begun in self._begun.values() if not begun.is_broken]

    def on_chunk(self, key: Key, chunk: Chunk, payload: bytes, now: float) -> list[Outcome]:
        """Add a chunk. Returns at most one Assembled, Returned or Late, and the messages that were
        given up."""
        begun = self._begun.get(chunk.uuid)
        if begun is None:
            returned = self._returned.get(chunk.uuid)
            if returned is not None and chunk.index and key not in returned:
                returned.add(key)
                return [Returned(key)]
            if chunk.index and chunk.uuid in self._ended:
                return [Late(key)]
            self._returned.pop(chunk.uuid, None)
            self._ended.pop(chunk.uuid, None)
            begun = self._begun[chunk.uuid] = _Begun(chunk, is_broken=chunk.index > 0)
        self._heard_at.pop(chunk.uuid, None)
        self._heard_at[chunk.uuid] = now
        if chunk.total_bytes > CHUNKED_MESSAGE_BYTES_MAX:
            return [self._end(chunk.uuid, "it is too large", last=key)]
        if len(begun.keys) >= CHUNKS_MAX:
            return [self._end(chunk.uuid, "it has too many chunks", last=key)]
        if key == begun.last or (chunk.index and key in begun.keys):
            return []  # delivered twice: the buffer handled the first delivery
        if chunk.index == 0:
            self._restart(begun, key, chunk)
        is_in_place = not begun.is_broken and chunk.index >= len(begun.pieces)
        if is_in_place or key not in begun.keys:
            begun.keys.pop(key, None)  # the newest key must be at the end
            begun.keys[key] = None
            begun.last = key
        if not is_in_place:
            return self._over_limit(chunk.uuid)
        if chunk.index > len(begun.pieces) or _differs(begun.chunk, chunk):
            self._break(begun)
            return self._over_limit(chunk.uuid)
        begun.pieces.append(payload)
        begun.size += len(payload)
        self._bytes += len(payload)
        if begun.size > chunk.total_bytes:
            return [self._end(chunk.uuid, "its size is wrong")]
        if chunk.index < chunk.count - 1:
            return self._over_limit(chunk.uuid)
        if begun.size != chunk.total_bytes:
            return [self._end(chunk.uuid, "its size is wrong")]
        self._forget(chunk.uuid)
        return [Assembled(tuple(begun.keys), begun.first, b"".join(begun.pieces))]

    def expire(self, now: float) -> list[GivenUp]:
        """Give up the messages of which no chunk arrived for `expire_s`."""
        if not self._expire_s:
            return []
        late = [uuid for uuid, at in self._heard_at.items() if at + self._expire_s <= now]
        reason = f"no chunk arrived for {self._expire_s:g} s"
        return [self._give_up(uuid, reason, acknowledge=True) for uuid in late]

    def timer_at(self) -> float | None:
        """Return the time when the first message expires. None: no message expires."""
        if not self._heard_at or not self._expire_s:
            return None
        return next(iter(self._heard_at.values())) + self._expire_s

    def clear(self) -> None:
        """Drop everything: the broker will deliver all chunks again."""
        self._begun.clear()
        self._heard_at.clear()
        self._returned.clear()
        self._ended.clear()
        self._bytes = 0

    def check(self) -> None:
        assert len(self._begun) <= self._messages_max
        assert self._begun.keys() == self._heard_at.keys()
        assert len(self._returned) <= RETURNED_MAX
        assert self._begun.keys().isdisjoint(self._returned)
        assert len(self._ended) <= ENDED_MAX
        assert self._begun.keys().isdisjoint(self._ended)
        assert list(self._heard_at.values()) == sorted(self._heard_at.values())
        assert self._bytes <= CHUNKED_BYTES_MAX or len(self._begun) == 1
        assert self._bytes == sum(begun.size for begun in self._begun.values())
        assert not any(begun.pieces for begun in self._begun.values() if begun.is_broken)

    def _restart(self, begun: _Begun, key: Key, chunk: Chunk) -> None:
        """Begin a message at chunk 0, or begin it again if chunk 0 was redelivered or resent."""
        self._break(begun)
        if key == begun.first:
            begun.keys.clear()  # redelivered: the other chunks follow
        begun.is_broken = False
        begun.chunk, begun.first = chunk, key

    def _break(self, begun: _Begun) -> None:
        begun.pieces.clear()
        self._bytes -= begun.size
        begun.size = 0
        begun.is_broken = True

    def _over_limit(self, newest: str) -> list[Outcome]:
        given_up: list[Outcome] = []
        while len(self._begun) > self._messages_max or (
            self._bytes > CHUNKED_BYTES_MAX and len(self._begun) > 1
        ):
            oldest = next(uuid for uuid in self._begun if uuid != newest)
            reason = "too many messages are incomplete"
            given_up.append(self._give_up(oldest, reason, acknowledge=self._acknowledge_oldest))
            if not self._acknowledge_oldest:
                self._returned[oldest] = set()
                if len(self._returned) > RETURNED_MAX:
                    del self._returned[next(iter(self._returned))]
        return given_up

    def _end(self, uuid: str, reason: str, last: Key | None = None) -> GivenUp:
        """Give an invalid message up, and remember this for its later chunks."""
        self._ended[uuid] = None
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        return self._give_up(uuid, reason, acknowledge=True, last=last)

    def _give_up(
        self, uuid: str, reason: str, *, acknowledge: bool, last: Key | None = None
    ) -> GivenUp:
        """`last`: the key of the chunk that arrived, unless the message has it already."""
        keys = self._forget(uuid).keys
        if last is not None:
            keys.setdefault(last)
        return GivenUp(uuid, tuple(keys), reason, acknowledge)

    def _forget(self, uuid: str) -> _Begun:
        begun = self._begun.pop(uuid)
        del self._heard_at[uuid]
        self._bytes -= begun.size
        return begun


def _differs(one: Chunk, other: Chunk) -> bool:
    return one.count != other.count or one.total_bytes != other.total_bytes
