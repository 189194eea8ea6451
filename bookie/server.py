"""The bookie's gRPC port: decodes protobuf, calls `BookieService` and encodes the answer.

It serves the rare calls. Adds and reads use the data port: data_port.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from magnetar.bookie.contract import LastConfirmed, LastConfirmedRequest
from magnetar.protos import bookie_pb2 as pb
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.grpc_frames import unary_handler

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

    from magnetar.bookie.service import BookieService

SERVICE: Final = "magnetar.bookie.Bookie"


def handlers(service: BookieService) -> Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]:
    """Return the methods of SERVICE, for `grpc_server`. They answer malformed protobuf with
    BAD_REQUEST, except Info, which does not read its request."""
    edge = _Edge(service)
    return {
        "LastConfirmed": unary_handler(edge.last_confirmed),
        "ListLedgers": unary_handler(edge.list_ledgers),
        "ListEntries": unary_handler(edge.list_entries),
        "Info": unary_handler(edge.info),
        "LastHeard": unary_handler(edge.last_heard),
    }


class _Edge:
    def __init__(self, service: BookieService) -> None:
        self._service = service

    async def last_confirmed(self, data: bytes) -> bytes:
        try:
            message = pb.LastConfirmedRequest.FromString(data)
        except DecodeError:
            last = LastConfirmed(code=BookieCode.BAD_REQUEST)
        else:
            last = await self._service.last_confirmed(
                LastConfirmedRequest(
                    incarnation=message.incarnation,
                    ledger=message.ledger,
                    master_key=message.master_key,
                    fence=message.fence,
                )
            )
        return pb.LastConfirmedReply(
            code=last.code,
            confirmed=last.confirmed,
            last_entry=last.last_entry,
            length=last.length,
        ).SerializeToString()

    async def list_ledgers(self, data: bytes) -> bytes:
        try:
            message = pb.ListLedgersRequest.FromString(data)
        except DecodeError:
            return pb.ListLedgersReply(code=BookieCode.BAD_REQUEST).SerializeToString()
        page = await self._service.list_ledgers(
            message.incarnation, after=message.after, ledgers_max=message.max_ledgers
        )
        return pb.ListLedgersReply(
            code=page.code, ledgers=page.ledgers, more=page.more
        ).SerializeToString()

    async def list_entries(self, data: bytes) -> bytes:
        try:
            message = pb.ListEntriesRequest.FromString(data)
        except DecodeError:
            return pb.ListEntriesReply(code=BookieCode.BAD_REQUEST).SerializeToString()
        page = await self._service.list_entries(
            message.incarnation,
            ledger=message.ledger,
            first=message.first,
            entries_max=message.max_entries,
        )
        runs = [pb.EntryRun(first=run.first, count=run.count) for run in page.runs]
        return pb.ListEntriesReply(code=page.code, runs=runs, more=page.more).SerializeToString()

    async def info(self, _: bytes) -> bytes:
        info = self._service.info()
        return pb.InfoReply(
            bookie=info.bookie,
            incarnation=info.incarnation,
            boot_epoch=info.boot_epoch,
            state=info.state,
            read_only=info.read_only,
            disk_total_bytes=info.disk_total_bytes,
            disk_free_bytes=info.disk_free_bytes,
            cluster=info.cluster,
        ).SerializeToString()

    async def last_heard(self, data: bytes) -> bytes:
        try:
            message = pb.LastHeardRequest.FromString(data)
        except DecodeError:
            return pb.LastHeardReply(code=BookieCode.BAD_REQUEST).SerializeToString()
        code, last = self._service.last_heard(
            message.incarnation,
            broker=message.broker,
            broker_incarnation=message.broker_incarnation,
        )
        if last is None:
            return pb.LastHeardReply(code=code).SerializeToString()
        return pb.LastHeardReply(
            code=code,
            known=True,
            heard_ms=int(last.heard_s * 1000),
            listening_ms=int(last.listening_s * 1000),
        ).SerializeToString()
