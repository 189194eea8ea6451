"""Checkpoints that do not fit a topic, against a real broker on the test's loop: without Spark."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from fakes.admin import admin_of
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState
from fakes.range_server import RangeServer, serving

from magnetar.broker.errors import NotAllowed
from magnetar.broker.session.batch_notes import SINKS_MAX, note_batches, note_of
from magnetar.client.asyncio import Client
from magnetar.client.message import MessageId
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.names import TopicName
from magnetar.spark.errors import CheckpointRefused, WriteRefused, WriteStalled
from magnetar.spark.sink.identity import Identity
from magnetar.spark.sink.notes import TOPICS_MAX, joined, note_batch
from magnetar.spark.sink.options import parse_options
from magnetar.spark.sink.policies import Policies, policies_of
from magnetar.spark.sink.task import TaskWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

pytestmark = pytest.mark.real_loop(deadline_s=60)

TOPIC = "persistent://public/exact/t"


@dataclass
class World:
    running: RunningBroker
    client: Client

    async def write(
        self,
        numbers: Iterable[int],
        *,
        batch: int,
        query: str = "q",
        name: str = "",
        partition: int = 0,
        note: bool = True,
    ) -> TaskWriter:
        """A micro-batch with one task. Without `note`, the driver is killed before its end."""
        given = {"service.url": self.running.grpc_url, "topic": TOPIC, "queryname": name}
        options = parse_options(given, streaming=True)
        sink = name or query

        async def policies(topic: str) -> Policies:
            return await asyncio.to_thread(policies_of, options, topic, sink)

        async def batches() -> AsyncIterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pydict({"value": [str(it) for it in numbers]})

        identity = Identity(query, batch, partition, (), sink)
        task = TaskWriter(options, identity, partition, policies=policies)
        await task.run(batches())
        if note:
            digests = joined([{topic: digest.value for topic, digest in task.digests.items()}])
            await asyncio.to_thread(
                note_batch, options, sink=sink, query=query, batch=batch, digests=digests
            )
        return task

    async def stored(self) -> list[int]:
        reader = await self.client.create_reader(TOPIC, MessageId.earliest)
        found = []
        while await reader.has_message_available():
            found.append(int((await reader.read_next(10_000)).data()))
        await reader.close()
        return found


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        path = "namespaces/public/exact"
        (await admin.put(path)).raise_for_status()
        (await admin.post(f"{path}/deduplication", json=True)).raise_for_status()
        keep = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        (await admin.post(f"{path}/retention", json=keep)).raise_for_status()
        async with Client(broker.grpc_url) as client:
            yield World(broker, client)


async def test_a_checkpoint_that_is_older_than_the_topic_is_refused() -> None:
    async with world() as it:
        for batch in range(3):
            await it.write(range(10 * batch, 10 * batch + 10), batch=batch)
        # A backup of the checkpoint knows only batch 0 and plans another batch 1.
        with pytest.raises(CheckpointRefused, match=r"rows of batch 2 .* continues with batch 1"):
            await it.write(range(10, 37), batch=1)
        with pytest.raises(CheckpointRefused):  # a task whose producer the broker does not know
            await it.write(range(10, 37), batch=1, partition=5)
        assert await it.stored() == list(range(30))


async def test_an_older_checkpoint_is_noticed_before_a_batch_was_noted() -> None:
    async with world() as it:
        await it.write(range(5), batch=4, note=False)
        with pytest.raises(CheckpointRefused, match=r"rows of batch 4 .* continues with batch 3"):
            await it.write(range(9), batch=3, note=False)
        assert await it.stored() == list(range(5))


async def test_a_named_query_with_a_new_checkpoint_is_refused() -> None:
    async with world() as it:
        await it.write(range(5), batch=0, name="copy")
        with pytest.raises(CheckpointRefused, match="batch 0 of the query 'copy' with another"):
            await it.write(range(5), batch=0, name="copy", query="q2")
        await it.write(range(5, 7), batch=0, name="other", query="q3")
        await it.write(range(7, 9), batch=0, query="q4")
        assert await it.stored() == list(range(9))


async def test_a_noted_batch_that_is_repeated_writes_nothing() -> None:
    async with world() as it:
        await it.write(range(20), batch=7)
        again = await it.write(range(20), batch=7)
        assert again.skipped == 20
        # Another division of the batch has another producer, so only the note names the batch.
        assert (await it.write(reversed(range(20)), batch=7, partition=3)).skipped == 20
        with pytest.raises(WriteRefused, match="other rows of this batch"):
            await it.write(range(21), batch=7)
        await it.write(range(20, 22), batch=8)
        assert await it.stored() == list(range(22))


async def test_a_batch_that_was_not_noted_is_completed() -> None:
    async with world() as it:
        await it.write(range(20), batch=0, note=False)
        await it.write(range(20), batch=0)
        await it.write(range(20, 30), batch=1)
        assert await it.stored() == list(range(30))


def test_a_batch_of_many_topics_is_noted_in_calls_of_a_thousand_topics() -> None:
    owner = RangeServer(None)
    with serving(owner), serving(RangeServer(None)) as asked:
        asked.owner = owner.url
        options = parse_options({"service.url": asked.url, "sendTimeoutMs": "1"}, streaming=True)
        digests = {f"t{number}": "d" for number in range(TOPICS_MAX * 6 + 1)}
        note_batch(options, sink="s", query="q", batch=3, digests=digests)
    for server in (asked, owner):
        assert [len(part) for part in server.noted] == [TOPICS_MAX] * 6 + [1]
        assert [topic for part in server.noted for topic in part] == list(digests)


@pytest.mark.parametrize(
    ("named", "expected"),
    [("NotAllowed: no", WriteRefused), ("LedgerFenced: later", WriteStalled)],
)
def test_a_failed_note_names_the_topic_that_failed(named: str, expected: type[Exception]) -> None:
    """The first topic has another owner, so it is not noted yet."""
    with serving(RangeServer(None)) as owner, serving(RangeServer(None)) as asked:
        asked.owner, asked.note_errors = owner.url, {"second": named}
        options = parse_options({"service.url": asked.url, "sendTimeoutMs": "1"}, streaming=True)
        digests = {"first": "d", "second": "d"}
        with pytest.raises(expected, match=r"^second: "):
            note_batch(options, sink="s", query="q", batch=3, digests=digests)


async def test_notes_have_a_limit_and_refuse_invalid_values() -> None:
    async with world() as it:
        await it.write(range(1), batch=0, name="first")
        for number in range(SINKS_MAX):
            await it.write(range(1), batch=0, name=f"n{number}", query=f"q{number}")
        topic = await it.running.broker.stored_topic(TopicName.parse(TOPIC), create=False)
        noted = [note_of(topic.log.properties, f"n{number}") for number in range(SINKS_MAX)]
        assert [note and note.query for note in noted] == [f"q{at}" for at in range(SINKS_MAX)]
        assert note_of(topic.log.properties, "first") is None
        good = {"sink": "s", "query": "q", "batch": 1}
        for wrong in ({"sink": ""}, {"sink": "é" * 101}, {"query": "a b"}, {"batch": -1}):
            request = pb.NoteBatchesRequest(**(good | wrong))  # type: ignore[arg-type]
            with pytest.raises(NotAllowed):
                await note_batches(it.running.broker, request)
        asked = pb.NoteBatchesRequest(sink="s", query="q", batch=1)
        for name in ("never-written", "non-persistent://public/default/t"):
            asked.topics.add(topic=name, digest="d")
        missing, kind = (await note_batches(it.running.broker, asked)).topics
        assert missing.error.startswith("TopicNotFound")
        assert kind.error.startswith("NotAllowed")
