"""Runs commands that Ctrl-C ends."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Coroutine

INTERRUPTED: Final = 130  # 128 + SIGINT, the exit code of shells


def run_interruptible(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` as `asyncio.run` does, but let a signal wake the loop.

    Raises KeyboardInterrupt after Ctrl-C. The interpreter calls a signal's handler only while the
    main thread runs Python code, not while the loop sleeps. With `asyncio.run`, a signal that
    arrives just before the loop sleeps, or in another thread, does not wake the loop. The signal
    would cancel `work` only when another event ends the sleep, for example a client's keep-alive
    after 30 s.
    """
    try:
        asyncio.run(_woken(work))
    finally:
        work.close()  # Ctrl-C may have arrived before `work` began


async def _woken(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` while every signal writes to a socket that the loop reads."""
    loop = asyncio.get_running_loop()
    handler = signal.getsignal(signal.SIGINT)
    # From now on, each signal writes to the loop's socket.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    # The handler of asyncio.run: the first Ctrl-C cancels `work`, the second raises.
    signal.signal(signal.SIGINT, handler)
    try:
        await work
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, handler)
