"""Starts of a bookie's directory that a kill ends before a given operation on the files.

The program reads lines "PATH METADATA STEP". It runs each start in a new child process, which it
forks before any thread exists, and prints the child's exit status.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from magnetar.bookie.storage.directory import open_directory
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_cookie
from magnetar.metadata.embedded import EmbeddedStore
from magnetar.metadata.model import BookieId

if TYPE_CHECKING:
    from magnetar.bookie.storage.directory import DataDirectory

KILLED = 9
_STEPS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


async def start_embedded(path: Path, metadata: Path, *, seed: int) -> tuple[DataDirectory, str]:
    """Start, close the directory, and return the incarnation that the cookie names."""
    store = await EmbeddedStore.open(metadata)
    try:
        directory = await open_directory(
            path, bookie="b1", metadata=store, chance=random.Random(seed), new_incarnation=True
        )
        stored = await store.get(paths.bookie_cookie(BookieId("b1")))
        assert stored is not None
        return directory, decode_bookie_cookie(stored.value).incarnation
    finally:
        await store.close()


class Starter:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def start_and_die(self, path: Path, metadata: Path, *, at_step: int) -> bool:
        """Return whether the start reached that step. If not, the start was complete."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{path} {metadata} {at_step}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        assert status in (0, KILLED), status
        return status == KILLED

    def close(self) -> None:
        self._process.communicate(timeout=60)


def _start(path: Path, metadata: Path, *, at_step: int) -> int:
    child = os.fork()
    if child == 0:
        steps = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal steps
            if event in _STEPS and any(str(each).startswith(str(path)) for each in arguments):
                steps += 1
                if steps == at_step:
                    os._exit(KILLED)

        sys.addaudithook(count)
        try:
            asyncio.run(start_embedded(path, metadata, seed=at_step))
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    for line in sys.stdin:
        path, metadata, step = line.split()
        print(_start(Path(path), Path(metadata), at_step=int(step)), flush=True)
