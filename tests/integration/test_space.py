"""Space on a real disk: deletions free it while adds continue; a full disk gets space again."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from fakes.bookie_process import BookieProcess, channel_to, open_ledger
from fakes.bookies import KEY, Writer, add
from fakes.data_port import connect
from prometheus_client import CollectorRegistry
from support import wait_until

from magnetar.bookie.bookie import open_bookie
from magnetar.bookie.collector import CollectorConfig
from magnetar.bookie.upkeep import UpkeepConfig
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_ledger, encode_ledger_counter
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import BookieId, LedgerId, Member
from magnetar.metadata.store import ABSENT
from magnetar.protos import bookie_pb2 as pb
from magnetar.protos.envelope import COPY, BookieCode, decode_hello_reply, encode_hello
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc_frames import call_unary
from magnetar.runtime.memory_stream import memory_stream_pair, serve_memory_stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from grpc import aio

    from magnetar.bookie.service import BookieService

pytestmark = pytest.mark.real_loop

OK, READ_ONLY = BookieCode.OK, BookieCode.READ_ONLY
LEDGERS, ENTRIES, ENTRY_BYTES = 200, 20, 50_000  # 200 MB
KEPT_EACH = 20  # one of 20 ledgers stays: 95 % are deleted
GIVEN_BACK_S = 60.0
# Adds that are sent and answered while a compaction runs. An add that waits for the compaction is
# not counted.
ADDS_MEANWHILE_MIN = 3


async def begin_ledger(store: MemoryStore, service: BookieService, ledger: int) -> None:
    member = Member(BookieId(service.identity.bookie), service.identity.incarnation)
    value = encode_ledger(open_ledger(LedgerId(ledger), member))
    await store.put(paths.ledger(LedgerId(ledger)), value, expected=ABSENT)


async def open_writer(service: BookieService, group: asyncio.TaskGroup) -> Writer:
    here, there = memory_stream_pair("test", "bookie", frames_max=16)
    group.create_task(serve_memory_stream(there, service.handle_write))
    await here.send([encode_hello(service.identity.incarnation, "test")])
    assert decode_hello_reply(await here.receive()).code is OK
    return Writer(here)


def size_of(directory: Path) -> int:
    sizes = 0
    for file in (directory / "store").iterdir():
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:  # RocksDB has just removed it
            continue
    return sizes


class Compactions(logging.Handler):
    """The start and the end of each compaction, as the reclaimer logs them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.spans: list[tuple[float, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("space reclaimed"):
            now_s = time.monotonic()
            seconds: float = vars(record)["magnetar_fields"]["seconds"]
            self.spans.append((now_s - seconds, now_s))


@pytest.fixture
def compactions() -> Iterator[list[tuple[float, float]]]:
    reclaiming, handler = logging.getLogger("magnetar.bookie.reclaimer"), Compactions()
    reclaiming.addHandler(handler)
    reclaiming.setLevel(logging.INFO)
    yield handler.spans
    reclaiming.removeHandler(handler)
    reclaiming.setLevel(logging.NOTSET)


@pytest.mark.real_loop(deadline_s=240)
async def test_space_is_freed_while_adds_continue(
    tmp_path: Path, compactions: list[tuple[float, float]]
) -> None:
    store = MemoryStore()
    counter = encode_ledger_counter(LedgerId(1000))
    await store.put(paths.NEXT_LEDGER_ID, counter, expected=ABSENT)
    chance = random.Random(1)
    async with (
        open_bookie(
            tmp_path,
            bookie="b1",
            metadata=store,
            clock=SystemClock(),
            chance=chance,
            registry=CollectorRegistry(),
            upkeep_config=UpkeepConfig(collector=CollectorConfig(interval_s=1.0)),
        ) as service,
        asyncio.TaskGroup() as group,
    ):
        writer = await open_writer(service, group)
        for ledger in range(LEDGERS + 1):
            await begin_ledger(store, service, ledger)
        for entry in range(ENTRIES):
            for ledger in range(LEDGERS):
                await writer.send(add(ledger, entry, chance.randbytes(ENTRY_BYTES)))
            assert all(code is OK for *_, code in await writer.acks(LEDGERS))
        before = size_of(tmp_path)
        assert before >= LEDGERS * ENTRIES * ENTRY_BYTES
        dead = [ledger for ledger in range(LEDGERS) if ledger % KEPT_EACH]
        for ledger in dead:
            await store.delete(paths.ledger(LedgerId(ledger)), expected=0)
        begun_s = time.monotonic()
        adds: list[tuple[float, float]] = []  # when each add was sent and answered
        goal = before - 0.9 * len(dead) * ENTRIES * ENTRY_BYTES
        while not compactions or size_of(tmp_path) - len(adds) * 1_000 > goal:
            added_s = time.monotonic()
            assert added_s - begun_s < GIVEN_BACK_S, size_of(tmp_path)
            assert await writer.add(add(LEDGERS, len(adds), bytes(1_000))) == [OK]
            adds.append((added_s, time.monotonic()))
        took_s, slowest_s = time.monotonic() - begun_s, max(end - sent for sent, end in adds)
        meanwhile = sum(
            begun <= sent and answered <= ended
            for begun, ended in compactions
            for sent, answered in adds
        )
        print(
            f"{before >> 20} MiB -> {size_of(tmp_path) >> 20} MiB in {took_s:.1f} s; slowest of"
            f" {len(adds)} adds {slowest_s * 1000:.0f} ms, {meanwhile} while a compaction ran"
        )
        assert meanwhile >= ADDS_MEANWHILE_MIN
        kept = await service.list_ledgers(service.identity.incarnation, after=-1, ledgers_max=0)
        assert kept.ledgers == (*range(0, LEDGERS, KEPT_EACH), LEDGERS)
        for ledger in kept.ledgers[:-1]:
            page = await service.list_entries(
                service.identity.incarnation, ledger=ledger, first=0, entries_max=0
            )
            assert [(each.first, each.count) for each in page.runs] == [(0, ENTRIES)]
        await writer.stream.close()


# -- A full disk ---------------------------------------------------------------------------------

DISK_BYTES = 100 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs permission to mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path, *, free: int) -> None:
    """Another program fills the disk except for `free` bytes."""
    other = disk / "other"
    other.unlink(missing_ok=True)
    found = os.statvfs(disk)
    with open(other, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - free)


async def fence(channel: aio.Channel, incarnation: str, ledger: int) -> BookieCode:
    request = pb.LastConfirmedRequest(
        incarnation=incarnation, ledger=ledger, master_key=KEY, fence=True
    )
    reply = await call_unary(
        channel, "/magnetar.bookie.Bookie/LastConfirmed", request.SerializeToString()
    )
    return BookieCode(pb.LastConfirmedReply.FromString(reply).code)


@pytest.mark.real_loop(deadline_s=240)
async def test_a_full_disk_turns_read_only_and_back(disk: Path, tmp_path: Path) -> None:
    bookie = BookieProcess(tmp_path / "b1", data_dir=str(disk / "data"))

    try:
        entry = 0

        async def answers(code: BookieCode, flags: int = 0) -> None:
            """Wait until ordinary adds of ledger 1 get this answer."""
            nonlocal entry
            async with asyncio.timeout(60):
                while True:
                    entry += 1
                    if await writer.add(add(1, entry, flags=flags)) == [code]:
                        return
                    # Without this pause, the disk would fill before the test checks.
                    await asyncio.sleep(0.01)

        bookie.start()
        channel = channel_to(bookie)
        writer = await connect(bookie.address.data, bookie.incarnation)
        await answers(OK)
        assert (disk / "data" / "reserve").stat().st_size == DISK_BYTES // 100
        fill(disk, free=DISK_BYTES * 3 // 100)
        await answers(READ_ONLY)
        assert await writer.add(add(1, 0, flags=COPY)) == [OK]
        assert await fence(channel, bookie.incarnation, 7) is BookieCode.NO_SUCH_ENTRY
        fill(disk, free=DISK_BYTES // 200)
        await answers(READ_ONLY, COPY)
        await wait_until(lambda: not (disk / "data" / "reserve").exists())
        assert await fence(channel, bookie.incarnation, 8) is BookieCode.NO_SUCH_ENTRY
        await channel.close()

        bookie.kill()
        bookie.start()
        channel = channel_to(bookie)
        writer = await connect(bookie.address.data, bookie.incarnation)
        entry += 1
        assert await writer.add(add(1, entry)) == [READ_ONLY]
        assert await writer.add(add(8, 0)) == [BookieCode.FENCED]
        (disk / "other").unlink()
        await answers(OK)
        await channel.close()
        assert bookie.terminate() == 0
    finally:
        bookie.end()
