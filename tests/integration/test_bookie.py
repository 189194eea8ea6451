"""Bookies as real processes: killed, stopped, refused, out of disk."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from fakes.bookie_process import BookieProcess, channel_to, open_ledger
from fakes.bookies import KEY, add, crash_image, envelope
from fakes.data_port import connect, read
from support import free_port, run, skip_without_zookeeper

from magnetar.bookie.bookie import EXIT_STORAGE_FAILED
from magnetar.bookie.errors import DirectoryUnusable, OpenTooSlow
from magnetar.bookie.storage.directory import open_directory
from magnetar.bookie.storage.layout import WATERMARK
from magnetar.bookie.storage.watermark import read_watermark
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_registration, encode_ledger
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import BookieId, LedgerId
from magnetar.metadata.store import ABSENT
from magnetar.metadata.zookeeper import ZooKeeperStore
from magnetar.protos import bookie_pb2 as pb
from magnetar.protos.envelope import (
    BookieCode,
    decode_acks,
    decode_envelope,
)
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import call_unary
from magnetar.zookeeper_server import ZooKeeperEnsemble

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop]

OK = BookieCode.OK


@pytest.fixture
def bookie(tmp_path: Path) -> Iterator[BookieProcess]:
    process = BookieProcess(tmp_path / "b1")
    yield process
    process.end()


def payload_of(ledger: int, entry: int) -> bytes:
    """Entries of every size: some are stored in tables, some in blob files."""
    sizes = (0, 10, 1000, 4000, 5000, 70_000)
    return random.Random(ledger * 1_000_003 + entry).randbytes(sizes[entry % len(sizes)])


async def add_until_killed(
    bookie: BookieProcess, ledger: int, *, kill_after: int
) -> tuple[set[int], int]:
    """Add entries to a ledger without pause; kill the bookie when this number was acknowledged.

    Returns the acknowledged entries, and the number of entries that may have been sent.
    """
    acked: set[int] = set()
    sent = 0
    room = asyncio.Semaphore(30)  # frames on their way
    writer = await connect(bookie.address.data, bookie.incarnation)

    async def send() -> None:
        nonlocal sent
        with suppress(StreamClosed):
            while True:
                first, sent = sent, sent + 7  # an add whose call failed may have arrived
                await writer.send(
                    *(add(ledger, first + n, payload_of(ledger, first + n)) for n in range(7))
                )
                await room.acquire()

    async with asyncio.TaskGroup() as group:
        sending = group.create_task(send())
        with suppress(StreamClosed):
            while True:
                for _, entry, code in decode_acks(await writer.stream.receive()):
                    assert code is OK
                    acked.add(entry)
                    if entry % 7 == 6:
                        room.release()
                if len(acked) >= kill_after:
                    bookie.kill()
        sending.cancel()
    await writer.stream.close()
    return acked, sent


NO: Final = frozenset({BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER})


async def read_all(
    bookie: BookieProcess,
    ledger: int,
    incarnation: str = "",
    *,
    ends: AbstractSet[BookieCode] = NO,
) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    code = OK
    while code is OK:
        request = pb.ReadRequest(
            incarnation=incarnation or bookie.incarnation,
            ledger=ledger,
            master_key=KEY,
            first=len(found),
            last=10**6,
        )
        for answer in await read(bookie.address.data, request):
            code = answer.code
            if code is OK:
                found[answer.entry] = answer.envelope
    assert code in ends
    return found


@pytest.mark.real_loop(deadline_s=240)
async def test_every_acknowledged_entry_survives_kill_minus_9(bookie: BookieProcess) -> None:
    acked: dict[int, set[int]] = {}
    for ledger, kill_after in enumerate((1, 60, 700, 1500)):
        bookie.start()
        assert bookie.ready["boot_epoch"] == ledger + 1
        acked[ledger], sent = await add_until_killed(bookie, ledger, kill_after=kill_after)
        assert kill_after <= len(acked[ledger]) <= sent
    bookie.start()
    for ledger, entries in acked.items():
        found = await read_all(bookie, ledger)
        assert entries <= found.keys()
        for entry, stored in found.items():
            assert stored == envelope(ledger, entry, payload_of(ledger, entry))


@pytest.mark.real_loop(deadline_s=240)
async def test_a_fence_survives_kill_minus_9_also_of_an_unknown_ledger(
    bookie: BookieProcess,
) -> None:
    bookie.start()
    writer = await connect(bookie.address.data, bookie.incarnation)
    assert await writer.add(add(1, 0)) == [OK]
    for ledger in (1, 2):
        request = pb.ReadRequest(
            incarnation=bookie.incarnation,
            ledger=ledger,
            master_key=KEY,
            first=1,
            last=1,
            fence=True,
        )
        answers = await read(bookie.address.data, request)
        assert answers == [(1, BookieCode.NO_SUCH_ENTRY, b"")]
    bookie.kill()

    bookie.start()
    writer = await connect(bookie.address.data, bookie.incarnation)
    for ledger in (1, 2):
        assert await writer.add(add(ledger, 1)) == [BookieCode.FENCED]
        assert await writer.add(add(ledger, 1, master_key=KEY + 1)) == [BookieCode.UNAUTHORIZED]


@pytest.mark.real_loop(deadline_s=240)
async def test_a_clean_stop_acknowledges_closes_and_ends_with_status_0(
    bookie: BookieProcess,
) -> None:
    bookie.start()
    writer = await connect(bookie.address.data, bookie.incarnation)
    for entry in range(50):
        await writer.send(add(1, entry))
    assert bookie.terminate() == 0
    acks: list[BookieCode] = []
    with suppress(StreamClosed):
        while True:
            acks += [code for *_, code in decode_acks(await writer.stream.receive())]
    assert set(acks) <= {OK, BookieCode.STOPPING}
    mark = read_watermark(bookie.data_dir / WATERMARK)
    assert mark is not None
    assert mark.closed
    bookie.start()
    assert "replaying its log" not in bookie.log
    found = await read_all(bookie, 1)
    assert acks.count(OK) <= len(found)


def get(bookie: BookieProcess, path: str) -> str:
    url = f"http://127.0.0.1:{bookie.ready['http_port']}{path}"
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


async def test_info_health_and_metrics_describe_a_running_bookie(bookie: BookieProcess) -> None:
    bookie.start()

    channel = channel_to(bookie)
    writer = await connect(bookie.address.data, bookie.incarnation)
    assert await writer.add(add(1, 0), add(1, 1)) == [OK, OK]
    data = await call_unary(channel, "/magnetar.bookie.Bookie/Info", b"")
    info = pb.InfoReply.FromString(data)
    assert (info.bookie, info.state, info.boot_epoch) == ("b1", "serving", 1)
    assert 0 < info.disk_free_bytes < info.disk_total_bytes
    await channel.close()
    health = json.loads(get(bookie, "/health"))
    assert (health["role"], health["id"], health["state"]) == ("bookie", "b1", "serving")
    assert health["incarnation"] == bookie.incarnation
    metrics = get(bookie, "/metrics")
    assert "magnetar_bookie_adds_stored_total 2.0" in metrics
    assert "magnetar_bookie_registered 1.0" in metrics
    assert "magnetar_bookie_sync_seconds_count" in metrics
    assert "listening on loopback only" in bookie.log


def test_a_second_process_on_the_directory_is_refused(
    bookie: BookieProcess, tmp_path: Path
) -> None:
    bookie.start()
    second = BookieProcess(tmp_path / "second", data_dir=str(bookie.data_dir))
    second.launch()
    assert second.wait() == 1
    assert f"found process {bookie.ready['pid']} using it" in second.log
    assert json.loads(get(bookie, "/health"))["state"] == "serving"


@pytest.mark.parametrize("key", ["data_port", "grpc_port", "http_port"])
def test_a_port_in_use_is_refused_by_number(tmp_path: Path, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        bookie = BookieProcess(tmp_path / "b1", **{key: port})
        bookie.launch()
        assert bookie.wait() == 1
    assert f"port {port} on 127.0.0.1 is in use" in bookie.log


@pytest.mark.real_loop(deadline_s=240)
async def test_a_bookie_whose_log_lost_its_end_starts_as_a_new_incarnation(
    bookie: BookieProcess,
) -> None:
    """The process starts as a new incarnation. It serves the remaining entries of the former
    incarnation, and answers "unknown" for the lost ones, also after a restart."""

    bookie.start()
    former = bookie.incarnation
    acked, _ = await add_until_killed(bookie, 1, kill_after=300)
    log = max((bookie.data_dir / "store").glob("*.log"))
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    for _ in range(2):
        bookie.start()
        assert bookie.incarnation != former
        assert "the log lost operations that were on disk" in bookie.log
        found = await read_all(bookie, 1, former, ends={BookieCode.DAMAGED_STORE})
        assert 0 < len(found) < len(acked)
        for entry, stored in found.items():
            assert stored == envelope(1, entry, payload_of(1, entry))
        assert await read_all(bookie, 1, "e" * 32, ends={BookieCode.WRONG_INCARNATION}) == {}
        channel = channel_to(bookie)
        refused = await connect(bookie.address.data, former)
        assert refused.reply is not None
        assert refused.reply.code is BookieCode.DAMAGED_STORE
        fence = pb.LastConfirmedRequest(incarnation=former, ledger=1, master_key=KEY, fence=True)
        data = await call_unary(
            channel, "/magnetar.bookie.Bookie/LastConfirmed", fence.SerializeToString()
        )
        assert pb.LastConfirmedReply.FromString(data).code == BookieCode.DAMAGED_STORE
        writer = await connect(bookie.address.data, bookie.incarnation)
        assert await writer.add(add(2, 0)) == [OK]
        await channel.close()
        bookie.kill()


# -- The program -------------------------------------------------------------------------------


def run_program(tmp_path: Path, config: str, **environment: str) -> tuple[int, str]:
    (tmp_path / "bookie.toml").write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "magnetar.bookie.main", "--config", str(tmp_path / "bookie.toml")],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_config_that_is_not_understood_is_refused_by_key(tmp_path: Path) -> None:
    status, said = run_program(tmp_path, 'id = "b1"\ndata_dirr = "/x"\n')
    assert status == 2
    assert "unknown key 'data_dirr'" in said
    assert "did you mean data_dir?" in said


def test_an_unreachable_zookeeper_is_named(tmp_path: Path) -> None:
    port = free_port()
    status, said = run_program(
        tmp_path,
        f'id = "b1"\ndata_dir = "{tmp_path / "data"}"\nmetadata_url = "zk://127.0.0.1:{port}"\n',
    )
    assert status == 1
    assert f"127.0.0.1:{port}" in said
    assert not (tmp_path / "data").exists()


@pytest.mark.zookeeper
@pytest.mark.real_loop(deadline_s=240)
async def test_a_killed_bookie_registers_again_at_a_real_zookeeper(tmp_path: Path) -> None:
    """The bookie is killed, and registers again before its former session has expired."""
    skip_without_zookeeper()
    ensemble = ZooKeeperEnsemble(tmp_path / "zookeeper", force_sync=False)
    with ensemble:
        (tmp_path / "bookie.toml").write_text(
            f'id = "b1"\ndata_dir = "{tmp_path / "data"}"\ndata_port = 0\ngrpc_port = 0\n'
            f"http_port = 0\n"
            f'metadata_url = "zk://{ensemble.hosts}/somewhere"\nsession_timeout_s = 9\n'
        )
        command = [sys.executable, "-m", "magnetar.bookie.main"]
        command += ["--config", str(tmp_path / "bookie.toml")]

        async def registered(epoch: int) -> None:
            store = await ZooKeeperStore.connect_url(
                f"zk://{ensemble.hosts}/somewhere", session_timeout_s=10
            )
            try:
                async with asyncio.timeout(60):
                    while True:
                        found = await store.get(paths.bookie_available(BookieId("b1")))
                        if found is not None:
                            entry = decode_bookie_registration(found.value)
                            if entry.boot_epoch == epoch:
                                break
                        await asyncio.sleep(0.05)
                writer = await connect(entry.address.data, entry.incarnation)
                assert await writer.add(add(2, epoch)) == [BookieCode.NO_SUCH_LEDGER]
                if epoch == 1:
                    ledger = encode_ledger(open_ledger(LedgerId(1), entry.member))
                    await store.put(paths.ledger(LedgerId(1)), ledger, expected=ABSENT)
                assert await writer.add(add(1, epoch)) == [OK]
                await writer.stream.close()
            finally:
                await store.close()

        with open(tmp_path / "log", "a") as log:
            for epoch in (1, 2):
                process = subprocess.Popen(command, stderr=log)
                try:
                    await registered(epoch)
                    process.send_signal(signal.SIGKILL if epoch == 1 else signal.SIGTERM)
                    assert process.wait(30) == (-signal.SIGKILL if epoch == 1 else 0)
                finally:
                    process.kill()
                    process.wait()


# -- Disks -------------------------------------------------------------------------------------


@contextmanager
def small_disk(path: Path, option: str) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs permission to mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.real_loop(deadline_s=240)
async def test_a_disk_that_fills_up_ends_the_process_and_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=12m") as disk:
        never_read_only = {"disk_full": 1.0, "disk_resume": 1.0, "disk_reserve_bytes": 0}
        bookie = BookieProcess(tmp_path / "b1", data_dir=str(disk / "data"), **never_read_only)

        try:
            bookie.start()
            acked, sent = await add_until_killed(bookie, 1, kill_after=10**9)
            assert bookie.wait() == EXIT_STORAGE_FAILED
            assert len(acked) < sent
            assert "No space left on device" in bookie.log
            subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
            bookie.start()
            found = await read_all(bookie, 1)
            assert acked
            assert acked <= found.keys()
            for entry, stored in found.items():
                assert decode_envelope(stored).payload == payload_of(1, entry)
        finally:
            bookie.end()


# Opens a directory as a user without write permission, or on a disk without space.
CHILD = """
import asyncio, os, random, sys
from pathlib import Path
from magnetar.bookie.errors import StartRefused
from magnetar.bookie.storage.directory import open_directory
from magnetar.metadata.memory import MemoryStore

async def main(path):
    try:
        await open_directory(
            Path(path), bookie="b1", metadata=MemoryStore(), chance=random.Random(1))
    except StartRefused as refused:
        print(type(refused).__name__, refused)

if sys.argv[2] == "no peer":
    os.setuid(65534)
asyncio.run(main(sys.argv[1]))
"""


def start_in_child(path: Path, user: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), user],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without permission")
def test_a_directory_without_permission_is_refused() -> None:
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o755)
        said = start_in_child(Path(path), "no peer")
    assert said.startswith("DirectoryUnusable")
    assert "Permission denied" in said
    assert "permission to read and write" in said


@pytest.mark.parametrize("option", ["ro", *(f"size={size}k" for size in (4, 16, 32, 48, 64, 96))])
def test_a_start_on_a_full_or_read_only_disk_is_refused(tmp_path: Path, option: str) -> None:
    with small_disk(tmp_path / "disk", option) as disk:
        said = start_in_child(disk, "root")
    if option == "size=96k" and not said:
        return  # this size may suffice; each smaller one stops the start at another step
    assert said.startswith("DirectoryUnusable"), said
    assert ("Read-only file system" if option == "ro" else "No space left on device") in said


def open_killed_directory(tmp_path: Path, *, open_deadline_s: float) -> str:
    """Format a directory, and open it again as a killed process would have left it.

    Returns the former incarnation of the directory, or "" if its incarnation is unchanged.
    """

    async def main() -> str:
        store = MemoryStore()
        chance = random.Random(1)
        first = await open_directory(tmp_path / "live", bookie="b1", metadata=store, chance=chance)
        crash_image(tmp_path / "live", tmp_path / "killed")
        first.close()
        again = await open_directory(
            tmp_path / "killed",
            bookie="b1",
            metadata=store,
            chance=chance,
            open_deadline_s=open_deadline_s,
        )
        again.close()
        assert again.identity.former in (None, first.identity.incarnation)
        return again.identity.former or ""

    return run(main())


def test_a_store_that_has_not_opened_at_the_deadline_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The child process stops itself at its start, like a process that waits for its disk.
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nos.kill(os.getpid(), {int(signal.SIGSTOP)})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(OpenTooSlow, match=r"did not open within 0.5 s.*Raise open_deadline_s"):
        open_killed_directory(tmp_path, open_deadline_s=0.5)
    assert not (tmp_path / "killed" / "former").exists()


def test_a_store_that_crashes_its_reader_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'means' not in sys.orig_argv:\n"
        f"    os.kill(os.getpid(), {int(signal.SIGSEGV)})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert open_killed_directory(tmp_path, open_deadline_s=20)
    assert "ended with status -11" in caplog.text


def test_a_killed_probe_process_does_not_make_the_store_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        with pytest.raises(DirectoryUnusable, match="ended by SIGKILL"):
            open_killed_directory(tmp_path, open_deadline_s=20)
