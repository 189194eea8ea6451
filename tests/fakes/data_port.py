"""A client of a bookie's data port that hides nothing: raw requests in, raw answers out."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fakes.bookies import Writer

from magnetar.bookie.data_port import data_server
from magnetar.bookie.server import SERVICE, handlers
from magnetar.metadata.model import BookieAddress
from magnetar.protos.envelope import (
    Purpose,
    decode_hello_reply,
    decode_read_answers,
    encode_hello,
    encode_purpose,
    is_read_end,
)
from magnetar.runtime.grpc_frames import grpc_server
from magnetar.runtime.listener import bind_port, port_of
from magnetar.runtime.tcp_frames import connect_frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from google.protobuf.message import Message

    from magnetar.bookie.service import BookieService
    from magnetar.protos.envelope import ReadAnswer
    from magnetar.runtime.tcp_frames import TcpFrameStream


@asynccontextmanager
async def served(service: BookieService) -> AsyncIterator[BookieAddress]:
    """The bookie behind its two ports."""
    listener = bind_port("127.0.0.1", 0)
    services = {SERVICE: handlers(service)}
    async with (
        grpc_server(services, host="127.0.0.1", port=0, grace_s=0.2) as grpc_port,
        asyncio.TaskGroup() as group,
    ):
        serving = group.create_task(data_server(service).run(listener))
        yield BookieAddress(f"127.0.0.1:{port_of(listener)}", f"127.0.0.1:{grpc_port}")
        serving.cancel()


async def connect(address: str, incarnation: str) -> Writer:
    """A stream of adds, after the hellos. `Writer.reply` has the answer, also a refusal."""
    stream = await connect_frames(address)
    await stream.send([encode_purpose(Purpose.ADDS)])
    await stream.send([encode_hello(incarnation, "test")])
    writer = Writer(stream)
    writer.reply = decode_hello_reply(await stream.receive())
    return writer


@asynccontextmanager
async def reads(address: str) -> AsyncIterator[TcpFrameStream]:
    stream = await connect_frames(address)
    try:
        await stream.send([encode_purpose(Purpose.READS)])
        yield stream
    finally:
        await stream.close()


async def ask(stream: TcpFrameStream, request: Message | bytes) -> list[ReadAnswer]:
    """The bookie's answer to one request on a connection of `reads`."""
    await stream.send([request if isinstance(request, bytes) else request.SerializeToString()])
    answers: list[ReadAnswer] = []
    while not is_read_end(frame := await stream.receive()):
        answers += decode_read_answers(frame)
    return answers


async def read(address: str, request: Message | bytes) -> list[ReadAnswer]:
    async with reads(address) as stream:
        return await ask(stream, request)
