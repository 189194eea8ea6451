"""The limit of pending messages: the order of waiting sends, in both clients."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING

from fakes.client_world import TOPIC, A, client_among, world_of
from fakes.session_broker import FakeBrokers
from support import settle, wait_for

from magnetar.client import sync, thread_bridge
from magnetar.client.errors import AlreadyClosed, Interrupted, Result
from magnetar.client.options import ClientOptions
from magnetar.client.producing.outgoing import PendingLimit
from magnetar.client.producing.thread_limit import ThreadLimit
from magnetar.client.thread_bridge import LoopThread
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.message import decode_messages, read_entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from magnetar.client.asyncio import Producer
    from magnetar.client.message import MessageId

LARGE = bytes(800)
LIMIT_BYTES = 1000


def sizes(cluster: FakeBrokers) -> list[int]:
    """Return the sizes of the stored messages, in order."""
    entries = cluster.topic(TOPIC).entries.values()
    return [len(one.payload) for entry in entries for one in decode_messages(read_entry(entry))]


def answer_first(cluster: FakeBrokers) -> None:
    """Release the receipt of the first message, which the broker held back."""
    session = cluster.brokers[A].sessions[0]
    (producer_id,) = session.producers
    stored = pb.MessageIdData(ledgerId=1, entryId=0)
    session.send(pb.CommandSendReceipt(producer_id=producer_id, sequence_id=0, message_id=stored))


async def full(cluster: FakeBrokers, producer: Producer) -> asyncio.Task[MessageId]:
    """Send a message after which the limit admits only small messages."""
    cluster.topic(TOPIC).hold_receipts = True
    first = asyncio.get_running_loop().create_task(producer.send(bytes(500)))
    await settle()
    cluster.topic(TOPIC).hold_receipts = False
    return first


async def test_small_message_does_not_overtake_a_waiting_large_one() -> None:
    async with client_among(pending_bytes_max=LIMIT_BYTES) as (client, cluster):
        producer = await client.create_producer("t", block_if_queue_full=True)
        first = await full(cluster, producer)
        told: list[Result] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(producer.send(LARGE))
            await settle()
            group.create_task(producer.send(b"small"))
            await settle()
            producer.send_async(b"never waits", lambda result, _: told.append(result))
            assert told == [Result.MemoryBufferIsFull]
            assert sizes(cluster) == [500]
            answer_first(cluster)
            await first
            group.create_task(producer.send(b""))  # in the turn of the loop that releases the limit
        assert sizes(cluster) == [500, 800, 5, 0]


async def test_cancelled_waiting_send_does_not_delay_others() -> None:
    async with client_among(pending_bytes_max=LIMIT_BYTES) as (client, cluster):
        producer = await client.create_producer("t", block_if_queue_full=True)
        sends = [await full(cluster, producer)]
        cluster.topic(TOPIC).hold_receipts = True
        for content in (LARGE, b"small"):
            sends.append(asyncio.get_running_loop().create_task(producer.send(content)))
            await settle()
        assert sizes(cluster) == [500]
        sends[1].cancel()
        await settle()
        assert sizes(cluster) == [500, 5]
        for send in sends:
            send.cancel()


async def test_closed_producer_fails_waiting_sends() -> None:
    async with client_among(pending_bytes_max=LIMIT_BYTES, operation_timeout_seconds=1) as (
        client,
        cluster,
    ):
        producer = await client.create_producer("t", block_if_queue_full=True)
        first = await full(cluster, producer)
        loop = asyncio.get_running_loop()
        waiting = [loop.create_task(producer.send(LARGE)) for _ in range(3)]
        await settle()
        client.shutdown()
        await asyncio.wait([first, *waiting])
        assert isinstance(first.exception(), Interrupted)
        assert [type(one.exception()) for one in waiting] == [AlreadyClosed] * 3


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_waiting_threads_are_admitted_in_fifo_order() -> None:
    cluster = FakeBrokers(A)
    client = sync.Client.in_environment(
        ClientOptions(A), world_of(cluster, pending_bytes_max=LIMIT_BYTES)
    )
    try:
        producer = client.create_producer("t", block_if_queue_full=True)
        cluster.topic(TOPIC).hold_receipts = True
        producer.send_async(bytes(500), None)
        wait_for(lambda: cluster.sends)
        threads = []
        for number, content in enumerate((LARGE, b"small", b"")):
            threads.append(in_thread(lambda content=content: producer.send(content)))  # type: ignore[misc]
            wait_for(lambda number=number: len(producer._limit._waiting) == number + 1)  # type: ignore[misc]
        cluster.topic(TOPIC).hold_receipts = False
        client._thread.call_soon(lambda: answer_first(cluster))
        for thread in threads:
            thread.join(30)
        assert sizes(cluster) == [500, 800, 5, 0]
    finally:
        client.shutdown()


def test_shutdown_fails_all_waiting_threads() -> None:
    cluster = FakeBrokers(A)
    client = sync.Client.in_environment(
        ClientOptions(A), world_of(cluster, pending_bytes_max=LIMIT_BYTES)
    )
    errors: list[type[Exception]] = []

    def send() -> None:
        try:
            producer.send(LARGE)
        except Exception as error:
            errors.append(type(error))

    producer = client.create_producer("t", block_if_queue_full=True)
    cluster.topic(TOPIC).hold_receipts = True
    producer.send_async(bytes(500), None)
    threads = [in_thread(send) for _ in range(3)]
    wait_for(lambda: len(producer._limit._waiting) == 3)
    client.shutdown()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == [AlreadyClosed] * 3


class Steps:
    """Counts the steps of a call in this thread, and interrupts it (Ctrl-C) at step `at`.

    The interpreter handles a signal at the beginning of a function, and after a call of a function
    in C: the events `call` and `c_return` of a profile function.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self.interrupted = self.waited = False
        self.on_waiting: Callable[[], object] = lambda: None  # called when `wait_for` begins

    def run(self, call: Callable[[], object]) -> None:
        sys.setprofile(self._step)
        try:
            call()
        except KeyboardInterrupt:
            assert self.interrupted
        finally:
            sys.setprofile(None)

    def _step(self, frame: FrameType, event: str, _: object) -> None:
        if "/client/" not in frame.f_code.co_filename or event not in ("call", "c_return"):
            return
        if event == "call" and frame.f_code is thread_bridge.wait_for.__code__:
            self.waited = True
            self.on_waiting()
        self.left -= 1
        if self.left == 0:
            self.interrupted = True
            raise KeyboardInterrupt


def test_ctrl_c_at_any_step_of_a_send_leaks_no_place() -> None:
    cluster = FakeBrokers(A)
    client = sync.Client.in_environment(ClientOptions(A), world_of(cluster))
    try:
        producer = client.create_producer("t", max_pending_messages=1)
        at, steps = 0, Steps(1)
        while at == 0 or steps.interrupted:
            at += 1
            steps = Steps(at)
            steps.run(lambda: producer.send_async(b"x", None))
            producer.flush()
            assert producer._limit._limit._messages == 0, f"interrupted at step {at}"
            producer.send(b"next")
        assert at > 10
    finally:
        client.shutdown()


def test_ctrl_c_at_any_step_of_a_wait_for_the_limit_leaks_no_place() -> None:
    thread = LoopThread("test")
    at, steps = 0, Steps(1)
    while at == 0 or steps.interrupted:
        at += 1
        places = PendingLimit(1, 100, topic="t")
        limit = ThreadLimit(places, thread, blocks=True)
        assert limit.reserve(1) is None
        steps = Steps(at)
        steps.on_waiting = lambda places=places: places.release(1, 1)  # type: ignore[misc]
        steps.run(lambda limit=limit: limit.reserve(1))  # type: ignore[misc]
        assert not limit._waiting
        assert not limit._lock.locked()
        first, second = not steps.waited, not steps.interrupted
        assert places._messages == first + second, f"interrupted at step {at}"
    assert at > 10
    thread.stop()
