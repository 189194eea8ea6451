"""Returns free memory to the system.

glibc keeps freed memory for later allocations of the process: after a burst of publishes a broker
would keep hundreds of megabytes until it ends. `trim` returns free pages. Other C libraries lack
this call; with them `trim` does nothing.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def trim() -> bool:
    """Give free memory back to the system. Returns whether there was any. This takes some
    milliseconds for each 100 MB, so call `trim` on a thread: it does not hold the
    interpreter's lock."""
    found = _malloc_trim()
    return found is not None and bool(found(0))


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return malloc_trim of the C library. None: the C library is not glibc."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found
