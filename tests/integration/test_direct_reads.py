"""The reads of executors from the bookies of a real cluster, without Spark."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from pyspark.sql.types import StructType
from support import free_port, skip_without_zookeeper

import magnetar
from magnetar.local_cluster import LocalCluster
from magnetar.spark.errors import ReadStalled
from magnetar.spark.sealed import Sealed
from magnetar.spark.source.driver import plan_frame
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.task_reader import read_task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from magnetar.spark.source.tasks import Task

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop(deadline_s=240)]

TOPIC = "persistent://public/default/direct"
SEALED, TAIL = 4_000, 50  # messages
VALUE_BYTES = 1_000  # the sealed ledger has 4 MB, enough for three tasks of more than 1 MiB


class Job:
    """The reads of an application's executors with the given options."""

    def __init__(self, cluster: LocalCluster, **given: str) -> None:
        self._given = {
            "service.url": cluster.service_url,
            "topic": TOPIC,
            "targetBytesPerTask": "1400000",
            "maxPartitions": "3",
        } | given
        self.schema = StructType().add("value", "binary").add("__index", "long")

    def plan(self) -> list[Task]:
        return plan_frame(parse_options(self._given))

    def read(self, tasks: Sequence[Task], **given: str) -> list[tuple[int, bytes]]:
        """Index and value of each row. `given`: options that differ from the plan's."""
        options = parse_options(self._given | given)
        rows: list[tuple[int, bytes]] = []
        for task in tasks:
            for batch in read_task(options, self.schema, task):
                columns = batch.to_pydict()
                rows += zip(columns["__index"], columns["value"], strict=True)
        return rows


def value(number: int) -> bytes:
    return number.to_bytes(4, "big") * (VALUE_BYTES // 4)


def publish(url: str, first: int, end: int) -> None:
    with magnetar.Client(url) as client:
        producer = client.create_producer(TOPIC, block_if_queue_full=True)
        for number in range(first, end):
            producer.send_async(value(number), lambda *_: None)
        producer.flush()


def unload(cluster: LocalCluster) -> None:
    """Close the topic's ledger. A later message is stored in another ledger."""
    connection = HTTPConnection(urlsplit(cluster.admin_url).netloc, timeout=60)
    connection.request("PUT", "/admin/v2/persistent/public/default/direct/unload")
    assert connection.getresponse().status == HTTPStatus.NO_CONTENT
    connection.close()


def without_brokers(task: Task) -> None:
    task.owners = dict.fromkeys(task.owners, NO_BROKER["service.url"])


NO_BROKER = {"service.url": f"grpc://127.0.0.1:{free_port()}", "readTimeoutMs": "300"}


async def test_sealed_ledgers_are_read_from_bookies_and_the_rest_from_the_owner(
    tmp_path: Path,
) -> None:
    skip_without_zookeeper()
    counts: dict[str, Any] = {"zookeepers": 1, "bookies": 3, "brokers": 1, "autorecoveries": 0}
    async with LocalCluster(tmp_path / "cluster", **counts) as cluster:
        await asyncio.to_thread(_fill, cluster)
        await asyncio.to_thread(_read_in_every_way, cluster)
        await cluster.kill("bookie", "bookie-1")
        await asyncio.to_thread(_read_from_the_other_bookies, cluster)


def _fill(cluster: LocalCluster) -> None:
    with magnetar.Client(cluster.service_url) as client:
        client.subscribe(TOPIC, "keeps").close()
    publish(cluster.service_url, 0, SEALED)
    unload(cluster)
    publish(cluster.service_url, SEALED, SEALED + TAIL)


ALL = [(number, value(number)) for number in range(SEALED + TAIL)]


def _read_in_every_way(cluster: LocalCluster) -> None:
    job = Job(cluster)
    tasks = job.plan()
    # The last task reads the open ledger, the tail of the topic, and not from the bookies.
    assert [len(task.sealed.ledgers) for task in tasks] == [1, 1, 1]
    assert len({span.ledger for task in tasks for span in task.spans}) == 2
    assert {len(task.sealed.addresses) for task in tasks} == {3}
    assert job.read(tasks) == ALL

    # A broker is needed only for the tail, whichever owners the plan names.
    for task in tasks[:-1]:
        without_brokers(task)
    first = job.read(tasks[:-1], **NO_BROKER)
    assert first == ALL[: len(first)]
    assert len(first) > SEALED // 2
    without_brokers(tasks[-1])
    with pytest.raises(ReadStalled):
        job.read(tasks[-1:], **NO_BROKER)

    # The option switches reads from bookies off.
    plain = Job(cluster, readFromBookies="false")
    assert all(task.sealed == Sealed() for task in plain.plan())
    assert plain.read(plain.plan()) == ALL

    # The read key is wrong, or the bookies are at other addresses: the task reads from the owner.
    for spoil in (_with_wrong_key, _with_wrong_addresses):
        tasks = job.plan()
        for task in tasks:
            task.sealed = spoil(task.sealed)
        assert job.read(tasks) == ALL


def _with_wrong_key(sealed: Sealed) -> Sealed:
    ledgers = {
        ledger: replace(metadata, master_key=metadata.master_key ^ 1)
        for ledger, metadata in sealed.ledgers.items()
    }
    return replace(sealed, ledgers=ledgers)


def _with_wrong_addresses(sealed: Sealed) -> Sealed:
    nowhere = f"127.0.0.1:{free_port()}"
    return replace(sealed, addresses=dict.fromkeys(sealed.addresses, nowhere))


def _read_from_the_other_bookies(cluster: LocalCluster) -> None:
    job = Job(cluster)
    tasks = job.plan()
    assert job.read(tasks) == ALL
    for task in tasks[:-1]:
        without_brokers(task)
    first = job.read(tasks[:-1], **NO_BROKER)
    assert first == ALL[: len(first)]
