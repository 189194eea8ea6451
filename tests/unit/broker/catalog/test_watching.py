"""Watched lists of topics while the metadata store fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from support import wait_until

from magnetar.broker.catalog.watching import RETRY_S, WatchedLists
from magnetar.metadata.errors import Unavailable
from magnetar.metadata.memory import MemoryStore
from magnetar.protos.names import Domain, NamespaceName, TopicName

if TYPE_CHECKING:
    from collections.abc import Mapping

BROKEN, SOUND = NamespaceName.parse("public/broken"), NamespaceName.parse("public/sound")


class Lists:
    """A catalog that cannot read the namespaces in `failing`."""

    def __init__(self) -> None:
        self.failing: set[NamespaceName] = set()
        self.names_of: dict[NamespaceName, list[TopicName]] = {BROKEN: [], SOUND: []}
        self.reads: list[NamespaceName] = []

    async def names(self, namespace: NamespaceName, domain: Domain) -> list[TopicName]:
        self.reads.append(namespace)
        if namespace in self.failing:
            raise Unavailable("no answer")
        return self.names_of[namespace]


class Watcher:
    def __init__(self) -> None:
        self.names: list[str] = []

    async def __call__(self, new: Mapping[str, TopicName], gone: Mapping[str, TopicName]) -> None:
        self.names += new


async def test_a_list_that_cannot_be_read_is_read_later_and_delays_no_other_list() -> None:
    catalog = Lists()
    lists = WatchedLists(MemoryStore(), catalog)  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(lists.run())
        watcher = Watcher()
        await lists.watch(BROKEN, watcher)
        catalog.failing.add(BROKEN)
        topic = TopicName.parse("persistent://public/broken/t")
        catalog.names_of[BROKEN] = [topic]
        catalog.reads.clear()
        for _ in range(3):
            lists._on_changed(BROKEN)
            await wait_until(lambda: not lists._changed)
            began = loop.time()
            await lists.watch(SOUND, Watcher())
            assert loop.time() - began < RETRY_S / 2
        assert catalog.reads == [BROKEN, SOUND] * 3
        catalog.reads.clear()
        catalog.failing.clear()
        await wait_until(lambda: watcher.names == [str(topic)])
        await asyncio.sleep(2 * RETRY_S)
        assert catalog.reads == [BROKEN], "a list was read again without a reason"
        running.cancel()
