"""The contract of every BookiePeer, tested over three of them: a real bookie in this process, a
real bookie behind its ports, and the fake bookie of the tests.

To test a new implementation, add a function to `PEERS`. The function returns
the peer of a bookie that stores in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from fakes.bookies import INCARNATION, KEY, OTHER, Writer, add, envelope, running_bookie
from fakes.data_port import served
from fakes.ledger_bookies import FakeBookie, FormerIncarnation

from magnetar.bookie.contract import (
    EntryPage,
    EntryRun,
    LastConfirmed,
    LastConfirmedRequest,
    ReadRequest,
)
from magnetar.bookie.ledger.connection import RemoteBookiePeer
from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.bookie.ledger.peer import BookiePeer
from magnetar.bookie.local import LocalBookiePeer
from magnetar.metadata.model import BookieId, Member
from magnetar.protos.envelope import BEAT, BookieCode, ReadAnswer, decode_read_answers
from magnetar.runtime.errors import StreamClosed

pytestmark = pytest.mark.real_loop

OK, NO_ENTRY, NO_LEDGER = BookieCode.OK, BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER
Open = Callable[..., AbstractAsyncContextManager[BookiePeer]]


@asynccontextmanager
async def local_peer(incarnation: str = INCARNATION) -> AsyncIterator[BookiePeer]:
    async with running_bookie() as bookie, asyncio.TaskGroup() as group:
        member = Member(BookieId("b1"), incarnation)
        peer = LocalBookiePeer(member, bookie.service, group=group)
        yield peer
        await peer.close()


@asynccontextmanager
async def remote_peer(incarnation: str = INCARNATION) -> AsyncIterator[BookiePeer]:
    async with running_bookie() as bookie, served(bookie.service) as address:
        peer = RemoteBookiePeer(Member(BookieId("b1"), incarnation), address)
        yield peer
        await peer.close()


@asynccontextmanager
async def fake_peer(incarnation: str = INCARNATION) -> AsyncIterator[BookiePeer]:
    if incarnation != INCARNATION:
        yield FormerIncarnation(Member(BookieId("b1"), incarnation))
        return
    async with asyncio.TaskGroup() as group:
        bookie = FakeBookie("b1", group=group)
        yield bookie
        bookie.kill()


PEERS: dict[str, Open] = {"local": local_peer, "remote": remote_peer, "fake": fake_peer}


@pytest.fixture(params=list(PEERS))
def opened(request: pytest.FixtureRequest) -> Open:
    return PEERS[request.param]


async def read(
    peer: BookiePeer, first: int, last: int, *, fence: bool = False, bytes_max: int | None = None
) -> list[ReadAnswer]:
    request = ReadRequest(
        incarnation=peer.member.incarnation,
        ledger=1,
        master_key=KEY,
        first=first,
        last=last,
        fence=fence,
        bytes_max=bytes_max,
    )
    return [answer async for frame in peer.read(request) for answer in decode_read_answers(frame)]


async def last_confirmed(peer: BookiePeer, *, fence: bool) -> LastConfirmed:
    return await peer.last_confirmed(
        LastConfirmedRequest(
            incarnation=peer.member.incarnation, ledger=1, master_key=KEY, fence=fence
        )
    )


async def test_adds_are_acked_and_read_back_as_they_were_sent(opened: Open) -> None:
    async with opened() as peer:
        writer = Writer(await peer.open_write("test/adds"))
        assert await writer.add(add(1, 0), add(1, 1), add(1, 2)) == [OK, OK, OK]
        assert await writer.add(add(1, 1)) == [OK]  # the bookie stores entry 1 already
        found = await read(peer, 0, 2)
        assert found == [ReadAnswer(n, OK, envelope(1, n)) for n in range(3)]
        assert await read(peer, 1, 1) == [ReadAnswer(1, OK, envelope(1, 1))]
        await writer.stream.close()


async def test_stored_entries_are_listed_as_runs(opened: Open) -> None:
    async with opened() as peer:
        assert (await peer.list_entries(1, 0)).code is NO_LEDGER
        writer = Writer(await peer.open_write("test/adds"))
        await writer.add(add(1, 0), add(1, 1), add(1, 3))
        assert await peer.list_entries(1, 0) == EntryPage(
            OK, (EntryRun(0, 2), EntryRun(3, 1)), more=False
        )
        assert await peer.list_entries(1, 1) == EntryPage(OK, (EntryRun(1, 1), EntryRun(3, 1)))
        assert await peer.list_entries(1, 4) == EntryPage(OK)
        await writer.stream.close()


async def test_a_range_read_returns_the_stored_run_and_the_reason_for_its_end(opened: Open) -> None:
    async with opened() as peer:
        assert [a.code for a in await read(peer, 0, 5)] == [NO_LEDGER]
        writer = Writer(await peer.open_write("test/adds"))
        await writer.add(add(1, 0), add(1, 1), add(1, 3))
        assert [(a.entry, a.code) for a in await read(peer, 0, 5)] == [
            (0, OK),
            (1, OK),
            (2, NO_ENTRY),
        ]
        assert [(a.entry, a.code) for a in await read(peer, 3, 3)] == [(3, OK)]
        assert [a.entry for a in await read(peer, 0, 1, bytes_max=1)] == [0]
        await writer.stream.close()


async def test_a_striped_read_skips_the_entries_of_other_stripes(opened: Open) -> None:
    async with opened() as peer:
        writer = Writer(await peer.open_write("test/adds"))
        await writer.add(*(add(1, n) for n in (1, 2, 5, 6, 9)))

        async def stripes(first: int, last: int, run: int, stride: int) -> list[ReadAnswer]:
            request = ReadRequest(
                incarnation=peer.member.incarnation,
                ledger=1,
                master_key=KEY,
                first=first,
                last=last,
                run=run,
                stride=stride,
            )
            frames = peer.read(request)
            return [answer async for frame in frames for answer in decode_read_answers(frame)]

        def found(*entries: int) -> list[ReadAnswer]:
            return [ReadAnswer(n, OK, envelope(1, n)) for n in entries]

        assert await stripes(1, 9, 2, 4) == found(1, 2, 5, 6, 9)
        assert await stripes(1, 8, 2, 4) == found(1, 2, 5, 6)
        assert await stripes(2, 6, 1, 4) == found(2, 6)
        missing = ReadAnswer(10, NO_ENTRY, b"")
        assert await stripes(5, 20, 2, 4) == [*found(5, 6, 9), missing]
        assert await stripes(3, 9, 2, 4) == [ReadAnswer(3, NO_ENTRY, b"")]
        await writer.stream.close()


async def test_a_fenced_ledger_refuses_all_adds_except_recovery_adds(opened: Open) -> None:
    async with opened() as peer:
        writer = Writer(await peer.open_write("test/adds"))
        assert await writer.add(add(1, 0), add(1, 1, confirmed=0)) == [OK, OK]
        before = await last_confirmed(peer, fence=False)
        assert (before.code, before.confirmed, before.last_entry) == (OK, 0, 1)
        assert await writer.add(add(1, 2)) == [OK]
        assert (await last_confirmed(peer, fence=True)).last_entry == 2
        assert await writer.add(add(1, 3)) == [BookieCode.FENCED]
        assert await writer.add(add(1, 3, flags=1)) == [OK]
        await writer.stream.close()


@pytest.mark.parametrize("by_read", [True, False])
async def test_a_ledger_that_is_new_to_the_bookie_can_be_fenced(
    opened: Open, by_read: bool
) -> None:
    async with opened() as peer:
        if by_read:
            (answer,) = await read(peer, 0, 9, fence=True)
            assert answer.code in (NO_ENTRY, NO_LEDGER)
        else:
            answer_code = (await last_confirmed(peer, fence=True)).code
            assert answer_code in (NO_ENTRY, NO_LEDGER)
        writer = Writer(await peer.open_write("test/adds"))
        assert await writer.add(add(1, 0)) == [BookieCode.FENCED]
        await writer.stream.close()


async def test_requests_for_another_incarnation_are_refused_and_fence_nothing(
    opened: Open,
) -> None:
    """A bookie that lost its disk does not answer for its earlier incarnation."""

    async with opened(OTHER) as peer:
        assert peer.member.incarnation == OTHER
        with pytest.raises(BookieUnavailable) as refused:
            await peer.open_write("test/adds")
        assert refused.value.code is BookieCode.WRONG_INCARNATION
        assert not refused.value.definite
        wrong = BookieCode.WRONG_INCARNATION
        assert await read(peer, 0, 0, fence=True) == [ReadAnswer(0, wrong, b"")]
        assert (await last_confirmed(peer, fence=True)).code is wrong
        assert (await peer.list_entries(1, 0)).code is wrong
        with pytest.raises(BookieUnavailable) as unheard:
            await peer.last_heard("broker", INCARNATION)
        assert unheard.value.code is wrong


async def test_hello_returns_the_identity_of_the_bookie(opened: Open) -> None:
    async with opened() as peer:
        info = await peer.info()
        assert (info.bookie, info.incarnation) == (
            peer.member.bookie,
            peer.member.incarnation,
        )


async def test_streams_of_a_peer_end_when_the_bookie_ends(opened: Open) -> None:
    async with opened() as peer:
        stream = await peer.open_write("test/adds")
        if isinstance(peer, FakeBookie):
            peer.kill()
        else:
            await peer.close()
        with pytest.raises(StreamClosed):
            await stream.receive()


async def test_each_beat_of_a_presence_is_answered(opened: Open) -> None:
    async with opened() as peer:
        stream = await peer.open_presence("broker", OTHER)
        for _ in range(3):
            await stream.send([BEAT])
            assert await stream.receive() == BEAT


async def test_a_broker_that_never_sent_a_beat_is_unknown(opened: Open) -> None:
    async with opened() as peer:
        assert await peer.last_heard("broker", OTHER) is None
