"""The watches of one path at a ZooKeeper server, which fire once and are armed again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from support import settle

from magnetar.metadata.store import SessionState
from magnetar.metadata.watches import Watches
from magnetar.metadata.zookeeper import _Arm

if TYPE_CHECKING:
    from collections.abc import Callable


class Server:
    """The part of a ZooKeeperStore that an `_Arm` uses. A test answers the requests."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._state = SessionState.CONNECTED
        self._client = SimpleNamespace(exists_async=print, get_children_async=print)
        self._watches = Watches()
        self._arms: dict[str, _Arm] = {}
        self.requests: list[asyncio.Future[None]] = []

    def _full(self, path: str) -> str:
        return path

    def _send(self, _: Callable[[], Any]) -> asyncio.Future[None]:
        self.requests.append(self._loop.create_future())
        return self.requests[-1]

    def _arm_soon(self, arms: list[_Arm]) -> None:
        for arm in arms:
            arm.maybe_arm()

    async def answer(self) -> None:
        for request in self.requests:
            if not request.done():
                request.set_result(None)
        await settle()


async def test_a_change_during_an_arming_is_seen_although_a_callback_fails() -> None:
    server, stray = Server(), list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: stray.append(str(context["exception"])))
    called: list[int] = []

    def fail() -> None:
        called.append(len(server.requests))
        raise ValueError("a bug")

    server._watches.add("/a", fail)
    arm = server._arms["/a"] = _Arm(server, "/a")  # type: ignore[arg-type]
    arm.maybe_arm()
    arm.maybe_arm()  # the watch has fired before its arming was answered
    assert len(server.requests) == 2
    await server.answer()
    assert len(server.requests) == 4
    await server.answer()
    assert called == [4, 4]
    assert stray == ["a bug", "a bug"]
