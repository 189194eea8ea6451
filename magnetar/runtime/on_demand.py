"""A task that exists only while there is work, so ten thousand idle topics need no task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Coroutine


class Spawn(Protocol):
    """Starts a task that calls `run`. Returns None if no task can be started any more."""

    def __call__(
        self, run: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> asyncio.Task[None] | None: ...


def spawn_in(
    group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str
) -> asyncio.Task[None] | None:
    """Start a task. None: the group is shutting down, and the work was not started."""
    try:
        return group.create_task(work, name=name)
    except RuntimeError:
        work.close()
        return None


def spawner(group: asyncio.TaskGroup) -> Spawn:
    return lambda run, name: spawn_in(group, run(), name)


class OnDemandTask:
    """Calls `work` in a task after a `wake`, one call at a time. A call handles all earlier wakes.

    1. A wake during a call of `work` causes another call, unless `work` then calls `clear`.
    2. Wakes before `start` count from `start` on; wakes after `cancel` do nothing.
    """

    __slots__ = ("_cancelled", "_kind", "_of", "_spawn", "_task", "_woken", "_work")

    def __init__(self, kind: str, work: Callable[[], Awaitable[None]], *, of: object = "") -> None:
        """The name of a task is `kind` and the text of `of`, as it is when the task starts."""
        self._kind = kind
        self._of = of
        self._work = work
        self._spawn: Spawn | None = None  # None: not started
        self._task: asyncio.Task[None] | None = None  # None: there is nothing to do
        self._woken = False
        self._cancelled = False

    @property
    def is_idle(self) -> bool:
        return self._task is None and not self._woken

    def start(self, spawn: Spawn) -> None:
        """Begin to start tasks, with `spawn`."""
        assert self._spawn is None, "started twice"
        self._spawn = spawn
        if self._woken:
            self._begin()

    def wake(self) -> None:
        """Note that there is work, and start a task if none is running."""
        self._woken = True
        if self._task is None or self._task.done():  # done: cancelled before its first step
            self._begin()

    def clear(self) -> None:
        """Forget all wakes until now. `work` calls this if the rest of its call handles them."""
        self._woken = False

    def cancel(self) -> None:
        """Begin no more work, and cancel the running task."""
        self._cancelled = True
        self._woken = False
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        if self._spawn is None or self._cancelled:
            return
        self._task = self._spawn(self._run, f"{self._kind} {self._of}".rstrip())

    async def _run(self) -> None:
        try:
            while self._woken:
                self._woken = False
                await self._work()
        finally:
            # No `await` stands between the last check of `_woken` and this line.
            self._task = None
