"""Reads the lines of a file or of standard input as they arrive."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from typing import Final, Self

from magnetar.protos.entry import MESSAGE_BYTES_MAX

STDIN: Final = "-"
READ_BYTES: Final = 64 << 10


class LineSource:
    """Reads the lines of a file without their line ends, at most READ_BYTES ahead.

    As soon as a line exceeds the maximum message size, `read` returns the part that it has read,
    and the producer refuses this part. So the memory for a line is bounded.
    """

    def __init__(self, path: str) -> None:
        """Open the file `path`; "-" is standard input. Raises OSError."""
        self._own = path != STDIN
        self._fd = os.open(path, os.O_RDONLY) if self._own else sys.stdin.fileno()
        self._lines: deque[bytes] = deque()
        self._rest = b""  # the beginning of a line whose end has not been read yet
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own:
            os.close(self._fd)

    async def read(self, lines_max: int) -> list[bytes]:
        """Return at least one line, and further lines if they were read together. []: the end of
        the file. Raises OSError."""
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
        """Wait until a terminal or a pipe has data. A regular file is always ready."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._fd, readable.set)
        except PermissionError:  # epoll does not accept regular files
            return
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._fd)
