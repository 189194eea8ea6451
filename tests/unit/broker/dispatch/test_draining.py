"""The draining hashes: counts, the end of a slot, and the memory of all 65,535 hashes."""

from __future__ import annotations

import tracemalloc

from magnetar.broker.dispatch.draining import DrainingHashes
from magnetar.broker.dispatch.permits import Consumer, Limits
from magnetar.broker.dispatch.sticky_hash import SLOTS


def consumer(name: str) -> Consumer:
    return Consumer(name, 0, lambda: True, Limits())


def test_slot_drains_until_its_last_entry_is_acknowledged() -> None:
    it, one, two = DrainingHashes(), consumer("one"), consumer("two")
    it.register(one, {7: 2, 9: 1})
    it.register(two, {7: 2, 8: 1})  # slot 7 drains at `one` already
    assert {slot: it.of(one)[slot].references for slot in it.of(one)} == {7: 2, 9: 1}
    assert set(it.of(two)) == {8}
    it.check()
    assert it.blocks(7, two)
    assert not it.blocks(7, one), "consumer one has the hash again"
    assert it.get(7) is None
    assert it.on_gone(9, two) is False
    assert it.on_gone(9, one) is True
    assert (it.cleared(one), it.cleared(two)) == (1, 0)
    assert it.on_left(two) == [8]
    assert not it
    it.check()


def test_all_hashes_take_less_than_5_mb_and_an_empty_table_takes_nothing() -> None:
    counts = dict.fromkeys(range(1, SLOTS), 1)
    it, one = DrainingHashes(), consumer("one")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        it.register(one, counts)
        full, _ = tracemalloc.get_traced_memory()
        assert len(it) == SLOTS - 1
        assert full - before < 5_000_000
        it.on_left(one)
        empty, _ = tracemalloc.get_traced_memory()
        assert empty - before < 10_000
    finally:
        tracemalloc.stop()


def test_consumers_that_left_are_forgotten_while_another_hash_drains_on() -> None:
    it, stays = DrainingHashes(), consumer("stays")
    it.register(stays, {7: 1})
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2_000):
            leaves = consumer(f"c{number}")
            it.register(leaves, {8: 1, 9: 2})
            assert set(it.of(leaves)) == {8, 9}
            assert sorted(it.on_left(leaves)) == [8, 9]
            it.check()
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 20_000
    finally:
        tracemalloc.stop()
    assert set(it.of(stays)) == {7}
    assert it.blocks(7, None)
