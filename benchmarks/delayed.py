"""Measures a million delayed entries in the index of one subscription: memory and CPU.

The delays are fixed, or random within an hour. The benchmark takes entries in lists of 100, as a
dispatcher does, and asserts that each comes at its delivery time. It also measures the segments
that a broker stores, and their recovery by the next owner. All times are CPU time. Run it with
`python -m benchmarks.delayed`.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Final

from magnetar.broker.dispatch.delayed_index import DelayedIndex
from magnetar.broker.dispatch.delayed_segment import decode_segment, encode_segment
from magnetar.broker.log.position import Position

ENTRIES: Final = 1_000_000
LEDGER_ENTRIES: Final = 50_000
LIST: Final = 100
HOUR_MS: Final = 3_600_000


def delays(kind: str, count: int) -> list[int]:
    chance = random.Random(1)
    if kind == "fixed":
        return [HOUR_MS + number for number in range(count)]
    return [number + chance.randrange(HOUR_MS) for number in range(count)]


def fill(index: DelayedIndex, due_ms: list[int]) -> None:
    for number, due in enumerate(due_ms):
        index.add(Position(number // LEDGER_ENTRIES, number % LEDGER_ENTRIES), due)


def measure(kind: str) -> None:
    due_ms = delays(kind, ENTRIES)
    index = DelayedIndex()
    began_s = time.thread_time()
    fill(index, due_ms)
    filled_s = time.thread_time()
    slowest_s, taken, now_ms = 0.0, 0, 0
    while taken < ENTRIES:
        step_s = time.thread_time()
        now_ms = index.next_due_ms or 0
        positions = index.take_due(now_ms, LIST)
        slowest_s = max(slowest_s, time.thread_time() - step_s)
        for at in positions:
            assert due_ms[at.ledger * LEDGER_ENTRIES + at.entry] == now_ms, "early or late"
        taken += len(positions)
    taken_s = time.thread_time()
    assert not index
    us_add, us_take = (
        (b - a) * 1e6 / ENTRIES for a, b in ((began_s, filled_s), (filled_s, taken_s))
    )
    print(
        f"{kind} delays: add {us_add:.1f} us, take {us_take:.1f} us each; "
        f"longest take of {LIST}: {slowest_s * 1e3:.1f} ms"
    )


def memory(kind: str) -> None:
    due_ms = delays(kind, ENTRIES)
    tracemalloc.start()
    index = DelayedIndex()
    fill(index, due_ms)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{kind} delays: {used / len(index):.1f} bytes each, {used / 1e6:.0f} MB together")


def stored(kind: str) -> None:
    """Measure the segments that a broker writes, and the index that the next owner restores."""
    index, segments = DelayedIndex(), []
    index.on_sealed = lambda run: segments.append(encode_segment("subscription", run.left()))
    began_s = time.thread_time()
    fill(index, delays(kind, ENTRIES))
    filled_s = time.thread_time()
    again, slowest_s = DelayedIndex(), 0.0
    for data in segments:
        step_s = time.thread_time()
        again.restore(decode_segment(data).items)
        slowest_s = max(slowest_s, time.thread_time() - step_s)
    restored_s = time.thread_time() - filled_s
    size = sum(map(len, segments))
    print(
        f"{kind} delays, stored: {size / len(again):.1f} bytes each, add with encoding"
        f" {(filled_s - began_s) * 1e6 / ENTRIES:.1f} us each, restored in {restored_s:.1f} s"
        f" ({len(again)} of {ENTRIES}), longest step {slowest_s * 1e3:.1f} ms"
    )


def main() -> None:
    for kind in ("fixed", "random"):
        measure(kind)
        memory(kind)
        stored(kind)


if __name__ == "__main__":
    main()
