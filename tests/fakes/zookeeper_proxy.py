"""A proxy between a ZooKeeper client and its server. It drops the messages that a test names."""

from __future__ import annotations

import asyncio
import contextlib
from enum import Enum
from typing import TYPE_CHECKING

from support import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.zookeeper_server import ZooKeeperEnsemble


class Mode(Enum):
    PASS = "pass"
    SWALLOW_REPLIES = "requests arrive, replies do not"
    REFUSE = "no connection"
    SILENT = "connections, and nothing else"
    TEAR_REPLIES = "the first bytes of a reply, and nothing after them"


class Proxy:
    """Between a client and the server."""

    def __init__(self, target_port: int) -> None:
        self.mode = Mode.PASS
        self.port = 0
        self._target = target_port
        self.serving = 0
        self._connections: list[asyncio.StreamWriter] = []
        self.garbage: bytes = b""  # sent instead of the next reply
        self.cut_after = 0  # replies, of all connections; 0: never

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving += 1
        with contextlib.suppress(OSError):
            if self.mode is Mode.PASS:
                server_reader, server = await asyncio.open_connection("127.0.0.1", self._target)
                self._connections += [writer, server]
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._copy(reader, server, replies=False))
                    group.create_task(self._copy(server_reader, writer, replies=True))
            elif self.mode is Mode.SILENT:
                self._connections.append(writer)
                await reader.read()
        writer.close()
        self.serving -= 1

    def cut(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65536):
                if replies and self.cut_after:
                    self.cut_after -= 1
                    if not self.cut_after:
                        self.cut()
                        break
                if replies and self.garbage:
                    chunk, self.garbage = self.garbage, b""
                if replies and self.mode is Mode.TEAR_REPLIES:
                    chunk, self.mode = chunk[:10], Mode.SWALLOW_REPLIES
                    writer.write(chunk)
                elif not (replies and self.mode is Mode.SWALLOW_REPLIES):
                    writer.write(chunk)
                    await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def proxied(server: ZooKeeperEnsemble) -> AsyncIterator[Proxy]:
    proxy = Proxy(server.nodes[0].ports["client"])
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        proxy.mode = Mode.REFUSE
        listener.close()
        proxy.cut()
        await wait_until(lambda: proxy.serving == 0)
