"""Keeps an unexpected exception within one producer or consumer.

Such an exception is a bug in the client, or in code of the program that the client calls. The
exception ends the producer or consumer whose work raised it. The client's other producers and
consumers continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from magnetar.client.errors import PulsarException, UnknownError
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

log = get_logger(__name__)


class Guarded(Protocol):
    """The core of a producer or consumer."""

    @property
    def topic(self) -> str: ...
    def shut_down(self, error: PulsarException) -> None:
        """End at once. Its user gets `error`."""


def end_after_bug(core: Guarded, bug: Exception) -> UnknownError:
    """End a producer or consumer because of an unexpected exception. Returns the user's error."""
    log.error("internal error: a producer or consumer ends", topic=core.topic, exc_info=bug)
    error = UnknownError(f"internal error: {bug!r}", topic=core.topic)
    core.shut_down(error)
    return error


async def guarded(core: Guarded, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the work of a task. An unexpected exception ends its producer or consumer."""
    try:
        await work()
    except Exception as bug:
        end_after_bug(core, bug)


def guarding(core: Guarded, function: Callable[[], None]) -> Callable[[], None]:
    """Return `function` for a timer. An unexpected exception ends its producer or consumer."""

    def call() -> None:
        try:
            function()
        except Exception as bug:
            end_after_bug(core, bug)

    return call
