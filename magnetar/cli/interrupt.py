"""Commands that a person ends with Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Coroutine

INTERRUPTED: Final = 130  # 128 + SIGINT, as a shell counts


def run_interruptible(work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run`, whose loop a signal wakes. Raises KeyboardInterrupt after Ctrl-C.

    The interpreter handles a signal between two of its steps. One that comes just before the loop
    goes to sleep, or to another thread, wakes nobody: asyncio.run cancels `work` only when
    something else ends the sleep, such as a client's keepalive after half a minute.
    """
    try:
        asyncio.run(_woken(work))
    finally:
        work.close()  # Ctrl-C may have come before it began


async def _woken(work: Coroutine[Any, Any, None]) -> None:
    """`work`, while every signal writes to a socket that the loop reads."""
    loop = asyncio.get_running_loop()
    handler = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # for that socket
    signal.signal(signal.SIGINT, handler)  # asyncio.run's: the first cancels, the second raises
    try:
        await work
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, handler)
