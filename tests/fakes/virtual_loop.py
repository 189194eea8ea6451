"""An event loop whose clock jumps to the next timer: minutes of pauses take no real time.

The loop refuses real sockets, and a test fails if a thread calls the loop: sockets and threads run
in real time. Tasks run in asyncio's order; the simulated world shuffles it.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextvars import Context

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Replaces the selector: instead of waiting it moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        own = not self.get_map()  # the loop's own pipe comes first
        assert own, "a socket or a pipe on the virtual loop: mark the test real_loop"
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task is blocked and no timer is pending"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        self._thread = threading.get_ident()
        self.called_by_thread = False
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def call_soon_threadsafe(  # type: ignore[override]  # typeshed's has a TypeVarTuple
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self.called_by_thread |= threading.get_ident() != self._thread
        return super().call_soon_threadsafe(callback, *args, context=context)

    def run_in_executor(self, *_: Any) -> NoReturn:  # type: ignore[override]
        raise AssertionError("a thread on the virtual loop: mark the test real_loop")


def stand_still(seconds: float) -> None:
    """Stop the process for this time, like a paused machine. Other processes continue."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop._virtual.now_s += seconds


def run_virtual(main: Coroutine[Any, Any, T], *, deadline_s: float = 3600.0) -> T:
    """Run a coroutine on a virtual loop. Fails if it takes longer than the deadline in the loop's
    time."""
    stray: list[dict[str, Any]] = []

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: stray.append(context))
        async with asyncio.timeout(deadline_s):
            return await main

    with asyncio.Runner(loop_factory=_Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, _Loop)
        try:
            result = runner.run(guarded())
        finally:
            assert not loop.called_by_thread, "a thread called the virtual loop: use real_loop"
    assert not stray, stray
    return result
