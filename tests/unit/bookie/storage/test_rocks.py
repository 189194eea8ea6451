"""RocksDB on damaged files. Damage must cause an error or a smaller sequence number. A damaged
store must never open as an empty store."""

from __future__ import annotations

import os
import shutil
import struct
import threading
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import crash_image

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import entry_key, ledger_key
from magnetar.bookie.storage.rocks import RocksStorage

if TYPE_CHECKING:
    from pathlib import Path

ENTRIES = 20
LOG_RECORD = struct.Struct("<IHB")  # crc, length, type: RocksDB's own


def value(entry: int) -> bytes:
    return b"value of %d " % entry * 50


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The directory of a killed process. Its log contains ENTRIES synced writes."""
    storage = RocksStorage(tmp_path / "live", create=True)
    for entry in range(ENTRIES):
        storage.write([(entry_key(1, entry), value(entry))])
    storage.sync()
    assert storage.sequence() == ENTRIES
    crash_image(tmp_path / "live", tmp_path / "image")
    storage.close()
    return tmp_path / "image"


def log_of(image: Path) -> Path:
    return max(image.glob("*.log"))


def records(log: bytes) -> list[int]:
    """The offsets at which the records of the log begin."""
    found, at = [], 0
    while at + LOG_RECORD.size <= len(log):
        _, size, kind = LOG_RECORD.unpack_from(log, at)
        if kind == 0:
            break
        found.append(at)
        at += LOG_RECORD.size + size
    return found


def entries_of(image: Path) -> tuple[list[int], int]:
    storage = RocksStorage(image, create=False)
    found = storage.entry_ids(1, 0, entries_max=1000)
    assert all(storage.entry(1, entry) == value(entry) for entry in found)
    sequence = storage.sequence()
    storage.close()
    return found, sequence


def test_a_log_cut_anywhere_keeps_a_prefix_and_shows_a_smaller_sequence(
    image: Path, tmp_path: Path
) -> None:
    log = log_of(image).read_bytes()
    starts = [*records(log), len(log)]
    for record in (0, 1, ENTRIES // 2, ENTRIES - 1):
        for cut in (starts[record], starts[record] + 3, starts[record] + 9, starts[record + 1] - 1):
            copy = tmp_path / f"cut-{cut}"
            shutil.copytree(image, copy)
            log_of(copy).write_bytes(log[:cut])
            assert entries_of(copy) == (list(range(record)), record)


@pytest.mark.parametrize("record", [0, ENTRIES // 2, ENTRIES - 1])
@pytest.mark.parametrize(("offset", "flip"), [(0, 1), (4, 1), (6, 1), (7, 1), (20, 1), (200, 0x80)])
def test_a_flipped_bit_in_the_log_refuses_to_open(
    image: Path, record: int, offset: int, flip: int
) -> None:
    log = bytearray(log_of(image).read_bytes())
    log[records(bytes(log))[record] + offset] ^= flip
    log_of(image).write_bytes(bytes(log))
    with pytest.raises(StorageFailed, match="open: Corruption"):
        RocksStorage(image, create=False)


@pytest.mark.parametrize("record", [0, ENTRIES // 2, ENTRIES - 1])
def test_a_grown_length_field_opens_with_a_smaller_sequence_than_the_watermark(
    image: Path, record: int
) -> None:
    log = bytearray(log_of(image).read_bytes())
    log[records(bytes(log))[record] + 5] ^= 0x40  # the record now claims to end beyond the log
    log_of(image).write_bytes(bytes(log))
    assert entries_of(image) == (list(range(record)), record)


def flush(path: Path, *, size: int) -> None:
    """A store with 20 entries of `size` bytes in a table or a blob file, not in the log."""
    storage = RocksStorage(path, create=True)
    storage.write([(ledger_key(1), b"record")])
    storage.write([(entry_key(1, entry), bytes([entry]) * size) for entry in range(20)])
    storage.close()  # the close flushes the entries


@pytest.mark.parametrize(("size", "suffix"), [(1000, "sst"), (10_000, "blob")])
def test_an_unreadable_value_is_an_error_and_not_an_absence(
    tmp_path: Path, size: int, suffix: str
) -> None:
    flush(tmp_path / "store", size=size)
    (file,) = (tmp_path / "store").glob(f"*.{suffix}")
    content = bytearray(file.read_bytes())
    at = content.index(bytes([10]) * size) + size // 2
    content[at] ^= 1
    file.write_bytes(bytes(content))
    storage = RocksStorage(tmp_path / "store", create=False)
    for read in (
        lambda: storage.entry(1, 10),
        lambda: storage.run(1, 10, 12, bytes_max=10**6, entries_max=10),
        lambda: storage.run(1, 0, 19, bytes_max=10**6, entries_max=100),
        lambda: storage.entry_ids(1, 0, entries_max=100),
    ):
        with pytest.raises(StorageFailed, match="read: Corruption"):
            read()
    storage.close()


@pytest.mark.parametrize("suffix", ["sst", "blob"])
def test_a_missing_file_refuses_to_open_or_to_read(tmp_path: Path, suffix: str) -> None:
    flush(tmp_path / "store", size=10_000)
    (file,) = (tmp_path / "store").glob(f"*.{suffix}")
    file.unlink()
    with pytest.raises(StorageFailed):
        RocksStorage(tmp_path / "store", create=False).entry(1, 10)


def test_opening_a_missing_store_creates_none(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="no store"):
        RocksStorage(tmp_path / "store", create=False)
    assert not (tmp_path / "store").exists()


def test_a_second_open_of_a_store_is_refused(tmp_path: Path) -> None:
    storage = RocksStorage(tmp_path / "store", create=True)
    with pytest.raises(StorageFailed, match="lock"):
        RocksStorage(tmp_path / "store", create=False)
    storage.close()


def test_every_call_after_a_close_is_a_typed_error(tmp_path: Path) -> None:
    storage = RocksStorage(tmp_path / "store", create=True)
    storage.close()
    for call in (
        storage.sync,
        storage.sequence,
        storage.close,
        lambda: storage.write([(ledger_key(1), b"r")]),
        lambda: storage.entry(1, 0),
        lambda: storage.last_entry(1),
        lambda: storage.ledgers(-1, ledgers_max=1),
    ):
        with pytest.raises(StorageFailed):
            call()


def test_a_reclaim_that_is_interrupted_leaves_a_whole_store(tmp_path: Path) -> None:
    storage = RocksStorage(tmp_path / "store", create=True)
    for ledger in range(20):
        storage.write([(entry_key(ledger, entry), os.urandom(50_000)) for entry in range(20)])
    storage.sync()
    for ledger in range(1, 20):
        storage.delete_ledger(ledger, None)

    def reclaim() -> None:
        while not storage._interrupted:
            storage.reclaim(0, 20)

    thread = threading.Thread(target=reclaim)
    thread.start()
    while not storage._interrupted:
        storage.interrupt()
    thread.join()
    storage.close()
    storage = RocksStorage(tmp_path / "store", create=False)
    assert storage.entry_ids(0, 0, entries_max=100) == list(range(20))
    assert storage.entry_ids(1, 0, entries_max=100) == []
    storage.close()


def test_pressure_grows_before_writes_stop(tmp_path: Path) -> None:
    storage = RocksStorage(tmp_path / "store", create=True)
    storage._store.set_options({"disable_auto_compactions": "true"})
    assert storage.pressure() == 0
    for entry in range(48):
        storage.write([(entry_key(1, entry), b"x")])
        storage._store.flush(True)
    assert storage.pressure() == 1
    storage.close()


def test_a_flush_syncs_in_steps(tmp_path: Path) -> None:
    """RocksDB writes its options to a file. Without these options, a sync of the log waits for all
    pages of a flush."""
    storage = RocksStorage(tmp_path / "store", create=True)
    newest = max((tmp_path / "store").glob("OPTIONS-*"))
    options = dict(
        line.strip().split("=", 1) for line in newest.read_text().splitlines() if "=" in line
    )
    storage.close()
    assert options["strict_bytes_per_sync"] == "true"
    assert int(options["bytes_per_sync"]) == 1 << 20
