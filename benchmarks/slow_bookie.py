"""Runs a bookie of a local cluster with a slow disk: each sync takes SYNC_S seconds longer.

python -m benchmarks.slow_bookie CONFIG SYNC_S
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import tomllib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from magnetar.bookie.main import main
from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.local_process import answers_health

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

POLL_S = 0.05


@asynccontextmanager
async def running(config: Path, *, sync_s: float) -> AsyncIterator[None]:
    """Run the slow bookie as a process, with the configuration of a stopped bookie."""
    port = tomllib.loads(config.read_text())["http_port"]
    command = [sys.executable, "-m", "benchmarks.slow_bookie", str(config), str(sync_s)]
    with config.with_suffix(".slow.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not await asyncio.to_thread(answers_health, port):
            assert process.poll() is None, config.with_suffix(".slow.log").read_text()
            await asyncio.sleep(POLL_S)
        yield
    finally:
        process.kill()
        process.wait()


def slow_down(sync_s: float) -> None:
    """Delay every sync of this process, which runs only this bookie."""
    sync = RocksStorage.sync

    def slow(storage: RocksStorage) -> None:
        time.sleep(sync_s)
        sync(storage)

    RocksStorage.sync = slow  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    slow_down(float(sys.argv[2]))
    sys.exit(main(["--config", sys.argv[1]]))
