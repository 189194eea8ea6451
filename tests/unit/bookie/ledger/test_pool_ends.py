"""Streams whose tasks end while the pool runs: reported lost, restarted, or ending the pool."""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest
from fakes.adds import encode_add
from fakes.ledger_bookies import FakeBookie, bookie_cluster
from support import wait_until

from magnetar.bookie.ledger.add_stream import AddStream
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.metadata.memory import MemoryStore
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.frames import Buffer, FrameStream


def an_add(entry: int) -> tuple[bytes, bytes]:
    return encode_add(ledger=1, entry=entry, confirmed=-1, length=1, payload=[b"x"], master_key=1)


class Broken:
    """A stream whose send or receive raises CancelledError by itself. grpc.aio may do this."""

    def __init__(self, stream: FrameStream, side: str) -> None:
        self.peer = stream.peer
        self.close = stream.close
        self._stream = stream
        self._side = side
        self.stop = asyncio.Event()

    async def send(self, parts: Sequence[Buffer]) -> None:
        if self._side == "send":
            await self.stop.wait()
            raise asyncio.CancelledError
        await self._stream.send(parts)

    async def receive(self) -> memoryview:
        if self._side == "receive":
            await self.stop.wait()
            raise asyncio.CancelledError
        return await self._stream.receive()


class Sink:
    """A ledger that records when its stream begins and ends."""

    def __init__(self) -> None:
        self.streams: list[bool] = []
        self.acks: list[int] = []

    def on_acks(self, _: AddStream, entries: list[int]) -> None:
        self.acks += entries

    def on_add_failed(self, _: AddStream, entry: int, code: BookieCode) -> None:
        raise AssertionError((entry, code))

    def on_stream(self, stream: AddStream) -> None:
        self.streams.append(stream.put is not None)


@pytest.mark.parametrize("side", ["send", "receive"])
async def test_a_stream_whose_task_ends_by_itself_is_reported_lost_and_restarted(
    side: str,
) -> None:
    class Frail(FakeBookie):
        async def open_write(self, client_name: str) -> FrameStream:
            stream = await super().open_write(client_name)
            if self.opened > 1:
                return stream
            self.broken = Broken(stream, side)
            return self.broken

    async with bookie_cluster(1) as nodes, asyncio.TaskGroup() as group:
        frail = Frail("b0", group=group)
        directory = BookieRegistry(MemoryStore(nodes.tree))
        pool = PeerPool(
            directory,
            lambda *_: frail,
            client_name="test",
            random=Random(1),
            connect_timeout_s=0.2,
        )
        tasks = [group.create_task(directory.run()), group.create_task(pool.run())]
        await directory.wait_ready()
        stream, sink = pool.adds(frail.member), Sink()
        stream.attach(1, sink)
        assert await stream.connect(1.0)
        assert stream.put is not None
        stream.put(*an_add(0))
        frail.broken.stop.set()
        await wait_until(lambda: sink.streams == [True, False, True], deadline_s=3)
        stream.put(
            *encode_add(ledger=1, entry=0, confirmed=-1, length=1, payload=[b"x"], master_key=1)
        )
        await wait_until(lambda: sink.acks == [0], deadline_s=3)
        assert frail.broken._stream.ended  # type: ignore[attr-defined]
        for task in tasks:
            task.cancel()
        frail.kill()


async def test_a_stream_requested_before_the_pool_runs_starts_with_the_pool() -> None:
    async with bookie_cluster(1) as nodes, asyncio.TaskGroup() as group:
        directory = BookieRegistry(MemoryStore(nodes.tree))
        pool = PeerPool(
            directory,
            lambda member, _: nodes.bookie(member),
            client_name="test",
            random=Random(1),
            connect_timeout_s=0.2,
        )
        stream = pool.adds(nodes.bookies[0].member)
        tasks = [group.create_task(directory.run()), group.create_task(pool.run())]
        await directory.wait_ready()
        assert await stream.connect(1.0)
        for task in tasks:
            task.cancel()


async def test_a_stream_that_fails_ends_the_pool() -> None:
    class Faulty(Sink):
        def on_stream(self, stream: AddStream) -> None:
            raise AssertionError("a bug")

    async with bookie_cluster(2) as nodes:
        directory = BookieRegistry(MemoryStore(nodes.tree))
        pool = PeerPool(
            directory,
            lambda member, _: nodes.bookie(member),
            client_name="test",
            random=Random(1),
            connect_timeout_s=0.2,
        )
        loop = asyncio.get_running_loop()
        listing = loop.create_task(directory.run())
        await directory.wait_ready()
        running = loop.create_task(pool.run())
        await asyncio.sleep(0)
        assert await pool.adds(nodes.bookies[0].member).connect(1.0)
        pool.adds(nodes.bookies[1].member).attach(1, Faulty())
        await asyncio.wait([running], timeout=5)
        with pytest.raises(ExceptionGroup):
            running.result()
        listing.cancel()
        await asyncio.wait([listing])
