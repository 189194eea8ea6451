"""Run as a program: open a store, replaying its log, and close it. Exit status 0 if that worked.

A process of its own, because RocksDB may hang on damaged files while it holds the interpreter's
lock.
"""

from __future__ import annotations

import sys
from pathlib import Path

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.rocks import RocksStorage


def main(arguments: list[str]) -> int:
    try:
        RocksStorage(Path(arguments[0]), create=False).close()
    except StorageFailed as error:
        sys.stderr.write(f"{error.reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
