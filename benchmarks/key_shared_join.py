"""Measures consumers that join and leave a Key_Shared subscription with many pending entries.

The dispatcher finds the pending entries of the slots that move, and registers them as draining.
Meanwhile nothing else runs on the broker's loop, so no step should take more than 20 ms. The
benchmark also measures a consumer that asks for the redelivery of all its entries, and the expiry
of all entries. The figures are the CPU time of the dispatcher alone, with one entry for each key.
Run it with `python -m benchmarks.key_shared_join`.

The benchmark also prints the cost of the tracker of draining hashes while no hash drains. A
dispatcher with the tracker and a dispatcher without it take turns. The cost should be 2 % at most.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from statistics import median
from typing import TYPE_CHECKING, Any, Final, cast

from magnetar.broker.cursor.redeliveries import Redeliveries
from magnetar.broker.dispatch.delayed import DelayPolicy, Delays
from magnetar.broker.dispatch.dispatcher import Environment, Read
from magnetar.broker.dispatch.draining import DrainingHashes
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.permits import UNLIMITED, Consumer, Limits
from magnetar.broker.dispatch.sticky_hash import SLOTS
from magnetar.broker.log.entry import StoredEntry
from magnetar.broker.log.position import EARLIEST, Position

if TYPE_CHECKING:
    from magnetar.broker.dispatch.dispatcher import Action

LIST: Final = 100
LEDGER_ENTRIES: Final = 50_000


class View:
    """The part of an entry that a dispatcher reads."""

    num_messages = 1
    is_batch = False
    chunk = None
    ordering_key = None
    partition_key_b64 = False
    deliver_at_ms = None

    def __init__(self, number: int) -> None:
        self.partition_key = f"key-{number}"


class NothingAcked:
    mark_delete = highest_acked = EARLIEST

    def is_acked(self, position: Position) -> bool:
        return False

    def first_unacked(self, position: Position) -> Position:
        return position


class _NoTracker:
    references = ()

    def __bool__(self) -> bool:
        return False


def dispatcher() -> KeyShared:
    limits = Limits(unacked_per_consumer=UNLIMITED, unacked_per_subscription=UNLIMITED)
    delays, redeliveries = Delays(DelayPolicy(), lambda _: 0), Redeliveries(lambda: None)
    last = Position(1 << 40, 0)
    acks = cast("Any", NothingAcked())
    return KeyShared(Environment("s", acks, lambda: last, limits, redeliveries, delays))


def join(machine: KeyShared, number: int) -> float:
    """Add a consumer, and give it permits. Return the CPU seconds of the first step."""
    consumer = Consumer(f"c{number}", 0, lambda: True, machine._limits, join_number=number)
    began_s = time.thread_time()
    machine.add_consumer(consumer, 0.0)
    step_s = time.thread_time() - began_s
    carry_out(machine, machine.on_flow(consumer, 1 << 30, 0.0))
    return step_s


def carry_out(machine: KeyShared, actions: list[Action]) -> None:
    """Carry out the actions. The log has no entries, so a Read needs no answer."""
    while any(isinstance(action, Read) for action in actions):
        actions = []


def fill(machine: KeyShared, count: int) -> float:
    """Deliver `count` entries. Return the CPU microseconds per entry."""
    began_s = time.thread_time()
    for first in range(0, count, LIST):
        entries = [
            StoredEntry(
                Position(number // LEDGER_ENTRIES, number % LEDGER_ENTRIES),
                number,
                0,
                cast("Any", View(number)),
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
    steps = leave(machine)
    shown = ", ".join(f"{step_s * 1e3:.1f}" for step_s in joins)
    print(
        f"{pending} pending, {consumers} consumers: joins {shown} ms, longest of {len(steps)} steps"
        f" of a leave {max(steps) * 1e3:.1f} ms (together {sum(steps) * 1e3:.0f} ms), dispatch"
        f" {fill_us:.2f} us an entry; {draining} hashes drain"
    )


def measure_waiting(count: int) -> None:
    """Measure a join and a leave while the entries of a consumer that has left wait for the only
    other consumer."""
    machine = dispatcher()
    join(machine, 0)
    fill(machine, count)
    join(machine, 1)
    leave(machine)
    waiting = machine.waiting
    steps = [join(machine, 2), *parts(machine)]
    left = leave(machine)
    print(
        f"{waiting} waiting, 1 consumer: longest of {len(steps)} steps of a join"
        f" {max(steps) * 1e3:.1f} ms (together {sum(steps) * 1e3:.0f} ms), of {len(left)} steps of"
        f" a leave {max(left) * 1e3:.1f} ms"
    )


def measure_redelivery(count: int) -> None:
    """The only consumer asks for all its entries again. Then the broker expires them all."""
    steps: list[float] = []
    for expires in (False, True):
        machine = dispatcher()
        join(machine, 0)
        fill(machine, count)
        [consumer] = machine._consumers
        began_s = time.thread_time()
        if expires:
            machine.on_acked_through(Position(1 << 40, 0), 0.0)
            expiry_s = time.thread_time() - began_s
        else:
            machine.on_redeliver(consumer, None, 0.0)
            steps = [time.thread_time() - began_s, *parts(machine)]
            assert machine.waiting == count
    print(
        f"{count} pending, 1 consumer: longest of {len(steps)} steps of a redelivery of all"
        f" {max(steps) * 1e3:.1f} ms (together {sum(steps) * 1e3:.0f} ms), expiry of all"
        f" {expiry_s * 1e3:.1f} ms"
    )


def leave(machine: KeyShared) -> list[float]:
    """Remove the first consumer. Return the seconds of each step until its entries are back."""
    began_s = time.thread_time()
    machine.remove_consumer(machine._consumers[0], 0.0)
    return [time.thread_time() - began_s, *parts(machine)]


def parts(machine: KeyShared) -> list[float]:
    """Run the remaining steps of a join or a leave. Return the seconds of each."""
    steps = []
    while (now := machine.next_timer()) is not None:
        began_s = time.thread_time()
        machine.on_timer(now)
        steps.append(time.thread_time() - began_s)
    return steps


def cycle(machine: KeyShared, entries: list[StoredEntry]) -> float:
    """Dispatch the entries and acknowledge each alone. Return the CPU seconds."""
    [consumer] = machine._consumers
    began_s = time.thread_time()
    for first in range(0, len(entries), LIST):
        machine.on_entries(entries[first : first + LIST], 0.0)
        for entry in entries[first : first + LIST]:
            machine.on_acked(consumer, [entry.position], 0.0)
    return time.thread_time() - began_s


def measure_empty_tracker() -> None:
    with_it, without = dispatcher(), dispatcher()
    without._draining = cast("Any", _NoTracker())
    for machine in (with_it, without):
        join(machine, 0)
    ratios = []
    for number in range(60):
        entries = [
            StoredEntry(Position(number, at), at, 0, cast("Any", View(at))) for at in range(20_000)
        ]
        order = (with_it, without) if number % 2 else (without, with_it)
        spent_s = {machine: cycle(machine, entries) for machine in order}
        ratios.append(spent_s[with_it] / spent_s[without])
    print(
        f"an empty tracker: {100 * (median(ratios) - 1):+.1f} % of the CPU of a delivery and its"
        f" acknowledgement (quartiles {100 * (sorted(ratios)[15] - 1):+.1f} and"
        f" {100 * (sorted(ratios)[45] - 1):+.1f} %)"
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
    gc.disable()  # a broker does not keep objects for each entry, as this benchmark does
    for pending in (60_000, 100_000):
        for consumers in (1, 10, 100):
            measure(pending, consumers)
        measure_waiting(pending)
    for pending in (50_000, 100_000):
        measure_redelivery(pending)
    measure_memory()
    measure_empty_tracker()


if __name__ == "__main__":
    main()
