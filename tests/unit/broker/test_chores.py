"""Periodic work on the open topics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from magnetar.broker.chores import Chore, Chores
from magnetar.broker.errors import TopicClosing

if TYPE_CHECKING:
    from magnetar.broker.topic.protocol import Topic


@dataclass(frozen=True)
class NamedTopic:
    name: str


async def visits_of(chores: list[Chore], topics: list[Topic], seconds: float) -> None:
    task = asyncio.get_running_loop().create_task(Chores(chores, lambda: tuple(topics)).run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])


async def test_a_chore_visits_each_topic_once_in_a_period_and_follows_the_open_topics() -> None:
    topics = [cast("Topic", NamedTopic("a")), cast("Topic", NamedTopic("b"))]
    seen: list[str] = []

    async def visit(topic: Topic) -> None:
        seen.append(str(topic.name))
        if len(seen) == 2:
            topics.append(cast("Topic", NamedTopic("c")))

    await visits_of([Chore("count", 10.0, visit)], topics, 25.0)
    assert seen == ["a", "b", "a", "b", "c"]


async def test_a_failed_visit_does_not_keep_the_chore_from_the_next_topic() -> None:
    topics = [cast("Topic", NamedTopic(name)) for name in "ab"]
    seen: list[str] = []

    async def visit(topic: Topic) -> None:
        seen.append(str(topic.name))
        if len(seen) == 1:
            raise TopicClosing(str(topic.name))

    await visits_of([Chore("count", 10.0, visit)], topics, 25.0)
    assert seen == ["a", "b", "a", "b"]


async def test_a_slow_chore_does_not_delay_another() -> None:
    topics = [cast("Topic", NamedTopic("a"))]
    seen: list[str] = []

    async def never(topic: Topic) -> None:
        await asyncio.Event().wait()

    async def visit(topic: Topic) -> None:
        seen.append(str(topic.name))

    await visits_of([Chore("never", 1.0, never), Chore("count", 1.0, visit)], topics, 3.5)
    assert seen == ["a", "a", "a"]
