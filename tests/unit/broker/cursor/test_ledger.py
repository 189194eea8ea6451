"""A cursor ledger: `replay_from` of its entries, and failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes.ledgers import FakeLedgers, SharedLedgers

from magnetar.bookie.ledger.errors import QuorumTimeout
from magnetar.broker.cursor import format as stored
from magnetar.broker.cursor.ledger import CursorLedger
from magnetar.metadata.model import LedgerId

if TYPE_CHECKING:
    from magnetar.broker.cursor.acks import Start


class Subscription:
    """A cursor with snapshots of a chosen size."""

    name = "s"
    changed = True

    def __init__(self, number: int, *sizes: int) -> None:
        self.number = number
        self.sizes = sizes

    def take_delta(self) -> list[bytes]:
        return []

    def snapshot(self) -> list[bytes]:
        return [bytes(size) for size in self.sizes]

    def restart(self, start: Start, number: int) -> None:
        raise NotImplementedError


async def begun() -> tuple[SharedLedgers, CursorLedger]:
    world = SharedLedgers()
    appender = await FakeLedgers(world).create(newer_than=LedgerId(0), custom={})
    return world, CursorLedger(appender)


def replay_from(world: SharedLedgers) -> list[int]:
    (ledger,) = world.ledgers.values()
    return [stored.read_header(entry) for entry in ledger.entries]


async def test_snapshot_over_several_entries_counts_from_its_last_entry() -> None:
    world, ledger = await begun()
    large = stored.ENTRY_BYTES_MAX - 100
    ledger.put_snapshot(Subscription(1, large, large))
    ledger.put([b"delta"])
    ledger.put_snapshot(Subscription(1, large, large, large))
    ledger.put([b"delta"])
    ledger.check()
    assert await ledger.wait_confirmed() is None
    assert replay_from(world) == [0, 0, 0, 0, 0, 3, 3]


async def test_oldest_snapshot_sets_replay_from() -> None:
    world, ledger = await begun()
    ledger.put_snapshot(Subscription(1, 10))
    ledger.put_snapshot(Subscription(2, 20))
    assert ledger.live_bytes == 30
    ledger.begin(3)  # the snapshot of subscription 3 is in the topic's record
    ledger.put([bytes(100)])
    tail = ledger.tail_bytes
    assert ledger.stalest == 1
    ledger.put_snapshot(Subscription(1, 10))
    assert ledger.stalest == 2
    assert ledger.tail_bytes < tail + 10, "the first snapshot is not needed any more"
    ledger.put_snapshot(Subscription(2, 20))
    assert ledger.stalest == 3
    ledger.forget(3)
    ledger.put([b"delta"])
    ledger.check()
    assert await ledger.wait_confirmed() is None
    assert replay_from(world) == [0, 0, 0, 1, 2, 3]
    assert not ledger.knows(3)


async def test_put_after_a_failure_reports_the_failure() -> None:
    world, ledger = await begun()
    world.hold()
    ledger.put([b"lost"])
    appender = world.live_appender()
    failure = QuorumTimeout(appender.ledger, 0, 1.0)
    appender.fail(failure)
    ledger.put([b"late"])
    assert await ledger.wait_confirmed() is failure
