"""A progress bar for a Spark job, on a terminal."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

POLL_S: Final = 0.25


class Stage(Protocol):
    """Spark's SparkStageInfo."""

    @property
    def numTasks(self) -> int: ...
    @property
    def numCompletedTasks(self) -> int: ...


class Tracker(Protocol):
    """Spark's StatusTracker."""

    def getActiveStageIds(self) -> Iterable[int]: ...
    def getStageInfo(self, stage: int, /) -> Stage | None: ...


class TaskCount:
    """The numbers of completed tasks and of all tasks in the stages seen so far. The total grows as
    Spark plans further stages."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._stages: dict[int, tuple[int, int]] = {}  # id -> completed, all

    def update(self) -> tuple[int, int]:
        """Ask Spark; return completed and all tasks."""
        for stage in {*self._stages, *self._tracker.getActiveStageIds()}:
            info = self._tracker.getStageInfo(stage)
            if info is not None:  # None: Spark has forgotten the stage
                self._stages[stage] = info.numCompletedTasks, info.numTasks
        return sum(done for done, _ in self._stages.values()), sum(
            tasks for _, tasks in self._stages.values()
        )


@contextmanager
def task_progress(tracker: Tracker, text: str, console: Console) -> Iterator[None]:
    """Show a bar of completed tasks while the block runs. Shows nothing unless `console` is a
    terminal. Spark's API blocks, so a separate thread polls it."""
    if not console.is_terminal:
        yield
        return
    ended = threading.Event()
    columns = (
        TextColumn("{task.description}", markup=False),  # it has names of topics
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tasks"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(text, total=None)
        count = TaskCount(tracker)

        def poll() -> None:
            while not ended.wait(POLL_S):
                done, tasks = count.update()
                progress.update(bar, completed=done, total=tasks or None)

        thread = threading.Thread(target=poll, name="spark progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
