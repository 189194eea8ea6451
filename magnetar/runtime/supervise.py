"""Restarts background work. Only this module restarts tasks and calls `asyncio.create_task`.

On Python 3.11 a `TaskGroup` loses a cancellation of its owner if the group fails in the same turn
of the loop: the group raises only the failure. A loop that catches the failure and retries then
never ends. `supervise` runs the child in a task of its own and waits for that task. A cancellation
of `supervise` then interrupts this wait and is not lost. `supervise` cancels the child itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterator

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays before the next attempt. A bound doubles from `first_s` to `max_s`. Each delay is
    random, between half of the bound and the whole bound. So clients that failed together do not
    all retry together."""

    first_s: float
    max_s: float
    random: random.Random

    def __post_init__(self) -> None:
        assert 0 < self.first_s <= self.max_s

    def delays(self) -> Iterator[float]:
        """Yield delays without end. The first bound is `first_s`."""
        bound_s = self.first_s
        while True:
            yield bound_s * self.random.uniform(0.5, 1.0)
            bound_s = min(bound_s * 2, self.max_s)


async def supervise(
    name: str,
    child: Callable[[], Awaitable[None]],
    *,
    backoff: Backoff,
    on_failure: Callable[[Exception | None], None] | None = None,
) -> NoReturn:
    """Run `child` until cancelled. When the child ends, start it again after a delay.

    The end of a child is logged and passed to `on_failure` (None: the child returned or cancelled
    itself). After a child that ran for longer than `backoff.max_s`, the delays begin anew. A bug
    (`is_bug`) in the child is raised. A cancelled `supervise` cancels the child and waits for its
    end.
    """
    loop = asyncio.get_running_loop()
    delays = backoff.delays()
    while True:
        started_s = loop.time()
        error = await _outcome(name, child)
        if loop.time() - started_s > backoff.max_s:
            delays = backoff.delays()
        delay_s = next(delays)
        _log_end(name, error, delay_s)
        if on_failure is not None:
            on_failure(error)
        await asyncio.sleep(delay_s)


def is_bug(error: BaseException) -> bool:
    """Return whether `error` is or contains a failed assertion."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(AssertionError) is not None
    return isinstance(error, AssertionError)


def is_operating_error(error: BaseException) -> bool:
    """Return whether `error` is an operating error of Magnetar (it has `definite`), an error of the
    operating system, or a group of only such errors."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_operating_error, error.exceptions))
    return isinstance(error, OSError) or isinstance(getattr(error, "definite", None), bool)


async def _outcome(name: str, child: Callable[[], Awaitable[None]]) -> Exception | None:
    """Run the child to its end in its own task. Raises a bug of the child, even if this call was
    cancelled."""

    async def run() -> None:
        await child()

    task = asyncio.create_task(run(), name=name)  # noqa: TID251
    try:
        await asyncio.wait({task})  # a cancellation always lands here, never inside the child
    finally:
        while not task.done():
            task.cancel()
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue  # a further cancellation; the first one is raised after the loop
        error = None if task.cancelled() else task.exception()
        if error is not None and (is_bug(error) or not isinstance(error, Exception)):
            raise error
    return error


def _log_end(name: str, error: Exception | None, delay_s: float) -> None:
    again_s = round(delay_s, 3)
    if error is None:
        log.warning("task ended", task=name, again_s=again_s)
    elif is_operating_error(error):
        log.warning("task failed", task=name, error=repr(error), again_s=again_s)
    else:
        log.error("task failed", task=name, again_s=again_s, exc_info=error)
