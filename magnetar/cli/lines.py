"""Lines of a file or of standard input, as they come."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from magnetar.protos.entry import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from pathlib import Path

STDIN: Final = "-"
READ_BYTES: Final = 64 << 10


class LineSource:
    """Gives the lines of a file without their line ends, and never more than one read ahead.

    A line that exceeds the maximum message size is given in full as soon as the excess is seen, so
    that the producer refuses it; the memory that a line takes is bounded by that.
    """

    def __init__(self, path: Path) -> None:
        """`path`: "-" is standard input. Raises OSError."""
        self._own = str(path) != STDIN
        self._fd = os.open(path, os.O_RDONLY) if self._own else sys.stdin.fileno()
        self._lines: deque[bytes] = deque()
        self._rest = b""  # a line whose end has not come yet
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own:
            os.close(self._fd)

    async def read(self, lines_max: int) -> list[bytes]:
        """At least one line, and what else is there by now; []: the end. Raises OSError."""
        while not self._lines and not self._ended:
            await self._wait_readable()
            self._take(os.read(self._fd, READ_BYTES))
        return [self._lines.popleft() for _ in range(min(lines_max, len(self._lines)))]

    def _take(self, data: bytes) -> None:
        if not data:
            self._ended = True
            if self._rest:
                self._lines.append(self._rest)
            return
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._lines.extend(line.removesuffix(b"\r") for line in whole)
        if len(self._rest) > MESSAGE_BYTES_MAX:
            self._lines.append(self._rest)
            self._rest = b""

    async def _wait_readable(self) -> None:
        """Wait for a terminal or a pipe; a regular file is always ready."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._fd, readable.set)
        except PermissionError:  # epoll takes no regular files
            return
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._fd)
