"""Notes a table that RocksDB could not read, for the next start.

RocksDB finds a damaged block of a table when it reads an entry, or when it compacts the table.
After a failed read of an entry, the bookie continues. After a failed compaction, RocksDB refuses
every write, and the bookie ends. Without a note the bookie would start, compact and end again and
again. So the bookie notes the cause, and the next start treats the store as damaged. A scrub that
cannot list the ledgers because of a damaged block also notes the cause and ends the bookie
(bookie/scrub.py). Damaged values in blob files are a separate case. A compaction meets them only
when space is reclaimed (bookie/reclaimer.py), and a scrub finds them one at a time.
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
    """Return whether the error names a table with corrupted content."""
    return _TABLE.search(error.reason) is not None


def note_rot(path: Path, incarnation: str, error: StorageFailed) -> None:
    """Note `error` for the next start, if it is rot. A failed write of the note is only logged. The
    next start then ends with the same error, and tries to write the note again."""
    if not is_rot(error):
        return
    try:
        with open(path / ROTTEN, "w") as file:
            file.write(f"{incarnation}\n{error.reason}\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path)
    except OSError as trouble:
        log.error("damaged table not noted", directory=str(path), error=str(trouble))


def noted_rot(path: Path, incarnation: str) -> str | None:
    """Return the note about this incarnation's store; None: there is none. Raises
    DirectoryUnusable."""
    try:
        of, _, reason = (path / ROTTEN).read_text(errors="replace").partition("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error) from error
    return reason.strip() if of == incarnation else None
