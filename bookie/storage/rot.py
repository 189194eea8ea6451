"""A table that RocksDB could not read, remembered for the next start.

RocksDB meets a rotten block of a table when it is read, which costs a reader that entry, or when it
compacts the table. Then it refuses every write from there on and the bookie ends; started again, it
would open, compact, and end again, for ever. So what ends it is noted, and the next start takes the
store for what it is: damaged. A scrub that cannot list the ledgers, over a block with their
records, ends it likewise (bookie/scrub.py). Values in blob files are not meant: a compaction meets
them only when space is given back (bookie/reclaimer.py), and a scrub finds them one at a time.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from magnetar.bookie.storage.layout import ROTTEN, sync_directory, unusable
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from magnetar.bookie.errors import StorageFailed

log = get_logger(__name__)

_TABLE: Final = re.compile(r"Corruption: .* in \S*\.sst\b", re.DOTALL)


def is_rot(error: StorageFailed) -> bool:
    """Whether it names a table whose content is not what was written."""
    return _TABLE.search(error.reason) is not None


def note_rot(path: Path, incarnation: str, error: StorageFailed) -> None:
    """For the next start, if `error` is rot. That it cannot be noted is logged: then the next start
    ends like this one, and notes it."""
    if not is_rot(error):
        return
    try:
        with open(path / ROTTEN, "w") as file:
            file.write(f"{incarnation}\n{error.reason}\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path)
    except OSError as trouble:
        log.error("rot not noted", directory=str(path), error=str(trouble))


def noted_rot(path: Path, incarnation: str) -> str | None:
    """What was noted of this incarnation's store. Raises DirectoryUnusable."""
    try:
        of, _, reason = (path / ROTTEN).read_text(errors="replace").partition("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error) from error
    return reason.strip() if of == incarnation else None
