"""A seeded event loop in virtual time: one seed always gives the same run.

The clock jumps to the next timer when nothing is ready. The seed decides which ready task runs
next, and delays some tasks by a turn, so no code can rely on an order of tasks. Plain callbacks
keep their order, as asyncio promises. Threads are `SimThread`s: their work happens at some virtual
moment, and its result arrives later.

Code that runs for a *host* (a simulated process) runs in that host's context. Callbacks of a paused
host, timers included, are kept until the host continues: SIGSTOP. There are no sockets.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from random import Random

T = TypeVar("T")

# The loop removes cancelled timers when they exceed this number and half of all timers.
TIMERS_CANCELLED_MAX = 200


class Deadlock(RuntimeError):
    """Every task is blocked and no timer is pending: the loop can do nothing any more."""


class Pausable:
    """The host that a callback runs for."""

    paused = False


RUNNING: ContextVar[Pausable | None] = ContextVar("RUNNING", default=None)  # None: the world itself


class SimTask(asyncio.Task[Any]):
    """A task whose hash is its number in the loop: asyncio keeps some tasks in sets, whose order
    would otherwise differ in each run."""

    number = 0


class SimLoop(asyncio.BaseEventLoop):
    # an attribute of asyncio's loop without a type declaration
    _ready: deque[Any]
    _scheduled: list[Any]
    _timer_cancelled_count: int

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.turns = 0
        self.stray: list[dict[str, Any]] = []  # failures that no code handled
        self.world_context = copy_context()
        self._now_s = 0.0
        self._tasks_made = 0
        self._held: list[Any] = []  # task steps kept back for a later turn
        self._frozen: list[Any] = []  # the callbacks of paused hosts, in order
        self._some_host_paused = False
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda _, context: self.stray.append(context))

    def time(self) -> float:
        return self._now_s

    def later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Schedule a callback that runs for the world, not for the host that runs now."""
        return self.call_later(delay_s, callback, *args, context=self.world_context)

    def pause(self, host: Pausable) -> None:
        host.paused = self._some_host_paused = True

    def resume(self, host: Pausable) -> None:
        host.paused = False
        frozen, self._frozen = self._frozen, []
        self._ready.extend(frozen)  # callbacks of hosts that are still paused are kept again

    def _run_once(self) -> None:
        """Run one turn. Replaces asyncio's selector, which would ask the kernel for events."""
        self.turns += 1
        self._sweep_timers()
        if not self._ready and not self._held:
            if not self._scheduled:
                raise Deadlock(f"nothing can happen any more at {self._now_s:.6f}")
            self._now_s = max(self._now_s, self._scheduled[0]._when)
        handles = list(self._ready)
        self._ready.clear()
        while self._scheduled and self._scheduled[0]._when <= self._now_s:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            handles.append(timer)
        if self._some_host_paused:
            handles = self._put_aside(handles)
        for handle in self._draw(handles):
            if not handle._cancelled:
                handle._run()

    def _draw(self, handles: list[Any]) -> list[Any]:
        """The callbacks of this turn: all plain ones, then some task steps in any order."""
        steps, callbacks = self._held, []
        for handle in handles:
            if isinstance(getattr(handle._callback, "__self__", None), SimTask):
                steps.append(handle)
            else:
                callbacks.append(handle)
        if len(steps) > 1:
            steps.sort(key=_task_number)
            self.random.shuffle(steps)
            keep = self.random.randint(1, len(steps))
            self._held = steps[keep:]
            return callbacks + steps[:keep]
        self._held = []
        return callbacks + steps

    def _put_aside(self, handles: list[Any]) -> list[Any]:
        live: list[Any] = []
        for handle in [*self._held, *handles]:
            host = handle._context.get(RUNNING)
            (self._frozen if host is not None and host.paused else live).append(handle)
        self._held = []
        return live

    def _make_task(self, loop: Any, work: Any, **options: Any) -> SimTask:
        task = SimTask(work, loop=loop, **options)
        self._tasks_made += 1
        task.number = self._tasks_made
        return task

    def _sweep_timers(self) -> None:
        cancelled = self._timer_cancelled_count
        if cancelled > TIMERS_CANCELLED_MAX and cancelled > len(self._scheduled) // 2:
            for timer in self._scheduled:
                timer._scheduled = timer._scheduled and not timer._cancelled
            self._scheduled = [timer for timer in self._scheduled if not timer._cancelled]
            heapq.heapify(self._scheduled)
            self._timer_cancelled_count = 0
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
            self._timer_cancelled_count -= 1

    def _process_events(self, event_list: list[Any]) -> None: ...
    def _write_to_self(self) -> None: ...


def _task_number(handle: Any) -> int:
    number: int = handle._callback.__self__.number
    return number


class SimThread:
    """A `Worker`. A job takes `takes_s()`. Its effect happens at some moment within this time. A
    crash before that moment leaves no effect."""

    def __init__(self, loop: SimLoop, takes_s: Callable[[], float]) -> None:
        self._loop = loop
        self._takes_s = takes_s
        self._jobs: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._busy = False
        self._killed = False

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        result: asyncio.Future[T] = self._loop.create_future()
        if not self._killed:
            self._jobs.append((work, result))
            if not self._busy:
                self._begin()
        return result

    def kill(self) -> None:
        """End with the process, and drop the jobs that have had no effect yet."""
        self._killed = True
        self._jobs.clear()

    def _begin(self) -> None:
        self._busy = True
        takes_s = self._takes_s()
        effect_s = takes_s * self._loop.random.random()
        self._loop.later(effect_s, self._work, takes_s - effect_s)

    def _work(self, rest_s: float) -> None:
        if self._killed:
            return
        work, result = self._jobs.popleft()
        error: BaseException | None = None
        value = None
        try:
            value = work()
        except Exception as raised:
            error = raised
        self._loop.later(rest_s, self._end, result, value, error)

    def _end(self, result: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        if self._killed:
            return
        self._busy = False
        if self._jobs:
            self._begin()
        if result.done():
            return  # the caller was cancelled
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)


async def until(condition: Callable[[], object], *, every_s: float = 0.02) -> None:
    """Wait, in virtual time, for a fact without an event. The caller has a deadline."""
    while True:
        if condition():
            return
        await asyncio.sleep(every_s)


def run_seeded(main: Callable[[SimLoop], Coroutine[Any, Any, T]], random: Random) -> T:
    loop = SimLoop(random)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        _cancel_rest(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_rest(loop: SimLoop) -> None:
    """End the tasks that a failure left behind, so that the collector does not meet them during a
    later run."""
    loop._ready.extend(loop._frozen)
    loop._frozen.clear()
    loop._some_host_paused = False
    rest = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for task in rest:
        task.cancel()
    for _ in range(1_000):
        if all(task.done() for task in rest):
            break
        try:
            loop.run_until_complete(asyncio.wait(rest, timeout=1.0))
        except (Deadlock, RuntimeError):
            break
    loop.stray.clear()
