"""One stream for many ledgers: each ledger gets its acks, losses are reported at once, and the
stream reconnects while a ledger needs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from fakes.adds import encode_add
from fakes.ledger_bookies import FakeBookie, FormerIncarnation
from support import settle, wait_until

from magnetar.bookie.ledger.add_stream import (
    ACKED_PER_TURN,
    GONE_PAUSE_S,
    LEDGERS_PER_TURN,
    AddStream,
)
from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.bookie.ledger.peer import BookiePeer
from magnetar.metadata.model import Member
from magnetar.protos.envelope import Add, BookieCode
from magnetar.runtime.frames import FrameStream
from magnetar.runtime.memory_stream import MemoryStream, memory_stream_pair
from magnetar.runtime.supervise import Backoff
from magnetar.runtime.turns import Turns


class Sink:
    """A ledger that records the calls of its stream."""

    def __init__(self) -> None:
        self.acks: list[list[int]] = []
        self.refused: list[tuple[int, BookieCode]] = []
        self.streams: list[bool] = []

    def on_acks(self, stream: AddStream, entries: list[int]) -> None:
        self.acks.append(entries)

    def on_add_failed(self, stream: AddStream, entry: int, code: BookieCode) -> None:
        self.refused.append((entry, code))

    def on_stream(self, stream: AddStream) -> None:
        self.streams.append(stream.put is not None)


def add(ledger: int, entry: int) -> tuple[bytes, bytes]:
    return encode_add(
        ledger=ledger, entry=entry, confirmed=-1, length=100, payload=[b"x"], master_key=1
    )


@asynccontextmanager
async def streaming(*, open_timeout_s: float = 0.2) -> AsyncIterator[tuple[FakeBookie, AddStream]]:
    async with asyncio.TaskGroup() as group:
        bookie = FakeBookie("b1", group=group)
        stream = AddStream(
            bookie.member,
            lambda: bookie,
            client_name="test/adds",
            backoff=Backoff(0.01, 0.05, Random(1)),
            open_timeout_s=open_timeout_s,
            turns=Turns(),
        )
        running = group.create_task(stream.run())
        yield bookie, stream
        running.cancel()
        bookie.kill()


async def test_each_ledger_gets_its_own_acks_one_call_per_frame() -> None:
    async with streaming() as (_, stream):
        one, two = Sink(), Sink()
        stream.attach(1, one)
        stream.attach(2, two)
        assert await stream.connect(1.0)
        assert stream.put is not None
        for entry in range(5):
            stream.put(*add(1, entry))
            stream.put(*add(2, entry + 10))
        await wait_until(lambda: two.acks)
        assert one.acks == [[0, 1, 2, 3, 4]]
        assert two.acks == [[10, 11, 12, 13, 14]]


async def test_acks_for_ledgers_that_have_left_are_dropped() -> None:
    async with streaming() as (bookie, stream):
        one, two = Sink(), Sink()
        stream.attach(1, one)
        stream.attach(2, two)
        await stream.connect(1.0)
        assert stream.put is not None
        bookie.may_ack.clear()
        stream.put(*add(1, 0))
        stream.put(*add(2, 0))
        stream.detach(1)
        bookie.may_ack.set()
        await wait_until(lambda: two.acks)
        assert one.acks == []


async def test_refusals_are_reported_with_their_code() -> None:
    def judge(add: Add) -> BookieCode | None:
        return BookieCode.READ_ONLY if add.entry % 2 else None

    async with streaming() as (bookie, stream):
        sink = Sink()
        stream.attach(1, sink)
        bookie.judge_add = judge
        await stream.connect(1.0)
        assert stream.put is not None
        for entry in range(4):
            stream.put(*add(1, entry))
        await wait_until(lambda: len(sink.refused) == 2)
        assert sink.acks == [[0, 2]]
        assert sink.refused == [(1, BookieCode.READ_ONLY), (3, BookieCode.READ_ONLY)]


async def test_a_lost_stream_is_reported_at_once_and_opened_again() -> None:
    async with streaming() as (bookie, stream):
        sink = Sink()
        stream.attach(1, sink)
        assert await stream.connect(1.0)
        bookie.kill()
        await wait_until(lambda: sink.streams == [True, False])
        assert stream.put is None
        assert not stream.keeps_up
        await settle()
        bookie.restart()
        await wait_until(lambda: sink.streams == [True, False, True])
        assert stream.keeps_up
        assert bookie.opened == 2


class Counts:
    """Counts calls in each turn of the loop."""

    def __init__(self) -> None:
        self.turns = [0]

    def add(self) -> None:
        if self.turns[-1] == 0:
            asyncio.get_running_loop().call_soon(self.turns.append, 0)
        self.turns[-1] += 1


class Counted(Sink):
    """A ledger whose calls are counted."""

    def __init__(self, calls: Counts, acks: Counts) -> None:
        super().__init__()
        self.calls = calls
        self.acked = acks

    def on_acks(self, stream: AddStream, entries: list[int]) -> None:
        super().on_acks(stream, entries)
        self.acked.add()

    def on_stream(self, stream: AddStream) -> None:
        super().on_stream(stream)
        self.calls.add()


async def test_a_stream_of_many_ledgers_calls_some_of_them_in_one_turn_of_the_loop() -> None:
    async with streaming() as (bookie, stream):
        calls, acks = Counts(), Counts()
        sinks = [Counted(calls, acks) for _ in range(ACKED_PER_TURN + 1)]
        for ledger, sink in enumerate(sinks):
            stream.attach(ledger, sink)
        assert await stream.connect(1.0)
        await wait_until(lambda: sinks[-1].streams == [True])
        assert stream.put is not None
        bookie.may_ack.clear()
        for ledger in range(len(sinks)):
            stream.put(*add(ledger, 0))
        bookie.may_ack.set()
        async with stream._turns._lock:  # acks do not wait for the losses of other streams
            await wait_until(lambda: sinks[-1].acks == [[0]])
        bookie.kill()
        await wait_until(lambda: sinks[-1].streams == [True, False])
        bookie.restart()
        await wait_until(lambda: sinks[-1].streams == [True, False, True])
        assert all(sink.acks == [[0]] for sink in sinks)
        assert all(sink.streams == [True, False, True] for sink in sinks)
        assert max(calls.turns) == LEDGERS_PER_TURN
        assert max(acks.turns) == ACKED_PER_TURN


async def test_a_ledger_that_detaches_before_it_learns_of_a_loss_is_not_called() -> None:
    async with streaming() as (bookie, stream):

        class Detaching(Sink):
            def on_stream(self, stream: AddStream) -> None:
                super().on_stream(stream)
                if stream.put is None:
                    stream.detach(last)
                    stream.attach(last, newcomer)

        last = LEDGERS_PER_TURN
        gone, newcomer = Sink(), Sink()
        stream.attach(0, Detaching())
        for ledger in range(1, last):
            stream.attach(ledger, Sink())
        stream.attach(last, gone)
        assert await stream.connect(1.0)
        await wait_until(lambda: gone.streams)
        bookie.kill()
        await settle()
        bookie.restart()
        await wait_until(lambda: newcomer.streams)
        assert gone.streams == [True]
        assert newcomer.streams == [True]


async def test_a_stream_without_a_ledger_is_not_opened() -> None:
    async with streaming() as (bookie, stream):
        await settle()
        assert bookie.opened == 0
        stream.attach(1, Sink())
        await wait_until(lambda: bookie.opened == 1)
        stream.detach(1)
        bookie.kill()
        bookie.restart()
        await wait_until(lambda: not stream._wanted.is_set())
        await settle()
        assert bookie.opened == 1
        assert await stream.connect(1.0)
        assert bookie.opened == 2


async def test_a_stream_whose_last_ledger_detaches_at_once_is_not_opened() -> None:
    async with streaming() as (bookie, stream):
        await settle()
        stream.attach(1, Sink())
        stream.detach(1)
        await settle()
        assert bookie.opened == 0


async def test_connect_returns_after_the_next_attempt_without_waiting_for_the_pause() -> None:
    async with streaming() as (bookie, stream):
        bookie.kill()
        assert not await stream.connect(1.0)
        bookie.restart()
        assert await stream.connect(1.0)


async def test_a_bookie_that_does_not_answer_the_hello_is_disconnected() -> None:
    class Mute(FakeBookie):
        async def open_write(self, client_name: str) -> FrameStream:
            await asyncio.Event().wait()
            raise AssertionError

    async with asyncio.TaskGroup() as group:
        mute = Mute("b1", group=group)
        stream = AddStream(
            mute.member,
            lambda: mute,
            client_name="test/adds",
            backoff=Backoff(0.01, 0.05, Random(1)),
            open_timeout_s=0.05,
            turns=Turns(),
        )
        running = group.create_task(stream.run())
        assert not await stream.connect(1.0)
        running.cancel()


async def test_connect_to_an_unlisted_bookie_returns_false() -> None:
    def unlisted() -> BookiePeer:
        raise BookieUnavailable("b1", BookieCode.CONNECTION_LOST, "it is not listed")

    async with asyncio.TaskGroup() as group:
        stream = AddStream(
            Member("b1", "0" * 32),  # type: ignore[arg-type]
            unlisted,
            client_name="test/adds",
            backoff=Backoff(0.01, 0.05, Random(1)),
            open_timeout_s=1.0,
            turns=Turns(),
        )
        running = group.create_task(stream.run())
        assert not await stream.connect(1.0)
        running.cancel()


async def test_a_stream_to_an_unlisted_member_reconnects_rarely_until_the_member_is_listed() -> (
    None
):
    """An idle ledger may keep the seat of an unlisted member for days."""

    class Replaced(FakeBookie):
        attempts = 0
        gone = True

        async def open_write(self, client_name: str) -> FrameStream:
            self.attempts += 1
            if self.gone:
                return await FormerIncarnation(self.member).open_write(client_name)
            return await super().open_write(client_name)

    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        bookie, sink = Replaced("b1", group=group), Sink()
        stream = AddStream(
            bookie.member,
            lambda: bookie,
            client_name="test/adds",
            backoff=Backoff(0.1, 2.0, Random(1)),
            open_timeout_s=1.0,
            turns=Turns(),
        )
        stream.attach(0, sink)
        running = group.create_task(stream.run())
        await asyncio.sleep(10 * GONE_PAUSE_S + 1)
        assert bookie.attempts == 11
        bookie.gone = False
        hurried_s = loop.time()
        stream.hurry()
        await wait_until(lambda: stream.put is not None)
        assert loop.time() - hurried_s < 1
        bookie.kill()  # killed, not replaced: the stream soon tries to connect again
        await wait_until(lambda: stream.put is None)
        attempts = bookie.attempts
        await asyncio.sleep(10)
        assert bookie.attempts > attempts + 3
        running.cancel()


async def test_damaged_acks_end_the_stream() -> None:
    class Garbling(FakeBookie):
        server: MemoryStream

        async def open_write(self, client_name: str) -> FrameStream:
            here, self.server = memory_stream_pair(client_name, "b1", frames_max=4)
            return here

    for garbage in (b"x" * 16, b"\0" * 17, b"\0" * 16 + b"\x63"):
        async with asyncio.TaskGroup() as group:
            bookie, sink = Garbling("b1", group=group), Sink()
            stream = AddStream(
                bookie.member,
                lambda bookie=bookie: bookie,  # type: ignore[misc]
                client_name="test/adds",
                backoff=Backoff(0.01, 0.05, Random(1)),
                open_timeout_s=1.0,
                turns=Turns(),
            )
            stream.attach(0, sink)
            running = group.create_task(stream.run())
            assert await stream.connect(1.0)
            await bookie.server.send([garbage])
            await wait_until(lambda sink=sink: False in sink.streams)
            running.cancel()
