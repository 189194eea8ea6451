"""The tasks of a client: a task group whose life is open() to close() instead of a `with` block."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine


class Scope:
    """Owns every task that a client starts, and ends them with it.

    A user may make a client in one task and close it in another, so the group lives in a task of
    its own. A task that fails (none is expected to: failures of the network end tasks quietly) ends
    all others; `on_failure` is told, and the loop's exception handler. `at_end` is run last,
    however it ends, also when the loop ends without anybody having closed the client.
    """

    def __init__(
        self,
        on_failure: Callable[[BaseException], None],
        at_end: Callable[[], Awaitable[None]],
    ) -> None:
        self._on_failure = on_failure
        self._at_end = at_end
        self._group: asyncio.TaskGroup | None = None  # None: not opened yet
        self._task: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()

    async def open(self) -> None:
        """Begin, unless it has begun. Returns also when it has ended meanwhile."""
        if self._task is None:
            # The one task that no group owns: close() and cancel() end it.
            self._task = asyncio.get_running_loop().create_task(self._run(), name="client")
            # Cancelled before it began, it opens nothing; nobody must wait for that.
            self._task.add_done_callback(lambda _: self._opened.set())
        await self._opened.wait()

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `coroutine` in a task that ends with the scope, if not before."""
        assert self._group is not None
        return self._group.create_task(coroutine, name=name)

    def cancel(self) -> None:
        """End every task, without waiting."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End every task and wait for that."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                self._opened.set()
                await asyncio.Event().wait()  # until it is cancelled
        except ExceptionGroup as error:  # a task's; nothing else leaves the group but cancellation
            self._on_failure(error)
            context = {"message": "a task of a client failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        finally:
            await self._at_end()
