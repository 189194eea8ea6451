"""Publishes bad records to a dead-letter topic (mode `dlq`).

A letter is a message with the payload and the key of the record. It has the properties REAL_TOPIC
and ORIGIN_MESSAGE_ID, as Pulsar's dead letters have, and ERROR, the reason. A task publishes the
bad records of a batch of rows before it hands the other rows to Spark. The task fails if it gets no
receipts. So each record reaches Spark or the dead-letter topic at least once. A repeated task
publishes its letters again.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from magnetar.client.consuming.letters import ORIGIN_MESSAGE_ID, REAL_TOPIC
from magnetar.spark.sink.options import Guarantee, WriteOptions, parse_options
from magnetar.spark.sink.task import TaskWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from magnetar.protos.names import TopicName
    from magnetar.spark.sink.policies import Policies
    from magnetar.spark.source.options import ReadOptions

ERROR: Final = "ERROR"

_SCHEMA: Final = pa.schema(
    {
        "value": pa.binary(),
        "__key": pa.binary(),
        "__messageProperties": pa.map_(pa.string(), pa.string()),
    }
)


def send_letters(
    options: ReadOptions,
    topic: TopicName,
    columns: Mapping[str, pa.Array],
    bad: Mapping[int, str],
    place_of: Callable[[int], tuple[int, int, int]],
) -> None:
    """Publish the bad rows, and wait for the receipts. `bad`: the reason for each bad row, keyed by
    the number of the row. `place_of` returns ledger, entry and batch index of a row
    (-1: the message was not in a batch).

    Raises WriteRefused, WriteStalled, RowRefused.
    """
    rows = pa.array(sorted(bad))
    partition = -1 if topic.partition is None else topic.partition
    properties = []
    for row in sorted(bad):
        ledger, entry, index = place_of(row)
        origin = f"{ledger}:{entry}:{partition}" + (f":{index}" if index >= 0 else "")
        properties.append(
            [(REAL_TOPIC, str(topic)), (ORIGIN_MESSAGE_ID, origin), (ERROR, bad[row])]
        )
    pairs = pa.array(properties, _SCHEMA.field("__messageProperties").type)
    letters = [columns["value"].take(rows), columns["__key"].take(rows), pairs]
    batch = pa.RecordBatch.from_arrays(letters, schema=_SCHEMA)

    async def batches() -> AsyncIterator[pa.RecordBatch]:
        yield batch

    async def send() -> None:
        # A record that was sent in chunks becomes a letter in chunks.
        writer = TaskWriter(_write_options(options), None, 0, policies=_never, chunks=True)
        await writer.run(batches())

    asyncio.run(send())


def _write_options(options: ReadOptions) -> WriteOptions:
    given = {
        "service.url": options.service_url,
        "topic": str(options.dead_letter_topic),
        "deliveryGuarantee": Guarantee.AT_LEAST_ONCE.value,
        "sendTimeoutMs": str(max(1, int(options.read_timeout_s * 1_000))),
    }
    return replace(parse_options(given), access=options.access)


async def _never(topic: str) -> Policies:
    raise AssertionError("the guarantee at-least-once needs no policies")
