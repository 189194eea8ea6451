"""The tasks of a client: a task group that lives from open() to close(), not in a `with` block."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from magnetar.client.errors import AlreadyClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine


class Scope:
    """Owns all tasks that a client starts, and ends them when the client ends.

    A user may create a client in one task and close it in another, so the group has its own task.
    A task that raises an exception ends all others. The scope then calls `on_failure` and the
    exception handler of the loop. Only a bug has this effect: a task that loses its connection
    returns. A scope that has begun calls `at_end` last, also when the loop ends before the client
    was closed. It calls `at_end` again if a call was cancelled.
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
        """Begin if the scope has not begun. Also returns if the scope ends during the wait."""
        if self._task is None:
            # No group owns this task: close() and cancel() end it.
            self._task = asyncio.get_running_loop().create_task(self._run(), name="client")
            # If the task is cancelled before it begins, it does not set `_opened` itself.
            self._task.add_done_callback(lambda _: self._opened.set())
        await self._opened.wait()

    def check_open(self) -> None:
        """Raise AlreadyClosed if the scope was not opened, or has begun to end."""
        if self._task is None or self._task.done() or self._task.cancelling():
            raise AlreadyClosed("the client was closed")

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `coroutine` in a task. The task ends with the scope at the latest.

        Raises AlreadyClosed if the task group takes no more tasks, because the scope ends.
        """
        assert self._group is not None
        try:
            return self._group.create_task(coroutine, name=name)
        except RuntimeError:  # the group takes no more tasks
            coroutine.close()
            raise AlreadyClosed("the client was closed") from None

    def cancel(self) -> None:
        """Cancel every task without waiting."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Cancel every task and wait until they have ended."""
        self.cancel()
        await self.wait_ended()

    async def wait_ended(self) -> None:
        """Return when every task has ended, after `cancel`."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                self._opened.set()
                await asyncio.Event().wait()  # until close() or cancel() cancels this task
        except ExceptionGroup as error:  # a task failed; otherwise only CancelledError is raised
            self._on_failure(error)
            context = {"message": "a task of the client failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        finally:
            await self._finish()

    async def _finish(self) -> None:
        """Call `at_end` until it returns. If this task is cancelled during the call, call it again:
        a program may shut a client down twice, and the end of a loop cancels all tasks."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            cancellations = task.cancelling()
            try:
                await self._at_end()
            except asyncio.CancelledError:
                if task.cancelling() == cancellations:
                    raise  # this task was not cancelled: another call would fail, too
            else:
                return  # the task ends now, as the cancellations asked
