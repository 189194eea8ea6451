"""The same service through gRPC: what the edge adds is conversion, and nothing gets lost in it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import IDENTITY, INCARNATION, KEY, Bookie, Writer, add, envelope, running_bookie

from magnetar.bookie.server import SERVICE, handlers
from magnetar.protos import bookie_pb2 as pb
from magnetar.protos.envelope import (
    ENTRY_BYTES_MAX,
    BookieCode,
    ReadAnswer,
    decode_hello_reply,
    decode_read_answers,
    encode_hello,
)
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import (
    call_unary,
    grpc_server,
    open_channel,
    open_frame_stream,
    read_frames,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from google.protobuf.message import Message

pytestmark = pytest.mark.real_loop

OK = BookieCode.OK


class Remote:
    """A client of a bookie behind a port."""

    def __init__(self, bookie: Bookie, address: str) -> None:
        self.bookie = bookie
        self.channel = open_channel(address)

    async def connect(self, incarnation: str = INCARNATION) -> Writer:
        stream = open_frame_stream(self.channel, f"/{SERVICE}/Write", peer="b1")
        await stream.send([encode_hello(incarnation, "test")])
        writer = Writer(stream)
        writer.reply = decode_hello_reply(await stream.receive())
        return writer

    async def call(self, method: str, request: Message | bytes) -> bytes:
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return await call_unary(self.channel, f"/{SERVICE}/{method}", data)

    async def read(self, request: pb.ReadRequest | bytes) -> list[ReadAnswer]:
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return [
            answer
            async for frame in read_frames(self.channel, f"/{SERVICE}/Read", data)
            for answer in decode_read_answers(frame)
        ]


@asynccontextmanager
async def remote() -> AsyncIterator[Remote]:
    async with running_bookie() as bookie:
        services = {SERVICE: handlers(bookie.service)}
        async with grpc_server(services, host="127.0.0.1", port=0) as port:
            client = Remote(bookie, f"127.0.0.1:{port}")
            yield client
            await client.channel.close()


async def test_adds_and_reads_of_every_size() -> None:
    async with remote() as client:
        writer = await client.connect()
        assert writer.reply == (OK, INCARNATION, IDENTITY.boot_epoch)
        payloads = [b"", b"x", bytes(100_000), bytes(ENTRY_BYTES_MAX), b"last"]
        for entry, payload in enumerate(payloads):
            assert await writer.add(add(1, entry, payload)) == [OK]
        answers = await client.read(
            pb.ReadRequest(incarnation=INCARNATION, ledger=1, master_key=KEY, first=0, last=99)
        )
        stored = [envelope(1, entry, payload) for entry, payload in enumerate(payloads)]
        assert [answer.envelope for answer in answers[:-1]] == stored
        assert answers[-1] == (5, BookieCode.NO_SUCH_ENTRY, b"")
        await writer.stream.close()


async def test_an_entry_too_large_is_refused_and_the_stream_goes_on() -> None:
    async with remote() as client:
        writer = await client.connect()
        code = await writer.add(add(1, 0, bytes(ENTRY_BYTES_MAX + 1)))
        assert code == [BookieCode.TOO_LARGE]
        assert await writer.add(add(1, 0)) == [OK]
        await writer.stream.close()


async def test_a_damaged_frame_ends_its_stream_with_the_reason_and_no_other() -> None:
    async with remote() as client:
        victim, other = await client.connect(), await client.connect()
        await victim.send(add(1, 0)[:-1])
        with pytest.raises(StreamClosed, match=r"FrameDamaged.*bytes"):
            await victim.stream.receive()
        assert await other.add(add(1, 0)) == [OK]
        await other.stream.close()


async def test_another_incarnation_is_refused_everywhere() -> None:
    async with remote() as client:
        other = "e" * 32
        writer = await client.connect(other)
        assert writer.reply is not None
        assert writer.reply.code is BookieCode.WRONG_INCARNATION
        wrong = BookieCode.WRONG_INCARNATION
        answers = await client.read(pb.ReadRequest(incarnation=other, ledger=1, last=1))
        assert answers == [(0, wrong, b"")]
        for method, request, reply in (
            ("LastConfirmed", pb.LastConfirmedRequest, pb.LastConfirmedReply),
            ("ListLedgers", pb.ListLedgersRequest, pb.ListLedgersReply),
            ("ListEntries", pb.ListEntriesRequest, pb.ListEntriesReply),
        ):
            got = reply.FromString(await client.call(method, request(incarnation=other)))
            assert got.code == wrong, method


async def test_the_ordinary_calls() -> None:
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


async def test_limits_of_a_read_are_passed_on() -> None:
    async with remote() as client:
        writer = await client.connect()
        await writer.add(*(add(1, entry) for entry in range(5)))
        for limits, count in (({"max_bytes": 1}, 1), ({"max_entries": 2}, 2)):
            request = pb.ReadRequest(
                incarnation=INCARNATION, ledger=1, master_key=KEY, last=4, **limits
            )
            assert len(await client.read(request)) == count
        await writer.stream.close()


async def test_bytes_that_are_no_request() -> None:
    async with remote() as client:
        garbage = b"\xff\xff\xff"
        bad = BookieCode.BAD_REQUEST
        assert await client.read(garbage) == [(-1, bad, b"")]
        for method, reply in (
            ("LastConfirmed", pb.LastConfirmedReply),
            ("ListLedgers", pb.ListLedgersReply),
            ("ListEntries", pb.ListEntriesReply),
        ):
            assert reply.FromString(await client.call(method, garbage)).code == bad
        assert pb.InfoReply.FromString(await client.call("Info", garbage)).bookie == "b1"
