"""The reader of RocksDB's logs, compared with the data that RocksDB itself recovers from them."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.storage.format import ManifestState, Watermark, entry_key
from magnetar.bookie.storage.logfile import BLOCK_BYTES, LogFile, log_damage, read_log
from magnetar.bookie.storage.manifest import ManifestWatch, current_manifest, find_damage
from magnetar.bookie.storage.rocks import RocksStorage

if TYPE_CHECKING:
    from pathlib import Path


def write_batches(storage: RocksStorage, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        value = random.Random(size).randbytes(size)
        storage.write([(entry_key(1, number), value), (entry_key(2, number), b"")])
    storage.sync()


# Records of one and of many fragments. Blocks end with room for a header (7 bytes) and with less.
SIZES = [10, 0, 32_600, 40, 100_000, 5, *range(32_630, 32_660), 200_000, 1]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("log")
    storage = RocksStorage(path / "store", create=True)
    write_batches(storage, SIZES)
    [file] = (path / "store").glob("*.log")
    data = file.read_bytes()
    storage.close()
    return data


def test_a_log_of_rocksdb_is_whole(log: bytes) -> None:
    found = read_log(log, batches=True)
    assert found == LogFile(len(SIZES), len(log), "", 1, 2 * len(SIZES) + 1)
    # Zeros: RocksDB allocates space in advance.
    assert read_log(log + bytes(5000), batches=True) == found
    assert read_log(log, batches=False).records == len(SIZES)
    assert read_log(b"", batches=True) == LogFile(0, 0, "", 0, 0)


def test_a_log_that_ends_anywhere_holds_what_comes_before(log: bytes) -> None:
    chance = random.Random(1)
    whole = [read_log(log[:at], batches=True).whole_bytes for at in range(0, len(log), 9973)]
    assert whole == sorted(whole)
    for _ in range(100):
        at = chance.randrange(len(log))
        found = read_log(log[:at], batches=True)
        assert found.whole_bytes <= at
        assert found.next <= 2 * len(SIZES) + 1
        torn = log[found.whole_bytes : at].strip(b"\0")
        assert bool(found.damage) == bool(torn)


def test_any_changed_byte_of_a_log_is_seen(log: bytes) -> None:
    chance = random.Random(2)
    places = [chance.randrange(len(log)) for _ in range(150)]
    places += [at for block in (0, BLOCK_BYTES, 5 * BLOCK_BYTES) for at in range(block, block + 19)]
    seen = 0
    for at in places:
        damaged = bytearray(log)
        damaged[at] ^= 1 << chance.randrange(8)
        found = read_log(bytes(damaged), batches=True)
        if found.damage:
            seen += 1
            assert found.whole_bytes <= at
        else:  # padding at the end of a block, which is not read
            assert at % BLOCK_BYTES >= BLOCK_BYTES - 6
    assert seen > 190


def log_of(first: int, count: int) -> LogFile:
    return LogFile(1 if count else 0, 100, "", first if count else 0, first + count if count else 0)


# logs by number, last flushed operation, last durable operation, the error
CHAINS = [
    ({4: log_of(1, 10)}, 0, 10, ""),
    ({4: log_of(1, 10)}, 0, 11, "operations 11 to 11 are missing"),
    ({4: log_of(1, 10), 6: log_of(11, 5)}, 0, 15, ""),
    ({4: log_of(1, 10), 6: log_of(11, 5)}, 8, 12, ""),
    ({4: log_of(1, 9), 6: log_of(11, 5)}, 0, 15, "operations 1 to 10 are missing"),
    # The tables contain operations 1 to 10.
    ({4: log_of(1, 9), 6: log_of(11, 5)}, 10, 15, ""),
    ({6: log_of(11, 5)}, 9, 15, "operations 10 to 10 are missing"),
    ({6: log_of(11, 5)}, 0, 15, "operations 1 to 10 are missing"),
    ({4: log_of(1, 10), 6: log_of(11, 0)}, 0, 12, "operations 11 to 12 are missing"),
    ({4: log_of(1, 10), 6: log_of(11, 0), 8: log_of(11, 2)}, 0, 12, ""),
    ({4: log_of(1, 0)}, 7, 7, ""),
    ({4: log_of(1, 0)}, 7, 9, "operations 8 to 9 are missing"),
    ({}, 7, 9, "operations 8 to 9 are missing"),
    ({}, 9, 9, ""),
]


@pytest.mark.parametrize(("logs", "flushed", "durable", "said"), CHAINS)
def test_logs_without_needed_operations_are_damaged(
    logs: dict[int, LogFile], flushed: int, durable: int, said: str
) -> None:
    assert log_damage(logs, flushed=flushed, durable=durable) == said


@given(st.lists(st.integers(0, 3), max_size=5), st.data())
def test_any_operation_that_is_missing_is_missed(sizes: list[int], data: st.DataObject) -> None:
    """Consecutive logs contain the operations from 1. One log is cut. The result is compared with a
    set of operation numbers."""
    logs, following = {}, 1
    for number, size in enumerate(sizes):
        logs[number] = log_of(following, size)
        following += size
    last = following - 1
    flushed = data.draw(st.integers(0, last))
    if sizes:
        number = data.draw(st.integers(0, len(sizes) - 1))
        kept = data.draw(st.integers(0, sizes[number]))
        logs[number] = log_of(logs[number].first, kept)
    held = {op for log in logs.values() for op in range(log.first, log.next)}
    missing = set(range(flushed + 1, last + 1)) - held
    assert bool(log_damage(logs, flushed=flushed, durable=last)) == bool(missing)


def test_the_watch_knows_up_to_where_tables_go(tmp_path: Path) -> None:
    storage = RocksStorage(tmp_path / "store", create=True)
    watch = ManifestWatch(tmp_path / "store", storage)
    fresh = watch.look()
    assert (fresh.number, fresh.flushed) == (current_manifest(tmp_path / "store"), 0)
    write_batches(storage, [100] * 5)
    assert watch.look() == fresh
    storage.flush()
    flushed = watch.look()
    assert flushed.size_bytes > fresh.size_bytes
    assert flushed.flushed == 10
    write_batches(storage, [100] * 3)
    assert watch.look() == flushed
    noted = Watermark(1, storage.sequence(), manifest=flushed)
    assert find_damage(tmp_path / "store", noted) == ""
    [log] = (tmp_path / "store").glob("*.log")
    whole = log.read_bytes()
    log.write_bytes(b"")
    assert "operations 11 to 16 are missing" in find_damage(tmp_path / "store", noted)
    log.write_bytes(whole)
    later = Watermark(1, 16, manifest=ManifestState(flushed.number, flushed.size_bytes + 1, 10))
    assert "bytes, had" in find_damage(tmp_path / "store", later)
    later = Watermark(1, 16, manifest=ManifestState(flushed.number + 1, 1, 10))
    assert "CURRENT names" in find_damage(tmp_path / "store", later)
    storage.flush()
    assert watch.look().flushed == 16
    storage.close()
    assert watch.settle()
    closed = Watermark(1, 16, closed=True, manifest=watch.look())
    watch.close()
    assert find_damage(tmp_path / "store", closed) == ""


def test_the_watermark_names_only_the_synced_part_of_the_manifest(tmp_path: Path) -> None:
    synced = {}

    def sync(file: int) -> None:
        found = os.fstat(file)
        synced[found.st_ino] = found.st_size

    storage = RocksStorage(tmp_path / "store", create=True)
    watch = ManifestWatch(tmp_path / "store", storage, sync=sync)
    for _ in range(3):
        noted = watch.look()
        manifest = tmp_path / "store" / f"MANIFEST-{noted.number:06}"
        assert synced[manifest.stat().st_ino] >= noted.size_bytes > 0
        write_batches(storage, [100])
        storage.flush()
    storage.close()
    watch.close()
