"""The progress bar of Spark jobs: what it counts, and when it is silent."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

from rich.console import Console

from magnetar.cli.spark_progress import TaskCount, task_progress


@dataclass
class FakeStage:
    numTasks: int
    numCompletedTasks: int = 0


@dataclass
class FakeTracker:
    active: list[int] = field(default_factory=list)
    stages: dict[int, FakeStage] = field(default_factory=dict)

    def getActiveStageIds(self) -> list[int]:
        return self.active

    def getStageInfo(self, stage: int) -> FakeStage | None:
        return self.stages.get(stage)


def test_tasks_of_ended_and_active_stages_are_summed() -> None:
    tracker = FakeTracker()
    count = TaskCount(tracker)
    assert count.update() == (0, 0)
    tracker.active, tracker.stages = [1], {1: FakeStage(4, 1)}
    assert count.update() == (1, 4)
    tracker.active, tracker.stages = [2], {1: FakeStage(4, 4), 2: FakeStage(8, 3)}
    assert count.update() == (7, 12)


def test_a_stage_that_spark_has_forgotten_keeps_its_last_count() -> None:
    tracker = FakeTracker([1], {1: FakeStage(4, 4)})
    count = TaskCount(tracker)
    count.update()
    tracker.active, tracker.stages = [], {}
    assert count.update() == (4, 4)


def test_no_progress_is_printed_without_a_terminal() -> None:
    text = io.StringIO()
    with task_progress(FakeTracker(), "archiving t", Console(file=text)):
        pass
    assert text.getvalue() == ""


def test_a_terminal_shows_the_job() -> None:
    text = io.StringIO()
    with task_progress(FakeTracker(), "archiving t", Console(file=text, force_terminal=True)):
        pass
    assert "archiving t" in text.getvalue()
