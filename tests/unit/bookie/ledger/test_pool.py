"""The pool connects to a bookie at its listed address, with one stream for each purpose."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest
from fakes.ledger_bookies import BookieCluster, FakeBookie, FormerIncarnation, bookie_cluster
from support import wait_until

from magnetar.bookie.ledger.add_stream import AddStream
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_registration, encode_bookie_registration
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import BookieAddress, BookieId, Member
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.frames import FrameStream


class Peer(FakeBookie):
    """A peer that reaches one bookie at a given address."""

    def __init__(self, address: str, group: asyncio.TaskGroup) -> None:
        super().__init__("b0", group=group)
        self.address = address
        self.closed = False
        self.replaced = False  # another incarnation answers

    async def open_write(self, client_name: str) -> FrameStream:
        if self.replaced:
            return await FormerIncarnation(self.member).open_write(client_name)
        return await super().open_write(client_name)

    async def close(self) -> None:
        self.closed = True


class Sink:
    """A ledger that records when its stream begins and ends."""

    def __init__(self) -> None:
        self.streams: list[bool] = []

    def on_acks(self, stream: AddStream, entries: list[int]) -> None:
        raise AssertionError("nothing was sent")

    def on_add_failed(self, stream: AddStream, entry: int, code: BookieCode) -> None:
        raise AssertionError("nothing was sent")

    def on_stream(self, stream: AddStream) -> None:
        self.streams.append(stream.put is not None)


@asynccontextmanager
async def pooling(
    nodes: BookieCluster,
) -> AsyncIterator[tuple[PeerPool, BookieRegistry, list[Peer]]]:
    directory = BookieRegistry(MemoryStore(nodes.tree))
    made: list[Peer] = []
    async with asyncio.TaskGroup() as group:

        def open_peer(member: Member, address: BookieAddress) -> Peer:
            made.append(Peer(address, group))
            return made[-1]

        pool = PeerPool(
            directory, open_peer, client_name="test", random=Random(1), connect_timeout_s=0.2
        )
        tasks = [group.create_task(directory.run()), group.create_task(pool.run())]
        await directory.wait_ready()
        yield pool, directory, made
        for task in tasks:
            task.cancel()
        for peer in made:
            peer.kill()


async def test_a_bookie_that_moved_is_reached_at_its_new_address() -> None:
    async with bookie_cluster(1) as nodes, pooling(nodes) as (pool, directory, made):
        member = nodes.bookies[0].member
        assert pool.peer(member) is pool.peer(member)
        path = paths.bookie_available(member.bookie)
        stored = await nodes.store.get(path)
        assert stored is not None
        elsewhere = BookieAddress("b0:3181", "elsewhere:1")
        moved = replace(decode_bookie_registration(stored.value), address=elsewhere)
        await nodes.store.put(path, encode_bookie_registration(moved), expected=0)
        await wait_until(lambda: directory.find(member) == moved)
        assert pool.peer(member) is made[1]
        before = BookieAddress("b0:3181", "b0:3182")
        assert [peer.address for peer in made] == [before, elsewhere]
        await wait_until(lambda: made[0].closed)
        # The bookie has left the list, and may still answer.
        await nodes.unregister(nodes.bookies[0])
        await wait_until(lambda: not directory.is_writable(member))
        assert pool.peer(member) is made[1]
    assert made[1].closed


async def test_a_never_listed_bookie_is_unavailable() -> None:
    async with bookie_cluster(1) as nodes, pooling(nodes) as (pool, _, _made):
        stranger = Member(BookieId("b7"), "f" * 32)
        with pytest.raises(BookieUnavailable, match="not listed"):
            pool.peer(stranger)
        assert not await pool.adds(stranger).connect(1.0)


async def test_ledgers_share_a_stream_and_recoveries_another() -> None:
    async with bookie_cluster(1) as nodes, pooling(nodes) as (pool, _, made):
        member = nodes.bookies[0].member
        assert pool.adds(member) is pool.adds(member)
        assert pool.write_backs(member) is not pool.adds(member)
        assert await pool.adds(member).connect(1.0)
        assert await pool.write_backs(member).connect(1.0)
        assert made[0].opened == 2


async def test_a_bookie_that_is_listed_again_is_tried_at_once() -> None:
    async with bookie_cluster(1) as nodes, pooling(nodes) as (pool, _, made):
        member = nodes.bookies[0].member
        stream = pool.adds(member)
        assert await stream.connect(1.0)
        made[0].kill()
        await wait_until(lambda: stream.put is None)
        for _ in range(3):
            await stream.connect(0.2)  # the pauses between attempts have grown
        made[0].restart()
        await nodes.register(nodes.bookies[0])
        assert await stream.connect(1.0)


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_bookie_listed_again_is_retried_at_once_even_if_draining(
    *, read_only: bool
) -> None:
    """In the meantime a different bookie answered at the address, so retries became rare. The
    listed bookie may still have seats, also when read-only or draining."""

    async with bookie_cluster(1) as nodes, pooling(nodes) as (pool, _, made):
        member = nodes.bookies[0].member
        stream, sink = pool.adds(member), Sink()
        stream.attach(1, sink)
        await wait_until(lambda: stream.put is not None)
        made[0].replaced = True
        made[0].kill()
        await asyncio.sleep(10)  # the first attempt of the stream is over
        made[0].replaced = False
        made[0].restart()
        await nodes.register(nodes.bookies[0], read_only=read_only, boot_epoch=2)
        await wait_until(lambda: stream.put is not None, deadline_s=1.0)
        assert sink.streams == [True, False, True]


async def test_a_pool_that_is_stopping_begins_no_stream() -> None:
    """A recovery that is cancelled together with the pool may ask for one more stream."""

    async with bookie_cluster(2) as nodes, asyncio.TaskGroup() as group:
        pool = PeerPool(
            BookieRegistry(nodes.store),
            lambda member, _: nodes.bookie(member),
            client_name="test",
            random=Random(1),
            connect_timeout_s=0.2,
        )
        running = group.create_task(pool.run())
        await asyncio.sleep(0)
        # The stream's task needs one turn of the loop to end.
        held = pool.adds(nodes.bookies[0].member)
        # The registry does not list the bookie.
        assert await asyncio.wait_for(held.connect(0.1), 1.0) is False
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        assert pool.adds(nodes.bookies[1].member).put is None
