"""Calls functions of the program that may block, each call in a daemon thread of its own.

At its end, a loop waits for the threads of its executor, but not for these threads. In the
executor, a function that never returns would block `Client.close` and the end of the program.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Final, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

CALLS_MAX: Final = 16
"""The maximum number of calls of one function that run at the same time. At this limit, a caller
waits for the newest of these calls. So a function that never returns occupies a bounded number of
threads, however often the client connects."""


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a thread of its own and return its result.

    A cancellation or the end of the loop does not stop the thread.
    """

    def call() -> T:
        return function(*args, **kwargs)

    return await asyncio.wrap_future(_started(call))


class Repeated(Generic[T]):
    """A function that clients call repeatedly, from any loop."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._calls: list[Future[T]] = []  # calls that have not returned, and some that have

    async def call(self) -> T:
        """Call the function in a thread and return its result. If CALLS_MAX calls are running,
        return the result of the newest one instead."""
        with self._lock:
            self._calls = [call for call in self._calls if not call.done()]
            if len(self._calls) < CALLS_MAX:
                self._calls.append(_started(self._function))
            newest = self._calls[-1]
        return await asyncio.wrap_future(newest)


def _started(function: Callable[[], T]) -> Future[T]:
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # a caller that is cancelled does not cancel the call
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(function)
        except (StopIteration, CancelledError) as error:
            # An asyncio future refuses a StopIteration, and a CancelledError would cancel it.
            outcome.set_exception(RuntimeError(f"the function raised {error!r}"))
        except Exception as error:
            outcome.set_exception(error)
        except BaseException as error:  # SystemExit, for example, would end the caller's loop
            outcome.set_exception(RuntimeError(f"the function raised {error!r}"))
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name="magnetar-call", daemon=True).start()
    return outcome
