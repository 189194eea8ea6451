"""A client program under kills of brokers: `make night`, or from the top folder

    PYTHONPATH=tests .venv/bin/python -m chaos.every_consumer [--kills 20]

One client has a producer, a subscription of each type, a reader and a table view on one topic with
deduplication. The run kills the owner of the topic repeatedly. In the end no message may be lost,
out of order where Pulsar promises an order, or delivered twice without an explanation.

A kill between two deliveries explains the second one: the acknowledgement was not durable at the
kill. The client itself drops messages that it has acknowledged. So the only consumer of a
subscription, the reader and the table view get no message twice.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
from chaos.administration import admin, keep_everything

from magnetar import ConsumerType, InitialPosition, MessageId, Result, Timeout
from magnetar.asyncio import Client
from magnetar.local_cluster import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from magnetar.asyncio import Consumer, Reader

TOPIC: Final = "persistent://public/default/every-consumer"
CONSUMERS: Final[Mapping[ConsumerType, int]] = {
    ConsumerType.Exclusive: 1,
    ConsumerType.Failover: 2,
    ConsumerType.Shared: 2,
    ConsumerType.KeyShared: 2,
}
ORDERED: Final = (ConsumerType.Exclusive, ConsumerType.Failover)
KEYS: Final = 16
RATE: Final = 300.0  # messages a second
QUIET_S: Final = 1.0  # the time from a receipt to the next kill
SERVED_S: Final = 30.0  # if no broker serves the topic by then, the run fails
SETTLED_S: Final = 3.0  # by then consumers are attached again and have dropped their old messages
DRAIN_S: Final = 60.0
POLL_S: Final = 0.02
WINDOW_MESSAGES: Final = 500  # the limit of messages under way; the client's own limit is 1,000
QUIET_MS: Final = 200  # a waiting consumer checks for the end this often


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill of the owner, from the signal until SETTLED_S after the topic was served again. Times
    are the loop's."""

    begun: float
    settled: float
    owner: str
    next_owner: str

    @property
    def bitten(self) -> bool:
        return self.owner != self.next_owner


@dataclass(slots=True)
class Record:
    """The record of a run. Messages have the numbers 0, 1, 2, ...; message n has the key n %
    KEYS."""

    sent: int = 0
    outcomes: dict[int, str] = field(default_factory=dict)  # the outcomes of sends, keyed by number
    deliveries: dict[ConsumerType, list[tuple[int, float]]] = field(
        default_factory=lambda: {kind: [] for kind in CONSUMERS}
    )
    read: list[int] = field(default_factory=list)
    table: dict[str, int] = field(default_factory=dict)
    changes: list[int] = field(default_factory=list)  # the changes that the table view reported
    kills: list[Kill] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    @property
    def all_seen(self) -> bool:
        wanted = self.sent
        return (
            all(len({it for it, _ in seen}) == wanted for seen in self.deliveries.values())
            and len(self.read) >= wanted
            and len(self.changes) >= wanted
        )

    def anomalies(self) -> list[str]:
        """The violations; empty: the program survived the kills."""
        found = list(self.trouble)
        found += [
            f"kill {at} did not meet the owner" for at, it in enumerate(self.kills) if not it.bitten
        ]
        refused = {it: text for it, text in self.outcomes.items() if text != "Ok"}
        if refused or len(self.outcomes) != self.sent:
            found.append(f"{self.sent} sent, {len(self.outcomes)} answered; not Ok: {refused}")
        for kind, deliveries in self.deliveries.items():
            found += [f"{kind.name}: {it}" for it in self._of_subscription(kind, deliveries)]
        if self.read != list(range(self.sent)):
            found.append(f"reader: {_first_difference(self.read)} of {self.sent}")
        last = {f"key-{it % KEYS}": it for it in range(self.sent)}
        if self.table != last:
            found.append(f"table view: {self.table}, not {last}")
        if self.changes != list(range(self.sent)):
            found.append(f"table view's changes: {_first_difference(self.changes)}")
        return found

    def _of_subscription(
        self, kind: ConsumerType, deliveries: list[tuple[int, float]]
    ) -> list[str]:
        found = []
        first: dict[int, float] = {}
        newest: dict[int, int] = {}  # for each message key; for 0 if all messages have one order
        for number, at in deliveries:
            if number in first:
                alone = CONSUMERS[kind] == 1
                if alone or not self._killed_between(first[number], at):
                    found.append(f"{number} was redelivered without a reason")
                continue
            first[number] = at
            order = number % KEYS if kind is ConsumerType.KeyShared else 0
            if kind is not ConsumerType.Shared and number < newest.get(order, -1):
                found.append(f"{number} was delivered after {newest[order]}")
            newest[order] = max(number, newest.get(order, -1))
        lost = sorted(set(range(self.sent)) - first.keys())
        return found[:5] + ([f"lost {len(lost)}: {lost[:5]}"] if lost else [])

    def _killed_between(self, first: float, second: float) -> bool:
        return any(first <= it.settled and second >= it.begun for it in self.kills)

    def text(self) -> str:
        again = {
            kind.name: len(seen) - len({it for it, _ in seen})
            for kind, seen in self.deliveries.items()
        }
        outages = ", ".join(f"{it.settled - it.begun - SETTLED_S:.1f}" for it in self.kills)
        problems = self.anomalies()
        return "\n".join(
            [
                f"every consumer: {len(self.kills)} kills, {self.sent} messages",
                f"  seconds without a receipt after each kill: {outages}",
                f"  delivered again: {again}",
                *(f"  ANOMALY {it}" for it in problems),
                "  FAILED" if problems else "  passed",
            ]
        )


class Program:
    """The program: its tasks write a Record."""

    def __init__(self, client: Client, record: Record) -> None:
        self._client = client
        self._record = record
        self._ending = asyncio.Event()  # set: the program sends no more messages
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self, faults: Callable[[], Awaitable[None]]) -> None:
        """Run while `faults` disturbs the program, and then until all messages have arrived."""
        client, record = self._client, self._record
        consumers = [
            (kind, await self._subscribe(kind))
            for kind, count in CONSUMERS.items()
            for _ in range(count)
        ]
        reader = await client.create_reader(TOPIC, MessageId.earliest)
        view = await client.create_table_view(TOPIC)
        await view.for_each_and_listen(self._on_change)
        async with asyncio.TaskGroup() as group:
            for kind, consumer in consumers:
                group.create_task(self._consume(kind, consumer))
            group.create_task(self._read(reader))
            producing = group.create_task(self._produce())
            try:
                await faults()
                self._ending.set()
                async with asyncio.timeout(DRAIN_S):
                    await producing
                    while not record.all_seen:  # noqa: ASYNC110 - many tasks see
                        await asyncio.sleep(POLL_S)
                await asyncio.sleep(1.0)  # messages that arrive a second time
            except TimeoutError:
                kills = len(record.kills)
                record.trouble.append(
                    f"after {kills} kills, not all messages arrived within the time limit"
                )
            finally:
                self._ending.set()
                self._over.set()
        record.table = {
            f"key-{it}": int(view.get(f"key-{it}") or -1) for it in range(min(KEYS, record.sent))
        }

    async def receipt(self) -> None:
        """Wait for the receipt of a message that is sent from now on."""
        number = self._record.sent
        while number not in self._record.outcomes:  # noqa: ASYNC110 - a poll is enough here
            await asyncio.sleep(POLL_S)

    async def _subscribe(self, kind: ConsumerType) -> Consumer:
        return await self._client.subscribe(
            TOPIC, kind.name, consumer_type=kind, initial_position=InitialPosition.Earliest
        )

    async def _produce(self) -> None:
        record = self._record
        producer = await self._client.create_producer(
            TOPIC,
            producer_name="every-consumer",
            send_timeout_millis=0,
            block_if_queue_full=True,
            batching_enabled=False,  # with batches, a key has an order only in its own batches
        )
        begun = self._loop.time()
        while not self._ending.is_set():
            number = record.sent
            record.sent += 1

            def note(result: Result, _: object, number: int = number) -> None:
                record.outcomes[number] = result.name

            producer.send_async(b"%d" % number, note, partition_key=f"key-{number % KEYS}")
            while len(record.outcomes) < record.sent - WINDOW_MESSAGES:
                await asyncio.sleep(POLL_S)
                begun = self._loop.time() - record.sent / RATE  # this avoids a burst after a delay
            await asyncio.sleep(max(0.0, begun + record.sent / RATE - self._loop.time()))
        await producer.close()

    async def _consume(self, kind: ConsumerType, consumer: Consumer) -> None:
        seen = self._record.deliveries[kind]
        while not self._over.is_set():
            with suppress(Timeout):
                message = await consumer.receive(QUIET_MS)
                seen.append((int(message.data()), self._loop.time()))
                await consumer.acknowledge(message)
        await consumer.close()

    async def _read(self, reader: Reader) -> None:
        while not self._over.is_set():
            with suppress(Timeout):
                self._record.read.append(int((await reader.read_next(QUIET_MS)).data()))

    def _on_change(self, _key: str, value: bytes) -> None:
        self._record.changes.append(int(value))


def _first_difference(seen: list[int]) -> str:
    """Describe numbers that should be 0, 1, 2, ..."""
    for place, number in enumerate(seen):
        if number != place:
            return f"{number} in place of {place}, {len(seen)} numbers"
    return f"{len(seen)} numbers"


async def run_every_consumer(directory: Path, *, kills: int) -> Record:
    """Run the program on a new cluster. Raises ProcessFailed and httpx.HTTPError if the cluster
    cannot be used."""
    record = Record()
    async with LocalCluster(directory, zookeepers=1, bookies=3, brokers=2) as cluster:

        def prepare() -> None:
            admin(cluster, "POST", "namespaces/public/default/deduplication", True)
            keep_everything(cluster)

        await asyncio.to_thread(prepare)
        client = Client(cluster.service_url)
        program = Program(client, record)

        async def kill_owners() -> None:
            for _ in range(kills):
                async with asyncio.timeout(SERVED_S):
                    await program.receipt()
                await asyncio.sleep(QUIET_S)
                await _kill_owner(cluster, program, record)

        await program.run(kill_owners)
        try:
            await client.close()
        except Timeout as error:
            record.trouble.append(f"the client did not close: {error}")
    return record


async def _kill_owner(cluster: LocalCluster, program: Program, record: Record) -> None:
    loop = asyncio.get_running_loop()
    owner = await asyncio.to_thread(_owner, cluster)
    begun = loop.time()
    await cluster.kill("broker", owner)
    async with asyncio.timeout(SERVED_S):
        await program.receipt()
    served = loop.time()
    await cluster.restart("broker", owner)
    next_owner = await asyncio.to_thread(_owner, cluster)
    await asyncio.sleep(max(0.0, served + SETTLED_S - loop.time()))
    record.kills.append(Kill(begun, served + SETTLED_S, owner, next_owner))


def _owner(cluster: LocalCluster) -> str:
    """The id of the broker that serves the topic."""
    port = cluster.of_role("broker")[0].ports["http"]
    path = TOPIC.replace("://", "/")
    answer = httpx.get(f"http://127.0.0.1:{port}/lookup/v2/topic/{path}", timeout=30.0)
    answer.raise_for_status()
    named = int(answer.json()["brokerUrl"].rpartition(":")[2])
    (found,) = (it.id for it in cluster.of_role("broker") if it.ports["pulsar"] == named)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.every_consumer", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="magnetar-every-consumer-") as folder:
        record = asyncio.run(run_every_consumer(Path(folder), kills=arguments.kills))
    print(record.text())
    return bool(record.anomalies())


if __name__ == "__main__":
    sys.exit(main())
