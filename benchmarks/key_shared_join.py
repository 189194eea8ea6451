"""Measures a consumer that joins a Key_Shared subscription with many pending entries.

Nothing else runs on the broker's loop while the dispatcher finds the pending entries of the slots
that move, and registers them as draining. CPU time of the dispatcher alone, with one entry for each
key: `python -m benchmarks.key_shared_join`.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import TYPE_CHECKING, Any, Final, cast

from magnetar.broker.dispatch.delayed import DelayPolicy, Delays
from magnetar.broker.dispatch.dispatcher import Environment, Read
from magnetar.broker.dispatch.draining import DrainingHashes
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.permits import UNLIMITED, Consumer, Limits
from magnetar.broker.dispatch.positions import PositionMap
from magnetar.broker.dispatch.sticky_hash import SLOTS
from magnetar.broker.log.entry import StoredEntry
from magnetar.broker.log.position import EARLIEST, Position

if TYPE_CHECKING:
    from magnetar.broker.dispatch.dispatcher import Action

LIST: Final = 100
LEDGER_ENTRIES: Final = 50_000


class _View:
    """What a dispatcher reads of an entry."""

    num_messages = 1
    is_batch = False
    chunk = None
    ordering_key = None
    partition_key_b64 = False
    deliver_at_ms = None

    def __init__(self, number: int) -> None:
        self.partition_key = f"key-{number}"


class _NothingAcked:
    mark_delete = highest_acked = EARLIEST

    def is_acked(self, position: Position) -> bool:
        return False

    def first_unacked(self, position: Position) -> Position:
        return position


def dispatcher() -> KeyShared:
    limits = Limits(unacked_per_consumer=UNLIMITED, unacked_per_subscription=UNLIMITED)
    delays = Delays(DelayPolicy(), lambda _: 0)
    last = Position(1 << 40, 0)
    acks = cast("Any", _NothingAcked())
    return KeyShared(
        Environment("s", acks, lambda: last, limits, cast("Any", PositionMap()), delays)
    )


def join(machine: KeyShared, number: int) -> float:
    """Seconds of the step."""
    consumer = Consumer(f"c{number}", 0, lambda: True, machine._limits, join_number=number)
    began_s = time.thread_time()
    machine.add_consumer(consumer, 0.0)
    step_s = time.thread_time() - began_s
    carry_out(machine, machine.on_flow(consumer, 1 << 30, 0.0))
    return step_s


def carry_out(machine: KeyShared, actions: list[Action]) -> None:
    """The log has nothing."""
    while any(isinstance(action, Read) for action in actions):
        actions = []


def fill(machine: KeyShared, count: int) -> float:
    """Deliver so many entries. Returns the microseconds of an entry."""
    began_s = time.thread_time()
    for first in range(0, count, LIST):
        entries = [
            StoredEntry(
                Position(number // LEDGER_ENTRIES, number % LEDGER_ENTRIES),
                number,
                0,
                cast("Any", _View(number)),
            )
            for number in range(first, min(first + LIST, count))
        ]
        machine.on_entries(entries, 0.0)
    return (time.thread_time() - began_s) * 1e6 / count


def measure(pending: int, consumers: int) -> None:
    machine = dispatcher()
    for number in range(consumers):
        join(machine, number)
    fill_us = fill(machine, pending)
    joins = [join(machine, number) for number in range(consumers, consumers + 3)]
    draining = len(machine._draining)
    leaver = machine._consumers[0]
    began_s = time.thread_time()
    machine.remove_consumer(leaver, 0.0)
    leave_s = time.thread_time() - began_s
    shown = ", ".join(f"{step_s * 1e3:.1f}" for step_s in joins)
    print(
        f"{pending} pending, {consumers} consumers: joins {shown} ms, leave {leave_s * 1e3:.1f} ms,"
        f" dispatch {fill_us:.2f} us an entry; {draining} hashes drain"
    )


def measure_memory() -> None:
    consumer = Consumer("c", 0, lambda: True, Limits())
    counts = dict.fromkeys(range(1, SLOTS), 1)
    tracemalloc.start()
    draining = DrainingHashes()
    before, _ = tracemalloc.get_traced_memory()
    draining.register(consumer, counts)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{len(draining)} draining hashes: {(after - before) / 1e6:.1f} MB")


def main() -> None:
    for pending in (60_000, 100_000):
        for consumers in (1, 10, 100):
            measure(pending, consumers)
    measure_memory()


if __name__ == "__main__":
    main()
