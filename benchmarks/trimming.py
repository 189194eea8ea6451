"""Measures the time that a publish takes while a topic's log drops 1,000 ledgers.

The ledgers and the metadata are in memory, so the benchmark measures the broker's own work: a long
step of the event loop delays every topic (python -m benchmarks.trimming).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fakes.cluster_state import ClusterState
from fakes.topic_log import SMALL, opened

from magnetar.broker.log.position import LATEST

LEDGERS = 1_000
ENTRIES = 1_500  # the second half of the ledgers has two entries each (broker/log/record_limits.py)
TINY = replace(SMALL, ledger_entries_max=1, check_interval_s=60.0)
LARGE = replace(SMALL, ledger_entries_max=1_000_000, check_interval_s=60.0)
TARGET_MS = 50.0


async def measure() -> tuple[float, float, float]:
    """Return the longest publish in ms without and with a trim, and the seconds of the trim."""
    world = ClusterState()
    async with opened(world, config=TINY) as topic:
        topic.append_run(*[f"m{number}" for number in range(ENTRIES)])
        while len(topic.appended) < ENTRIES:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    async with opened(world, config=LARGE) as topic:
        await topic.append_and_wait("first")

        async def longest(seconds: float) -> float:
            worst, end_s = 0.0, time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                began_s = time.thread_time()  # other processes do not count
                expected = len(topic.appended) + 1
                topic.append("m")
                while len(topic.appended) < expected:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                worst = max(worst, time.thread_time() - began_s)
            return worst * 1e3

        before_ms = await longest(0.5)
        dropped = topic.log.drop_through(LATEST)
        assert dropped >= LEDGERS, dropped
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(longest(2.0))
            await topic.log.wait_dropped(LATEST)
            while topic.log.owned_record.record.deleting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            trim_s = time.perf_counter() - began_s
        during_ms = publishing.result()
    return before_ms, during_ms, trim_s


def main() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        before_ms, during_ms, trim_s = asyncio.run(measure())
        print(
            f"longest publish: {before_ms:.1f} ms; while {LEDGERS} ledgers are dropped:"
            f" {during_ms:.1f} ms (target: below {TARGET_MS:.0f} ms)"
        )
        print(f"dropped and deleted within {trim_s:.2f} s")


if __name__ == "__main__":
    main()
