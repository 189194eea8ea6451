"""Measures the dispatchers alone: each subscription type with 1, 10 and 1,000 consumers.

The figures are the CPU time of the broker's event loop for one entry: its delivery, and its
individual acknowledgement. They do not include connections, cursors and the log. The reference is
the least that Python can do: a deque of consumers, and a dict of pending entries for each. Run it
with `python -m benchmarks.dispatch`.

The benchmark also measures Key_Shared with 1,000 and 1,000,000 keys. With a million pending entries
that are acknowledged in random order, it measures their memory and the CPU of an acknowledgement.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any, Final, cast

from benchmarks.key_shared_join import NothingAcked, View
from magnetar.broker.cursor.redeliveries import Redeliveries
from magnetar.broker.dispatch.delayed import DelayPolicy, Delays
from magnetar.broker.dispatch.dispatcher import Deliver, Environment
from magnetar.broker.dispatch.exclusive import Exclusive
from magnetar.broker.dispatch.failover import Failover
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.permits import UNLIMITED, Consumer, Limits
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.log.entry import StoredEntry
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.dispatch.dispatcher import Action, Dispatcher

TYPES: Final[dict[str, Callable[[Environment], Dispatcher]]] = {
    "Exclusive": Exclusive,
    "Failover": Failover,
    "Shared": Shared,
    "Key_Shared": KeyShared,
}
ENTRIES: Final = 50_000  # the entries of one round, and of a ledger
LIST: Final = 100  # the entries of one read
ROUNDS: Final = 7
PENDING: Final = 1_000_000


def entries_of(ledger: int, count: int, keys: int) -> list[StoredEntry]:
    chance = random.Random(ledger)
    return [
        StoredEntry(Position(ledger, at), at, 0, cast("Any", View(chance.randrange(keys))))
        for at in range(count)
    ]


class World:
    """A dispatcher with consumers that have unlimited permits."""

    def __init__(self, kind: str, consumers: int) -> None:
        limits = Limits(unacked_per_consumer=UNLIMITED, unacked_per_subscription=UNLIMITED)
        last = Position(1 << 40, 0)
        self.machine = TYPES[kind](
            Environment(
                "s",
                cast("Any", NothingAcked()),
                lambda: last,
                limits,
                Redeliveries(lambda: None),
                Delays(DelayPolicy(), lambda _: 0),
                topic="t",
            )
        )
        self.given: dict[Position, Consumer] = {}
        for number in range(consumers):
            consumer = Consumer(f"c{number}", 0, lambda: True, limits, join_number=number)
            self.machine.add_consumer(consumer, 0.0)
            self.machine.on_flow(consumer, 1 << 40, 0.0)

    def deliver(self, entries: list[StoredEntry]) -> float:
        """Deliver the entries. Return the CPU seconds."""
        spent_s = 0.0
        for first in range(0, len(entries), LIST):
            read = entries[first : first + LIST]
            began_s = time.thread_time()
            actions = self.machine.on_entries(read, 0.0)
            spent_s += time.thread_time() - began_s
            self._note(actions)
        return spent_s

    def acknowledge(self, positions: list[Position]) -> float:
        """Acknowledge each entry alone. Return the CPU seconds."""
        owners = [(self.given.pop(position), [position]) for position in positions]
        began_s = time.thread_time()
        for consumer, one in owners:
            self.machine.on_acked(consumer, one, 0.0)
        return time.thread_time() - began_s

    def _note(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                for entry in action.entries:
                    self.given[entry.position] = action.consumer


def reference(consumers: int, entries: list[StoredEntry]) -> float:
    """Return the microseconds per entry of the reference: round robin, and dicts of pending
    entries."""
    ring = deque(dict[Position, int]() for _ in range(consumers))
    owners: dict[Position, dict[Position, int]] = {}
    began_s = time.thread_time()
    for entry in entries:
        pending = ring[0]
        ring.rotate(-1)
        pending[entry.position] = 1
        owners[entry.position] = pending
    for entry in entries:
        del owners.pop(entry.position)[entry.position]
    return (time.thread_time() - began_s) * 1e6 / len(entries)


def measure(kind: str, consumers: int, keys: int) -> None:
    world = World(kind, consumers)
    given, acked, least = [], [], []
    for number in range(ROUNDS):
        entries = entries_of(number, ENTRIES, keys)
        gc.collect()
        gc.disable()
        given.append(world.deliver(entries) * 1e6 / ENTRIES)
        acked.append(world.acknowledge([entry.position for entry in entries]) * 1e6 / ENTRIES)
        least.append(reference(consumers, entries))
        gc.enable()
    us, least_us = median(given) + median(acked), median(least)
    print(
        f"{kind:<10} {consumers:>5} consumers, {keys:>9,} keys: deliver {median(given):5.2f} us,"
        f" acknowledge {median(acked):5.2f} us | reference {least_us:.2f} us, ratio"
        f" {us / least_us:.1f}",
        flush=True,
    )


def measure_pending(kind: str) -> None:
    """Measure a million pending entries at 25 consumers, acknowledged in random order."""
    world, count = World(kind, 25), 0
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for ledger in range(PENDING // ENTRIES):
        entries = entries_of(ledger, ENTRIES, 1_000_000)
        for first in range(0, ENTRIES, LIST):
            count += len(world.machine.on_entries(entries[first : first + LIST], 0.0))
        del entries
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for consumer in world.machine._consumers:  # type: ignore[attr-defined]
        world.given.update(dict.fromkeys(consumer.pending, consumer))
    chosen = sorted(world.given)
    random.Random(1).shuffle(chosen)
    us = world.acknowledge(chosen) * 1e6 / PENDING
    print(
        f"{kind:<10} {PENDING:,} pending entries: {(after - before) / PENDING:.0f} bytes each;"
        f" acknowledged in random order {us:.2f} us each"
    )


def main() -> None:
    for kind in TYPES:
        for consumers in (1,) if kind == "Exclusive" else (1, 10, 1_000):
            measure(kind, consumers, 1_000)
    for consumers in (1, 10, 1_000):
        measure("Key_Shared", consumers, 1_000_000)
    for kind in ("Shared", "Key_Shared"):
        measure_pending(kind)


if __name__ == "__main__":
    main()
