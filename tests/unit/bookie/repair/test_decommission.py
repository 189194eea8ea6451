"""A bookie is drained while it serves. The bookie is removed after it stops and no ledger names
it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.ledger_bookies import BookieCluster, bookie_cluster
from fakes.repairs import (
    bake_cookies,
    lose,
    metadata_of,
    payload_of,
    replicating,
    written,
)
from support import ManualClock

from magnetar.bookie.repair.decommission import Progress, Stage, decommission, drain, undrain
from magnetar.bookie.repair.errors import NoSuchBookie, StillNeeded
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_drain, encode_bookie_drain, encode_cluster
from magnetar.metadata.errors import Unavailable
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import NO_LEDGER, BookieId
from magnetar.metadata.store import ABSENT
from magnetar.metadata.under_replication import BookieDrain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.ledger_bookies import FakeBookie

    from magnetar.metadata.node import Versioned


@asynccontextmanager
async def founded(bookies: int) -> AsyncIterator[BookieCluster]:
    async with bookie_cluster(bookies) as nodes:
        await nodes.store.put(paths.CLUSTER, encode_cluster("c" * 32), expected=ABSENT)
        await bake_cookies(nodes)
        yield nodes


async def test_t32_ledgers_leave_the_bookie_and_then_it_leaves_the_cluster() -> None:
    told: list[Progress] = []
    async with founded(4) as nodes, nodes.process() as ledgers, replicating(nodes):
        made = [await written(ledgers, 5) for _ in range(6)]
        empty = await written(ledgers, 0)
        leaving = nodes.bookie(empty.segments[0].members[0])
        name = leaving.member.bookie
        async with asyncio.TaskGroup() as group:
            work = group.create_task(
                decommission(
                    nodes.store, ManualClock(), name, timeout_s=600, on_progress=told.append
                )
            )
            while not told or told[-1].stage is not Stage.SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            for each in (*made, empty):
                after = await metadata_of(nodes, each.ledger)
                assert leaving.member not in after.segments[0].members
            # The bookie gets no new entries, and stays known until it is stopped.
            assert leaving.member not in (await written(ledgers, 1)).segments[0].members
            assert await nodes.store.get(paths.bookie_cookie(name)) is not None
            assert not work.done()
            await lose(nodes, leaving)
            await work
        assert [each.stage for each in told][-2:] == [Stage.SERVING, Stage.REMOVED]
        assert told[0].stage is Stage.MOVING
        assert await nodes.store.get(paths.bookie_cookie(name)) is None
        assert await nodes.store.get(paths.bookie_draining(name)) is None


async def test_a_decommission_continues_after_an_outage_of_the_metadata_store() -> None:
    """A drain takes hours, and the ensemble may elect a leader in that time."""

    told: list[Progress] = []
    async with founded(4) as nodes, nodes.process() as ledgers, replicating(nodes):
        made = await written(ledgers, 5)
        leaving = nodes.bookie(made.segments[0].members[0])
        name = leaving.member.bookie
        store = MemoryStore(nodes.store._shared)
        async with asyncio.TaskGroup() as group:
            work = group.create_task(
                decommission(store, ManualClock(), name, timeout_s=600, on_progress=told.append)
            )
            while not told or told[-1].stage is not Stage.SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            store.suspend()
            await asyncio.sleep(20)
            assert not work.done()
            await lose(nodes, leaving)
            store.reconnect()
            await work
        assert told[-1].stage is Stage.REMOVED
        assert await nodes.store.get(paths.bookie_cookie(name)) is None


async def test_a_bookie_that_starts_again_at_the_last_moment_keeps_its_cookie() -> None:
    """A process manager may start the bookie during the second search for its ledgers."""

    told: list[Progress] = []
    async with founded(4) as nodes, nodes.process() as ledgers, replicating(nodes):
        made = await written(ledgers, 5)
        leaving = nodes.bookie(made.segments[0].members[0])
        name = leaving.member.bookie
        store = Restarting(nodes, leaving)
        async with asyncio.TaskGroup() as group:
            work = group.create_task(
                decommission(store, ManualClock(), name, timeout_s=600, on_progress=told.append)
            )
            while not told or told[-1].stage is not Stage.SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            store.armed = True
            await lose(nodes, leaving)
            await asyncio.sleep(30)
            assert not store.armed, "the bookie did not start again"
            assert await nodes.store.get(paths.bookie_cookie(name)) is not None
            assert await nodes.store.get(paths.bookie_draining(name)) is not None
            assert told[-1].stage is Stage.SERVING
            await lose(nodes, leaving)
            await work
        assert await nodes.store.get(paths.bookie_cookie(name)) is None


class Restarting(MemoryStore):
    """A store that starts the bookie again after a check found the bookie down, once armed."""

    def __init__(self, nodes: BookieCluster, bookie: FakeBookie) -> None:
        super().__init__(nodes.tree)
        self.armed = False
        self._nodes = nodes
        self._bookie = bookie

    async def get(self, path: str) -> Versioned | None:
        found = await super().get(path)
        if self.armed and path == paths.bookie_available(self._bookie.member.bookie) and not found:
            self.armed = False
            await bake_cookies(self._nodes, boot_epoch=2)  # a start records its cookie first
            self._bookie.restart()
            await self._nodes.register(self._bookie)
        return found


async def test_t32_blockers_of_a_decommission_are_named() -> None:
    told: list[Progress] = []
    async with founded(3) as nodes, nodes.process() as ledgers:
        made = await written(ledgers, 5)
        appender = await ledgers.create(newer_than=NO_LEDGER, custom={})
        appender.append_nowait([[payload_of(0)]])
        name = nodes.bookies[0].member.bookie
        with pytest.raises(StillNeeded) as caught:
            await decommission(
                nodes.store, ManualClock(), name, timeout_s=30, on_progress=told.append
            )
        assert "replicator" in caught.value.blockers[made.ledger]
        assert "being written" in caught.value.blockers[appender.ledger]
        # A replicator runs, but no bookie can take copies.
        async with replicating(nodes):
            with pytest.raises(StillNeeded) as caught:
                await decommission(
                    nodes.store, ManualClock(), name, timeout_s=30, on_progress=told.append
                )
            assert "no other bookie" in caught.value.blockers[made.ledger]
            # The writer continues, and finally leaves the bookie by itself, because a spare exists.
            await nodes.add_bookie()
            appender.append_nowait([[payload_of(1)]])
            await appender.close()
            with pytest.raises(StillNeeded) as caught:
                await decommission(
                    nodes.store, ManualClock(), name, timeout_s=30, on_progress=told.append
                )
            assert caught.value.blockers == {}
            assert "still served at the last check" in str(caught.value)
        assert await nodes.store.get(paths.bookie_cookie(name)) is not None


class NoLedgers(MemoryStore):
    """A store that cannot list the ledgers, at once or after a check found the bookie down."""

    def __init__(self, nodes: BookieCluster, bookie: BookieId, *, at_once: bool) -> None:
        super().__init__(nodes.tree)
        self._available = paths.bookie_available(bookie)
        self._fails = at_once

    async def get(self, path: str) -> Versioned | None:
        found = await super().get(path)
        self._fails = self._fails or (path == self._available and found is None)
        return found

    async def children(self, path: str) -> list[str]:
        if self._fails and path.startswith(paths.LEDGERS):
            raise Unavailable("a fault")
        return await super().children(path)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_decommission_does_not_say_of_a_stopped_bookie_that_it_serves(
    at_once: bool,
) -> None:
    async with founded(4) as nodes:
        name = nodes.bookies[0].member.bookie
        await lose(nodes, nodes.bookies[0])
        store = NoLedgers(nodes, name, at_once=at_once)
        with pytest.raises(StillNeeded, match="not all checks of its ledgers") as caught:
            await decommission(store, ManualClock(), name, timeout_s=30, on_progress=print)
        assert caught.value.blockers == {}


async def test_an_unreadable_under_replication_record_blocks_only_its_own_ledger() -> None:
    async with founded(4) as nodes, nodes.process() as ledgers, replicating(nodes):
        made = [await written(ledgers, 5) for _ in range(6)]
        name = made[0].segments[0].members[0].bookie
        junk = paths.under_replicated(made[0].ledger)
        await nodes.store.put(junk, b"junk", expected=ABSENT)
        with pytest.raises(StillNeeded) as caught:
            await decommission(nodes.store, ManualClock(), name, timeout_s=30, on_progress=print)
        why = "its under-replication record cannot be read"
        assert caught.value.blockers == {made[0].ledger: why}


class Gathering(MemoryStore):
    """A store that answers the first writes of under-replication records only together."""

    def __init__(self, nodes: BookieCluster, together: int) -> None:
        super().__init__(nodes.tree)
        self._missing = together
        self._all = asyncio.Event()

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        if path.startswith(paths.UNDER_REPLICATED):
            self._missing -= 1
            if self._missing == 0:
                self._all.set()
            await self._all.wait()
        return await super().put(path, value, expected=expected)


async def test_a_decommission_writes_many_records_at_once() -> None:
    async with founded(3) as nodes, nodes.process() as ledgers:
        made = [await written(ledgers, 1) for _ in range(6)]
        store = Gathering(nodes, len(made))
        name = nodes.bookies[0].member.bookie
        with pytest.raises(StillNeeded) as caught:
            await decommission(store, ManualClock(), name, timeout_s=30, on_progress=print)
        assert list(caught.value.blockers) == [each.ledger for each in made]


async def test_a_decommission_continues_after_one_of_many_writes_failed() -> None:
    class Failing(MemoryStore):
        fails_at = ""

        async def get(self, path: str) -> Versioned | None:
            if path == self.fails_at:
                self.fails_at = ""
                raise Unavailable("a fault")
            return await super().get(path)

    async with founded(3) as nodes, nodes.process() as ledgers:
        made = [await written(ledgers, 1) for _ in range(6)]
        store = Failing(nodes.tree)
        store.fails_at = paths.repair_lock(made[2].ledger)
        name = nodes.bookies[0].member.bookie
        with pytest.raises(StillNeeded) as caught:
            await decommission(store, ManualClock(), name, timeout_s=30, on_progress=print)
        assert store.fails_at == ""
        assert list(caught.value.blockers) == [each.ledger for each in made]


async def test_unknown_fields_of_a_record_are_kept() -> None:
    async with founded(2) as nodes:
        clock, name, later = ManualClock(), BookieId("b0"), b"\xc2\x3e\x05later"  # field 1000
        value = encode_bookie_drain(BookieDrain(name, 1)) + later
        await nodes.store.put(paths.bookie_draining(name), value, expected=ABSENT)
        await drain(nodes.store, clock, name, decommission=True)
        stored = await nodes.store.get(paths.bookie_draining(name))
        assert stored is not None
        assert decode_bookie_drain(stored.value).decommission
        assert stored.value.endswith(later)


async def test_drain_is_idempotent_and_only_undrain_revokes_a_decommission() -> None:
    async with founded(2) as nodes:
        clock, name = ManualClock(), BookieId("b0")

        async def leaves() -> bool | None:
            stored = await nodes.store.get(paths.bookie_draining(name))
            return None if stored is None else decode_bookie_drain(stored.value).decommission

        await drain(nodes.store, clock, name, decommission=False)
        await drain(nodes.store, clock, name, decommission=False)
        assert await leaves() is False
        await drain(nodes.store, clock, name, decommission=True)
        await drain(nodes.store, clock, name, decommission=False)
        assert await leaves() is True
        await undrain(nodes.store, name)
        await undrain(nodes.store, name)
        assert await leaves() is None
        for call in (
            drain(nodes.store, clock, BookieId("b9"), decommission=False),
            undrain(nodes.store, BookieId("b9")),
        ):
            with pytest.raises(NoSuchBookie, match="b0, b1"):
                await call
