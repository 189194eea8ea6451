"""The tasks of a sink with brokers that do not answer, on a loop with a virtual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from fakes.client_world import TOPIC, A, world_of
from fakes.session_broker import FakeBrokers

from magnetar.protos import pulsar_pb2 as pb
from magnetar.spark.errors import WriteStalled
from magnetar.spark.sink.options import parse_options
from magnetar.spark.sink.task import TaskWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.spark.sink.policies import Policies


async def rows() -> AsyncIterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"value": ["a", "b"]})


async def no_policies(_: str) -> Policies:
    raise AssertionError("a task without deduplication asks for no policies")


@pytest.mark.parametrize("command", [pb.CommandPartitionedTopicMetadata, pb.CommandProducer])
@pytest.mark.parametrize("answer", [None, pb.CommandError(error=pb.ServiceNotReady, message="no")])
async def test_a_broker_that_accepts_no_producer_in_time_stalls_the_task(
    command: type, answer: pb.CommandError | None
) -> None:
    async with FakeBrokers(A) as cluster:
        cluster.brokers[A].script(command, *[answer] * 1_000)
        given = {"service.url": A, "topic": TOPIC, "sendTimeoutMs": "3000"}
        task = TaskWriter(
            parse_options(given), None, 0, policies=no_policies, environment=world_of(cluster)
        )
        with pytest.raises(WriteStalled):
            await task.run(rows())
