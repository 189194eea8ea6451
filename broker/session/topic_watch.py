"""Pushes the names of topics and their changes to a client (WatchTopics), so that an idle query
sends no requests.

A watch of namespaces follows the lists that the broker reads once for all watchers
(catalog/watching.py). A watch of named topics follows the records in the metadata store that decide
the number of their partitions. Every broker can serve a watch, not only the owner of the topics.

A watch has one task, which sends one message after the other. The next message holds all changes
that happen while a message is sent, so a slow client needs no queue. A topic that was created and
deleted meanwhile is in no message.

While the metadata store does not answer, no watch can begin. A watch that has begun sends only its
signs of life meanwhile, and a watch of named topics ends when it cannot read a change. A client
whose watch ended asks another broker.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

from magnetar.broker.catalog.listing import NAMES_PER_TURN
from magnetar.broker.errors import (
    IsPartitioned,
    NotAllowed,
    RequestRefused,
    ReservedName,
    TopicNotFound,
)
from magnetar.broker.session.topic_ranges import (
    FOUND_MAX,
    NAMESPACES_MAX,
    TOPICS_MAX,
    require_few,
    stored_name,
)
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.names import NamespaceName

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from magnetar.broker.broker import Broker
    from magnetar.broker.catalog.watching import Names
    from magnetar.protos.names import TopicName

    Send = Callable[[bytes], Awaitable[None]]

BEAT_S: Final = 2.0
"""Seconds between two messages while nothing changes. A client that gets no message for three such
periods looks for another broker."""

GATHER_S: Final = 0.1
"""The shortest time in seconds between two messages of a watch that has changes. If changes need
several messages, these follow each other at once."""

WATCHES_MAX: Final = 256
"""The limit of watches of one broker. A query has one watch, or one for each 1,000 topics that it
names."""

NAMED_MAX: Final = 20_000
"""The limit for the named topics of all watches of a broker. Each topic needs one or two watches in
the metadata store."""


class TopicWatches:
    """The watches of one broker."""

    def __init__(self, *, named_max: int = NAMED_MAX, beat_s: float = BEAT_S) -> None:
        self._named_max = named_max
        self._beat_s = beat_s
        self._running: dict[_Watch, int] = {}  # -> the number of its named topics

    async def serve(self, broker: Broker, asked: pb.FindTopicsRequest, send: Send) -> None:
        """Push until the client leaves or `end_all` is called. Raises NotAllowed, InvalidTopicName,
        InvalidNamespaceName, RequestRefused, ListUnavailable, and the errors of `send` and of
        reading the metadata."""
        named = len(asked.topics)
        require_few("topics", named, TOPICS_MAX)
        require_few("namespaces", len(asked.namespaces), NAMESPACES_MAX)
        if named and asked.namespaces:
            raise NotAllowed("WatchTopics", "the request names both topics and namespaces")
        if len(self._running) >= WATCHES_MAX:
            raise RequestRefused(f"the broker has {WATCHES_MAX} watches, which is the limit")
        if sum(self._running.values()) + named > self._named_max:
            raise RequestRefused(f"more than {self._named_max} topics would be watched")
        watch = _Watch(broker, asked, send, self._beat_s)
        self._running[watch] = named
        try:
            await watch.run()
        finally:
            del self._running[watch]

    def end_all(self) -> None:
        """End every watch; the clients look for another broker."""
        for watch in self._running:
            watch.end()


class _Watch:
    def __init__(
        self, broker: Broker, asked: pb.FindTopicsRequest, send: Send, beat_s: float
    ) -> None:
        self._broker = broker
        self._send = send
        self._beat_s = beat_s
        names = dict.fromkeys(map(stored_name, asked.topics))
        namespaces = dict.fromkeys(map(NamespaceName.parse, asked.namespaces))
        self._named = [_Named(broker, name, self._wake) for name in names]
        self._lists = [_List(namespace, self._change) for namespace in namespaces]
        # For each topic or partition, the number of items in `_named` that include it.
        self._count: Counter[str] = Counter()
        self._total = 0  # the number of topics that exist
        # The unsent changes: the client knows the topics in `_gone`, and not those in `_added`.
        self._added: dict[str, None] = {}
        self._gone: dict[str, None] = {}
        self._woken = asyncio.Event()
        self._ended = False

    def end(self) -> None:
        self._ended = True
        self._wake()

    async def run(self) -> None:
        try:
            for listed in self._lists:
                await listed.begin(self._broker)
            await self._push()
        finally:
            for listed in self._lists:
                listed.end(self._broker)
            for named in self._named:
                named.end()

    def _wake(self) -> None:
        self._woken.set()

    async def _push(self) -> None:
        loop = asyncio.get_running_loop()
        beat_at = 0.0  # the first message is sent at once, even without topics
        while not self._ended:
            self._woken.clear()
            await self._look()
            require_few("topics in the answer", self._total, FOUND_MAX)
            update = self._take_news()
            if not (update.topics or update.gone) and loop.time() < beat_at:
                await self._wait_until(beat_at)
                continue
            await self._send(update.SerializeToString())
            beat_at = loop.time() + self._beat_s
            await asyncio.sleep(0 if update.more else GATHER_S)

    async def _wait_until(self, time: float) -> None:
        try:
            async with asyncio.timeout_at(time):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _look(self) -> None:
        """Find out about the named topics whose records have changed."""
        for named in self._named:
            if named.changed:
                before, found = named.texts, await named.look()
                new, gone = found.keys() - before.keys(), before.keys() - found.keys()
                self._count.update(new)
                self._count.subtract(gone)
                left = [text for text in gone if not self._count[text]]
                self._change([text for text in new if self._count[text] == 1], left)
                for text in left:
                    del self._count[text]
                await asyncio.sleep(0)  # a topic may have thousands of partitions

    def _change(self, new: Iterable[str], gone: Iterable[str]) -> None:
        added, left = dict.fromkeys(new), dict.fromkeys(gone)
        self._total += len(added) - len(left)
        unsent, back = left.keys() & self._added.keys(), added.keys() & self._gone.keys()
        self._added |= added
        self._gone |= left
        for text in unsent | back:
            del self._added[text], self._gone[text]
        self._wake()

    def _take_news(self) -> pb.TopicsUpdate:
        gone = list(islice(self._gone, NAMES_PER_TURN))
        added = list(islice(self._added, NAMES_PER_TURN - len(gone)))
        for text in gone:
            del self._gone[text]
        for text in added:
            del self._added[text]
        more = bool(self._gone or self._added)
        return pb.TopicsUpdate(topics=added, gone=gone, more=more)


class _Named:
    """A topic that the client has named."""

    def __init__(self, broker: Broker, name: TopicName, on_change: Callable[[], None]) -> None:
        self.changed = True
        self.texts: dict[str, None] = {}  # the topic, or its partitions; empty: no topic
        self._broker = broker
        self._name = name
        self._on_change = on_change
        self._unwatch = broker.watch_partitioned(name, self._note)
        # None: `look` was not called yet, or the topic is partitioned.
        self._unwatch_record: Callable[[], None] | None = None

    async def look(self) -> dict[str, None]:
        """Read the records again. Returns the new `texts`. Raises the errors of reading the
        metadata."""
        self.changed = False
        count = await self._count()
        if not count and self._unwatch_record is None:
            self._unwatch_record = self._broker.watch_record(self._name, self._note)
            count = await self._count()  # the count includes the changes before the watch
        elif count and self._unwatch_record is not None:
            self._unwatch_record()
            self._unwatch_record = None
        if count is None:
            self.texts = {}
        else:
            parts = [self._name.with_partition(it) for it in range(count)] or [self._name]
            self.texts = dict.fromkeys(map(str, parts))
        return self.texts

    def end(self) -> None:
        self._unwatch()
        if self._unwatch_record is not None:
            self._unwatch_record()

    async def _count(self) -> int | None:
        """Return the number of partitions; 0: the topic is not partitioned. None: it does not
        exist."""
        try:
            return await self._broker.stored_partitions_of(self._name)
        except (TopicNotFound, ReservedName):  # no such topic or partition
            return None
        except IsPartitioned as error:  # the topic was created while the metadata was read
            return error.partitions

    def _note(self) -> None:
        self.changed = True
        self._on_change()


class _List:
    """A namespace that the client has named."""

    def __init__(
        self, namespace: NamespaceName, change: Callable[[Iterable[str], Iterable[str]], None]
    ) -> None:
        self._namespace = namespace
        self._change = change
        self._early: list[tuple[Names, Names]] | None = []  # None: `begin` has passed the list on

    async def begin(self, broker: Broker) -> None:
        """Pass the list on, then each change. Raises ListUnavailable."""
        names = await broker.watched_lists.watch(self._namespace, self._on_change)
        self._change(names, ())
        for new, gone in self._early or ():
            self._change(new, gone)
        self._early = None

    def end(self, broker: Broker) -> None:
        broker.watched_lists.end(self._namespace, self._on_change)

    async def _on_change(self, new: Names, gone: Names) -> None:
        if self._early is None:
            self._change(new, gone)
        else:  # a change of a list that `begin` has not passed on yet
            self._early.append((new, gone))
