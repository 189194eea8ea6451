"""RemoteBookiePeer: a bookie on the network, over its two ports.

Adds and reads travel as frames over TCP to the data port; the rare calls travel over gRPC. Each
stream of adds and each read under way has a connection of its own. So acknowledgements do not wait
behind entries, and cancelling a read ends no other read. After a completed read, its connection
serves the next read.

This is the only module of `bookie/ledger` that uses gRPC.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from magnetar.bookie.contract import (
    BookieInfo,
    EntryPage,
    EntryRun,
    LastConfirmed,
    LastConfirmedRequest,
    LastHeard,
    ReadRequest,
)
from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.protos import bookie_pb2 as pb
from magnetar.protos.envelope import (
    BookieCode,
    Purpose,
    check_beat,
    decode_hello_reply,
    encode_hello,
    encode_purpose,
    is_read_end,
)
from magnetar.runtime.errors import CallFailed
from magnetar.runtime.grpc_frames import call_unary, open_channel
from magnetar.runtime.tcp_frames import TcpFrameStream, connect_frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from grpc import aio

    from magnetar.metadata.model import BookieAddress, Member
    from magnetar.runtime.frames import Buffer, FrameStream

SERVICE: Final = "/magnetar.bookie.Bookie"
CLOSE_S: Final = 1.0

READS_MAX: Final = 32
"""Concurrent reads of one process at one bookie; further reads wait in FIFO order. A bookie reads
with one thread, and refuses a read while 256 wait (READS_WAITING_MAX): the reads of eight
processes."""

IDLE_READS_MAX: Final = 2
"""Connections that are kept for the next read. A new connection costs about 0.2 ms."""


class RemoteBookiePeer:
    """A `BookiePeer` on the network. Connects at the first call; creates no task."""

    def __init__(self, member: Member, address: BookieAddress) -> None:
        self._member = member
        self._address = address
        self._channel: aio.Channel | None = None  # None: not used yet, or closed
        # Streams of adds and presences; some may have ended.
        self._writes: list[TcpFrameStream] = []
        self._reads: set[TcpFrameStream] = set()  # the streams that each serve a read
        self._idle_reads: list[TcpFrameStream] = []
        self._may_read = asyncio.Semaphore(READS_MAX)

    @property
    def member(self) -> Member:
        return self._member

    async def open_write(self, client_name: str) -> FrameStream:
        stream = await self._connect(Purpose.ADDS)
        try:
            await stream.send([encode_hello(self._member.incarnation, client_name)])
            reply = decode_hello_reply(await stream.receive())
        except BaseException:
            stream.abort("the bookie did not answer the hello")
            raise
        code = reply.code
        if reply.incarnation != self._member.incarnation:
            code = BookieCode.WRONG_INCARNATION
        if code is not BookieCode.OK:
            await stream.close()
            raise self._unavailable(code, "it refused the stream")
        self._keep(stream)
        return stream

    async def read(self, request: ReadRequest) -> AsyncIterator[Buffer]:
        message = pb.ReadRequest(
            incarnation=request.incarnation,
            ledger=request.ledger,
            master_key=request.master_key,
            first=request.first,
            last=request.last,
            max_bytes=request.bytes_max or 0,
            max_entries=request.entries_max or 0,
            fence=request.fence,
            run=request.run,
            stride=request.stride,
        )
        async with self._may_read:
            stream = await self._read_connection()
            self._reads.add(stream)
            completed = False
            try:
                await stream.send([message.SerializeToString()])
                while not is_read_end(frame := await stream.receive()):
                    yield frame
                completed = True
            finally:
                self._reads.discard(stream)
                if completed and len(self._idle_reads) < IDLE_READS_MAX:
                    self._idle_reads.append(stream)
                else:
                    stream.abort("the read has ended")

    async def last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        message = pb.LastConfirmedRequest(
            incarnation=request.incarnation,
            ledger=request.ledger,
            master_key=request.master_key,
            fence=request.fence,
        )
        answer = await self._call("LastConfirmed", message.SerializeToString())
        try:
            reply = pb.LastConfirmedReply.FromString(answer)
            code = BookieCode(reply.code)
        except (DecodeError, ValueError) as error:
            raise self._unavailable(BookieCode.CORRUPT, str(error)) from error
        return LastConfirmed(
            code=code,
            confirmed=reply.confirmed,
            last_entry=reply.last_entry,
            length=reply.length,
        )

    async def list_entries(self, ledger: int, first: int) -> EntryPage:
        message = pb.ListEntriesRequest(
            incarnation=self._member.incarnation, ledger=ledger, first=first
        )
        answer = await self._call("ListEntries", message.SerializeToString())
        try:
            reply = pb.ListEntriesReply.FromString(answer)
            code = BookieCode(reply.code)
        except (DecodeError, ValueError) as error:
            raise self._unavailable(BookieCode.CORRUPT, str(error)) from error
        runs = tuple(EntryRun(run.first, run.count) for run in reply.runs)
        return EntryPage(code, runs, more=reply.more)

    async def info(self) -> BookieInfo:
        answer = await self._call("Info", pb.InfoRequest().SerializeToString())
        try:
            reply = pb.InfoReply.FromString(answer)
        except DecodeError as error:
            raise self._unavailable(BookieCode.CORRUPT, str(error)) from error
        return BookieInfo(
            bookie=reply.bookie,
            incarnation=reply.incarnation,
            boot_epoch=reply.boot_epoch,
            cluster=reply.cluster,
            state=reply.state,
            read_only=reply.read_only,
            disk_total_bytes=reply.disk_total_bytes,
            disk_free_bytes=reply.disk_free_bytes,
        )

    async def open_presence(self, broker: str, incarnation: str) -> FrameStream:
        stream = await self._connect(Purpose.PRESENCE)
        try:
            await stream.send([encode_hello(incarnation, broker)])
            check_beat(await stream.receive())
        except BaseException:
            stream.abort("the bookie did not answer the hello")
            raise
        self._keep(stream)
        return stream

    async def last_heard(self, broker: str, incarnation: str) -> LastHeard | None:
        message = pb.LastHeardRequest(
            incarnation=self._member.incarnation, broker=broker, broker_incarnation=incarnation
        )
        answer = await self._call("LastHeard", message.SerializeToString())
        try:
            reply = pb.LastHeardReply.FromString(answer)
            code = BookieCode(reply.code)
        except (DecodeError, ValueError) as error:
            raise self._unavailable(BookieCode.CORRUPT, str(error)) from error
        if code is not BookieCode.OK:
            raise self._unavailable(code, "it does not say when it heard a broker")
        if not reply.known:
            return None
        return LastHeard(heard_s=reply.heard_ms / 1000, listening_s=reply.listening_ms / 1000)

    async def close(self) -> None:
        for read in (*self._reads, *self._idle_reads):
            read.abort("the bookie's connections were closed here")
        self._idle_reads.clear()
        writes, self._writes = self._writes, []
        channel, self._channel = self._channel, None
        async with asyncio.TaskGroup() as group:  # each stream ends within a second
            for stream in writes:
                group.create_task(stream.close())
            if channel is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await channel.close()

    async def _connect(self, purpose: Purpose) -> TcpFrameStream:
        stream = await connect_frames(self._address.data)
        try:
            await stream.send([encode_purpose(purpose)])
        except BaseException:
            stream.abort("cancelled here")
            raise
        return stream

    def _keep(self, stream: TcpFrameStream) -> None:
        self._writes = [each for each in self._writes if not each.ended]
        self._writes.append(stream)

    async def _read_connection(self) -> TcpFrameStream:
        while self._idle_reads:
            stream = self._idle_reads.pop()
            if not stream.ended:
                return stream
        return await self._connect(Purpose.READS)

    def _open(self) -> aio.Channel:
        if self._channel is None:
            self._channel = open_channel(self._address.grpc)
        return self._channel

    async def _call(self, method: str, request: bytes) -> bytes:
        try:
            return await call_unary(self._open(), f"{SERVICE}/{method}", request)
        except CallFailed as error:
            raise self._unavailable(BookieCode.CONNECTION_LOST, error.reason) from error

    def _unavailable(self, code: BookieCode, why: str) -> BookieUnavailable:
        return BookieUnavailable(self._member.bookie, code, why)
