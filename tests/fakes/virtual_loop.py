"""An event loop whose clock jumps to the next timer: minutes of pauses pass in no time.

Real sockets and threads have no place on it. Task order is asyncio's own; the simulated world
shuffles.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Stands where the kernel would stand: instead of waiting it moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task is blocked and no timer is pending"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def stand_still(seconds: float) -> None:
    """The process does nothing for so long, as when its machine is paused; others go on."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop._virtual.now_s += seconds


def run_virtual(main: Coroutine[Any, Any, T], *, deadline_s: float = 3600.0) -> T:
    """Run a coroutine on such a loop; fails when it takes longer, in the loop's time."""
    stray: list[dict[str, Any]] = []

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: stray.append(context))
        async with asyncio.timeout(deadline_s):
            return await main

    with asyncio.Runner(loop_factory=_Loop) as runner:
        result = runner.run(guarded())
    assert not stray, stray
    return result
