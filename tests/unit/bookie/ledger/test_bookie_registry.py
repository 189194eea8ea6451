"""The registry follows the list of bookies, keeps the last list while the metadata store is away,
and skips unreadable registrations."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from fakes.ledger_bookies import BookieCluster, bookie_cluster
from support import settle, wait_until

from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_bookie_drain
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import BookieAddress, BookieId, Member
from magnetar.metadata.store import ABSENT
from magnetar.metadata.under_replication import BookieDrain


@asynccontextmanager
async def followed(nodes: BookieCluster, store: MemoryStore) -> AsyncIterator[BookieRegistry]:
    directory = BookieRegistry(store)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(directory.run())
        await directory.wait_ready()
        yield directory
        running.cancel()


def names(directory: BookieRegistry) -> list[str]:
    return [each.bookie for each in directory.writable]


async def test_joins_leaves_and_read_only_bookies_are_noticed() -> None:
    async with bookie_cluster(2) as nodes, followed(nodes, MemoryStore(nodes.tree)) as directory:
        changes: list[list[str]] = []
        unwatch = directory.watch(lambda: changes.append(names(directory)))
        assert names(directory) == ["b0", "b1"]
        third = await nodes.add_bookie()
        await wait_until(lambda: names(directory) == ["b0", "b1", "b2"])
        assert directory.is_writable(third.member)
        await nodes.register(third, read_only=True)
        await wait_until(lambda: names(directory) == ["b0", "b1"])
        await wait_until(lambda: directory.find(third.member).read_only)  # type: ignore[union-attr]
        await nodes.unregister(nodes.bookies[0])
        await wait_until(lambda: names(directory) == ["b1"])
        assert changes[-1] == ["b1"]
        unwatch()
        await nodes.unregister(nodes.bookies[1])
        await wait_until(lambda: names(directory) == [])
        assert changes[-1] == ["b1"]


async def test_a_change_of_only_the_data_is_noticed() -> None:
    async with bookie_cluster(1) as nodes, followed(nodes, MemoryStore(nodes.tree)) as directory:
        path = paths.bookie_available(nodes.bookies[0].member.bookie)
        stored = await nodes.store.get(path)
        assert stored is not None
        await nodes.store.put(path, b"garbage", expected=stored.version)
        await wait_until(lambda: names(directory) == [])
        await nodes.store.put(path, stored.value, expected=stored.version + 1)
        await wait_until(lambda: names(directory) == ["b0"])


async def test_an_unlisted_bookie_is_found_at_its_last_address() -> None:
    async with bookie_cluster(1) as nodes, followed(nodes, MemoryStore(nodes.tree)) as directory:
        member = nodes.bookies[0].member
        await nodes.unregister(nodes.bookies[0])
        await wait_until(lambda: not directory.is_writable(member))
        found = directory.find(member)
        assert found is not None
        assert found.address == BookieAddress("b0:3181", "b0:3182")


async def test_a_draining_bookie_serves_reads_and_gets_no_new_ledgers() -> None:
    async with bookie_cluster(2) as nodes, followed(nodes, MemoryStore(nodes.tree)) as directory:
        member = nodes.bookies[0].member
        path = paths.bookie_draining(member.bookie)
        drain = BookieDrain(member.bookie, since_ms=1)
        version = await nodes.store.put(path, encode_bookie_drain(drain), expected=ABSENT)
        await wait_until(lambda: names(directory) == ["b1"])
        assert not directory.is_writable(member)
        assert member in directory.listed
        assert directory.draining == {member.bookie}
        assert directory.decommissioned == frozenset()
        leaving = encode_bookie_drain(replace(drain, decommission=True))
        version = await nodes.store.put(path, leaving, expected=version)
        await wait_until(lambda: directory.decommissioned == {member.bookie})
        assert directory.draining == {member.bookie}
        await nodes.store.delete(path, expected=version)
        await wait_until(lambda: directory.is_writable(member))
        assert directory.decommissioned == frozenset()


async def test_the_last_list_is_kept_while_the_metadata_store_is_away() -> None:
    async with bookie_cluster(2) as nodes:
        store = MemoryStore(nodes.tree)
        async with followed(nodes, store) as directory:
            store.suspend()
            await nodes.add_bookie()
            await settle()
            assert names(directory) == ["b0", "b1"]
            store.reconnect()
            await wait_until(lambda: names(directory) == ["b0", "b1", "b2"])


async def test_a_former_incarnation_has_the_present_address_of_its_bookie() -> None:
    """The bookie may still have the damaged store of that incarnation and answer reads from the
    store."""

    async with bookie_cluster(1) as nodes, followed(nodes, MemoryStore(nodes.tree)) as directory:
        reborn = nodes.bookies[0].member
        former = Member(reborn.bookie, "f" * 32)
        found = directory.find(former)
        assert found is not None
        assert found == directory.find(reborn)
        assert not directory.is_writable(former)
        await nodes.unregister(nodes.bookies[0])
        await wait_until(lambda: names(directory) == [])
        assert directory.find(former) == found
        assert directory.find(Member(BookieId("stranger"), reborn.incarnation)) is None
