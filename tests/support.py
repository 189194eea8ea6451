"""Helpers of many tests: a loop with a deadline, waits without blind sleeps, a clock that tests
move."""

from __future__ import annotations

import asyncio
import sys
import time
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from magnetar.runtime.ports import free_ports
from magnetar.zookeeper_server import JavaMissing, ZooKeeperJarsMissing, find_jars, find_java

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

POLL_S = 0.002
STOOD_STILL_S = 0.5  # a longer time between two checks means that this process did not run
# grpc.aio has one thread for all loops of a process. Events that it delivers after a test must find
# this loop open; otherwise they fail in the loop of a later test.
LATE_COMPLETIONS_S = 0.02


def run(main: Coroutine[Any, Any, T], *, deadline_s: float = 60.0) -> T:
    """Run a test's coroutine on a loop of its own.

    Fails if it takes longer than `deadline_s`, or if something else failed unnoticed: a callback, a
    task that was not awaited, a server's handler.
    """
    stray: list[dict[str, Any]] = []

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: is_foreign(context) or stray.append(context))
        try:
            async with asyncio.timeout(deadline_s):
                return await main
        finally:
            if "grpc" in sys.modules:
                await asyncio.sleep(LATE_COMPLETIONS_S)

    result = asyncio.run(guarded())
    assert not stray, stray
    return result


def frames_of(error: BaseException) -> int:
    """Return the number of frames that the traceback of an error keeps in memory."""
    return len(list(walk_tb(error.__traceback__)))


def is_foreign(context: dict[str, Any]) -> bool:
    """Return whether grpc.aio found *another* loop closed.

    That loop belonged to an earlier test or to a client that ended. The thread of grpc.aio reports
    the error to the loop that runs now.
    """
    closed = isinstance(context.get("exception"), RuntimeError)
    return closed and "PollerCompletionQueue" in str(context.get("message"))


async def wait_until(
    predicate: Callable[[], object], *, deadline_s: float = 30.0, what: str = "the condition"
) -> None:
    """Let the loop run until `predicate()` is true."""
    waiting = _Waiting(asyncio.get_running_loop().time, deadline_s)
    while not predicate():
        assert waiting.goes_on(), f"{what} was not true within {deadline_s} s"
        await asyncio.sleep(POLL_S)


def wait_for(predicate: Callable[[], object], *, deadline_s: float = 30.0) -> None:
    """Wait until `predicate()` is true, in a test without a loop."""
    waiting = _Waiting(time.monotonic, deadline_s)
    while not predicate():
        assert waiting.goes_on(), f"the condition was not true within {deadline_s} s"
        time.sleep(POLL_S)


class _Waiting:
    """A deadline that counts only time in which this process ran. While the machine stands still or
    a test blocks the loop, no other task can make the condition true."""

    def __init__(self, now: Callable[[], float], deadline_s: float) -> None:
        self._now = now
        self._left_s = deadline_s
        self._asked_s = now()

    def goes_on(self) -> bool:
        now_s = self._now()
        self._left_s -= min(now_s - self._asked_s, STOOD_STILL_S)
        self._asked_s = now_s
        return self._left_s > 0


async def settle(turns: int = 20) -> None:
    """Give every ready task some turns, before a test asserts that something did *not* happen."""
    for _ in range(turns):
        await asyncio.sleep(0)


def free_port() -> int:
    """Return a TCP port on loopback that is free now and that no other test of this process got.

    Bind port 0 instead where possible.
    """
    [port] = free_ports(1)
    return port


def skip_without_zookeeper() -> None:
    """Skip the test, with the reason, where no real ZooKeeper can be started."""
    try:
        find_java()
        find_jars()
    except (JavaMissing, ZooKeeperJarsMissing) as missing:
        pytest.skip(str(missing))


class ManualClock:
    """A wall clock that stands still until it is moved."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance_ms(self, by_ms: int) -> None:
        self._now_ms += by_ms
