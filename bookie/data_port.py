"""The bookie's data port: converts frames over TCP to calls of `BookieService`, and back.

A connection serves one purpose, so acknowledgements never wait behind the entries of a read. The
purposes are the adds of one client process, a series of reads, and the presence of a broker
(witness.py). The first frame names the purpose. A client that gives up a read closes the connection
and disturbs no other read. `handlers` in server.py has the calls over gRPC.
"""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

from google.protobuf.message import DecodeError

from magnetar.bookie.contract import ReadRequest
from magnetar.protos import bookie_pb2 as pb
from magnetar.protos.envelope import (
    READ_END,
    BookieCode,
    Purpose,
    decode_purpose,
    encode_read_answer,
)
from magnetar.runtime.tcp_frames import FrameServer

if TYPE_CHECKING:
    from magnetar.bookie.service import BookieService
    from magnetar.runtime.frames import Buffer, FrameStream

CONNECTIONS_MAX: Final = 1_000
"""Enough for 256 streams of adds (STREAMS_MAX), and for some reads and one presence of each of a
few dozen brokers. RocksDB keeps up to 512 files open beside them: the process needs a hard limit of
1,600 open files (`ulimit -Hn`)."""


def data_server(service: BookieService) -> FrameServer:
    return FrameServer(partial(serve_data, service), connections_max=CONNECTIONS_MAX)


async def serve_data(service: BookieService, stream: FrameStream) -> None:
    """Serve one connection to its end. Raises StreamClosed, FrameDamaged, StorageFailed."""
    purpose = decode_purpose(await stream.receive())
    match purpose:
        case Purpose.ADDS:
            await service.handle_write(stream)
        case Purpose.READS:
            while True:
                await _answer_read(service, await stream.receive(), stream)
        case Purpose.PRESENCE:
            await service.handle_presence(stream)
        case _:
            assert_never(purpose)


async def _answer_read(service: BookieService, data: Buffer, stream: FrameStream) -> None:
    try:
        message = pb.ReadRequest.FromString(bytes(data))
    except DecodeError:
        await stream.send(encode_read_answer(-1, BookieCode.BAD_REQUEST))
    else:
        request = ReadRequest(
            incarnation=message.incarnation,
            ledger=message.ledger,
            master_key=message.master_key,
            first=message.first,
            last=message.last,
            bytes_max=message.max_bytes or None,
            entries_max=message.max_entries or None,
            fence=message.fence,
            run=message.run,
            stride=message.stride,
        )
        async with aclosing(service.read(request)) as frames:
            async for parts in frames:
                await stream.send(parts)
    await stream.send([READ_END])
