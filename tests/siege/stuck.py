"""Prints on SIGUSR1 what the tasks of this process wait for, to explain a siege that is stuck."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


def describe_on_signal() -> None:
    """Install the signal handler in the running loop."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _print)


def tasks_text(places_max: int = 30) -> str:
    """The places where tasks wait, each with the number of tasks."""
    places: dict[str, int] = {}
    for task in asyncio.all_tasks():
        places[_place(task)] = places.get(_place(task), 0) + 1
    ordered = sorted(places.items(), key=lambda place: -place[1])
    return "\n".join(f"{count} x {place}" for place, count in ordered[:places_max])


def _place(task: asyncio.Task[object]) -> str:
    steps = []
    inner: object = task.get_coro()
    while inner is not None and (frame := _frame_of(inner)) is not None:
        steps.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        inner = getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None)
    return " > ".join(steps)


def _frame_of(awaited: object) -> FrameType | None:
    return getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)


def _print() -> None:
    print(tasks_text(), file=sys.stderr, flush=True)
