"""Notes of the batches that a streaming query has stored completely.

The owners of the topics keep the notes. The sink's name is the name of the query (`queryName`), or
else the query's id. Before a task writes its first rows to a topic, it asks the topic's owner for
the last note of the sink:

- The note is of another query: the checkpoint was lost or replaced. This query would store rows
  again that the other query has stored. The task fails.
- The note is of a later batch: the checkpoint is older than the topic, for example a backup. The
  broker would drop new rows as duplicates of other rows. The task fails.
- The note is of this batch: the driver was killed before Spark noted the batch in the checkpoint.
  The task writes nothing. When the driver notes the batch again, the owner compares the digests of
  the rows.

The driver notes a batch when all tasks of the batch have succeeded, before Spark notes it in the
checkpoint.

Pure, except for `note_batch`.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

import google_crc32c

from magnetar.client.session.backoff import ReconnectDelay
from magnetar.spark.errors import CheckpointRefused, WriteRefused, WriteStalled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from magnetar.protos.message import OutgoingMessage
    from magnetar.spark.access import Access
    from magnetar.spark.range_client import BrokerLost, BrokerRefused
    from magnetar.spark.sink.identity import Identity
    from magnetar.spark.sink.options import WriteOptions

REDIRECTS_MAX: Final = 4  # the redirects in one round; the next round begins after a delay
TOPICS_MAX: Final = 1_000  # the topics of one call


@dataclass(frozen=True, slots=True)
class Note:
    """The last batch that a query has stored completely in a topic."""

    query: str
    batch: int


def is_stored(topic: str, identity: Identity, note: Note | None) -> bool:
    """Return whether the topic holds the whole batch. Raises CheckpointRefused."""
    if note is None:
        return False
    if note.query != identity.writer:
        raise CheckpointRefused(
            topic,
            f"the topic holds batch {note.batch} of the query {identity.sink!r} with another"
            f" checkpoint (query id {note.query}); with this checkpoint (query id"
            f" {identity.writer}) rows would be stored again: restore the other checkpoint, or give"
            " this query another name",
        )
    if note.batch > identity.batch:
        raise behind(topic, identity, note.batch)
    return note.batch == identity.batch


def behind(topic: str, identity: Identity, batch: int) -> CheckpointRefused:
    """The error of a checkpoint that is older than the rows of the topic."""
    return CheckpointRefused(
        topic,
        f"the topic holds rows of batch {batch} of this query, but its checkpoint continues with"
        f" batch {identity.batch}: the checkpoint is an older copy, and the broker would drop new"
        " rows as duplicates; restore the newest checkpoint, or begin with an empty checkpoint and"
        " another query name",
    )


class Digest:
    """The digest of rows for one topic. It does not depend on how tasks divide and order the
    rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._checksums = 0

    def add(self, messages: Sequence[OutgoingMessage]) -> None:
        """Add the messages of an entry."""
        self.rows += len(messages)
        self._checksums += sum(map(_crc32c, [message.payload for message in messages]))
        keys = [it.partition_key.encode() for it in messages if it.partition_key is not None]
        self._checksums += sum(map(_crc32c, keys)) << 64

    @property
    def value(self) -> tuple[int, int]:
        return self.rows, self._checksums


_crc32c = google_crc32c.value


def joined(tasks: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, str]:
    """Return the digest of each topic. `tasks`: the digests of each task, keyed by topic."""
    rows: Counter[str] = Counter()
    checksums: Counter[str] = Counter()
    for task in tasks:
        for topic, (count, checksum) in task.items():
            rows[topic] += count
            checksums[topic] += checksum
    return {
        topic: f"{count}-{hashlib.sha256(str(checksums[topic]).encode()).hexdigest()[:32]}"
        for topic, count in rows.items()
    }


def note_batch(
    options: WriteOptions, *, sink: str, query: str, batch: int, digests: Mapping[str, str]
) -> None:
    """Note a batch at its topics. Blocks. Raises WriteRefused, WriteStalled."""
    from magnetar.spark.range_client import BrokerRefused  # loads grpc

    began_s = time.monotonic()
    delay = ReconnectDelay(Random())
    left = dict(digests)
    brokers = list(options.brokers)
    while True:
        try:
            _note(options.access, brokers[0], sink, query, batch, left)
            return
        except _NotNoted as failure:
            topic, error = failure.topic, failure.error
        if isinstance(error, BrokerRefused):
            raise WriteRefused(topic, str(error)) from error
        brokers.append(brokers.pop(0))
        waited_s = time.monotonic() - began_s
        if waited_s >= options.send_timeout_s:
            raise WriteStalled(topic, waited_s, str(error)) from error
        time.sleep(delay.on_failed(time.monotonic()))


class _NotNoted(Exception):
    """The first failure of a round, and the topic that failed."""

    def __init__(self, topic: str, error: BrokerLost | BrokerRefused) -> None:
        super().__init__(topic, error)
        self.topic = topic
        self.error = error


def _note(
    access: Access, broker: str, sink: str, query: str, batch: int, left: dict[str, str]
) -> None:
    """One round: ask a broker, then the owners that it names. Remove noted topics from `left`.

    Raises _NotNoted.
    """
    from magnetar.protos import broker_pb2 as pb
    from magnetar.spark.range_client import BrokerLost, BrokerRefused, error_named, note_batches

    owners: dict[str, str] = {}
    for _ in range(REDIRECTS_MAX + 1):
        by_owner: dict[str, list[str]] = {}
        for topic in left:
            by_owner.setdefault(owners.get(topic, broker), []).append(topic)
        for owner, part in _calls(by_owner):
            request = pb.NoteBatchesRequest(sink=sink, query=query, batch=batch)
            for topic in part:
                request.topics.add(topic=topic, digest=left[topic])
            try:
                answers = note_batches(access, owner, request)
            except (BrokerLost, BrokerRefused) as error:
                raise _NotNoted(part[0], error) from error
            for topic, noted in zip(part, answers, strict=True):
                if noted.owner_url:
                    owners[topic] = noted.owner_url
                elif noted.error:
                    raise _NotNoted(topic, error_named(owner, noted.error))
                else:
                    del left[topic]
        if not left:
            return
    topic = next(iter(left))
    raise _NotNoted(topic, BrokerLost(f"no owner of {topic} after {REDIRECTS_MAX} redirects"))


def _calls(by_owner: Mapping[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Divide the topics of each broker into calls of at most TOPICS_MAX topics."""
    for owner, topics in by_owner.items():
        for first in range(0, len(topics), TOPICS_MAX):
            yield owner, topics[first : first + TOPICS_MAX]
