"""The tasks of a sink against a real broker on the test's loop: without Spark."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from fakes.admin import admin_of
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState
from support import wait_until

from magnetar.client.asyncio import Client
from magnetar.client.message import MessageId
from magnetar.protos.names import TopicName
from magnetar.spark.errors import (
    CheckpointRefused,
    DeduplicationOff,
    RowsChanged,
    SparkError,
    WriteStalled,
)
from magnetar.spark.sink.identity import Identity
from magnetar.spark.sink.options import parse_options
from magnetar.spark.sink.policies import Policies, policies_of
from magnetar.spark.sink.task import TaskWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from httpx import AsyncClient

pytestmark = pytest.mark.real_loop(deadline_s=60)

TOPIC = "persistent://public/exact/t"
PATH = "persistent/public/exact/t"
LIMIT = f"{PATH}/maxMessageSize"
WIDE = 130  # bytes of a message: an entry holds about 1,000 messages
LARGE = 200_000


@dataclass
class World:
    broker: RunningBroker
    client: Client
    admin: AsyncClient

    async def write(
        self,
        numbers: Iterable[int],
        *,
        batch: int = 0,
        partition: int = 0,
        dedup: bool = True,
        is_on: bool = True,
        bytes_max: int = 0,
        width: int = WIDE,
        large: int = -1,
        until: asyncio.Event | None = None,
        **options: str,
    ) -> TaskWriter:
        """Run one task. The row `large` has LARGE bytes.

        With `until`, the task gets further rows when the event is set.
        """
        given = {"service.url": self.broker.grpc_url, "topic": TOPIC} | options

        async def policies(_: str) -> Policies:
            return Policies(is_on, bytes_max)

        task = TaskWriter(
            parse_options(given),
            Identity("q", batch, partition) if dedup else None,
            partition,
            policies=policies,
        )
        widths = ((number, LARGE if number == large else width) for number in numbers)
        await task.run(batches([str(number).zfill(size) for number, size in widths], until))
        return task

    async def stored(self, topic: str = TOPIC) -> list[int]:
        reader = await self.client.create_reader(topic, MessageId.earliest)
        found = []
        while await reader.has_message_available():
            found.append(int((await reader.read_next(10_000)).data().lstrip(b"0") or b"0"))
        await reader.close()
        return found


async def batches(values: list[str], until: asyncio.Event | None) -> AsyncIterator[pa.RecordBatch]:
    for at in range(0, len(values), 1_000):
        yield pa.RecordBatch.from_pydict({"value": values[at : at + 1_000]})
    if until is not None:
        await until.wait()


@asynccontextmanager
async def world(**settings: Any) -> AsyncIterator[World]:
    async with (
        running_broker(ClusterState(), **settings) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        (await admin.put("namespaces/public/exact")).raise_for_status()
        path = "namespaces/public/exact"
        (await admin.post(f"{path}/deduplication", json=True)).raise_for_status()
        keep = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        (await admin.post(f"{path}/retention", json=keep)).raise_for_status()
        async with Client(broker.grpc_url) as client:
            yield World(broker, client, admin)


async def wait_stored(it: World, count: int = 1, topic: str = TOPIC) -> None:
    while len(await it.stored(topic)) < count:  # noqa: ASYNC110 - the topic announces nothing
        await asyncio.sleep(0.01)


async def wait_without_producer(it: World) -> None:
    while (await it.admin.get(f"{PATH}/stats")).json()["publishers"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def write_and_end(it: World, numbers: Iterable[int]) -> None:
    """Cancel a task after it has stored messages and before it ends by itself."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(it.write(numbers, until=asyncio.Event()))
        await wait_stored(it)
        task.cancel()


async def test_a_task_that_is_repeated_stores_nothing_twice() -> None:
    async with world() as it:
        first = await it.write(range(3_500))
        again = await it.write(range(3_500))
        assert (first.rows, first.skipped) == (3_500, 0)
        assert (again.rows, again.skipped) == (3_500, 3_500)
        await it.write(range(3_500, 4_000), batch=1)
        await wait_without_producer(it)  # a task closes its producer
        with pytest.raises(CheckpointRefused):
            await it.write(range(3_500))  # a zombie of the first batch
        assert await it.stored() == list(range(4_000))


async def test_a_task_that_was_ended_is_finished_by_the_next_attempt() -> None:
    async with world() as it:
        for _ in range(3):
            await write_and_end(it, range(9_000))
        task = await it.write(range(12_000))
        assert task.skipped
        assert await it.stored() == list(range(12_000))


async def test_an_attempt_waits_for_its_twin_and_then_stores_nothing() -> None:
    async with world() as it:
        end = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(it.write(range(5_000), until=end))
            await wait_stored(it)
            twin = group.create_task(it.write(range(5_000)))
            await asyncio.sleep(0.3)
            assert not twin.done()
            end.set()
        assert slow.result().skipped == 0
        assert twin.result().skipped == 5_000
        assert await it.stored() == list(range(5_000))


async def test_a_twin_that_never_ends_is_named() -> None:
    async with world() as it:
        end = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(it.write(range(2_000), until=end))
            await wait_stored(it)
            with pytest.raises(WriteStalled, match="spark/q/0"):
                await it.write(range(2_000), sendTimeoutMs="400")
            end.set()


async def test_other_rows_in_a_repeated_batch_are_refused() -> None:
    async with world() as it:
        await write_and_end(it, range(5_000))
        count = len(await it.stored())
        assert count
        with pytest.raises(RowsChanged, match="'spark/q/0', batch 0"):
            await it.write(range(5_000), width=1)
        assert len(await it.stored()) == count


async def test_rows_are_not_lost_if_partitions_are_added_before_a_batch_is_repeated() -> None:
    async with world() as it:
        topic = "persistent://public/exact/parts"
        partitions = f"{topic.replace(':/', '')}/partitions"
        (await it.admin.put(partitions, json=2)).raise_for_status()
        async with asyncio.TaskGroup() as group:  # one partition gets 1,000 rows: an entry
            task = group.create_task(
                it.write(range(1_999), until=asyncio.Event(), topic=topic, width=10)
            )
            await wait_stored(it, 1_000, f"{topic}-partition-0")
            task.cancel()
        (await it.admin.post(partitions, json=3)).raise_for_status()
        await it.write(range(3_000), topic=topic, width=10)
        stored = [await it.stored(f"{topic}-partition-{number}") for number in range(3)]
        assert {row for part in stored for row in part} == set(range(3_000))


async def test_dedup_needs_deduplication() -> None:
    async with world() as it:
        with pytest.raises(DeduplicationOff, match="set-deduplication"):
            await it.write([1], is_on=False)
        assert await it.stored() == []


async def test_deduplication_counts_as_on_when_it_is_durable() -> None:
    async with world() as it, asyncio.TaskGroup() as group:
        name = "persistent://public/default/late"
        producer = await it.client.create_producer(name)
        deduplication = (await it.broker.broker.stored_topic(TopicName.parse(name))).deduplication
        options = parse_options({"service.url": it.broker.grpc_url, "topic": name})
        deduplication._switching = asyncio.Lock()  # the first switch would create it
        # The lock holds the switch up, like a metadata store that does not answer.
        async with deduplication._switching:
            path = "persistent/public/default/late/deduplicationEnabled"
            (await it.admin.post(path, json=True)).raise_for_status()
            asked = group.create_task(asyncio.to_thread(policies_of, options, name))
            await wait_until(lambda: deduplication.wanted)
            await asyncio.sleep(0.2)
            assert not asked.done()
        assert (await asked).deduplication
        assert deduplication.is_settled
        await producer.close()


async def test_a_message_that_is_too_large_ends_the_task_and_leaves_no_gap() -> None:
    async with world(message_bytes_max=4_000) as it:
        numbers = [*range(10), int("9" * 4_200), *range(100)]
        with pytest.raises(SparkError, match="MessageTooBig"):
            await it.write(numbers, width=3_000)
        stored = await it.stored()
        assert stored == numbers[: len(stored)]
        assert len(stored) <= 10


async def test_a_repeated_task_stores_the_entry_that_was_refused_amid_others() -> None:
    """The topic's limit is lowered after the task has asked for it."""
    async with world() as it:
        await it.write([0])
        (await it.admin.post(LIMIT, json=150_000)).raise_for_status()
        for _ in range(2):
            with pytest.raises(SparkError, match="exceeds the limit of 150000"):
                await it.write(range(1, 6_001), batch=1, large=3_000)
        assert await it.stored() == list(range(3_000))
        (await it.admin.delete(LIMIT)).raise_for_status()
        await it.write(range(1, 6_001), batch=1, large=3_000)
        assert await it.stored() == list(range(6_001))


async def test_a_refusal_ends_the_client_while_the_task_waits_for_rows() -> None:
    """Without this end, the client would reconnect and send the entries behind the refused one."""
    async with world() as it:
        await it.write([0])
        (await it.admin.post(LIMIT, json=150_000)).raise_for_status()
        end = asyncio.Event()
        with pytest.RaisesGroup(
            pytest.RaisesExc(SparkError, match=r"row 1499 .*exceeds the limit")
        ):
            async with asyncio.TaskGroup() as group:
                group.create_task(it.write(range(1, 3_001), batch=1, large=1_500, until=end))
                await wait_stored(it, 1_500)
                await wait_without_producer(it)
                end.set()


async def test_an_unreachable_broker_is_named() -> None:
    async with world() as it:
        with pytest.raises(SparkError, match=r"127\.0\.0\.1:1"):
            await it.write([1], **{"service.url": "grpc://127.0.0.1:1", "sendTimeoutMs": "300"})


async def test_a_low_limit_of_pending_bytes_loses_no_message() -> None:
    async with world() as it:
        task = await it.write(range(20_000), dedup=False, pendingBytes=str(1 << 20))
        assert task.rows == 20_000
        assert await it.stored() == list(range(20_000))


async def test_an_entry_that_the_topic_accepts_as_it_is_sent_is_not_refused() -> None:
    async with world() as it:
        await it.write([0])
        (await it.admin.post(LIMIT, json=1_000)).raise_for_status()
        await it.write([1], batch=1, bytes_max=1_000, width=1_000)  # exactly the limit
        await it.write([2], batch=2, bytes_max=1_000, width=5_000, compression="zlib")
        assert await it.stored() == [0, 1, 2]


async def test_with_dedup_an_entry_over_the_topics_limit_ends_the_task_before_it_is_sent() -> None:
    async with world() as it:
        with pytest.raises(SparkError, match=r"rows 0 to 0 have .* limit for a message is 100"):
            await it.write([1], bytes_max=100)
        assert await it.stored() == []
