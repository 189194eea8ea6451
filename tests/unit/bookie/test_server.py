"""The service through its gRPC port: the port converts requests and answers without loss."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import INCARNATION, KEY, Writer, add, running_bookie
from fakes.data_port import connect, served

from magnetar.bookie.server import SERVICE
from magnetar.protos import bookie_pb2 as pb
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.errors import CallFailed
from magnetar.runtime.grpc_frames import call_unary, open_channel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from google.protobuf.message import Message
    from grpc import aio

    from magnetar.metadata.model import BookieAddress

pytestmark = pytest.mark.real_loop

OK = BookieCode.OK


class Remote:
    """A client of a bookie behind its ports."""

    def __init__(self, address: BookieAddress, channel: aio.Channel) -> None:
        self._address = address
        self._channel = channel

    async def connect(self) -> Writer:
        return await connect(self._address.data, INCARNATION)

    async def call(self, method: str, request: Message | bytes) -> bytes:
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return await call_unary(self._channel, f"/{SERVICE}/{method}", data)


@asynccontextmanager
async def remote() -> AsyncIterator[Remote]:
    async with (
        running_bookie() as bookie,
        served(bookie.service) as address,
        open_channel(address.grpc) as channel,
    ):
        yield Remote(address, channel)


async def test_another_incarnation_is_refused_everywhere() -> None:
    async with remote() as client:
        for method, request, reply in (
            ("LastConfirmed", pb.LastConfirmedRequest, pb.LastConfirmedReply),
            ("ListLedgers", pb.ListLedgersRequest, pb.ListLedgersReply),
            ("ListEntries", pb.ListEntriesRequest, pb.ListEntriesReply),
            ("LastHeard", pb.LastHeardRequest, pb.LastHeardReply),
        ):
            got = reply.FromString(await client.call(method, request(incarnation="e" * 32)))
            assert got.code == BookieCode.WRONG_INCARNATION, method


async def test_each_grpc_call_returns_the_service_answer() -> None:
    async with remote() as client:
        writer = await client.connect()
        await writer.add(*(add(2**40, entry, confirmed=entry - 1) for entry in (0, 1, 2, 7)))
        data = await client.call(
            "LastConfirmed",
            pb.LastConfirmedRequest(
                incarnation=INCARNATION, ledger=2**40, master_key=KEY, fence=True
            ),
        )
        assert pb.LastConfirmedReply.FromString(data) == pb.LastConfirmedReply(
            code=OK, confirmed=6, last_entry=7, length=8 * len(b"payload")
        )
        assert await writer.add(add(2**40, 8)) == [BookieCode.FENCED]
        data = await client.call(
            "ListLedgers", pb.ListLedgersRequest(incarnation=INCARNATION, after=-1)
        )
        assert pb.ListLedgersReply.FromString(data) == pb.ListLedgersReply(code=OK, ledgers=[2**40])
        data = await client.call(
            "ListEntries", pb.ListEntriesRequest(incarnation=INCARNATION, ledger=2**40)
        )
        assert pb.ListEntriesReply.FromString(data) == pb.ListEntriesReply(
            code=OK, runs=[pb.EntryRun(first=0, count=3), pb.EntryRun(first=7, count=1)]
        )
        info = pb.InfoReply.FromString(await client.call("Info", pb.InfoRequest()))
        assert (info.bookie, info.incarnation, info.state) == ("b1", INCARNATION, "serving")
        await writer.stream.close()


async def test_malformed_requests_are_answered_bad_request() -> None:
    async with remote() as client:
        garbage = b"\xff\xff\xff"
        bad = BookieCode.BAD_REQUEST
        for method, reply in (
            ("LastConfirmed", pb.LastConfirmedReply),
            ("ListLedgers", pb.ListLedgersReply),
            ("ListEntries", pb.ListEntriesReply),
            ("LastHeard", pb.LastHeardReply),
        ):
            assert reply.FromString(await client.call(method, garbage)).code == bad
        assert pb.InfoReply.FromString(await client.call("Info", garbage)).bookie == "b1"


@pytest.mark.parametrize("method", ["Write", "Read"])
async def test_adds_and_reads_are_not_served_over_grpc(method: str) -> None:
    async with remote() as client:
        with pytest.raises(CallFailed, match="UNIMPLEMENTED"):
            await client.call(method, b"")
