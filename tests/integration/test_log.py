"""A topic's log and its cursors on real ledgers: bookies and owners die, and no append or
acknowledgement with an answer is lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from fakes.bookie_process import BookieProcess
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.ledger_bookies import bookie_cluster
from fakes.topic_log import SMALL, opened, opened_cursors
from support import wait_until

from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.connection import RemoteBookiePeer
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.broker.errors import LogFenced
from magnetar.broker.log.position import EARLIEST
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_bookie_registration
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BookieId, BookieRegistration
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from fakes.topic_log import TopicLog

    from magnetar.broker.cursor.cursors import Cursors
    from magnetar.broker.log.log import LogConfig
    from magnetar.broker.log.position import Position

CONFIG = replace(SMALL, ledger_entries_max=40)
PATIENT = replace(CONFIG, degraded_age_s_min=1000.0)
LEDGERS = LedgerConfig(add_timeout_s=0.3, quorum_timeout_s=1.0, health_half_life_s=0.1)


@dataclass(frozen=True, slots=True)
class Owner:
    """A broker that owns the topic."""

    topic: TopicLog
    cursors: Cursors


@asynccontextmanager
async def owner(
    tree: MemoryTree, ledgers: Ledgers, *, config: LogConfig = CONFIG, close: bool = True
) -> AsyncIterator[Owner]:
    async with (
        opened(ClusterState(tree), config=config, ledgers=ledgers, close=close) as topic,
        opened_cursors(topic.log, close=close) as cursors,
    ):
        yield Owner(topic, cursors)


class Acked:
    """The positions whose acknowledgement was answered."""

    def __init__(self) -> None:
        self.positions: set[Position] = set()

    async def acknowledge(self, broker: Owner, position: Position) -> None:
        cursor = await broker.cursors.ensure("s", EARLIEST)
        cursor.acknowledge([position])
        await cursor.flush()
        self.positions.add(position)


async def test_a_writer_survives_deaths_and_restarts_of_bookies() -> None:
    async with bookie_cluster(3) as nodes:
        acked = Acked()
        names = [f"m{number}" for number in range(300)]
        async with (
            nodes.process(LEDGERS) as ledgers,
            owner(nodes.tree, ledgers, close=False) as broker,
        ):
            for start in range(0, 300, 50):
                victim = nodes.bookies[start // 50 % 3]
                broker.topic.append(*names[start : start + 20])
                victim.kill()
                await broker.topic.append_and_wait(*names[start + 20 : start + 50])
                await wait_until(lambda end=start + 50: len(broker.topic.appended) == end)
                await acked.acknowledge(broker, broker.topic.appended[start + 7][1])
                victim.restart()
            assert [name for name, _ in broker.topic.appended] == names
            assert broker.topic.error is None
            assert await broker.topic.contents() == names
        async with (
            nodes.process(LEDGERS, seed=2) as ledgers,
            owner(nodes.tree, ledgers) as broker,
        ):
            assert await broker.topic.contents() == names
            cursor = broker.cursors.get("s")
            assert cursor is not None
            assert all(cursor.is_acked(position) for position in acked.positions)
            assert cursor.backlog_entries == len(names) - len(acked.positions)


async def test_without_a_quorum_appends_wait_and_keep_their_order() -> None:
    async with (
        bookie_cluster(3) as nodes,
        nodes.process(LEDGERS) as ledgers,
        owner(nodes.tree, ledgers, config=PATIENT) as broker,
    ):
        topic = broker.topic
        await topic.append_and_wait("a", "b")
        for bookie in nodes.bookies[:2]:
            bookie.kill()
        before = len(topic.log.chain.records)
        topic.append("c", "d", "e")
        late = 0
        while topic.log.describe()["queued"] == 0:  # until the ledger has failed
            topic.append(f"late{late}")
            late += 1
            await asyncio.sleep(0.05)
        assert 5 + late < CONFIG.ledger_entries_max, "the ledger was full before it failed"
        await asyncio.sleep(0.1)
        assert len(topic.appended) == 2
        for bookie in nodes.bookies[:2]:
            bookie.restart()
        count = 5 + late
        await wait_until(lambda: len(topic.appended) == count)
        names = [*"abcde", *(f"late{number}" for number in range(late))]
        assert await topic.contents() == names
        assert [name for name, _ in topic.appended] == names
        assert len(topic.log.chain.records) > before


async def test_a_degraded_ledger_is_left_once_the_third_bookie_is_there() -> None:
    async with (
        bookie_cluster(2) as nodes,
        nodes.process(LEDGERS) as ledgers,
        owner(nodes.tree, ledgers) as broker,
    ):
        await broker.topic.append_and_wait("a")
        assert broker.topic.log.describe()["degraded"] is True
        await asyncio.sleep(5 * CONFIG.check_interval_s)
        await broker.topic.append_and_wait("b")
        assert len(broker.topic.log.chain.records) == 1
        await nodes.add_bookie()
        await wait_until(lambda: broker.topic.log.describe()["open_ledger"] is None)
        await broker.topic.append_and_wait("c")
        assert broker.topic.log.describe()["degraded"] is False
        assert await broker.topic.contents() == ["a", "b", "c"]


@pytest.mark.real_loop
async def test_the_topic_moves_while_its_old_owner_keeps_running() -> None:
    async with bookie_cluster(3) as nodes:
        acked = Acked()
        async with (
            nodes.process() as old_ledgers,
            nodes.process(seed=2) as new_ledgers,
            owner(nodes.tree, old_ledgers, close=False) as old,
        ):
            names: list[str] = []
            await old.topic.append_and_wait("start")
            await acked.acknowledge(old, old.topic.appended[0][1])

            async def write() -> None:
                while old.topic.error is None:
                    names.append(f"m{len(names)}")
                    try:
                        old.topic.append_view(entry_of(names[-1]), names[-1])
                    except LogFenced:
                        names.pop()
                        return
                    await asyncio.sleep(0)

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(write())
                await wait_until(lambda: len(old.topic.appended) > 100)
                async with owner(nodes.tree, new_ledgers) as new:
                    await wait_until(lambda: old.topic.error is not None)
                    assert isinstance(old.topic.error, LogFenced)
                    contents = await new.topic.contents()
                    answered = [name for name, _ in old.topic.appended]
                    assert contents[: len(answered)] == answered
                    assert contents == ["start", *names][: len(contents)]
                    assert [name for name in names if name not in answered] == old.topic.failed
                    cursor = new.cursors.get("s")
                    assert cursor is not None
                    assert all(cursor.is_acked(position) for position in acked.positions)
                    await new.topic.append_and_wait("moved")


# ---- real processes ------------------------------------------------------------------------------


@pytest.fixture
def bookies(tmp_path: Path) -> Iterator[list[BookieProcess]]:
    processes = [BookieProcess(tmp_path / f"b{n}", id=f"b{n}") for n in range(3)]
    try:
        for process in processes:
            process.launch()
        for process in processes:
            process.wait_ready()
        yield processes
    finally:
        for process in processes:
            process.end()


async def register(store: MemoryStore, process: BookieProcess) -> None:
    registration = BookieRegistration(
        bookie=BookieId(process.directory.name),
        incarnation=process.incarnation,
        boot_epoch=int(process.ready["boot_epoch"]),
        address=process.address,
        http_address="",
        zone="",
        read_only=False,
    )
    path = paths.bookie_available(registration.bookie)
    await store.create_ephemeral(path, encode_bookie_registration(registration))


@asynccontextmanager
async def real_ledgers(tree: MemoryTree, seed: int) -> AsyncIterator[Ledgers]:
    store, random = MemoryStore(tree), Random(seed)
    directory = BookieRegistry(store)
    pool = PeerPool(
        directory,
        RemoteBookiePeer,
        client_name=f"broker-{seed}",
        random=random,
        connect_timeout_s=2.0,
    )
    ledgers = Ledgers(
        store, directory, pool, LedgerIds(store), LedgerConfig(), SystemClock(), random
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(ledgers.run())
        await ledgers.wait_ready()
        yield ledgers
        running.cancel()


@pytest.mark.real_loop(deadline_s=240)
@pytest.mark.cluster
async def test_bookies_on_disk_keep_a_log_over_the_death_of_one_and_of_the_owner(
    bookies: list[BookieProcess],
) -> None:
    tree = MemoryTree()
    registry = MemoryStore(tree)
    for process in bookies:
        await register(registry, process)
    names = [f"m{number}" for number in range(500)]
    acked = Acked()
    async with real_ledgers(tree, 1) as ledgers, owner(tree, ledgers, close=False) as broker:
        topic = broker.topic
        await topic.append_and_wait(*names[:200])
        await acked.acknowledge(broker, topic.appended[3][1])
        topic.append(*names[200:300])
        bookies[0].kill()
        await topic.append_and_wait(*names[300:])
        await wait_until(lambda: len(topic.appended) == 500)
        await acked.acknowledge(broker, topic.appended[450][1])
        assert [name for name, _ in topic.appended] == names
    async with real_ledgers(tree, 2) as ledgers, owner(tree, ledgers) as broker:
        assert await broker.topic.contents() == names
        cursor = broker.cursors.get("s")
        assert cursor is not None
        assert all(cursor.is_acked(position) for position in acked.positions)
        assert cursor.backlog_entries == 498
        await broker.topic.append_and_wait("after")
