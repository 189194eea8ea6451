from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import process_time

import pytest
from fakes.bookies import (
    KEY,
    OTHER,
    Bookie,
    FaultyStorage,
    add,
    envelope,
    none,
    read_request,
    running_bookie,
    some,
)
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.read_cache import ENTRY_OVERHEAD_BYTES, RUN_OVERHEAD_BYTES, ReadCache, Run
from magnetar.bookie.storage.format import entry_key
from magnetar.protos.envelope import COPY, BookieCode, decode_read_answers

pytestmark = pytest.mark.real_loop

OK = BookieCode.OK
BROKEN = StorageFailed("read", "Corruption: checksum mismatch")
MANY = 1 << 20


def entries(ledger: int, first: int, count: int) -> list[bytes]:
    """Entries with different payloads of different sizes."""
    return [
        envelope(ledger, entry, b"x" * (7 * entry % 30)) for entry in range(first, first + count)
    ]


def answered(run: Run | None) -> list[bytes]:
    if run is None:
        return []
    answers = list(decode_read_answers(b"".join(run.parts)))
    assert [answer.entry for answer in answers] == list(range(run.first, run.following))
    assert run.size == sum(len(answer.envelope) for answer in answers)
    return [answer.envelope for answer in answers]


def cost_of(ledger: int, first: int, count: int) -> int:
    return Run.of(first, entries(ledger, first, count)).cost


# -- the cache by itself ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Put:
    ledger: int
    first: int
    count: int


@dataclass(frozen=True)
class Get:
    ledger: int
    first: int
    last: int
    bytes_max: int
    entries_max: int


@dataclass(frozen=True)
class Forget:
    ledger: int


LEDGERS = st.integers(1, 2)
PLACES = st.integers(0, 40)
STEPS = st.lists(
    st.one_of(
        st.builds(Put, LEDGERS, PLACES, st.integers(0, 12)),
        st.builds(
            Get, LEDGERS, PLACES, st.integers(40, 60), st.integers(1, 600), st.integers(1, 30)
        ),
        st.builds(Forget, LEDGERS),
    ),
    max_size=60,
)


def expected(held: set[int], get: Get) -> list[bytes]:
    """Return the run that a store with these entries would return."""
    found: list[bytes] = []
    for entry in range(get.first, min(get.last, get.first + get.entries_max - 1) + 1):
        if entry not in held:
            break
        found += entries(get.ledger, entry, 1)
        if sum(map(len, found)) >= get.bytes_max:
            break
    return found


@given(STEPS)
def test_a_large_cache_returns_the_same_runs_as_a_store(steps: list[Put | Get | Forget]) -> None:
    cache = ReadCache(MANY)
    held: dict[int, set[int]] = {1: set(), 2: set()}
    for step in steps:
        match step:
            case Put(ledger, first, count):
                cache.put(ledger, Run.of(first, entries(ledger, first, count)), cache.epoch)
                held[ledger] |= set(range(first, first + count))
            case Get(ledger, first, last, bytes_max, entries_max):
                run = cache.get(ledger, first, last, bytes_max=bytes_max, entries_max=entries_max)
                assert answered(run) == expected(held[ledger], step)
            case Forget(ledger):
                cache.forget(ledger)
                held[ledger].clear()
        cache.check()


@given(STEPS, st.integers(0, 6_000))
def test_a_small_cache_returns_less_but_nothing_wrong(
    steps: list[Put | Get | Forget], bytes_max: int
) -> None:
    cache = ReadCache(bytes_max)
    for step in steps:
        match step:
            case Put(ledger, first, count):
                run = Run.of(first, entries(ledger, first, count))
                cache.put(ledger, run, cache.epoch)
                if count and run.cost <= bytes_max:
                    found = cache.get(ledger, first, 99, bytes_max=MANY, entries_max=MANY)
                    assert answered(found)[:count] == answered(run)
            case Get(ledger, first, last, most, entries_max):
                found = cache.get(ledger, first, last, bytes_max=most, entries_max=entries_max)
                given_ = answered(found)
                assert given_ == expected(set(range(100)), step)[: len(given_)]
            case Forget(ledger):
                cache.forget(ledger)
                assert cache.get(ledger, 0, 99, bytes_max=1, entries_max=1) is None
        cache.check()


def test_the_least_recently_used_run_is_dropped_first() -> None:
    cache = ReadCache(2 * cost_of(1, 0, 4))
    cache.put(1, Run.of(0, entries(1, 0, 4)), 0)
    cache.put(2, Run.of(0, entries(2, 0, 4)), 0)
    assert cache.get(1, 0, 0, bytes_max=1, entries_max=1) is not None
    cache.put(2, Run.of(4, entries(2, 0, 4)), 0)
    assert cache.get(1, 3, 3, bytes_max=1, entries_max=1) is not None
    assert cache.get(2, 0, 3, bytes_max=1, entries_max=1) is None
    assert (cache.hits, cache.misses) == (2, 1)


def test_a_run_read_before_a_deletion_is_not_cached() -> None:
    cache = ReadCache(MANY)
    before = cache.epoch
    cache.forget(2)
    cache.put(1, Run.of(0, entries(1, 0, 4)), before)
    assert cache.bytes == 0
    cache.put(1, Run.of(0, entries(1, 0, 4)), cache.epoch)
    assert cache.bytes > 0


def test_the_size_includes_the_overhead_of_python() -> None:
    cache = ReadCache(MANY)
    cache.put(1, Run.of(0, [envelope(1, 0), envelope(1, 1)]), 0)
    size = len(envelope(1, 0)) + len(envelope(1, 1))
    assert cache.bytes == size + 2 * ENTRY_OVERHEAD_BYTES + RUN_OVERHEAD_BYTES


def test_runs_of_one_entry_are_joined_and_dropped_in_linear_time() -> None:
    """A reader that reads entries one at a time fills the cache with such runs."""
    cache, count = ReadCache(1 << 30), 250_000
    for entry in range(1, count):
        cache.put(1, Run.of(entry, [b"x" * 60]), 0)
    began_s = process_time()
    found = cache.get(1, 1, 50_000, bytes_max=1 << 30, entries_max=count)
    assert found is not None
    assert (found.first, found.count, found.size) == (1, 50_000, 50_000 * 60)
    assert process_time() - began_s < 1.5, "each run was joined to a copy of the runs before it"
    covering = Run.of(0, [b"x" * 60] * (count // 4))
    began_s = process_time()
    cache.put(1, covering, 0)
    assert process_time() - began_s < 1.0, "each removal moved all later runs"
    assert cache.get(1, 0, 0, bytes_max=1, entries_max=1) is not None
    began_s = process_time()
    cache.forget(1)
    assert process_time() - began_s < 1.0, "each removal moved all later runs"
    assert (cache.bytes, cache.get(1, 0, 0, bytes_max=1, entries_max=1)) == (0, None)
    cache.check()


# -- a bookie with a cache -------------------------------------------------------------------------


async def with_five_read(bookie: Bookie) -> None:
    """Store entries 0 to 4 of ledger 1 and read them once."""
    writer = await bookie.connect()
    await writer.add(*(add(1, entry) for entry in range(5)))
    assert await bookie.read(read_request(0, 4)) == some(0, 1, 2, 3, 4)
    assert bookie.service.read_cache.bytes > 0


async def test_only_uncached_entries_are_read_from_the_store() -> None:
    async with running_bookie() as bookie:
        await with_five_read(bookie)
        bookie.storage.failing["read"] = BROKEN
        assert await bookie.read(read_request(0, 4)) == some(0, 1, 2, 3, 4)
        assert await bookie.read(read_request(2, 3)) == some(2, 3)
        assert await bookie.read(read_request(1, 4, bytes_max=44)) == some(1, 2)
        assert await bookie.read(read_request(3, 9)) == [
            *some(3, 4),
            none(5, BookieCode.IO_ERROR),
        ]
        del bookie.storage.failing["read"]
        absent = none(5, BookieCode.NO_SUCH_ENTRY)
        assert await bookie.read(read_request(3, 9)) == [*some(3, 4), absent]
        writer = await bookie.connect()
        await writer.add(add(1, 5))
        assert await bookie.read(read_request(3, 5)) == some(3, 4, 5)


async def test_a_cache_of_size_0_keeps_no_run() -> None:
    async with running_bookie() as bookie:
        bookie.service.read_cache = ReadCache(0)
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        assert await bookie.read(read_request(0, 0)) == some(0)
        assert bookie.service.read_cache.bytes == 0


@pytest.mark.parametrize("for_good", [True, False])
async def test_a_deleted_ledger_is_forgotten(*, for_good: bool) -> None:
    async with running_bookie() as bookie:
        await with_five_read(bookie)
        bookie.service._admission.delete(1, for_good=for_good)
        code = BookieCode.DELETED if for_good else BookieCode.NO_SUCH_LEDGER
        assert await bookie.read(read_request(0, 4)) == [none(0, code)]
        if not for_good:  # a replicator stores one entry again
            writer = await bookie.connect()
            assert await writer.add(add(1, 3, flags=COPY)) == [OK]
            missing = BookieCode.NO_SUCH_ENTRY
            assert await bookie.read(read_request(0, 4)) == [none(0, missing)]
            assert await bookie.read(read_request(3, 4)) == [*some(3), none(4, missing)]


async def test_an_entry_read_during_a_deletion_is_not_cached() -> None:
    async with running_bookie(inline=True) as bookie:
        writer = await bookie.connect()
        await writer.add(*(add(1, entry) for entry in range(5)))
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(bookie.read(read_request(0, 4)))
            # The bookie has read the store, and the caller has no answer yet.
            await asyncio.sleep(0)
            bookie.service._admission.delete(1, for_good=False)
        assert reading.result() == some(0, 1, 2, 3, 4)
        assert bookie.service.read_cache.misses == 1
        assert bookie.service.read_cache.bytes == 0


async def test_a_replaced_entry_is_returned_in_its_new_form() -> None:
    """A different entry was stored in its place."""

    async with running_bookie() as bookie:
        await with_five_read(bookie)
        bookie.storage.write([(entry_key(1, 2), envelope(1, 9))])
        bookie.service.read_cache.forget(1)
        assert (await bookie.read(read_request(2, 2)))[0].envelope == envelope(1, 9)
        writer = await bookie.connect()
        assert await writer.add(add(1, 2, flags=COPY)) == [OK]
        assert await bookie.read(read_request(2, 2)) == some(2)


async def test_a_read_that_fences_bypasses_the_cache() -> None:
    async with running_bookie() as bookie:
        await with_five_read(bookie)
        bookie.storage.failing["read"] = BROKEN
        fencing = read_request(0, 4, fence=True)
        assert await bookie.read(fencing) == [none(0, BookieCode.IO_ERROR)]
        assert await bookie.read(read_request(0, 4)) == some(0, 1, 2, 3, 4)


async def test_a_wrong_master_key_gets_nothing_from_the_cache() -> None:
    async with running_bookie(formers={OTHER: FaultyStorage()}) as bookie:
        await with_five_read(bookie)
        wrong_key = read_request(0, 4, master_key=KEY + 1)
        assert await bookie.read(wrong_key) == [none(0, BookieCode.UNAUTHORIZED)]
        # Runs of another incarnation of the bookie do not mix with the cached ones.
        former = read_request(0, 9, incarnation=OTHER)
        assert await bookie.read(former) == [none(0, BookieCode.DAMAGED_STORE)]
