"""WATCH_TOPIC_LIST: a client follows the topics of a namespace that match a pattern."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.broker.catalog.listing import hash_of, matches, matching, visible
from magnetar.broker.catalog.pattern import TopicPattern
from magnetar.broker.errors import NotAllowed, TooManyWatchers
from magnetar.broker.session import reply
from magnetar.protos.names import NamespaceName

if TYPE_CHECKING:
    from magnetar.broker.catalog.watching import Names
    from magnetar.broker.session.context import Context
    from magnetar.protos import pulsar_pb2 as pb

WATCHERS_MAX: Final = 100
"""Of one connection. Each keeps the set of the names that match: 0.5 MB for 10,000."""

LIST_BYTES_MAX: Final = 4 << 20
"""Of the names in one command: a frame has at most 5 MB."""


class _Watcher:
    def __init__(
        self, context: Context, watcher_id: int, namespace: NamespaceName, pattern: TopicPattern
    ) -> None:
        self._context = context
        self._watcher_id = watcher_id
        self._namespace = namespace
        self._pattern = pattern
        self._matched: set[str] | None = None  # None: the first list is not complete
        self._early: list[tuple[Names, Names]] = []  # changes since

    async def begin(self) -> list[str]:
        """The names that match, sorted."""
        lists = self._context.broker.watched_lists
        names = await lists.watch(self._namespace, self.on_change)
        found = await matching(self._pattern, visible(names.values()))
        self._matched = {str(name) for name in found}
        first = sorted(self._matched)
        asyncio.get_running_loop().call_soon(self._catch_up)  # behind the answer
        return first

    def end(self) -> None:
        self._context.broker.watched_lists.end(self._namespace, self.on_change)

    def on_change(self, new: Names, gone: Names) -> None:
        if self._matched is None or self._early:
            self._early.append((new, gone))
            return
        matched = self._matched
        removed = [text for text in gone if text in matched]
        added = [
            str(name)
            for name in visible(new.values())
            if str(name) not in matched and matches(self._pattern, name)
        ]
        if not (added or removed):
            return
        matched.difference_update(removed)
        matched.update(added)
        self._context.put_control(
            reply.topic_update(self._watcher_id, added, removed, hash_of(matched))
        )

    def _catch_up(self) -> None:
        early, self._early = self._early, []
        for new, gone in early:
            self.on_change(new, gone)


async def watch(context: Context, body: pb.CommandWatchTopicList) -> bytes:
    """Unlike an answer to GET_TOPICS_OF_NAMESPACE, updates are not filtered by clients. So a
    pattern that the broker does not understand is refused, and the client asks for the list
    periodically instead."""
    namespace = NamespaceName.parse(body.namespace)
    pattern = TopicPattern(body.topics_pattern)
    if (former := context.watchers.pop(body.watcher_id, None)) is not None:
        former()
    if len(context.watchers) >= WATCHERS_MAX:
        raise TooManyWatchers(WATCHERS_MAX)
    watcher = _Watcher(context, body.watcher_id, namespace, pattern)
    context.watchers[body.watcher_id] = watcher.end
    try:
        names = await watcher.begin()
        if (size := sum(map(len, names))) > LIST_BYTES_MAX:
            why = f"its topics have {size} characters, at most {LIST_BYTES_MAX} can be sent"
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


def _forget(context: Context, watcher_id: int, watcher: _Watcher) -> None:
    watcher.end()
    if context.watchers.get(watcher_id) == watcher.end:
        del context.watchers[watcher_id]
