"""A client's view of a bookie over the simulated network. The oracle observes bookies here."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from world.net import SimStream, Unreachable, serve_stream

from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.metadata.model import BookieId, Member
from magnetar.protos.envelope import (
    BookieCode,
    check_beat,
    decode_hello_reply,
    decode_read_answers,
    encode_hello,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from world.net import Host, Network
    from world.nodes import BookieNode
    from world.oracle import Oracle

    from magnetar.bookie.contract import (
        BookieInfo,
        EntryPage,
        LastConfirmed,
        LastConfirmedRequest,
        LastHeard,
        ReadRequest,
    )
    from magnetar.bookie.service import BookieService

T = TypeVar("T")

PENDING_BYTES_MAX = 1 << 20  # the limit of a bookie
FRAME_BYTES = 300_000  # the frame size of an outbox with entries of 20 kB; less with smaller ones
FENCED = (BookieCode.OK, BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER)


class SimPeer:
    """A `BookiePeer`."""

    def __init__(
        self, network: Network, oracle: Oracle, source: Host, target: BookieNode, member: Member
    ) -> None:
        self.member = member
        self._network = network
        self._oracle = oracle
        self._source = source
        self._target = target

    async def open_write(self, client_name: str) -> SimStream:
        stream = await self._call("write", lambda: self._accept(client_name))
        try:
            await stream.send([encode_hello(self.member.incarnation, client_name)])
            reply = decode_hello_reply(await stream.receive())
        except BaseException:
            await stream.close()
            raise
        code = reply.code
        if reply.incarnation != self.member.incarnation:
            code = BookieCode.WRONG_INCARNATION
        if code is not BookieCode.OK:
            await stream.close()
            raise BookieUnavailable(self.member.bookie, code, "the bookie refused the stream")
        return stream

    async def read(self, request: ReadRequest) -> AsyncIterator[bytes]:
        frames = await self._call("read", lambda: self._serve_read(request))
        for frame in frames:
            yield frame

    async def last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        answer = await self._call("last confirmed", lambda: self._serve_last_confirmed(request))
        if answer.code is BookieCode.OK:
            self._oracle.on_named(request.ledger, answer.confirmed)
        return answer

    async def list_entries(self, ledger: int, first: int) -> EntryPage:
        async def serve() -> EntryPage:
            acked = self._oracle.acked(self.member, ledger)
            page = await self._service().list_entries(
                self.member.incarnation, ledger=ledger, first=first, entries_max=0
            )
            self._oracle.i10_no_false_gap(self.member, ledger, first, page, acked)
            return page

        return await self._call("list entries", serve)

    async def info(self) -> BookieInfo:
        async def serve() -> BookieInfo:
            return self._service().info()

        return await self._call("info", serve)

    async def open_presence(self, broker: str, incarnation: str) -> SimStream:
        async def accept() -> SimStream:
            service = self._service()
            near, far = self._network.connect(self._source, self._target.host)
            self._target.host.spawn(serve_stream(far, service.handle_presence))
            return near

        stream = await self._call("presence", accept)
        try:
            await stream.send([encode_hello(incarnation, broker)])
            check_beat(await stream.receive())
        except BaseException:
            await stream.close()
            raise
        return stream

    async def last_heard(self, broker: str, incarnation: str) -> LastHeard | None:
        async def serve() -> LastHeard | None:
            code, last = self._service().last_heard(
                self.member.incarnation, broker=broker, broker_incarnation=incarnation
            )
            if code is not BookieCode.OK:
                raise BookieUnavailable(self.member.bookie, code, "another incarnation")
            return last

        return await self._call("last heard", serve)

    async def close(self) -> None:
        """This peer holds no frames."""

    # -- at the bookie -----------------------------------------------------------------------------

    async def _accept(self, client_name: str) -> SimStream:
        service, target, oracle = self._service(), self._target, self._oracle
        near, far = self._network.connect(self._source, target.host)
        member = _member_of(service)
        normal = client_name.endswith("/adds")
        greeted = False

        def tap(frame: bytes) -> None:
            nonlocal greeted
            if greeted:
                oracle.on_acks(member, frame, normal=normal, durable=target.disk.durable)
                if target.commit is not None:
                    held, streams = target.commit.pending_bytes, len(service._streams)
                    limit = PENDING_BYTES_MAX + (1 + streams) * FRAME_BYTES
                    oracle.i17_within("bookie", held, limit)
            greeted = True

        far.tap = tap
        target.host.spawn(serve_stream(far, service.handle_write))
        return near

    async def _serve_read(self, request: ReadRequest) -> list[bytes]:
        service = self._service()
        present = _member_of(service).incarnation == request.incarnation
        member = Member(BookieId(self.member.bookie), request.incarnation)
        acked = self._oracle.acked(member, request.ledger)
        if present and request.fence:
            self._oracle.r2_reads_behind_fences(request.ledger)
        async with aclosing(service.read(request)) as answers:
            frames = [b"".join(parts) async for parts in answers]
        for frame in frames:
            for answer in decode_read_answers(frame):
                self._oracle.i10_no_false_negative(
                    member, request.ledger, answer.entry, answer.code, acked
                )
                if present and request.fence and answer.code in FENCED:
                    self._note_fence(member, request.ledger)
        return frames

    async def _serve_last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        service = self._service()
        acked = self._oracle.acked(_member_of(service), request.ledger)
        answer = await service.last_confirmed(request)
        if request.incarnation == service.identity.incarnation:
            if answer.code in FENCED and request.fence:
                self._note_fence(_member_of(service), request.ledger)
            self._oracle.i10_no_false_negative(
                _member_of(service), request.ledger, 0, answer.code, acked
            )
        return answer

    def _note_fence(self, member: Member, ledger: int) -> None:
        image = self._target.disk.image
        assert image is not None
        visible = set(image.entry_ids(ledger, 0, entries_max=1 << 30))
        durable = self._target.disk.durably_fenced(ledger)
        self._oracle.on_fence_answer(member, ledger, visible, durable=durable)

    def _service(self) -> BookieService:
        service = self._target.service
        if service is None:
            raise Unreachable(f"{self.member.bookie} does not listen yet")
        return service

    async def _call(self, what: str, serve: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._network.call(self._source, self._target.host, what, serve)
        except Unreachable as error:
            raise BookieUnavailable(
                self.member.bookie, BookieCode.CONNECTION_LOST, str(error)
            ) from error


def _member_of(service: BookieService) -> Member:
    return Member(BookieId(service.identity.bookie), service.identity.incarnation)
