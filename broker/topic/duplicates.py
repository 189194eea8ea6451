"""The stage that recognises duplicates: entries that the topic holds already.

Theory of operation. A producer's sequence ids rise. The *stored* sequence id of a producer is the
highest sequence id of its durable entries. `Sequences` keeps it. An entry is a duplicate if its
last sequence id is at most the stored sequence id. An entry is new if its first sequence id is
higher than the sequence ids of all entries of the producer that have passed the stage.

Between these two cases, the entry repeats an entry that has passed and has no known outcome: a
client has reconnected and resends the entries without a receipt. The stage waits for the outcome of
the earlier entry and then decides. If the earlier entry is stored, this entry is a duplicate. If
the earlier entry was dropped, this entry is appended. If only a part of a batch is stored, the
stage refuses the batch, because the broker does not cut batches.

The chunks of a large message share one sequence id. It becomes the stored sequence id only when the
last chunk is durable. Until then the stage distinguishes chunks by the message's uuid and the
number of the chunk.

`Sequences` may forget a producer in the step in which its entries become durable. So the stage
remembers the stored sequence id of each producer itself until the next `forget_idle`. If a run has
the same entry twice, the second one waits for the first, and the stage decides again when the first
is stored. Without that memory, the stage would decide each time that the second one must wait.

This must be the last stage: it counts every entry that passes as in flight to the log.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from operator import lt, methodcaller
from typing import TYPE_CHECKING, Final

from magnetar.broker.cursor.sequences import SEQUENCE_ID_MAX
from magnetar.broker.errors import NotAllowed, StraddlingBatch
from magnetar.broker.topic.pipeline import Append, Duplicate, Refuse, Wait
from magnetar.protos.entry import CHECKED_HEAD_BYTES, varint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.cursor.sequences import Sequences
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.pipeline import Answer, Publish
    from magnetar.protos.entry import Chunk, EntryView
    from magnetar.protos.sends import SendRun

CHUNKED_IDLE_MAX: Final = 1_000
"""The stage remembers the unfinished chunked messages of at most this many producers without a
publish in flight. They take 1 MB. Beyond the limit, the stage forgets the producers that came
first. A takeover of the topic forgets all of them. If a forgotten producer sends its chunks again,
the topic stores them again."""


@dataclass(slots=True)
class _ChunkedMessage:
    """A message of which the producer has sent chunks, but not the last chunk yet."""

    uuid: str
    passed: int  # the highest number of a chunk that has passed
    publish: Publish | None  # the publish with that chunk; None: its outcome is known
    stored: int = -1  # the highest number of a stored chunk

    @property
    def reached(self) -> int:
        """The highest number of a chunk that is stored or may still be stored."""
        return self.stored if self.publish is None or self.publish.known else self.passed


@dataclass(slots=True)
class _Progress:
    """The entries of a producer that are in flight to the log."""

    name_field: bytes  # the encoded name of the producer, as in the metadata of its entries
    # The publishes that have passed, wholly or in part, each with the highest sequence id of the
    # producer that had passed by then. A message in chunks counts when its last chunk has passed.
    passed: deque[tuple[int, Publish]] = field(default_factory=deque)
    chunked: _ChunkedMessage | None = None
    stored: int = -1  # the stored sequence id; -1: no entry was stored since the last `forget_idle`

    def prune(self) -> None:
        """Drop the publishes at both ends of `passed` whose outcome is known: they hold megabytes.
        Afterwards the outcome of the last publish in `passed` is not known."""
        chunked, passed = self.chunked, self.passed
        if chunked is not None and chunked.publish is not None and chunked.publish.known:
            chunked.publish = None
        while passed and passed[0][1].unknown == 0:
            passed.popleft()
        # If its producer was closed, the last publish may have an outcome before earlier ones.
        while passed and passed[-1][1].unknown == 0:
            passed.pop()


class DuplicatesStage:
    """`sequences` None: deduplication is off, and every publish passes."""

    __slots__ = (
        "_progress",
        "sequences",
    )

    def __init__(self) -> None:
        self.sequences: Sequences | None = None
        self._progress: dict[str, _Progress] = {}

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        sequences = self.sequences
        if sequences is None:
            return ()
        name = publish.publisher.name
        progress = self._progress.get(name)
        if progress is None:
            progress = self._progress[name] = _Progress(_name_field(name))
        else:
            progress.prune()
        stored = through = max(sequences.get(name), progress.stored)
        if progress.passed and progress.passed[-1][0] > through:
            through = progress.passed[-1][0]
        sends = publish.sends
        if _is_new(sends, through, progress.name_field):
            progress.passed.append((sends.sequence_ids[-1], publish))
            return ()
        return _Decision(publish, progress, stored, through).answers()

    def last_sequence_id(self, name: str) -> int:
        """The stored sequence id of this producer; -1: deduplication is off, or none is known."""
        if self.sequences is None:
            return -1
        progress = self._progress.get(name)
        return max(self.sequences.get(name), -1 if progress is None else progress.stored)

    def on_appended(self, publish: Publish, start: int, stop: int, at: Position, ms: int) -> None:
        """Record that the entries at the places `start` to `stop - 1` of a publish are durable.
        `at`: the position of the last entry. `ms`: the append time in milliseconds."""
        sequences = self.sequences
        if sequences is None:
            return
        name, sends = publish.publisher.name, publish.sends
        stored = self.last_sequence_id(name)
        progress = self._progress.get(name)
        if sends.views:
            for place in range(start, stop):
                view = sends.views.get(place)
                if view is None or view.chunk is None or _is_last(view.chunk):
                    stored = max(stored, _numbers_at(sends, place)[1])
                elif progress is not None:
                    _on_chunk_stored(progress, view.chunk)
        else:
            stored = max(stored, sends.sequence_ids[stop - 1])  # ids of appended entries rise
        sequences.put(name, stored, at, ms)
        if progress is not None:
            progress.stored = stored
            progress.prune()

    def forget_idle(self) -> None:
        """Drop the progress of producers that have no publish in flight. Keeps at most
        CHUNKED_IDLE_MAX of those that have not sent the last chunk of a message."""
        chunked: list[str] = []
        for name, progress in list(self._progress.items()):
            progress.prune()
            if not progress.passed:
                if progress.chunked is None:
                    del self._progress[name]
                else:
                    progress.stored = -1
                    chunked.append(name)
        for name in chunked[: max(len(chunked) - CHUNKED_IDLE_MAX, 0)]:
            del self._progress[name]

    def clear(self) -> None:
        """Let every publish pass: deduplication was switched off."""
        self.sequences = None
        self._progress.clear()


class _Decision:
    """Decides on each entry of a publish that `_is_new` does not accept as a whole."""

    def __init__(self, publish: Publish, progress: _Progress, stored: int, through: int) -> None:
        self._publish = publish
        self._progress = progress
        self._stored = stored
        self._through = through
        self._appended = False  # a part of this publish has passed
        self._answers: list[Answer] = []

    def answers(self) -> list[Answer]:
        sends = self._publish.sends
        name, name_field = self._publish.publisher.name, self._progress.name_field
        for place in range(len(sends)):
            view = sends.views.get(place)
            first, last = _numbers_at(sends, place)
            answer: Answer
            if last > SEQUENCE_ID_MAX:
                why = f"expected at most {SEQUENCE_ID_MAX} on a topic with deduplication"
                answer = Refuse(1, NotAllowed(f"sequence id {last}", why))
            elif not _is_of(sends.entries[place], view, name, name_field):
                why = f"its metadata names another producer than {name!r}"
                answer = Refuse(1, NotAllowed(f"entry with sequence id {first}", why))
            elif view is not None and view.chunk is not None:
                answer = self._chunk(view.chunk, last)
            else:
                answer = self._entry(first, last)
            self._add(answer)
            if isinstance(answer, Wait):
                break
        if self._appended:
            self._progress.passed.append((self._through, self._publish))
        return self._answers

    def _entry(self, first: int, last: int) -> Answer:
        if first > self._through:
            self._through = last
            return Append(1)
        if last <= self._stored:
            return Duplicate(1, self._stored)
        if first <= self._stored:
            return Refuse(1, StraddlingBatch(first, last, self._stored))
        return self._wait()

    def _chunk(self, chunk: Chunk, number: int) -> Answer:
        if number <= self._stored:
            return Duplicate(1, self._stored)
        known = self._progress.chunked
        if known is not None and known.uuid == chunk.uuid:
            if chunk.index <= known.stored:
                return Duplicate(1, number)
            if chunk.index <= known.reached:
                assert known.publish is not None, (
                    "the publish of a chunk without an outcome is forgotten"
                )
                return Wait(None if self._appended else known.publish)
        elif number <= self._through:
            return self._wait()
        if known is None or known.uuid != chunk.uuid:
            known = _ChunkedMessage(chunk.uuid, chunk.index, self._publish)
            self._progress.chunked = known
        known.passed, known.publish = chunk.index, self._publish
        if _is_last(chunk):
            self._through = max(self._through, number)
            self._progress.chunked = None
        return Append(1)

    def _wait(self) -> Wait:
        """Return a wait for the outcome of the producer's last publish in flight. If a part of the
        present publish has passed, return a wait for the outcome of that part."""
        return Wait(None if self._appended else self._progress.passed[-1][1])

    def _add(self, answer: Answer) -> None:
        """Add an answer. Consecutive answers of one kind become one answer."""
        last = self._answers[-1] if self._answers else None
        if isinstance(answer, Append):
            self._appended = True
            if isinstance(last, Append):
                self._answers[-1] = Append(last.count + 1)
                return
        elif isinstance(answer, Duplicate) and isinstance(last, Duplicate):
            highest = max(last.stored_sequence_id, answer.stored_sequence_id)
            self._answers[-1] = Duplicate(last.count + 1, highest)
            return
        self._answers.append(answer)


def _is_new(sends: SendRun, through: int, name_field: bytes) -> bool:
    """Return True when the run has only plain messages of this producer, and their sequence ids
    rise and are above `through`. Runs for every publish."""
    numbers = sends.sequence_ids
    first, last = numbers[0], numbers[-1]
    if sends.views or first <= through or last > SEQUENCE_ID_MAX:
        return False
    count = len(numbers)
    if count > 1:
        is_dense = last - first == count - 1 and numbers == list(range(first, last + 1))
        if not is_dense and not all(map(lt, numbers, islice(numbers, 1, None))):
            return False
    names = sends.plain_names
    if names is not None:
        return len(names) == 1 and name_field in names
    return all(map(methodcaller("startswith", name_field, CHECKED_HEAD_BYTES), sends.entries))


def _is_of(entry: bytes, view: EntryView | None, name: str, name_field: bytes) -> bool:
    """Return True when the entry's metadata names this producer. A recovery reads the producer's
    name from the metadata."""
    if view is not None:
        return view.producer_name == name
    return entry.startswith(name_field, CHECKED_HEAD_BYTES)


def _name_field(name: str) -> bytes:
    encoded = name.encode()
    return b"\x0a" + varint(len(encoded)) + encoded


def _numbers_at(sends: SendRun, place: int) -> tuple[int, int]:
    """Return the first and the last sequence id of an entry."""
    first = sends.sequence_ids[place]
    last = max(first, sends.highest_sequence_ids[place])
    view = sends.views.get(place)
    if view is None:
        return first, last
    return first, max(last, view.highest_sequence_id)


def _is_last(chunk: Chunk) -> bool:
    return chunk.index == chunk.count - 1


def _on_chunk_stored(progress: _Progress, chunk: Chunk) -> None:
    known = progress.chunked
    if known is not None and known.uuid == chunk.uuid:
        known.stored = max(known.stored, chunk.index)
