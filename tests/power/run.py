"""Power cuts and kills of a real bookie under load: `make powercuts`, or from the top folder

    PYTHONPATH=tests .venv/bin/python -m power.run [--cuts 50] [--kills 50] [--seed N]

In each turn, the brokers' ledger writer fills three ledgers without pause, with entries of all
sizes, until a given number is confirmed. Then the power of the bookie's disk is cut (or the process
is killed), the disk is mounted again, and the bookie is started again. It must then hold every
entry that was ever confirmed, with the bytes that were sent, under the same incarnation. The
control does the same with a bookie whose syncs do nothing, and must lose entries: otherwise the
power cuts have no effect.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Final

from fakes.bookie_process import BookieProcess
from fakes.data_port import read
from power.disk import DiskUnusable, LoopDisk

from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.connection import RemoteBookiePeer
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_bookie_registration
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BookieId, BookieRegistration, LedgerId, Member
from magnetar.protos import bookie_pb2 as pb
from magnetar.protos.envelope import BookieCode, decode_envelope
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from magnetar.bookie.ledger.appender import LedgerAppender

LEDGERS: Final = 3  # written at once
AHEAD: Final = 100  # entries of each that are not confirmed yet
LATE_ACKS_S: Final = 0.2  # the wait for adds that are under way when the bookie ends
SIZES: Final = (0, 10, 1000, 4000, 5000, 40_000)  # some in tables, some in blob files
DISK_MB: Final = 2048
LYING: Final = Path(__file__).with_name("lying_bookie.py")


class Lost(Exception):
    """An acknowledged entry is missing, or has other bytes."""

    definite = True


@dataclass(frozen=True, slots=True)
class Written:
    """A ledger, and the last entry that its writer had confirmed."""

    ledger: int
    master_key: int
    last: int


@dataclass
class Tally:
    """The counts of a run so far."""

    turns: int = 0
    acked: int = 0
    lost: int = 0  # acknowledged entries that the bookie lacks
    renewed: int = 0  # turns after which the bookie needed a new incarnation
    ledgers: list[Written] = field(default_factory=list)


def payload_of(ledger: int, entry: int) -> bytes:
    return Random(ledger * 1_000_003 + entry).randbytes(SIZES[entry % len(SIZES)])


@asynccontextmanager
async def writing(
    tree: MemoryTree, bookie: BookieProcess, chance: Random
) -> AsyncIterator[Ledgers]:
    """A client of the only bookie: each entry has one copy."""
    store = MemoryStore(tree)
    member = Member(BookieId("b1"), bookie.incarnation)
    entry = BookieRegistration(
        bookie=member.bookie,
        incarnation=member.incarnation,
        boot_epoch=int(bookie.ready["boot_epoch"]),
        address=bookie.address,
        http_address="",
        zone="",
        read_only=False,
    )
    await store.create_ephemeral(
        paths.bookie_available(member.bookie), encode_bookie_registration(entry)
    )
    directory = BookieRegistry(store)
    pool = PeerPool(
        directory, RemoteBookiePeer, client_name="writer", random=chance, connect_timeout_s=5.0
    )
    config = LedgerConfig(ensemble_size=1, write_quorum=1, ack_quorum=1)
    ledgers = Ledgers(store, directory, pool, LedgerIds(store), config, SystemClock(), chance)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(ledgers.run())
        yield ledgers
        running.cancel()
    await store.close()


async def load(ledgers: Ledgers, *, until: int, stop: Callable[[], None]) -> list[Written]:
    """Write until this number of entries is confirmed, then `stop` the bookie."""
    appenders = [await ledgers.create(newer_than=LedgerId(-1), custom={}) for _ in range(LEDGERS)]
    stopped = False

    def progress() -> None:
        nonlocal stopped
        if not stopped and sum(each.confirmed + 1 for each in appenders) >= until:
            stopped = True
            stop()

    async def write(appender: LedgerAppender) -> None:
        appender.progress = progress
        while not stopped and appender.failure is None:
            if appender.appended - appender.confirmed < AHEAD:
                payload = payload_of(appender.ledger, appender.appended + 1)
                appender.append_nowait([[payload]])
            else:
                await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as group:
        for appender in appenders:
            group.create_task(write(appender))
    await asyncio.sleep(LATE_ACKS_S)
    for appender in appenders:
        appender.abandon()
    return [Written(each.ledger, each.metadata.master_key, each.confirmed) for each in appenders]


async def count_lost(bookie: BookieProcess, incarnation: str, ledgers: list[Written]) -> int:
    """Count the entries 0 .. last of each ledger that the bookie lacks. Raises Lost if an entry has
    other bytes than those sent."""
    lost = 0
    for written in ledgers:
        at = 0
        while at <= written.last:
            request = pb.ReadRequest(
                incarnation=incarnation,
                ledger=written.ledger,
                master_key=written.master_key,
                first=at,
                last=written.last,
            )
            for answer in await read(bookie.address.data, request):
                at = answer.entry + 1
                if answer.code is not BookieCode.OK:
                    lost += 1
                    continue
                found = decode_envelope(answer.envelope)
                if (found.ledger, found.entry, bytes(found.payload)) != (
                    written.ledger,
                    answer.entry,
                    payload_of(written.ledger, answer.entry),
                ):
                    raise Lost(f"entry {answer.entry} of ledger {written.ledger} is another")
    return lost


async def turn(
    bookie: BookieProcess, tree: MemoryTree, tally: Tally, chance: Random, disk: LoopDisk | None
) -> None:
    """One cut of the disk's power; without a disk, one kill. The bookie runs before and after."""

    def stop() -> None:
        if disk is not None:
            disk.cut()
        bookie.kill()

    incarnation = bookie.incarnation
    until = int(10 ** chance.uniform(0, 3.3))
    async with writing(tree, bookie, chance) as ledgers:
        written = await load(ledgers, until=until, stop=stop)
    if disk is not None:
        disk.restore()
    bookie.start()
    tally.turns += 1
    tally.acked += sum(each.last + 1 for each in written)
    tally.ledgers += written
    tally.renewed += bookie.incarnation != incarnation
    try:
        tally.lost += await count_lost(bookie, incarnation, written)
    except StreamClosed as error:
        error.add_note(f"its exit status: {bookie.status}; its log:\n{bookie.log[-4000:]}")
        raise


async def run_turns(
    directory: Path, chance: Random, *, turns: int, cuts: bool, lying: bool = False
) -> Tally:
    """Run the turns on a new bookie. Raises DiskUnusable, and Lost if an honest bookie lost an
    entry."""
    disk = LoopDisk(directory, size_mb=DISK_MB) if cuts else None
    data_dir = directory / "data" if disk is None else disk.path / "data"
    bookie = BookieProcess(directory / "b1", data_dir=str(data_dir))
    if lying:
        bookie.use_program(LYING)
    tree, tally = MemoryTree(), Tally()
    try:
        bookie.start()
        incarnation = bookie.incarnation
        for _ in range(turns):
            await turn(bookie, tree, tally, chance, disk)
            if lying and (tally.lost or tally.renewed):
                break
            if not lying and (tally.lost or tally.renewed):
                raise Lost(f"{tally.lost} lost, {tally.renewed} times renewed: {bookie.log}")
        if not lying and await count_lost(bookie, incarnation, tally.ledgers):
            raise Lost("an entry of an earlier turn is missing")
    finally:
        bookie.end()
        if disk is not None:
            disk.close()
    return tally


def main(arguments: list[str]) -> int:
    about = "Cut the power of a bookie's disk, and kill it, under load."
    parser = argparse.ArgumentParser(prog="python -m power.run", description=about)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--controls", type=int, default=3)
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(10**6))
    options = parser.parse_args(arguments)
    configure_logging(level="ERROR")  # a writer whose bookie dies warns
    print(f"seed {options.seed}", flush=True)
    chance = Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        for what, turns, cuts, lying in (
            ("kill -9", options.kills, False, False),
            ("power cuts", options.cuts, True, False),
            ("power cuts without sync (must lose)", options.controls, True, True),
        ):
            begun_s = time.monotonic()
            directory = Path(name) / what.replace(" ", "-").partition("(")[0]
            try:
                tally = asyncio.run(
                    run_turns(directory, chance, turns=turns, cuts=cuts, lying=lying)
                )
            except DiskUnusable as unusable:
                print(f"{what}: skipped: {unusable}")
                continue
            except Lost as lost:
                print(f"{what}: FAILED: {lost}")
                return 1
            print(
                f"{what}: {tally.turns} turns, {tally.acked} acknowledged, {tally.lost} lost, "
                f"{time.monotonic() - begun_s:.0f} s",
                flush=True,
            )
            if lying and not tally.lost:
                print("the control lost nothing: these cuts prove nothing")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
