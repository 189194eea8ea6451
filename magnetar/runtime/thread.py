"""One thread that works for the loop: what the blocking calls of a disk are given to.

Not an executor of `concurrent.futures`: its futures lock and signal for whoever might wait in
another thread, and nobody does. A bookie syncs once per message that travels alone, and with them
such a message took 7 % longer (p50 of 1 KB at 3/3/2: 2.35 ms, and 2.17 without).
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    _Job = tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[[], Any]]

T = TypeVar("T")


class Worker(Protocol):
    """Does one thing after the other, elsewhere."""

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Called on the loop. The future has what `work` returns or raises; it is cancelled if the
        worker ends before. `work` is left out if the future is cancelled before its turn."""


class WorkerThread:
    """A `Worker`. End it with `shutdown`; nobody waits for it at the interpreter's exit."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None: no more
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """See Worker. Raises RuntimeError after `shutdown`."""
        if self._ended:
            raise RuntimeError(f"thread {self._thread.name} has ended")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((loop, future, work))
        return future

    def shutdown(self, *, wait: bool = True) -> None:
        """Let it finish what it does now, and drop the rest. Blocks meanwhile, unless told not to
        `wait`. Idempotent."""
        if self._ended:
            return
        self._ended = True
        dropped = list(self._drain())
        self._jobs.put(None)
        if wait:
            self._thread.join()
        for loop, future, _ in dropped:
            if not loop.is_closed():
                future.cancel()

    def _drain(self) -> Iterator[_Job]:
        with suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                yield job

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, work = job
            if future.cancelled():
                continue
            value: Any = None
            failure: BaseException | None = None
            try:
                value = work()
            except BaseException as error:
                failure = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, value, failure)
            del job, loop, future, work, value, failure  # not to be kept until the next one comes


def _settle(future: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
    if future.cancelled():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(value)
