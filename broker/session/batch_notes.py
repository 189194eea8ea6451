"""Notes about the batches that Spark's sinks have stored whole, kept with each topic.

Deduplication knows what one producer has stored. It does not know whether a batch was stored whole,
nor by which query, and it forgets idle producers. So a sink notes each batch at its topics after
all rows have their receipts. The last note shows whether a batch is a repetition, and whether the
checkpoint is outdated or of another query.

A note is a property of the topic's record: it moves with the topic and ends with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.calls import call_each
from magnetar.broker.errors import NotAllowed
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.broker.session.topic_ranges import (
    CONCURRENT_MAX,
    other_owner,
    require_few,
    stored_name,
    text_of,
)
from magnetar.protos import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.broker.broker import Broker

PREFIX: Final = "spark-sink/"  # the beginning of the property's name
SINKS_MAX: Final = 20
"""The limit of sinks that one topic remembers. Each takes at most 500 bytes of the topic's record.
Beyond the limit the topic forgets the sink with the oldest note; then only deduplication checks the
next batch of that sink."""

TOPICS_MAX: Final = 1_000  # the topics of one request
SINK_BYTES_MAX: Final = 200
TEXT_CHARACTERS_MAX: Final = 64  # the characters of a query's id, and of a digest


@dataclass(frozen=True, slots=True)
class Note:
    """The note about one batch of a sink."""

    query: str
    batch: int
    digest: str  # equal for equal rows
    noted_ms: int

    def to_text(self) -> str:
        return f"{self.query} {self.batch} {self.digest} {self.noted_ms}"


def note_of(properties: Mapping[str, str], sink: str) -> Note | None:
    """Return the last note of a sink from the properties of a topic. None: the sink has no note
    there."""
    text = properties.get(PREFIX + sink)
    return None if text is None else _parsed(text)


async def note_batches(broker: Broker, asked: pb.NoteBatchesRequest) -> pb.NoteBatchesReply:
    """See NoteBatches in broker.proto. Raises NotAllowed if a value of the request is invalid."""
    require_few("topics", len(asked.topics), TOPICS_MAX)
    _require_valid(asked)

    async def one(topic: pb.TopicDigest) -> pb.NotedTopic:
        try:
            return await _note_one(broker, asked, topic)
        except OPERATING_ERRORS as error:
            return pb.NotedTopic(error=text_of(error))

    return pb.NoteBatchesReply(topics=await call_each(asked.topics, one, at_once=CONCURRENT_MAX))


async def _note_one(
    broker: Broker, asked: pb.NoteBatchesRequest, digest: pb.TopicDigest
) -> pb.NotedTopic:
    name = stored_name(digest.topic)
    if owner := await other_owner(broker, name):
        return pb.NotedTopic(owner_url=owner)
    topic = await broker.stored_topic(name, create=False)
    note = Note(asked.query, asked.batch, digest.digest, broker.now_ms())
    refusal = ""

    def noted(properties: Mapping[str, str]) -> Mapping[str, str]:
        nonlocal refusal
        refusal = _refusal(note_of(properties, asked.sink), note)
        return properties if refusal else _with(properties, asked.sink, note)

    await topic.log.change_properties(noted)
    if refusal:
        raise NotAllowed(f"batch {note.batch} of the sink {asked.sink!r}", refusal)
    return pb.NotedTopic()


def _refusal(last: Note | None, new: Note) -> str:
    """Return the reason why the new note must not follow the last one. Empty: it may follow."""
    if last is None:
        return ""
    if last.query != new.query:
        return f"the topic holds the batches of another query, {last.query}"
    if last.batch > new.batch:
        return f"the topic holds batch {last.batch} already"
    if last.batch == new.batch and last.digest != new.digest:
        return "the topic holds other rows of this batch"
    return ""


def _with(properties: Mapping[str, str], sink: str, note: Note) -> Mapping[str, str]:
    kept = {**properties, PREFIX + sink: note.to_text()}
    notes = {name: _parsed(text) for name, text in kept.items() if name.startswith(PREFIX)}
    while len(notes) > SINKS_MAX:
        oldest = min(notes, key=lambda name: notes[name].noted_ms)
        del notes[oldest], kept[oldest]
    return kept


def _parsed(text: str) -> Note:
    query, batch, digest, noted_ms = text.split(" ")
    return Note(query, int(batch), digest, int(noted_ms))


def _require_valid(asked: pb.NoteBatchesRequest) -> None:
    if not 0 < len(asked.sink.encode()) <= SINK_BYTES_MAX:
        raise NotAllowed("NoteBatches", f"the sink's name must have 1 to {SINK_BYTES_MAX} bytes")
    if asked.batch < 0:
        raise NotAllowed("NoteBatches", f"batch {asked.batch} is negative")
    for what, text in [("query", asked.query), *(("digest", it.digest) for it in asked.topics)]:
        if not 0 < len(text) <= TEXT_CHARACTERS_MAX or not text.isascii() or not text.isprintable():
            raise NotAllowed("NoteBatches", f"the {what} {text[:80]!r} is invalid")
        if " " in text:
            raise NotAllowed("NoteBatches", f"the {what} {text!r} contains a space")
