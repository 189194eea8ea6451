"""WATCH_TOPIC_LIST: a client follows the topics of a namespace that match a pattern."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.broker.catalog.listing import compiled, hash_of, matching, texts_of, visible_of
from magnetar.broker.errors import NotAllowed, TooManyWatchers
from magnetar.broker.session import reply
from magnetar.protos.names import NamespaceName

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from magnetar.broker.catalog.pattern import TopicPattern
    from magnetar.broker.catalog.watching import Names
    from magnetar.broker.session.context import Context
    from magnetar.protos import pulsar_pb2 as pb

WATCHERS_MAX: Final = 100
"""The limit of watchers of one connection. Each keeps the names that match: 1.1 MB for 10,000
names of 40 characters."""

LIST_BYTES_MAX: Final = 4 << 20
"""The limit for the names in one command, in UTF-8: a frame has at most 5 MB."""


class _Watcher:
    """One watcher. It keeps the pattern as text, because a compiled pattern takes up to 3 MB."""

    def __init__(
        self, context: Context, watcher_id: int, namespace: NamespaceName, pattern: str
    ) -> None:
        self._context = context
        self._watcher_id = watcher_id
        self._namespace = namespace
        self._pattern = pattern
        # The names that match, almost sorted, because sorting 100,000 unsorted names for the hash
        # takes 60 ms.
        self._matched: dict[str, None] | None = None  # None: the first list is not complete
        self._changes: list[tuple[Names, Names]] = []  # not yet sent to the client

    async def begin(self, pattern: TopicPattern) -> list[str]:
        """Begin to watch. Returns the names that match, sorted."""
        broker = self._context.broker
        names = await broker.watched_lists.watch(self._namespace, self.on_change)
        shown = await visible_of(list(names.values()), broker.turns)
        first = await texts_of(await matching(pattern, shown, broker.turns), broker.turns)
        first.sort()
        self._matched = dict.fromkeys(first)
        asyncio.get_running_loop().call_soon(self._catch_up)  # the catch-up follows the answer
        return first

    def end(self) -> None:
        self._context.broker.watched_lists.end(self._namespace, self.on_change)

    async def on_change(self, new: Names, gone: Names) -> None:
        self._changes.append((new, gone))
        if self._matched is not None:
            while self._changes:
                await self._tell(self._matched, *self._changes.pop(0))

    async def _tell(self, matched: dict[str, None], new: Names, gone: Names) -> None:
        turns = self._context.broker.turns
        shown = await visible_of(list(new.values()), turns)
        fresh = [name for name in shown if str(name) not in matched]
        found = []
        if fresh:
            found = await matching(await compiled(self._pattern, turns), fresh, turns)
        removed = [text for text in gone if text in matched]
        added = [str(name) for name in found]
        for part_added, part_removed in _parts(added, removed):
            await turns.take()
            if self._context.over:
                return
            for name in part_removed:
                matched.pop(name, None)
            matched.update(dict.fromkeys(sorted(part_added)))
            digest = hash_of(matched)  # the hash of the list that the client has after this part
            self._context.put_control(
                reply.topic_update(self._watcher_id, part_added, part_removed, digest)
            )

    def _catch_up(self) -> None:
        if self._changes:
            self._context.broker.watched_lists.call(self.on_change)


async def watch(context: Context, body: pb.CommandWatchTopicList) -> bytes:
    """Begin a watch. Clients filter an answer to GET_TOPICS_OF_NAMESPACE, but not the updates. So
    the broker refuses a pattern that it does not understand, and the client asks for the list
    periodically instead."""
    namespace = NamespaceName.parse(body.namespace)
    pattern = await compiled(body.topics_pattern, context.broker.turns)
    if (former := context.watchers.pop(body.watcher_id, None)) is not None:
        former()
    if len(context.watchers) >= WATCHERS_MAX:
        raise TooManyWatchers(WATCHERS_MAX)
    watcher = _Watcher(context, body.watcher_id, namespace, body.topics_pattern)
    context.watchers[body.watcher_id] = watcher.end
    try:
        names = await watcher.begin(pattern)
        if (size := sum(map(_size_of, names))) > LIST_BYTES_MAX:
            why = f"the names that match have {size} bytes; the limit is {LIST_BYTES_MAX}"
            raise NotAllowed(f"watching {namespace}", why)
    except BaseException:
        _forget(context, body.watcher_id, watcher)
        raise
    if context.over:
        watcher.end()
    digest = hash_of(names)
    shown = () if body.HasField("topics_hash") and body.topics_hash == digest else names
    return reply.watching(body.request_id, body.watcher_id, shown, digest)


async def end_watch(context: Context, body: pb.CommandWatchTopicListClose) -> bytes:
    if (end := context.watchers.pop(body.watcher_id, None)) is not None:
        end()
    return reply.success(body.request_id)


def _parts(added: Sequence[str], removed: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Divide a change into parts that fit into a command. Removed names come first."""
    part: tuple[list[str], list[str]] = [], []
    size = 0
    for place, names in ((1, removed), (0, added)):
        for name in names:
            size += _size_of(name)
            if size > LIST_BYTES_MAX:
                yield part
                part, size = ([], []), _size_of(name)
            part[place].append(name)
    if any(part):
        yield part


def _size_of(name: str) -> int:
    return len(name.encode())


def _forget(context: Context, watcher_id: int, watcher: _Watcher) -> None:
    watcher.end()
    if context.watchers.get(watcher_id) == watcher.end:
        del context.watchers[watcher_id]
