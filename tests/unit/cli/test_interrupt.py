"""Ctrl-C at commands that wait, in processes of their own."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from magnetar.cli.interrupt import run_interruptible

if TYPE_CHECKING:
    from collections.abc import Coroutine

PROGRAM = """
import asyncio, signal, sys, threading, time
from magnetar.cli.interrupt import run_interruptible

main = threading.get_ident()

def interrupt():
    while sys._current_frames()[main].f_code.co_name != "select":
        time.sleep(0.001)
    # To this thread, which does not end the other one's sleep: like a signal that comes before it.
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

async def work():
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        await asyncio.sleep(3600)
    finally:
        print("cleaning up", flush=True)
        {clean_up}
        print("clean", flush=True)

try:
    run_interruptible(work())
except KeyboardInterrupt:
    print("interrupted")
"""


def run(clean_up: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(clean_up=clean_up)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_ctrl_c_wakes_a_sleeping_loop_and_the_work_cleans_up() -> None:
    said = run("await asyncio.sleep(0)")
    assert said == ["cleaning up", "clean", "interrupted"]


def test_a_second_interrupt_ends_the_clean_up() -> None:
    again = "threading.Thread(target=interrupt, daemon=True).start(); await asyncio.sleep(3600)"
    assert run(again) == ["cleaning up", "interrupted"]


def test_ctrl_c_before_the_work_begins_closes_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work learns that it will not begin. A RuntimeWarning would fail this test."""
    monkeypatch.setattr(asyncio, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(asyncio.sleep(0))


def interrupted(main: Coroutine[Any, Any, None]) -> None:
    main.close()
    raise KeyboardInterrupt


def test_the_signal_handler_is_restored_after_the_work() -> None:
    before = signal.getsignal(signal.SIGINT)
    ran: list[object] = []

    async def work() -> None:
        await asyncio.sleep(0)
        ran.append(signal.getsignal(signal.SIGINT))

    run_interruptible(work())
    assert ran != [before]
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_an_exception_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise OSError("weather")

    with pytest.raises(OSError, match="weather"):
        run_interruptible(work())
