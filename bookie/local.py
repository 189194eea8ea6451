"""A bookie in the same process, for `magnetar standalone`: no port, no protobuf."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.protos.envelope import BookieCode, check_beat, decode_hello_reply, encode_hello
from magnetar.runtime.memory_stream import MemoryStream, memory_stream_pair, serve_memory_stream

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from magnetar.bookie.contract import (
        BookieInfo,
        EntryPage,
        LastConfirmed,
        LastConfirmedRequest,
        LastHeard,
        ReadRequest,
    )
    from magnetar.bookie.service import BookieService
    from magnetar.metadata.model import Member
    from magnetar.runtime.frames import Buffer, FrameStream

# Frames that wait at a busy bookie: 4 MiB, if each has FRAME_BYTES_MAX. Further frames wait at the
# writer.
_FRAMES_MAX: Final = 16


class LocalBookiePeer:
    """A `BookiePeer`. The serving ends of its streams run in `group`, which must outlive the peer.

    `member` may be a former incarnation of the bookie. Requests for entries name the incarnation,
    and the bookie answers them from the store of that incarnation.
    """

    def __init__(self, member: Member, service: BookieService, *, group: asyncio.TaskGroup) -> None:
        self._member = member
        self._service = service
        self._group = group
        self._streams: list[MemoryStream] = []

    @property
    def member(self) -> Member:
        return self._member

    async def open_write(self, client_name: str) -> FrameStream:
        here, there = memory_stream_pair(client_name, self.member.bookie, frames_max=_FRAMES_MAX)
        self._group.create_task(serve_memory_stream(there, self._service.handle_write))
        await here.send([encode_hello(self.member.incarnation, client_name)])
        reply = decode_hello_reply(await here.receive())
        if reply.code is not BookieCode.OK:
            await here.close()
            raise BookieUnavailable(self.member.bookie, reply.code, "it refused the stream")
        self._keep(here)
        return here

    async def read(self, request: ReadRequest) -> AsyncIterator[Buffer]:
        async with aclosing(self._service.read(request)) as frames:
            async for parts in frames:
                yield b"".join(parts)

    async def last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        return await self._service.last_confirmed(request)

    async def list_entries(self, ledger: int, first: int) -> EntryPage:
        return await self._service.list_entries(
            self.member.incarnation, ledger=ledger, first=first, entries_max=0
        )

    async def info(self) -> BookieInfo:
        return self._service.info()

    async def open_presence(self, broker: str, incarnation: str) -> FrameStream:
        here, there = memory_stream_pair(broker, self.member.bookie, frames_max=_FRAMES_MAX)
        self._group.create_task(serve_memory_stream(there, self._service.handle_presence))
        await here.send([encode_hello(incarnation, broker)])
        check_beat(await here.receive())
        self._keep(here)
        return here

    async def last_heard(self, broker: str, incarnation: str) -> LastHeard | None:
        code, last = self._service.last_heard(
            self.member.incarnation, broker=broker, broker_incarnation=incarnation
        )
        if code is not BookieCode.OK:
            raise BookieUnavailable(
                self.member.bookie, code, "it does not say when it heard a broker"
            )
        return last

    async def close(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.close()

    def _keep(self, stream: MemoryStream) -> None:
        self._streams = [each for each in self._streams if not each.ended]
        self._streams.append(stream)
