"""A bookie's answers for its former incarnations, and for entries that it cannot read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fakes.bookies import (
    KEY,
    OTHER,
    FaultyStorage,
    add,
    envelope,
    last_request,
    none,
    read_request,
    running_bookie,
    some,
)
from fakes.memory_storage import MemoryStorage

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import LedgerRecord, encode_ledger_record, entry_key, ledger_key
from magnetar.protos.envelope import BookieCode

if TYPE_CHECKING:
    from magnetar.bookie.storage.store import Storage

pytestmark = pytest.mark.real_loop

DEAD = "d" * 32  # the store of this former incarnation is unreadable
NEVER_SEEN = "e" * 32


def former_store() -> MemoryStorage:
    """A store with the entries 0, 1, 2 and 4 of ledger 1. Entry 5 is damaged. The place of entry 6
    has the bytes of another entry."""
    storage = MemoryStorage()
    torn = bytearray(envelope(1, 5))
    torn[-1] ^= 1
    storage.write(
        [(ledger_key(1), encode_ledger_record(LedgerRecord(KEY, fenced=False, created_ms=0)))]
        + [(entry_key(1, entry), envelope(1, entry)) for entry in (0, 1, 2, 4)]
        + [(entry_key(1, 5), bytes(torn)), (entry_key(1, 6), envelope(1, 7))]
    )
    return storage


FORMERS: dict[str, Storage | None] = {OTHER: former_store(), DEAD: None}


async def test_a_former_incarnation_returns_its_entries_and_never_answers_no() -> None:
    async with running_bookie(formers=FORMERS) as bookie:
        unknown = BookieCode.DAMAGED_STORE
        for first, last, answer in (
            (0, 9, [*some(0, 1, 2), none(3, unknown)]),
            (0, 2, some(0, 1, 2)),
            (3, 9, [none(3, unknown)]),
            (4, 9, [*some(4), none(5, unknown)]),
            (6, 6, [none(6, unknown)]),
        ):
            assert await bookie.read(read_request(first, last, incarnation=OTHER)) == answer
        one = read_request(0, 9, incarnation=OTHER, entries_max=2)
        assert await bookie.read(one) == some(0, 1)
        for request in (
            read_request(0, 9, ledger=2, incarnation=OTHER),
            read_request(0, 9, incarnation=OTHER, master_key=KEY + 1),
        ):
            assert await bookie.read(request) == [none(0, unknown)]


async def test_a_former_incarnation_serves_a_recovery_without_a_fence() -> None:
    """A stored entry is a proof without a fence. If the former store refused the read, a ledger
    without other copies could never be closed."""

    async with running_bookie(formers=FORMERS) as bookie:
        unknown = BookieCode.DAMAGED_STORE
        for first, answer in ((0, [*some(0, 1, 2), none(3, unknown)]), (3, [none(3, unknown)])):
            request = read_request(first, 9, incarnation=OTHER, fence=True)
            assert await bookie.read(request) == answer
        unreadable = read_request(0, 9, incarnation=DEAD, fence=True)
        assert await bookie.read(unreadable) == [none(0, BookieCode.WRONG_INCARNATION)]
        assert bookie.service.counts.fences == 0


async def test_everything_else_of_a_former_incarnation_is_unknown() -> None:
    async with running_bookie(formers=FORMERS) as bookie:
        service = bookie.service
        for incarnation, code in (
            (OTHER, BookieCode.DAMAGED_STORE),
            (DEAD, BookieCode.WRONG_INCARNATION),
            (NEVER_SEEN, BookieCode.WRONG_INCARNATION),
        ):
            assert not code.definite
            for fence in (False, True):
                request = last_request(incarnation=incarnation, fence=fence)
                assert (await service.last_confirmed(request)).code is code
            page = await service.list_ledgers(incarnation, after=-1, ledgers_max=0)
            assert (page.code, page.ledgers) == (code, ())
            runs = await service.list_entries(incarnation, ledger=1, first=0, entries_max=0)
            assert (runs.code, runs.runs) == (code, ())
            heard = service.last_heard(incarnation, broker="b", broker_incarnation=NEVER_SEEN)
            assert heard == (code, None)
            writer = await bookie.connect(incarnation=incarnation)
            assert writer.reply is not None
            assert writer.reply.code is code
        assert await bookie.read(read_request(incarnation=DEAD)) == [
            none(0, BookieCode.WRONG_INCARNATION)
        ]
        # The present incarnation has none of these entries.
        assert await bookie.read(read_request()) == [none(0, BookieCode.NO_SUCH_LEDGER)]
        writer = await bookie.connect()
        assert await writer.add(add(1, 0)) == [BookieCode.OK]


class Spotted(FaultyStorage):
    """A storage that cannot read entry 3 of ledger 1, nor a run that contains this entry."""

    def run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> list[bytes]:
        found = super().run(ledger, first, last, bytes_max=bytes_max, entries_max=entries_max)
        if first <= 3 < first + len(found):
            raise StorageFailed("read", "checksum mismatch")
        return found


async def test_an_unreadable_entry_is_answered_as_unknown_and_the_others_are_returned() -> None:
    async with running_bookie(storage=Spotted()) as bookie:
        writer = await bookie.connect()
        await writer.add(*(add(1, entry) for entry in range(6)))
        bad = none(3, BookieCode.IO_ERROR)
        assert await bookie.read(read_request(0, 9)) == [*some(0, 1, 2), bad]
        assert await bookie.read(read_request(3, 9)) == [bad]
        gap = none(6, BookieCode.NO_SUCH_ENTRY)
        assert await bookie.read(read_request(4, 9)) == [*some(4, 5), gap]
        assert await bookie.read(read_request(0, 9, entries_max=3)) == some(0, 1, 2)
