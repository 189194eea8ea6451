"""An owner that is stopped by SIGSTOP, with and without load, in a cluster of real processes.

Another broker takes over the owner's topics, and our client continues there. Later the stopped
broker continues with its old state.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pulsar
import pytest
from fakes.entries import texts_of
from fakes.wire import wire_to
from support import skip_without_zookeeper, wait_until

import magnetar.asyncio as magnetar
from magnetar import ConsumerType, InitialPosition, MessageId
from magnetar.local_cluster import LocalCluster, run_local_cluster
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from fakes.broker import RunningBroker

    from magnetar.asyncio import Client
    from magnetar.local_process import LocalProcess

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper]

REPLACED_S = 6.0
"""On an idle machine 2.4 s. Without the rule for silent brokers it takes 10 s, and a client that
stays takes 60 s."""

WINDOW = 50  # messages in flight
PACE_S = 0.002


@asynccontextmanager
async def cluster_in(directory: Path) -> AsyncIterator[LocalCluster]:
    skip_without_zookeeper()
    counts = {"zookeepers": 1, "bookies": 3, "brokers": 2, "autorecoveries": 0}
    async with LocalCluster(directory / "cluster", **counts) as cluster:
        try:
            yield cluster
        finally:
            for broker in cluster.of_role("broker"):
                broker.resume()


def url_of(broker: LocalProcess, kind: str) -> str:
    return f"{kind}://127.0.0.1:{broker.ports[kind]}"


async def owner_of(cluster: LocalCluster, client: Client, topic: str, kind: str) -> LocalProcess:
    url = (await client.parts.lookup.owner(topic)).url
    return next(it for it in cluster.of_role("broker") if url_of(it, kind) == url)


@dataclass
class Load:
    """A producer and a consumer of one topic, with the times of receipts and deliveries."""

    client: Client
    topic: str
    receipts: list[int] = field(default_factory=list)
    deliveries: list[int] = field(default_factory=list)
    receipt_times: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def produce(self) -> None:
        producer = await self.client.create_producer(self.topic, batching_enabled=False)
        now, room, number = asyncio.get_running_loop().time, asyncio.Semaphore(WINDOW), 0

        def on_sent(number: int, result: Any) -> None:
            assert result.name == "Ok", result
            self.receipts.append(number)
            self.receipt_times.append(now())
            room.release()

        while not self.done.is_set():
            await room.acquire()
            producer.send_async(
                b"%d" % number, lambda result, _, number=number: on_sent(number, result)
            )
            number += 1
            await asyncio.sleep(PACE_S)
        await producer.flush()

    async def consume(self) -> None:
        consumer = await self.client.subscribe(
            self.topic, "s", initial_position=InitialPosition.Earliest
        )
        while True:
            message = await consumer.receive()
            self.deliveries.append(int(message.data()))
            await consumer.acknowledge(message)

    async def more(self, count: int = 2 * WINDOW) -> None:
        """Wait for `count` further receipts and deliveries: more than were in flight."""
        receipts, deliveries = len(self.receipts) + count, len(self.deliveries) + count
        await wait_until(
            lambda: len(self.receipts) >= receipts and len(self.deliveries) >= deliveries
        )

    def is_delivered(self) -> bool:
        """Return whether all messages with a receipt were delivered."""
        return set(self.receipts) <= set(self.deliveries)

    def longest_pause_s(self, since: int) -> float:
        """The longest pause between two receipts, from the receipt `since` on."""
        times = self.receipt_times[since:]
        return max(late - early for early, late in itertools.pairwise(times))


@pytest.mark.real_loop(deadline_s=240)
@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.night)])
async def test_a_stopped_owner_is_replaced_under_load_again_and_again(
    tmp_path: Path, rounds: int
) -> None:
    async with cluster_in(tmp_path) as cluster:
        for kind, urls in (("pulsar", cluster.pulsar_url), ("grpc", cluster.service_url)):
            async with magnetar.Client(urls) as client:
                load = Load(client, f"persistent://public/default/{kind}")
                async with asyncio.TaskGroup() as group:
                    consuming = group.create_task(load.consume())
                    producing = group.create_task(load.produce())
                    for _ in range(rounds):
                        await load.more(500)
                        await _stop_and_continue(cluster, load, kind)
                    load.done.set()
                    await producing
                    await wait_until(load.is_delivered)
                    consuming.cancel()
                assert load.receipts == sorted(load.receipts)
                first = list(dict.fromkeys(load.deliveries))
                assert first == sorted(first)
                # Messages in flight are resent, and unacknowledged messages are redelivered.
                repeated = len(load.deliveries) - len(first)
                assert repeated <= rounds * 2 * WINDOW


async def _stop_and_continue(cluster: LocalCluster, load: Load, kind: str) -> None:
    owner = await owner_of(cluster, load.client, load.topic, kind)
    since = len(load.receipts) - 1
    owner.pause()
    await load.more()
    pause_s = load.longest_pause_s(since)
    print(f"{kind}: {owner.id} stopped, {pause_s:.2f} s until the next receipts")
    assert pause_s < REPLACED_S
    assert await owner_of(cluster, load.client, load.topic, kind) is not owner
    owner.resume()


@pytest.mark.real_loop(deadline_s=120)
async def test_a_continued_owner_confirms_nothing_and_gives_its_topics_up(tmp_path: Path) -> None:
    """The owner gets commands of a client before it knows that it was replaced. It sends no receipt
    and confirms no acknowledgement, and it closes the producer and the consumer with the name of
    the new owner."""
    topic = "persistent://public/default/t"
    async with cluster_in(tmp_path) as cluster:
        async with magnetar.Client(cluster.pulsar_url) as client:
            producer = await client.create_producer(topic, batching_enabled=False)
            owner = await owner_of(cluster, client, topic, "pulsar")
            [other] = [it for it in cluster.of_role("broker") if it is not owner]
            stale = cast(
                "RunningBroker", SimpleNamespace(pulsar_url=url_of(owner, "pulsar"), grpc_url="")
            )
            async with wire_to(stale, "pulsar") as wire:
                shared = pb.CommandSubscribe.Shared
                await wire.subscribe(topic, subType=shared)
                await wire.produce(topic, producer_name="stale")
                numbers = [b"%d" % number for number in range(10)]
                ids = [await producer.send(number) for number in numbers]
                owner.pause()
                async with magnetar.Client(url_of(other, "pulsar")) as quick:
                    consumer = await quick.subscribe(topic, "s", ConsumerType.Shared)
                    for _ in range(10):
                        await consumer.acknowledge(await consumer.receive(20_000))
                    await consumer.close()
                    await (await quick.create_producer(topic)).send(b"new")
                for number in range(3):
                    await wire.publish("stale", sequence_id=number)
                await wire.flow(100)
                acked = pb.MessageIdData(ledgerId=ids[0].ledger_id(), entryId=ids[0].entry_id())
                ack = pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, request_id=77)
                ack.message_id.append(acked)
                await wire.send(ack)
                owner.resume()
                said = await _said(wire)
        assert await _metric(owner, "magnetar_standstills_total") >= 1
        assert await _metric(other, "magnetar_silent_brokers_total") >= 1
        kinds = [type(body).__name__ for body, _ in said]
        print(kinds)
        assert "CommandSendReceipt" not in kinds
        confirmed = [
            body
            for body, _ in said
            if isinstance(body, pb.CommandAckResponse) and not body.HasField("error")
        ]
        assert confirmed == []
        assert [texts for _, texts in said if texts] == [], (
            "the messages were acknowledged elsewhere"
        )
        closes = [
            body
            for body, _ in said
            if isinstance(body, pb.CommandCloseProducer | pb.CommandCloseConsumer)
        ]
        assert len(closes) == 2
        assert {body.assignedBrokerServiceUrl for body in closes} <= {"", url_of(other, "pulsar")}
        async with magnetar.Client(cluster.pulsar_url) as client:
            # The acknowledged messages are deleted, at once or later.
            assert {b"new"} <= set(await _stored(client, topic)) <= {*numbers, b"new"}


@pytest.mark.real_loop(deadline_s=120)
async def test_under_a_watchdog_apaches_client_continues_after_its_broker_was_stopped(
    tmp_path: Path,
) -> None:
    """The client's keep-alive would end the connection only after 30 to 60 s."""
    skip_without_zookeeper()
    topic = "persistent://public/default/apache"
    cluster = LocalCluster(
        tmp_path / "cluster", zookeepers=1, bookies=3, brokers=2, autorecoveries=0
    )
    ready, stop, now = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        group.create_task(
            run_local_cluster(cluster, stop, restart=True, on_ready=ready.set, watchdog=True)
        )
        await ready.wait()
        apache = await asyncio.to_thread(pulsar.Client, cluster.pulsar_url)
        try:
            producer = await asyncio.to_thread(apache.create_producer, topic)
            await asyncio.to_thread(producer.send, b"before")
            async with magnetar.Client(cluster.pulsar_url) as client:
                await client.get_topic_partitions(topic)
                owner = await owner_of(cluster, client, topic, "pulsar")
            await asyncio.sleep(2.0)  # the watchdog gets its first answers
            pid, began = owner.pid, now()
            owner.pause()
            await asyncio.to_thread(producer.send, b"after")
            print(f"Apache's client: {now() - began:.2f} s until the next receipt")
            assert now() - began < 2 * REPLACED_S
            await wait_until(lambda: owner.pid not in (None, pid), what="the restart")
            await asyncio.to_thread(owner.wait_ready)
        finally:
            await asyncio.to_thread(apache.close)
            stop.set()


async def _said(wire: Any) -> list[tuple[Any, list[str]]]:
    """The commands that arrive before the close of the producer and of the consumer, and within a
    second after."""
    said: list[tuple[Any, list[str]]] = []
    closes = 0
    while True:
        wire.wait_s = 30.0 if closes < 2 else 1.0
        try:
            command = await wire.receive()
        except (TimeoutError, EOFError):
            return said
        closes += isinstance(command.body, pb.CommandCloseProducer | pb.CommandCloseConsumer)
        said.append((command.body, [] if command.entry is None else texts_of(command.entry)))


async def _metric(broker: LocalProcess, name: str) -> float:
    url = f"http://127.0.0.1:{broker.ports['http']}/metrics"
    text = (await asyncio.to_thread(httpx.get, url)).text
    return next(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} ")
    )


async def _stored(client: Client, topic: str) -> list[bytes]:
    reader = await client.create_reader(topic, MessageId.earliest)
    found = []
    while await reader.has_message_available():
        found.append((await reader.read_next(timeout_millis=20_000)).data())
    return found
