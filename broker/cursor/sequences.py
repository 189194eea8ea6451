"""The highest stored sequence id of each producer of a topic, as a part of the cursor journal.

A producer's sequence id is *stored* once the entry that carries it is durable. The state covers the
log up to the position `through`; a recovery reads the entries after the journaled position and adds
their sequence ids. Merging takes the higher sequence id. So the second replay of a record, or the
replay of an older one, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.cursor import format as stored
from magnetar.broker.log.position import EARLIEST, Position

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from magnetar.broker.cursor.acks import Start

DEDUPLICATION: Final = "pulsar.dedup"
"""The name of the sequence ids among the subscriptions of the topic's record. It is Pulsar's name;
users cannot take it."""

SEQUENCE_ID_MAX: Final = (1 << 63) - 1
"""The highest sequence id that can be sent to a client: PRODUCER_SUCCESS has a signed number."""


@dataclass(slots=True)
class Known:
    """The stored state of one producer."""

    sequence_id: int
    seen_ms: int  # when the producer's last entry was stored


class SequenceState:
    """Sequence ids by producer, and the position up to which they cover the log."""

    def __init__(self) -> None:
        self.producers: dict[str, Known] = {}
        self.through = EARLIEST

    def merge(self, producers: Iterable[tuple[str, int, int]], through: Position) -> None:
        for name, sequence_id, seen_ms in producers:
            self.put(name, sequence_id, seen_ms)
        self.through = max(self.through, through)

    def put(self, name: str, sequence_id: int, seen_ms: int) -> None:
        """Record that an entry of this producer is stored."""
        known = self.producers.get(name)
        if known is None:
            self.producers[name] = Known(sequence_id, seen_ms)
        else:
            if sequence_id > known.sequence_id:
                known.sequence_id = sequence_id
            if seen_ms > known.seen_ms:
                known.seen_ms = seen_ms


class Sequences:
    """The sequence ids of an open topic: `Journaled`, like a cursor."""

    name = DEDUPLICATION

    def __init__(self, number: int, state: SequenceState, *, producers_max: int) -> None:
        self._number = number
        self._state = state
        self._producers_max = producers_max
        self.durable_mark = state.through  # a recovery needs the entries after it
        self._written = state.through  # written by the last delta or snapshot
        self._changed: set[str] = set()

    @property
    def number(self) -> int:
        return self._number

    @property
    def through(self) -> Position:
        """The position up to which the sequence ids cover the log."""
        return self._state.through

    @property
    def count(self) -> int:
        """The number of known producers."""
        return len(self._state.producers)

    def get(self, producer: str) -> int:
        """The highest stored sequence id of a producer; -1: none is known."""
        known = self._state.producers.get(producer)
        return -1 if known is None else known.sequence_id

    def put(self, producer: str, sequence_id: int, through: Position, seen_ms: int) -> None:
        """Record that this producer's entries up to `sequence_id` are durable, and cover the log up
        to `through`. Calls must come in the log's order. Beyond `producers_max`, the producers that
        stored no entry for the longest time are forgotten."""
        state = self._state
        state.put(producer, sequence_id, seen_ms)
        state.through = through
        self._changed.add(producer)
        if len(state.producers) > self._producers_max:
            self._forget_oldest()

    def cover(self, through: Position) -> None:
        """Cover the entries up to `through`, which have no new sequence ids."""
        self._state.through = through

    def forget_inactive(self, before_ms: int, *, connected: Collection[str]) -> int:
        """Forget the producers that are not connected and have stored no entry since `before_ms`.
        Returns their number."""
        gone = [
            name
            for name, known in self._state.producers.items()
            if known.seen_ms < before_ms and name not in connected
        ]
        self._forget(gone)
        return len(gone)

    def _forget_oldest(self) -> None:
        """Forget a tenth of the producers at once, so that not every new producer needs a sort.
        Keep at least one producer."""
        count = len(self._state.producers) - max(self._producers_max * 9 // 10, 1)
        by_age = sorted(self._state.producers.items(), key=lambda item: item[1].seen_ms)
        self._forget([name for name, _ in by_age[:count]])

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            del self._state.producers[name]
            self._changed.discard(name)

    # ---- for the journal -------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        return self._state.through != self._written

    @property
    def mark_delete(self) -> Position:
        return self._state.through

    def on_stored(self, mark: Position) -> bool:
        """The sequence ids of all entries up to `mark` are durable. A recovery reads only the later
        entries. Returns True if `mark` is later than before."""
        before, self.durable_mark = self.durable_mark, mark
        return mark > before

    def take_delta(self) -> list[bytes]:
        return self._records(sorted(self._changed))

    def snapshot(self) -> list[bytes]:
        return self._records(self._state.producers)

    def restart(self, start: Start, number: int) -> None:
        raise AssertionError("sequence ids are never reset")

    def _records(self, names: Iterable[str]) -> list[bytes]:
        producers = self._state.producers
        before, self._written = self._written, self._state.through
        self._changed.clear()
        return stored.producers(
            self._number,
            [(name, producers[name].sequence_id, producers[name].seen_ms) for name in names],
            before=before,
            through=self._written,
        )
