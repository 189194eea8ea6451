"""The embedded store after restarts, kills and damage, and on directories with other files."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from magnetar.metadata.embedded import EmbeddedStore
from magnetar.metadata.errors import (
    MetadataError,
    OutcomeUnknown,
    StoreBusy,
    StoreClosed,
    StoreDamaged,
    StoreFailed,
    StoreForeign,
)
from magnetar.metadata.store import ABSENT, SessionState, Versioned

if TYPE_CHECKING:
    from magnetar.metadata.disk import Files

pytestmark = pytest.mark.real_loop


async def filled(directory: Path, count: int = 50) -> None:
    store = await EmbeddedStore.open(directory)
    for number in range(count):
        await store.put(f"/a/{number}", b"v" * 100, expected=ABSENT)
    await store.close()


async def opening(directory: Path, files: Files = os) -> MetadataError | None:
    """Open the store and return the error, if there is one."""
    try:
        store = await EmbeddedStore.open(directory, files=files)
    except MetadataError as error:
        return error
    await store.close()
    return None


async def test_persistent_nodes_survive_a_restart_and_ephemerals_do_not(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path / "m")
    await store.put("/a/b", b"1", expected=ABSENT)
    await store.put("/a/b", b"2", expected=0)
    await store.put("/gone", b"", expected=ABSENT)
    await store.delete("/gone", expected=0)
    await store.create_ephemeral("/brokers/b1", b"x")
    first = await store.create_sequential("/queue/n-", b"", ephemeral=True)
    second = await store.create_sequential("/queue/n-", b"", ephemeral=False)
    session = store.session_id
    await store.close()

    store = await EmbeddedStore.open(tmp_path / "m")
    assert store.session_id > session
    assert store.session_state is SessionState.CONNECTED
    assert await store.get("/a/b") == Versioned(b"2", 1)
    assert await store.get("/gone") is None
    assert await store.get("/brokers/b1") is None
    assert await store.get("/brokers") == Versioned(b"", 0)
    assert await store.children("/") == ["a", "brokers", "queue"]
    assert await store.children("/queue") == [second.rpartition("/")[2]]
    third = await store.create_sequential("/queue/n-", b"", ephemeral=True)
    assert first < second < third
    await store.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from magnetar.metadata.embedded import EmbeddedStore
from magnetar.metadata.store import ABSENT

async def main():
    store = await EmbeddedStore.open(Path(sys.argv[1]))
    for number in range(10**6):
        await store.put(f"/n/{number}", b"", expected=ABSENT)
        await store.put("/last", str(number).encode(), expected=number - 1)
        print(number, flush=True)

asyncio.run(main())
"""


async def test_answered_writes_survive_kill_9_and_the_directory_can_be_opened_again(
    tmp_path: Path,
) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "m")], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) == 30:
            break
    busy = await opening(tmp_path / "m")
    assert isinstance(busy, StoreBusy), f"the writer has ended: {writer.poll()}"
    assert busy.path == str(tmp_path / "m")
    writer.send_signal(signal.SIGKILL)
    answered = int(([str(30), *writer.stdout.read().split()])[-1])
    writer.wait()

    store = await EmbeddedStore.open(tmp_path / "m")
    last = await store.get("/last")
    assert last is not None
    assert last.version == int(last.value)
    assert int(last.value) >= answered
    children = await store.children("/n")
    assert sorted(map(int, children)) == list(range(len(children)))
    assert len(children) in (int(last.value) + 1, int(last.value) + 2)
    await store.close()


async def test_a_second_store_in_the_same_process_is_refused(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path)
    with pytest.raises(StoreBusy):
        await EmbeddedStore.open(tmp_path)
    await store.put("/a", b"", expected=ABSENT)
    await store.close()
    store = await EmbeddedStore.open(tmp_path)
    assert await store.get("/a") is not None
    await store.close()


async def test_concurrent_requests_share_syncs_and_all_are_durable(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path / "m")
    commits = 0
    commit = store._nodes.commit

    def counted() -> None:
        nonlocal commits
        commits += 1
        commit()

    store._nodes.commit = counted  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        for number in range(500):
            group.create_task(store.put(f"/a/{number}", b"", expected=ABSENT))
    assert commits < 20
    await store.close()
    store = await EmbeddedStore.open(tmp_path / "m")
    assert len(await store.children("/a")) == 500
    await store.close()


async def test_the_loop_runs_while_the_disk_syncs(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path / "m")
    commit, turned = store._nodes.commit, threading.Event()

    def slow() -> None:
        assert turned.wait(30), "the loop stands still"
        commit()

    store._nodes.commit = slow  # type: ignore[method-assign]
    put = asyncio.get_running_loop().create_task(store.put("/a", b"", expected=ABSENT))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not put.done()
    turned.set()
    await put
    await store.close()


async def test_close_answers_all_pending_requests(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path / "m")
    tasks = [
        asyncio.get_running_loop().create_task(store.put(f"/a/{n}", b"", expected=ABSENT))
        for n in range(600)  # more than one group
    ]
    await asyncio.sleep(0)
    await store.close()
    done, pending = await asyncio.wait(tasks, timeout=30)
    assert not pending
    refused = [task for task in done if isinstance(task.exception(), StoreClosed)]
    kept = [task for task in done if task.exception() is None]
    assert len(refused) + len(kept) == 600
    assert refused
    assert kept
    store = await EmbeddedStore.open(tmp_path / "m")
    assert len(await store.children("/a")) == len(kept)
    await store.close()


# ---- directories that are not what they should be ------------------------------------------------


async def test_a_failing_callback_of_a_watch_stops_no_request(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path / "m")
    stray: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: stray.append(context["exception"]))

    def fail() -> None:
        raise ValueError("a bug")

    store.watch("/a", fail)
    async with asyncio.timeout(10):
        async with asyncio.TaskGroup() as group:
            # The first request is a group of its own; the others wait for the second group.
            for path in ("/a", "/b", "/c"):
                group.create_task(store.put(path, b"v" * 200_000, expected=ABSENT))
        await store.close()
    assert list(map(str, stray)) == ["a bug"]


async def test_a_folder_with_other_files_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"jpg")
    error = await opening(tmp_path)
    assert isinstance(error, StoreForeign)
    assert str(tmp_path) in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


async def test_a_later_format_is_refused(tmp_path: Path) -> None:
    assert await opening(tmp_path / "m") is None
    (tmp_path / "m" / "format").write_text("magnetar metadata 2\n")
    error = await opening(tmp_path / "m")
    assert isinstance(error, StoreForeign)
    assert "metadata 2" in str(error)


async def test_a_file_in_the_place_of_the_directory_raises_an_error_with_its_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "m").write_text("")
    error = await opening(tmp_path / "m")
    assert isinstance(error, StoreFailed)
    assert str(tmp_path / "m") in str(error)


async def test_an_interrupted_first_start_is_continued(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("magnetar metadata 1\n")
    assert await opening(tmp_path) is None


class DyingDisk:
    """A replacement of `os`. Its n-th call that can fail raises an error."""

    def __init__(self, fails_at: int) -> None:
        self._left = fails_at

    @property
    def has_failed(self) -> bool:
        return self._left <= 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in ("open", "write", "pwrite", "fsync", "replace"):
            return found

        def call(*arguments: object) -> object:
            self._left -= 1
            if self._left == 0:
                raise OSError(5, "Input/output error")
            return found(*arguments)

        return call


async def test_a_first_start_that_died_at_any_step_is_continued(
    tmp_path: Path,
) -> None:
    for step in range(1, 100):
        disk = DyingDisk(step)
        error = await opening(tmp_path / f"{step}", disk)
        if not disk.has_failed:
            break
        assert isinstance(error, StoreFailed), step
        assert await opening(tmp_path / f"{step}") is None, step
    else:
        pytest.fail("it never starts")
    assert step > 8


async def test_the_parents_of_a_new_directory_are_synced(
    tmp_path: Path,
) -> None:
    synced: set[Path] = set()

    class WatchedDisk(DyingDisk):
        def fsync(self, descriptor: int) -> None:
            synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            os.fsync(descriptor)

    directory = tmp_path / "made" / "as" / "well"
    assert await opening(directory, WatchedDisk(0)) is None
    assert synced >= {directory, *list(directory.parents)[:3]}


async def test_a_vanished_store_is_reported_as_damage_and_not_created_again(tmp_path: Path) -> None:
    await filled(tmp_path / "m")
    shutil.rmtree(tmp_path / "m" / "store")
    assert isinstance(await opening(tmp_path / "m"), StoreDamaged)


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST-*", "*.sst"])
async def test_a_damaged_file_is_named_as_damage(tmp_path: Path, name: str) -> None:
    await filled(tmp_path / "m")
    (file,) = list((tmp_path / "m" / "store").glob(name))[:1]
    content = bytearray(file.read_bytes())
    for index in range(0, len(content), 7):
        content[index] ^= 0x55
    file.write_bytes(bytes(content))
    error = await opening(tmp_path / "m")
    assert isinstance(error, StoreDamaged)
    assert str(tmp_path / "m") in str(error)


def killed_with_a_log(directory: Path) -> Path:
    """A store whose process died: all its changes are in the write-ahead log. Returns the log."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) == 20:
            break
    writer.kill()
    writer.wait()
    writer.stdout.close()
    (log,) = (path for path in (directory / "store").glob("*.log") if path.stat().st_size)
    return log


async def test_synced_changes_that_are_missing_are_noticed(tmp_path: Path) -> None:
    """The length field of a log record is damaged. RocksDB opens the store without an error."""
    log = killed_with_a_log(tmp_path / "m")
    content = bytearray(log.read_bytes())
    # The log is a sequence of records: crc u32, length u16, kind u8, (log number u32,) payload.
    offset = 0
    for _ in range(3):
        offset += 7 + int.from_bytes(content[offset + 4 : offset + 6], "little")
    content[offset + 5] |= 0x7F
    log.write_bytes(bytes(content))
    error = await opening(tmp_path / "m")
    assert isinstance(error, StoreDamaged)


async def test_a_log_cut_short_is_noticed(tmp_path: Path) -> None:
    log = killed_with_a_log(tmp_path / "m")
    os.truncate(log, log.stat().st_size // 2)
    error = await opening(tmp_path / "m")
    assert isinstance(error, StoreDamaged)
    assert "missing" in str(error)


async def test_an_unreadable_watermark_is_reported_as_damage(tmp_path: Path) -> None:
    await filled(tmp_path / "m", 3)
    (tmp_path / "m" / "watermark").write_bytes(b"\0" * 12)
    assert isinstance(await opening(tmp_path / "m"), StoreDamaged)
    (tmp_path / "m" / "watermark").write_bytes(b"")
    assert isinstance(await opening(tmp_path / "m"), StoreDamaged)


async def test_a_store_refuses_all_calls_after_a_disk_error(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path / "m")
    await store.put("/a", b"1", expected=ABSENT)

    class BrokenDisk:
        def write(self, batch: object) -> None:
            raise Exception("IO error: No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(healthy, name)

    healthy = store._nodes._db
    store._nodes._db = BrokenDisk()  # type: ignore[assignment]
    loop = asyncio.get_running_loop()
    first = loop.create_task(store.put("/a", b"2", expected=0))
    await asyncio.sleep(0)
    second = loop.create_task(store.get("/a"))
    for request in (first, second, loop.create_task(store.get("/a"))):
        with pytest.raises(StoreFailed, match="No space left") as error:
            await request
        assert not error.value.definite
        # OutcomeUnknown would let the caller try again.
        assert not isinstance(error.value, OutcomeUnknown)
    store._nodes._db = healthy
    with pytest.raises(StoreFailed):
        await store.get("/a")
    await store.close()


async def test_a_failed_assertion_is_not_reported_as_a_failed_disk(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path / "m")

    class TextKeys:
        def keys(self, from_key: bytes) -> list[str]:
            return [from_key.decode()]

        def __getattr__(self, name: str) -> object:
            return getattr(healthy, name)

    healthy = store._nodes._db
    store._nodes._db = TextKeys()  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        await store.children("/")
    await store.close()
