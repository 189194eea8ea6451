from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import INCARNATION, KEY, Writer, add, envelope, running_bookie

from magnetar.bookie.contract import LastConfirmedRequest, ReadRequest
from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.bookie.local import LocalBookiePeer
from magnetar.metadata.model import BookieId, Member
from magnetar.protos.envelope import BookieCode, decode_read_answers
from magnetar.runtime.errors import StreamClosed

if TYPE_CHECKING:
    from magnetar.bookie.ledger.peer import BookiePeer

pytestmark = pytest.mark.real_loop

MEMBER = Member(BookieId("b1"), INCARNATION)


async def test_a_local_peer_serves_adds_and_reads_of_the_bookie() -> None:
    async with running_bookie() as bookie, asyncio.TaskGroup() as group:
        peer: BookiePeer = LocalBookiePeer(MEMBER, bookie.service, group=group)
        assert peer.member == Member(BookieId("b1"), INCARNATION)
        writer = Writer(await peer.open_write("broker"))
        assert await writer.add(add(1, 0), add(1, 1)) == [BookieCode.OK, BookieCode.OK]
        request = ReadRequest(incarnation=INCARNATION, ledger=1, master_key=KEY, first=0, last=1)
        answers = [a async for frame in peer.read(request) for a in decode_read_answers(frame)]
        assert [answer.envelope for answer in answers] == [envelope(1, 0), envelope(1, 1)]
        last = await peer.last_confirmed(
            LastConfirmedRequest(incarnation=INCARNATION, ledger=1, master_key=KEY, fence=True)
        )
        assert (last.code, last.last_entry) == (BookieCode.OK, 1)
        assert (await peer.info()).bookie == "b1"
        await peer.close()
        with pytest.raises(StreamClosed):
            await writer.stream.receive()


async def test_a_bookie_that_stops_refuses_the_stream() -> None:
    async with running_bookie() as bookie, asyncio.TaskGroup() as group:
        peer = LocalBookiePeer(MEMBER, bookie.service, group=group)
        await bookie.service.stop(grace_s=1)
        with pytest.raises(BookieUnavailable) as refused:
            await peer.open_write("broker")
        assert refused.value.code is BookieCode.STOPPING


async def test_a_local_peer_passes_beats_to_the_bookie() -> None:
    async with running_bookie() as bookie, asyncio.TaskGroup() as group:
        peer: BookiePeer = LocalBookiePeer(MEMBER, bookie.service, group=group)
        assert await peer.last_heard("broker", "a" * 32) is None
        await peer.open_presence("broker", "a" * 32)
        assert await peer.last_heard("broker", "a" * 32) is not None
        await peer.close()
