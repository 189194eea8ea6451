"""Run as a program: open a store, and close it. Exit status 0 if that worked; DAMAGED if the store
is to blame, and the last line of what it says is the reason. Any other status is the trouble of
this program itself, and tells nothing of the store.

    whole STORE SEQUENCE   nothing may be missing from the store up to that operation: first opened
                           without writing to it, then once more, which replays its log
    salvage VIEW           whatever can be read of a damaged one (former.py)
    means                  no store at all: may a process have what opening one takes?

A process of its own, because RocksDB may hang or crash on damaged files while it holds the
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

# What eight memtables take, and as much again for blocks, buffers, libraries and threads' stacks.
MEMORY_BYTES: Final = 1 << 30
THREADS: Final = 16
DAMAGED: Final = 65  # EX_DATAERR of sysexits.h; an exception that nobody catches ends with 1


def check_sequence(found: int, durable: int) -> None:
    """Raises StorageFailed: the store has lost what was on disk."""
    if found < durable:
        raise StorageFailed(
            "open",
            f"{found} operations instead of the {durable} that were on disk: "
            "its log has lost its end",
        )


def check_means() -> None:
    """Raises what there is too little of. Costs nothing: what is not touched is only reserved."""
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
