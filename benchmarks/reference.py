"""The reference: a minimal data path without features, with which Magnetar is compared.

    client ─► broker ─► bookies ─► RocksDB, synced ─► back          (python -m benchmarks.reference)
    client ─► bookies ─► RocksDB, synced ─► back           (the same with --direct: one hop less)

Each process sends raw frames over gRPC, and gathers pending bytes into one frame. A bookie syncs
once per group of entries. The broker encodes an entry once for all bookies. The program has no
checksums, metadata, fencing, recovery or orderly shutdown. Its cost is the cost of gRPC, RocksDB
and Python's event loop. Machines differ, and one machine differs from day to day. So Magnetar's
figures are given as ratios to this program in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import struct
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio
from rocksdict import Options, Rdict, WriteBatch

from benchmarks.figures import Figure, Shape

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

HEADER = struct.Struct(">QQQI")  # ledger, entry, last confirmed, bytes of the body that follows
ACK = struct.Struct(">QQ")  # ledger, entry
FRAME_BYTES_MAX = 256 << 10
MESSAGE_BYTES_MAX = 64 << 20
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
]
START_TIMEOUT_S = 60.0


class Outbox:
    """Sends all pending parts as one frame. Parts that arrive meanwhile form the next frame."""

    def __init__(self, write: Callable[[bytes], Awaitable[Any]]) -> None:
        self._write = write
        self._parts: list[bytes] = []
        self._wake = asyncio.Event()

    def put(self, *parts: bytes) -> None:
        self._parts.extend(parts)
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            parts, self._parts = self._parts, []
            frame: list[bytes] = []
            size = 0
            for part in parts:
                frame.append(part)
                size += len(part)
                if size >= FRAME_BYTES_MAX:
                    await self._write(b"".join(frame))
                    frame, size = [], 0
            if frame:
                await self._write(b"".join(frame))


def adds(frame: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (ledger, entry, body) of each add in a frame."""
    at = 0
    while at < len(frame):
        ledger, entry, _, size = HEADER.unpack_from(frame, at)
        at += HEADER.size
        yield ledger, entry, frame[at : at + size]
        at += size


async def serve(port: int, name: str, stream: Callable[[Any, Any], Awaitable[None]]) -> None:
    server = aio.server(options=OPTIONS)
    method: Any = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"S": method}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def connect(port: int, name: str) -> Any:
    channel = aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
    return channel.stream_stream(f"/{name}/S")(wait_for_ready=True)


def bookie(port: int, folder: str) -> None:
    """Run a bookie: store the entries that have gathered, sync once, then acknowledge them."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_enable_blob_files(True)
    options.set_min_blob_size(4096)
    store = Rdict(folder, options)

    async def main() -> None:
        pending: list[tuple[bytes, bytes, Outbox]] = []
        wake = asyncio.Event()

        async def commit() -> None:
            while True:
                await wake.wait()
                wake.clear()
                group = pending[:]
                pending.clear()
                write_group(store, group)
                await asyncio.get_running_loop().run_in_executor(None, store.flush_wal, True)
                for key, _, outbox in group:
                    outbox.put(key)

        async def stream(_: Any, context: Any) -> None:
            outbox = Outbox(context.write)
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(outbox.run())
                while (frame := await context.read()) is not aio.EOF:
                    for ledger, entry, body in adds(frame):
                        pending.append((ACK.pack(ledger, entry), body, outbox))
                    wake.set()
                sending.cancel()

        async with asyncio.TaskGroup() as group:
            group.create_task(commit())
            await serve(port, "Bookie", stream)

    asyncio.run(main())


def write_group(store: Rdict, group: list[tuple[bytes, bytes, Outbox]]) -> None:
    at = 0
    while at < len(group):
        batch, size = WriteBatch(raw_mode=True), 0
        while at < len(group) and size < FRAME_BYTES_MAX:
            key, value, _ = group[at]
            batch.put(key, value)
            size += len(value)
            at += 1
        store.write(batch)


def broker(port: int, bookies: list[int], ack_quorum: int) -> None:
    """Run a broker: send each entry to every bookie; acknowledge it after `ack_quorum` answers."""

    async def main() -> None:
        outboxes: list[Outbox] = []
        waiting: dict[int, list[Any]] = {}
        following = 0

        async def receive_acks(call: Any) -> None:
            while (frame := await call.read()) is not aio.EOF:
                for _, entry in ACK.iter_unpack(frame):
                    state = waiting[entry]
                    state[0] += 1
                    if state[0] == ack_quorum:
                        state[1].put(ACK.pack(state[2], entry))
                    if state[0] == len(bookies):
                        del waiting[entry]

        async def stream(_: Any, context: Any) -> None:
            nonlocal following
            receipts = Outbox(context.write)
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(receipts.run())
                while (frame := await context.read()) is not aio.EOF:
                    for _, sequence, body in adds(frame):
                        waiting[following] = [0, receipts, sequence]
                        header = HEADER.pack(1, following, following, len(body))
                        for outbox in outboxes:
                            outbox.put(header, body)
                        following += 1
                sending.cancel()

        async with asyncio.TaskGroup() as group:
            for bookie_port in bookies:
                call = connect(bookie_port, "Bookie")
                outboxes.append(Outbox(call.write))
                group.create_task(outboxes[-1].run())
                group.create_task(receive_acks(call))
            await serve(port, "Broker", stream)

    asyncio.run(main())


async def publish(port: int, shape: Shape) -> Figure:
    """Publish with `shape.window` entries in flight until all are acknowledged."""
    call = connect(port, "Broker")
    outbox, window = Outbox(call.write), asyncio.Semaphore(shape.window)
    body = os.urandom(shape.bytes)
    sent: dict[int, float] = {}
    latencies: list[float] = []

    async def receipts() -> None:
        while len(latencies) < shape.count:
            frame = await call.read()
            now_s = time.perf_counter()
            for sequence, _ in ACK.iter_unpack(frame):
                latencies.append(now_s - sent.pop(sequence))
                window.release()

    async with asyncio.TaskGroup() as group:
        sending = group.create_task(outbox.run())
        receiving = group.create_task(receipts())
        began_s = time.perf_counter()
        for sequence in range(shape.count):
            await window.acquire()
            sent[sequence] = time.perf_counter()
            outbox.put(HEADER.pack(1, sequence, 0, shape.bytes), body)
        await receiving
        seconds = time.perf_counter() - began_s
        sending.cancel()
    await call.done_writing()
    return Figure.of(shape, seconds, latencies)


async def publish_direct(ports: list[int], shape: Shape, ack_quorum: int) -> Figure:
    """Publish as `publish`, but send to each bookie directly, as the writer of a ledger does."""
    calls = [connect(port, "Bookie") for port in ports]
    outboxes, window = [Outbox(call.write) for call in calls], asyncio.Semaphore(shape.window)
    body = os.urandom(shape.bytes)
    sent: dict[int, list[Any]] = {}
    latencies: list[float] = []

    async def receive_acks(call: Any) -> None:
        for_all = shape.count
        while for_all:
            frame = await call.read()
            now_s = time.perf_counter()
            for _, entry in ACK.iter_unpack(frame):
                for_all -= 1
                state = sent[entry]
                state[0] += 1
                if state[0] == ack_quorum:
                    latencies.append(now_s - state[1])
                    window.release()
                if state[0] == len(calls):
                    del sent[entry]

    async with asyncio.TaskGroup() as group:
        sending = [group.create_task(outbox.run()) for outbox in outboxes]
        receiving = [group.create_task(receive_acks(call)) for call in calls]
        began_s = time.perf_counter()
        for entry in range(shape.count):
            await window.acquire()
            sent[entry] = [0, time.perf_counter()]
            header = HEADER.pack(1, entry, entry, shape.bytes)
            for outbox in outboxes:
                outbox.put(header, body)
        for _ in range(shape.window):
            await window.acquire()
        seconds = time.perf_counter() - began_s
        for task in receiving:
            await task
        for task in sending:
            task.cancel()
    for call in calls:
        await call.done_writing()
    return Figure.of(shape, seconds, latencies)


@contextmanager
def running(
    folder: str, *, bookies: int, ack_quorum: int, first_port: int, direct: bool = False
) -> Iterator[list[int]]:
    """Run the processes. Yields the broker's port; with `direct`, the bookies' ports."""
    context = multiprocessing.get_context("spawn")
    ports = [first_port + 1 + number for number in range(bookies)]
    processes = [context.Process(target=bookie, args=(p, f"{folder}/{p}")) for p in ports]
    if not direct:
        processes.append(context.Process(target=broker, args=(first_port, ports, ack_quorum)))
    for process in processes:
        process.start()
    try:
        yield ports if direct else [first_port]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def measure(
    shapes: list[Shape], *, bookies: int, ack_quorum: int, port: int, direct: bool = False
) -> list[Figure]:
    """Start the reference, publish each shape, and stop the reference."""
    folder = tempfile.mkdtemp(prefix="magnetar-reference-")
    try:
        with running(
            folder, bookies=bookies, ack_quorum=ack_quorum, first_port=port, direct=direct
        ) as ports:

            async def load(shape: Shape) -> Figure:
                if direct:
                    return await publish_direct(ports, shape, ack_quorum)
                return await publish(ports[0], shape)

            async def main() -> list[Figure]:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await load(Shape(1024, 200, 64))  # connects and warms up
                return [await load(shape) for shape in shapes]

            return asyncio.run(main())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bookies", type=int, default=3, help="number of bookies")
    parser.add_argument("--ack-quorum", type=int, default=2, help="answers before a receipt")
    parser.add_argument("--port", type=int, default=31800, help="first port of the processes")
    parser.add_argument("--direct", action="store_true", help="write to the bookies directly")
    options = parser.parse_args()
    for figure in measure(
        [Shape(1024, 1_500, 1), Shape(1024, 40_000, 1_000), Shape(65_536, 2_000, 16)],
        bookies=options.bookies,
        ack_quorum=options.ack_quorum,
        port=options.port,
        direct=options.direct,
    ):
        print(figure)
