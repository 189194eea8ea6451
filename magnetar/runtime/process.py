"""The frame of every server process: its loop, signals, exit codes, bugs, the garbage collector."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import uvloop

from magnetar.runtime.errors import ConfigError
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import is_bug, is_operating_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

log = get_logger(__name__)


class ExitCode(IntEnum):
    CLEAN = 0
    FAILED = 1  # an operating error, named in one log line
    USAGE = 2  # the command line, the environment or the config file
    BUG = 70  # a failed assertion or an error that nobody expected; a traceback is in the log


def run_process(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run a server to its end and return the exit code for `sys.exit`. Logging is set up already.

    `main` is given the event that SIGTERM or SIGINT sets; it then drains, within a deadline of its
    own, and returns. A second signal ends the process at once. A bug that surfaces where nobody
    waits for it, in a callback or in a transport's handler, ends it at once too, without clean-up:
    the data on disk is made for that, and the state in memory is not to be trusted any more.
    """
    if not __debug__:
        sys.stderr.write(
            "magnetar does not run under python -O (or PYTHONOPTIMIZE): its assertions are what "
            "keeps a bug from becoming lost data\n"
        )
        return ExitCode.USAGE
    faulthandler.enable()
    try:
        # uvloop: a message that travels alone takes some 60 turns of the loops on its way (9 % less
        # latency, a tenth less CPU; nothing under load, where turns are few for what they carry).
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_guarded(main))
    except BaseException as error:  # the process's last line
        return report_failure(error)
    return ExitCode.CLEAN


def report_failure(error: BaseException) -> ExitCode:
    """Log what ended the process: a line for an operating error, else a traceback."""
    causes = list(_leaves(error))
    if all(is_operating_error(cause) for cause in causes):
        for text in dict.fromkeys(str(cause) or repr(cause) for cause in causes):
            log.error("stopped by an error", error=text)
        if all(isinstance(cause, ConfigError) for cause in causes):
            return ExitCode.USAGE
        return ExitCode.FAILED
    log.error("stopped by a bug", exc_info=error)
    return ExitCode.BUG


def settle_gc() -> None:
    """Call once when everything that lives as long as the process has been made.

    What exists is never looked at again by the collector, and young objects are collected every
    20,000 instead of every 700: a pass over that many takes about 2 ms if all survive, and at the
    usual threshold a burst of messages in flight would be traversed dozens of times.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def _guarded(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_stray_error)
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("second signal: exiting at once", signal=number.name)
            _exit_now(128 + number)
        log.info("stopping", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await main(stop)


def _on_stray_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An error that no task waits for: a callback's, a handler's, a forgotten task's."""
    error = context.get("exception")
    message = context.get("message", "an error that nobody waits for")
    if error is not None and is_bug(error):
        log.error("stopped by a bug", where=message, exc_info=error)
        _exit_now(ExitCode.BUG)
    log.error("stray error", where=message, exc_info=error)


def _exit_now(code: int) -> None:
    logging.shutdown()
    os._exit(code)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
