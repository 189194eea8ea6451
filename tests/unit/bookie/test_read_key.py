"""The read key of a ledger: it allows reads, and nothing else."""

from __future__ import annotations

import pytest
from fakes.bookies import KEY, OTHER, add, last_request, none, read_request, running_bookie, some

from magnetar.bookie.contract import read_key
from magnetar.protos.envelope import RECOVERY, BookieCode

READ_KEY = read_key(KEY, 1)
UNAUTHORIZED = BookieCode.UNAUTHORIZED


def test_the_key_depends_on_the_master_key_and_the_ledger() -> None:
    keys = {read_key(master, ledger) for master in (KEY, KEY + 1) for ledger in range(100)}
    assert len(keys) == 200
    assert keys.isdisjoint({KEY, KEY + 1})
    assert all(0 <= key < 1 << 64 for key in keys)
    # A broker and a bookie of different versions must compute the same read key.
    assert read_key(0xA11CE, 1) == 0x19D86CA405F6DFDB


async def test_a_read_with_the_read_key_returns_the_entries() -> None:
    async with running_bookie(inline=True) as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0), add(1, 1))
        found = await bookie.read(read_request(0, 1, master_key=READ_KEY))
        assert found == some(0, 1)


@pytest.mark.parametrize("key", [read_key(KEY, 2), read_key(KEY + 1, 1), KEY + 1, 0])
async def test_a_read_with_another_key_is_refused(key: int) -> None:
    async with running_bookie(inline=True) as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        assert await bookie.read(read_request(0, 0, master_key=key)) == [none(0, UNAUTHORIZED)]


async def test_the_read_key_neither_adds_nor_fences() -> None:
    async with running_bookie(inline=True) as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        for flags in (0, RECOVERY):
            assert await writer.add(add(1, 1, master_key=READ_KEY, flags=flags)) == [UNAUTHORIZED]
        request = read_request(0, 0, master_key=READ_KEY, fence=True)
        assert await bookie.read(request) == [none(0, UNAUTHORIZED)]
        for fence in (False, True):
            last = await bookie.service.last_confirmed(
                last_request(master_key=READ_KEY, fence=fence)
            )
            assert last.code is UNAUTHORIZED
        assert await writer.add(add(1, 1)) == [BookieCode.OK]  # the read key fenced nothing


async def test_the_read_key_reads_the_entries_of_a_damaged_store() -> None:
    async with running_bookie(inline=True) as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        async with running_bookie(inline=True, formers={OTHER: bookie.storage}) as later:
            for key, found in ((READ_KEY, some(0)), (read_key(KEY, 2), [])):
                request = read_request(0, 0, incarnation=OTHER, master_key=key)
                answers = await later.read(request)
                assert answers == (found or [none(0, BookieCode.DAMAGED_STORE)])
