"""Measures the limits of the machine: synced writes of RocksDB, frames over one gRPC stream.

No design with these two libraries can be faster (python -m benchmarks.limits).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import tempfile
import time
from typing import Any

from grpc import aio
from rocksdict import Options, Rdict, WriteBatch

from benchmarks.reference import OPTIONS, START_TIMEOUT_S, serve

PORT = 31_790
SECONDS = 1.0  # the length of each measurement
GROUP_BYTES = 256 << 10


def synced_writes(entry_bytes: int, group: int) -> tuple[float, float]:
    """Return syncs/s and MB/s if each batch of `group` entries is synced before the next write."""
    folder = tempfile.mkdtemp(prefix="magnetar-limits-")
    try:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        store = Rdict(folder, options)
        value, syncs, began_s = os.urandom(entry_bytes), 0, time.perf_counter()
        while (spent_s := time.perf_counter() - began_s) < SECONDS:
            batch = WriteBatch(raw_mode=True)
            for number in range(group):
                batch.put(b"%016d" % (syncs * group + number), value)
            store.write(batch)
            store.flush_wal(True)
            syncs += 1
        store.close()
        return syncs / spent_s, syncs * group * entry_bytes / spent_s / 1e6
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def drain(port: int) -> None:
    """Receive frames, and answer the empty frame that ends each measurement."""

    async def stream(_: Any, context: Any) -> None:
        while (frame := await context.read()) is not aio.EOF:
            if not frame:
                await context.write(b"")

    asyncio.run(serve(port, "Drain", stream))


async def frames(port: int, frame_bytes: int) -> tuple[float, float]:
    """Return frames/s and MB/s over one stream to another process."""
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        call: Any = channel.stream_stream("/Drain/S")(wait_for_ready=True)
        async with asyncio.timeout(START_TIMEOUT_S):
            await call.write(b"")
            await call.read()
        frame, sent, began_s = os.urandom(frame_bytes), 0, time.perf_counter()
        while time.perf_counter() - began_s < SECONDS:
            await call.write(frame)
            sent += 1
        await call.write(b"")
        await call.read()
        spent_s = time.perf_counter() - began_s
        await call.done_writing()
        return sent / spent_s, sent * frame_bytes / spent_s / 1e6


def frame_rates(sizes: list[int]) -> dict[int, tuple[float, float]]:
    """Return `frames` for each size."""

    async def main() -> dict[int, tuple[float, float]]:
        return {size: await frames(PORT, size) for size in sizes}

    process = multiprocessing.get_context("spawn").Process(target=drain, args=(PORT,))
    process.start()
    try:
        return asyncio.run(main())
    finally:
        process.terminate()
        process.join()


def report() -> None:
    print("\nLimits of this machine, for one process each")
    for entry_bytes, group in [(1024, 1), (1024, GROUP_BYTES // 1024), (65_536, 4)]:
        per_s, mb_per_s = synced_writes(entry_bytes, group)
        name = f"RocksDB, {group} x {entry_bytes} B per sync"
        print(f"{name:<34} {per_s:>9,.0f} syncs/s {mb_per_s:>8.1f} MB/s", flush=True)
    for frame_bytes, (per_s, mb_per_s) in frame_rates([1024, 65_536, 262_144]).items():
        name = f"gRPC, frames of {frame_bytes} B"
        print(f"{name:<34} {per_s:>9,.0f} frames/s {mb_per_s:>7.1f} MB/s", flush=True)


if __name__ == "__main__":
    report()
