"""Runs a server process: its event loop, its signals, its exit code, and its end after a bug."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from enum import IntEnum
from functools import partial
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
    FAILED = 1  # operating errors; the log has one line for each
    USAGE = 2  # the command line, the environment or the config file
    BUG = 70  # a failed assertion or another unexpected error; the log has a traceback


def run_process(
    main: Callable[[asyncio.Event], Awaitable[None]],
    *,
    survives: Callable[[BaseException], bool] = lambda _: False,
) -> int:
    """Run a server to its end and return the exit code for `sys.exit`. Configure the logs first.

    The process may open as many files and sockets as its hard limit allows.

    `main` receives an event that SIGTERM or SIGINT sets. `main` then drains, within its own
    deadline, and returns. A second signal ends the process at once.

    A bug in a callback or in a transport's handler also ends the process at once, without clean-up:
    the state in memory may be wrong, and the data on disk survives this end. If `survives` returns
    True for the bug, the process logs the bug and continues. A broker does so: it has no data on
    disk that a bug could damage, and a client must not be able to end a broker.
    """
    if not __debug__:
        sys.stderr.write(
            "magnetar does not run under python -O (or PYTHONOPTIMIZE): its assertions keep a bug "
            "from becoming lost data\n"
        )
        return ExitCode.USAGE
    faulthandler.enable()
    _raise_file_limit()
    try:
        # An unbatched message takes about 60 turns of the event loops: with uvloop it has 7 % less
        # latency and needs 10 % less CPU. Under load a turn carries many messages and uvloop
        # makes no difference.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_guarded(main, survives))
    except BaseException as error:  # the outermost handler of the process
        return report_failure(error)
    return ExitCode.CLEAN


def _raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit. The usual soft limit of 1,024 is meant
    for programs that call select(); a broker needs a socket for each client."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS refuses a limit above that of its kernel
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def report_failure(error: BaseException) -> ExitCode:
    """Log the error that ended the process: a line for each operating error, or a traceback."""
    causes = list(_leaves(error))
    if all(is_operating_error(cause) for cause in causes):
        for text in dict.fromkeys(str(cause) or repr(cause) for cause in causes):
            log.error("stopped by an error", error=text)
        if all(isinstance(cause, ConfigError) for cause in causes):
            return ExitCode.USAGE
        return ExitCode.FAILED
    log.error("stopped by a bug", exc_info=error)
    return ExitCode.BUG


async def _guarded(
    main: Callable[[asyncio.Event], Awaitable[None]], survives: Callable[[BaseException], bool]
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(partial(_on_stray_error, survives))
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


def _on_stray_error(
    survives: Callable[[BaseException], bool],
    _: asyncio.AbstractEventLoop,
    context: dict[str, Any],
) -> None:
    """Handle an error that no code awaits: in a callback, a transport's handler or a lost task."""
    error = context.get("exception")
    message = context.get("message", "an error outside of any task")
    if error is not None and is_bug(error) and not survives(error):
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
