"""A program that tries to open and close a store.

Exit status 0: success. DAMAGED: the store is damaged, and the last line of the output is the
reason. Any other status is a failure of this program, and says nothing about the store.

    whole STORE SEQUENCE   check that STORE lacks no operation up to SEQUENCE: open it
                           read-only, then again with a replay of its log
    salvage VIEW           VIEW is a directory of links to the files of a damaged store (former.py):
                           open everything that can be read of the store
    means                  open no store; check that a process gets the resources to open one

It is a separate process because RocksDB may hang or crash on damaged files while it holds the
interpreter's lock.
"""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path
from typing import Final

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.rocks import RocksStorage

# The memory of eight memtables, and the same again for blocks, buffers, libraries and stacks.
MEMORY_BYTES: Final = 1 << 30
THREADS: Final = 16
DAMAGED: Final = 65  # EX_DATAERR of sysexits.h; an uncaught exception ends with 1


def check_sequence(found: int, durable: int) -> None:
    """Raise StorageFailed if the store has lost operations that were on disk."""
    if found < durable:
        raise StorageFailed(
            "open",
            f"{found} operations instead of the {durable} that were on disk: the log lost its end",
        )


def check_means() -> None:
    """Raise an error if the process cannot get the memory or the threads. The check is cheap,
    because untouched memory is only reserved."""
    mmap.mmap(-1, MEMORY_BYTES).close()
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(THREADS)]
    try:
        for thread in threads:
            thread.start()
    finally:
        done.set()


def main(arguments: list[str]) -> int:
    if arguments == ["means"]:
        check_means()
        return 0
    kind, path, *rest = arguments
    directory = Path(path)
    try:
        if kind == "salvage":
            RocksStorage.open_read_only(directory, salvage=True).close()
        else:
            storage = RocksStorage.open_read_only(directory, salvage=False)
            try:
                check_sequence(storage.sequence(), int(rest[0]))
            finally:
                storage.close()
            RocksStorage(directory, create=False).close()
    except StorageFailed as error:
        sys.stderr.write(f"{error.reason}\n")
        return DAMAGED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
