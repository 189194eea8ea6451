"""The offsets of a streaming query, which Spark stores in the query's checkpoint.

    {"v": 1, "start": "earliest"}                                before the first batch
    {"v": 1, "t": {topic: [ledger, entry, index, bytes]}}        from then on
    {"v": 1, "t": {...}, "from": {topic: [...]}}                 a batch in which topics begin
    {"v": 1, "t": {...}, "tasks": [bytes, most]}                 how the batch is divided into tasks

A position is the place of the next message: `index` is its number in the topic, `entry` holds it.
A batch therefore reads [start, end). The index shows which messages are lost, because indexes are
dense, and an owner never uses an index twice. `bytes` counts the bytes of the topic that the query
has read, as far as sizes are known. The difference of two positions gives rows and bytes.

`from` holds the position at which a topic begins in this batch, if the preceding offsets do not
have this position. These are all topics of the first batch, new topics, and topics whose next
messages were lost. So the checkpoint alone gives both ends of a batch that Spark repeats, even
after the topic was trimmed.

`tasks` holds the options by which the batch that ends here was divided into tasks. A sink that
writes exactly once needs the same tasks when the batch is repeated, even if the options were
changed in between.

Spark compares offsets as JSON text. Equal positions must therefore have equal text: topics are
sorted, and a query that has read nothing new returns the same offsets, `from` included.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from magnetar.spark.errors import InvalidOffsets

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the next message of a topic."""

    ledger: int
    entry: int  # the entry that holds the message; if it is not stored yet, the next entry id
    index: int  # the index of the message in its topic
    bytes: int = 0  # read by the query so far, an estimate

    def to_json(self) -> list[int]:
        return [self.ledger, self.entry, self.index, self.bytes]


@dataclass(frozen=True, slots=True)
class Offsets:
    """The positions of a query, by full name of the topic."""

    places: Mapping[str, Place]
    begun: Mapping[str, Place] = field(default_factory=dict)  # `from`
    tasks: tuple[int, int] | None = None  # bytes of one task, maximal number; None: unknown

    def to_json(self) -> dict[str, Any]:
        """The offsets for Spark, topics in order."""
        shown: dict[str, Any] = {"v": VERSION, "t": _places_to_json(self.places)}
        if self.begun:
            shown["from"] = _places_to_json(self.begun)
        if self.tasks is not None:
            shown["tasks"] = list(self.tasks)
        return shown


def symbolic(start: str) -> dict[str, Any]:
    """The offsets of a query before its first batch. They do not depend on the topics."""
    return {"v": VERSION, "start": start}


def parse_offsets(offsets: Mapping[str, Any]) -> Offsets | None:
    """Parse offsets from a checkpoint. None: symbolic offsets. Raises InvalidOffsets."""
    if offsets.get("v") != VERSION:
        raise InvalidOffsets(f"version {offsets.get('v')!r} is not {VERSION}")
    if "start" in offsets:
        return None
    return Offsets(
        _parse_places(offsets.get("t")),
        _parse_places(offsets.get("from", {})),
        _parse_tasks(offsets.get("tasks")),
    )


def _places_to_json(places: Mapping[str, Place]) -> dict[str, list[int]]:
    return {topic: places[topic].to_json() for topic in sorted(places)}


def _parse_places(places: Any) -> dict[str, Place]:
    if not isinstance(places, dict):
        raise InvalidOffsets(f"{places!r} is not a map of topics")
    return {topic: _parse_place(topic, place) for topic, place in places.items()}


def _parse_place(topic: str, place: Any) -> Place:
    if (
        not isinstance(place, list)
        or len(place) != 4
        or not all(type(part) is int for part in place)
    ):
        raise InvalidOffsets(f"{topic}: {place!r} is not [ledger, entry, index, bytes]")
    return Place(*place)


def _parse_tasks(tasks: Any) -> tuple[int, int] | None:
    if tasks is None:
        return None
    if (
        not isinstance(tasks, list)
        or len(tasks) != 2
        or not all(type(part) is int and part > 0 for part in tasks)
    ):
        raise InvalidOffsets(f"tasks: {tasks!r} is not [bytes, most], two positive integers")
    return tasks[0], tasks[1]
