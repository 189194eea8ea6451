"""The unit of work that Spark's driver sends to an executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from magnetar.spark.planner import plan_tasks
from magnetar.spark.sealed import Sealed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.spark.offsets import Place
    from magnetar.spark.planner import Span
    from magnetar.spark.source.options import ReadOptions
    from magnetar.spark.topic_state import TopicState


class Task(InputPartition):
    """The entries that one task reads. Spark sends it to an executor."""

    def __init__(
        self,
        spans: tuple[Span, ...],
        owners: Mapping[str, str],
        indexes: Mapping[str, tuple[int, int | None]],
        *,
        number: int = 0,
    ) -> None:
        super().__init__(None)
        self.number = number  # among the tasks of its batch
        # The ledgers that the task may read from bookies. The rows are the same as from the owners.
        self.sealed = Sealed()
        self.spans = spans
        self.owners = owners  # topic -> URL of the broker that owned it at planning time
        # topic -> index of the first message to read, and the index after the last message (None:
        # there is no limit)
        self.indexes = indexes


def tasks_between(
    options: ReadOptions,
    starts: Mapping[str, Place],
    ends: Mapping[str, Place],
    states: Mapping[str, TopicState],
) -> list[Task]:
    """The tasks that read [start, end) of each topic. The same starts, ends and options give the
    same tasks. Only the owners may differ, and deleted ledgers are left out."""
    spans: list[Span] = []
    for topic in sorted(states):
        spans += states[topic].spans(topic, starts[topic], ends[topic])
    planned = plan_tasks(
        spans, target_bytes=options.target_bytes_per_task, tasks_max=options.tasks_max
    )
    return [
        Task(
            part,
            {topic: states[topic].owner for topic in topics},
            {topic: (starts[topic].index, ends[topic].index) for topic in topics},
            number=number,
        )
        for number, part in enumerate(planned)
        for topics in [dict.fromkeys(span.topic for span in part)]
    ]
