"""Lost copies are restored on real processes, while a client produces and consumes undisturbed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from chaos.administration import keep_everything
from support import skip_without_zookeeper

import magnetar
import magnetar.asyncio
from magnetar.bookie.ledger.connection import RemoteBookiePeer
from magnetar.bookie.ledger.errors import LedgerNotFound
from magnetar.bookie.repair.survey import survey_bookies, survey_ledger
from magnetar.local_cluster import LocalCluster
from magnetar.local_process import ProcessFailed
from magnetar.metadata import paths
from magnetar.metadata.ledger_tree import ledger_ids
from magnetar.metadata.model import LedgerState, Member
from magnetar.metadata.zookeeper import ZooKeeperStore
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop]

EARLIEST = magnetar.InitialPosition.Earliest
# Shorter times than usual, because a test waits for each of them.
PATIENCE = {
    "broker_settings": {
        "degraded_ledger_min_age_in_seconds": "2",
        "open_ledger_check_interval_in_seconds": "1",
    },
    # the time after which a dead bookie is no longer listed
    "bookie_settings": {"session_timeout_s": "5"},
}


@pytest.fixture(autouse=True)
def _java() -> None:
    skip_without_zookeeper()


def command(cluster: LocalCluster, *words: str) -> tuple[list[str], dict[str, str]]:
    url = cluster.metadata_url
    return [sys.executable, "-m", "magnetar.cli.main", *words], {
        **os.environ,
        "MAGNETAR_METADATA_URL": url,
        "MAGNETAR_AUTORECOVERY_METADATA_URL": url,
    }


@asynccontextmanager
async def process(cluster: LocalCluster, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command, killed at the end if it still runs."""
    arguments, environment = command(cluster, *words)
    log = (cluster.directory / f"{words[0]}.out").open("ab")
    running = await asyncio.create_subprocess_exec(
        *arguments, env=environment, stdout=asyncio.subprocess.PIPE, stderr=log
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()
        log.close()


def repairing(cluster: LocalCluster) -> Any:
    """An autorecovery process with shorter delays than usual."""
    patience = {"lost-bookie-delay-s": 1, "open-grace-s": 2, "audit-period-s": 3}
    flags = [f"--{name}={value}" for name, value in patience.items()]
    return process(cluster, "autorecovery", "--http-port=0", *flags)


async def ask(cluster: LocalCluster, *words: str) -> Any:
    async with process(cluster, "bookies", *words, "--json") as asked:
        said, _ = await asked.communicate()
        assert asked.returncode == 0, (cluster.directory / "bookies.out").read_text()
    return json.loads(said)


@asynccontextmanager
async def metadata(cluster: LocalCluster) -> AsyncIterator[ZooKeeperStore]:
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    try:
        yield store
    finally:
        await store.close()


async def wait_left(store: ZooKeeperStore, member: Member) -> None:
    """Wait until no ledger names the bookie."""
    async with asyncio.timeout(120):
        while True:
            rows = await survey_bookies(store, RemoteBookiePeer)
            if not any(row.ledgers for row in rows if row.member == member):
                return
            await asyncio.sleep(0.3)


async def member_of(store: ZooKeeperStore, bookie: str) -> Member:
    rows = await survey_bookies(store, RemoteBookiePeer)
    [member] = [row.member for row in rows if row.member.bookie == bookie]
    return member


async def wait_whole(store: ZooKeeperStore) -> int:
    """Wait until every closed ledger has three copies of each entry. Returns the number of
    ledgers."""
    closed: set[int] = set()
    missing: list[object] = []
    try:
        async with asyncio.timeout(120):
            while missing or not closed:
                missing = []
                async for ledger in ledger_ids(store, paths.LEDGERS):
                    try:
                        view = await survey_ledger(store, RemoteBookiePeer, SystemClock(), ledger)
                    except LedgerNotFound:
                        continue  # the broker has deleted the ledger
                    if view.metadata.state is LedgerState.CLOSED:
                        closed.add(ledger)
                        if view.metadata.write_quorum < 3:
                            missing.append((ledger, "narrow"))
                        missing += [
                            (ledger, row)
                            for row in view.copies
                            if row.expected is None or (row.held or 0) < row.expected
                        ]
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(missing) from None
    return len(closed)


async def wait_unmarked(cluster: LocalCluster) -> None:
    """Wait until no under-replication record is left. A record stays for a moment after its copies
    are made, and the broker marks what its writers have missed at a time of its own."""
    marked: object = None
    try:
        async with asyncio.timeout(120):
            while True:
                marked = await ask(cluster, "under-replicated")
                if marked == []:
                    return
                await asyncio.sleep(0.3)
    except TimeoutError:
        raise AssertionError(marked) from None


class Traffic:
    """Sends numbered messages and receives them, until it is stopped. An error of the client fails
    the test."""

    def __init__(self, client: magnetar.asyncio.Client, topic: str) -> None:
        self.sent = 0
        self.received: list[int] = []
        self.slowest_s = 0.0
        self._total: int | None = None  # None: not known yet
        self._client = client
        self._topic = topic
        self._stop = asyncio.Event()

    async def run(self) -> None:
        consumer = await self._client.subscribe(self._topic, "reader", initial_position=EARLIEST)
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(self._receive(consumer))
            await self._send()
            await receiving

    def stop(self) -> None:
        self._stop.set()

    async def _send(self) -> None:
        producer = await self._client.create_producer(self._topic)
        loop = asyncio.get_running_loop()
        while self._total is None:
            if self._stop.is_set():
                self._total = self.sent + 1
            began = loop.time()
            await producer.send(b"%d" % self.sent)
            self.slowest_s = max(self.slowest_s, loop.time() - began)
            self.sent += 1
            await asyncio.sleep(0.01)

    async def _receive(self, consumer: Any) -> None:
        while self._total is None or len(self.received) < self._total:
            message = await consumer.receive(timeout_millis=30_000)
            self.received.append(int(message.data()))
            await consumer.acknowledge(message)


async def fill(client: magnetar.asyncio.Client, cluster: LocalCluster) -> None:
    """Create ledgers of several topics: some are closed by a stop of the broker, some stay open."""
    for round_number in range(2):
        for topic in ("a", "b", "c"):
            producer = await client.create_producer(topic)
            for number in range(20):
                await producer.send(b"%d %d" % (round_number, number) + bytes(1000))
            await producer.close()
        if round_number == 0:
            await cluster.restart("broker", "broker-1")


async def check_topics(client: magnetar.asyncio.Client) -> None:
    for topic in ("a", "b", "c"):
        reader = await client.create_reader(topic, magnetar.MessageId.earliest)
        for round_number in range(2):
            for number in range(20):
                message = await reader.read_next(timeout_millis=20_000)
                assert message.data().startswith(b"%d %d" % (round_number, number))
        await reader.close()
        producer = await client.create_producer(topic)
        await producer.send(b"more")
        await producer.close()


@pytest.mark.real_loop(deadline_s=380)
@pytest.mark.timeout(400)
async def test_a_bookie_that_dies_is_replaced_and_another_is_decommissioned(tmp_path: Path) -> None:
    async with (
        LocalCluster(
            tmp_path / "c", zookeepers=1, bookies=4, brokers=1, autorecoveries=0, **PATIENCE
        ) as cluster,
        metadata(cluster) as store,
        magnetar.asyncio.Client(cluster.service_url) as client,
        repairing(cluster),
    ):
        await asyncio.to_thread(keep_everything, cluster)  # trimming would delete closed ledgers
        await fill(client, cluster)
        dead = await member_of(store, "bookie-2")
        traffic = Traffic(client, "live")
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.run())
            await cluster.kill("bookie", "bookie-2")
            await wait_left(store, dead)
            assert await wait_whole(store) >= 3
            await check_topics(client)
            await cluster.restart("bookie", "bookie-2")
            await decommission(cluster, "bookie-3")
            assert "bookie-3" not in [row["bookie"] for row in await ask(cluster, "list")]
            assert await wait_whole(store) >= 3
            traffic.stop()
        assert traffic.received == list(range(traffic.sent))
        assert traffic.sent > 100
        assert traffic.slowest_s < 8, "a send waited for longer than a dead bookie explains"
        await check_topics_again(client)
        await wait_unmarked(cluster)
        await check_tables(cluster)
        view = await ask(cluster, "ledger", "0")
        assert [row["held"] for row in view["copies"]] == [20, 20, 20]


@pytest.mark.real_loop(deadline_s=380)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "damaged",
    [pytest.param(False, marks=pytest.mark.night, id="wiped"), pytest.param(True, id="damaged")],
)
async def test_a_bookie_without_its_store_is_filled_again_as_a_new_one(
    tmp_path: Path, damaged: bool
) -> None:
    """With three bookies, no other bookie can take the seats. Ledgers that are created meanwhile
    have two copies, and repair adds the third. A wiped bookie is refused under its old identity. A
    bookie whose log lost its end continues as a new incarnation."""

    async with (
        LocalCluster(
            tmp_path / "c", zookeepers=1, bookies=3, brokers=1, autorecoveries=0, **PATIENCE
        ) as cluster,
        metadata(cluster) as store,
        magnetar.asyncio.Client(cluster.service_url) as client,
        repairing(cluster),
    ):
        await fill(client, cluster)
        wiped = cluster.process("bookie", "bookie-2")
        former = await member_of(store, "bookie-2")
        traffic = Traffic(client, "live")
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.run())
            await cluster.kill("bookie", "bookie-2")
            if damaged:
                log = max((wiped.directory / "data" / "store").glob("*.log"))
                log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
            else:
                shutil.rmtree(wiped.directory / "data")
                with pytest.raises(ProcessFailed, match="new-incarnation"):
                    await cluster.restart("bookie", "bookie-2")
                wiped.command = [*wiped.command, "--new-incarnation"]
            await cluster.restart("broker", "broker-1")
            await cluster.restart("bookie", "bookie-2")
            await wait_left(store, former)
            assert await wait_whole(store) >= 3
            traffic.stop()
        assert traffic.received == list(range(traffic.sent))
        await check_topics(client)
        rows = {row["bookie"]: row for row in await ask(cluster, "list")}
        assert rows["bookie-2"]["incarnation"] != former.incarnation
        assert rows["bookie-2"]["ledgers"] >= 3


async def check_tables(cluster: LocalCluster) -> None:
    """The tables that the commands print without a terminal."""
    for words, expected in (
        (
            ("list",),
            r"bookie-1 +[0-9a-f]{8} +writable +127\.0\.0\.1:\d+ +- +\d+% of \d+ GB +\d+ +\d+",
        ),
        (("under-replicated",), r"ledger +since +lost"),
        (
            ("ledger", "0"),
            r"CLOSED, E/Qw/Qa 3/3/2(.|\n)*20 entries(.|\n)*0-19 +0 +bookie-\d.* 20 +20",
        ),
    ):
        async with process(cluster, "bookies", *words) as asked:
            said, _ = await asked.communicate()
        assert asked.returncode == 0
        assert re.search(expected, said.decode()), said.decode()


async def decommission(cluster: LocalCluster, bookie: str) -> None:
    """Decommission by the command, and stop the bookie when the command says so."""
    async with process(cluster, "bookies", "decommission", bookie) as leaving:
        assert leaving.stdout is not None
        said = ""
        async with asyncio.timeout(120):
            while "Stop it now" not in said:
                said = (await leaving.stdout.readline()).decode()
                assert said, (cluster.directory / "bookies.out").read_text()
        await asyncio.to_thread(cluster.process("bookie", bookie).stop)
        async with asyncio.timeout(120):
            rest, _ = await leaving.communicate()
        assert leaving.returncode == 0
        assert b"removed from the cluster" in rest


async def check_topics_again(client: magnetar.asyncio.Client) -> None:
    for topic in ("a", "b", "c"):
        reader = await client.create_reader(topic, magnetar.MessageId.earliest)
        for _ in range(40):
            await reader.read_next(timeout_millis=20_000)
        assert (await reader.read_next(timeout_millis=20_000)).data() == b"more"
        await reader.close()
