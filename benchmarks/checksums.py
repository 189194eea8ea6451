"""Measures the cost of RocksDB's checksums for a range read: `python -m benchmarks.checksums`.

Reads the same values from the kernel's cache with and without checks. The figure without checks is
a lower limit: a build of rocksdict with the CPU's CRC32C comes close to it (docs/sizing.md). The
last line is from RocksDB's log and says whether this build has it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from rocksdict import Options, Rdict, ReadOptions

TOTAL_BYTES = 256 << 20
ROUNDS = 5


def read_ms_per_mb(store: Rdict, *, verify: bool) -> float:
    """Return the CPU milliseconds per MB of one pass over all values."""
    options = ReadOptions()
    options.set_verify_checksums(verify)
    began_s, size = time.process_time(), 0
    cursor = store.iter(options)
    cursor.seek_to_first()
    while cursor.valid():
        size += len(cursor.value())
        cursor.next()
    return (time.process_time() - began_s) * 1e3 / (size / 1e6)


def measure(folder: Path, value_bytes: int) -> tuple[float, float]:
    """Return the lowest figure of several rounds, with checks and without."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_enable_blob_files(True)
    options.set_min_blob_size(4096)
    store = Rdict(str(folder), options)
    value = os.urandom(value_bytes)
    for number in range(TOTAL_BYTES // value_bytes):
        store.put(b"%016d" % number, value)
    store.flush()
    rounds = [[read_ms_per_mb(store, verify=each) for each in (True, False)] for _ in range(ROUNDS)]
    store.close()
    return min(each[0] for each in rounds), min(each[1] for each in rounds)


def report() -> None:
    for value_bytes in (1024, 65_536):
        with tempfile.TemporaryDirectory(prefix="magnetar-checksums-") as folder:
            checked, unchecked = measure(Path(folder), value_bytes)
            said = (Path(folder) / "LOG").read_text().splitlines()
        print(
            f"values of {value_bytes} B: {checked:.2f} ms of CPU per MB with checks,"
            f" {unchecked:.2f} without"
        )
    print(next(line.split(" ", 2)[2] for line in said if "Fast CRC32" in line))


if __name__ == "__main__":
    report()
