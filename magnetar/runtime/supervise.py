"""The one place that restarts things, and therefore the one place that makes a task by hand.

On Python 3.11 a `TaskGroup` that fails in the same turn in which its owner is cancelled raises the
failure and forgets the cancellation. A loop that catches the failure and tries again then never
ends: a third of all schedules, when tried. Running the child in a task of its own and waiting for
that task loses none, because the cancellation always lands on the wait and never inside the child.
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
    """Delays before the next attempt: doubling from `first_s` to `max_s`, each drawn from its upper
    half, so that many who failed together do not come back together."""

    first_s: float
    max_s: float
    random: random.Random

    def __post_init__(self) -> None:
        assert 0 < self.first_s <= self.max_s

    def delays(self) -> Iterator[float]:
        """An endless sequence, starting over at `first_s`."""
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
    """Run `child` for ever: start it again, after a delay, when it ends. Ends only by cancellation.

    The end of a child is logged, then handed to `on_failure` (None: it returned, or cancelled
    itself). A child that has lived longer than `backoff.max_s` starts again at the first delay.
    A bug (`is_bug`) is not weather: it is raised. Cancelling waits for the child to end.
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
    """Whether `error` is or contains a failed assertion."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(AssertionError) is not None
    return isinstance(error, AssertionError)


def is_operating_error(error: BaseException) -> bool:
    """Whether `error` is one of the typed errors of the house (they say whether they are definite),
    an error of the operating system, or a group of only such."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_operating_error, error.exceptions))
    return isinstance(error, OSError) or isinstance(getattr(error, "definite", None), bool)


async def _outcome(name: str, child: Callable[[], Awaitable[None]]) -> Exception | None:
    """Run the child to its end in its own task; a bug in it is raised, also while cancelling."""

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
                continue  # cancelled again: the first one is on its way up already
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
