"""Follows the broker's announcements of new and deleted topics of a namespace."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.client.errors import PulsarException
    from magnetar.client.session.connection import Connection


class TopicWatch:
    """A watch on one session. The session calls the watch until either of them ends.

    The watch gathers the announcements in a set of new names and a set of deleted names. `changes`
    returns both. So the number of topics limits the memory, even if the caller is slow. A topic
    that was deleted and created again is in both sets.
    """

    def __init__(self, connection: Connection, watcher_id: int) -> None:
        self._connection = connection
        self._watcher_id = watcher_id
        self._new: dict[str, None] = {}  # new topics in the order of the announcements
        self._gone: dict[str, None] = {}
        self._changed = asyncio.Event()
        self._error: PulsarException | None = None  # why the watch ended; None: it has not

    async def begin(self, namespace: str, pattern: str) -> list[str]:
        """Begin to watch. Returns the names of the matching topics.

        Raises the broker's refusal, for example if it does not understand the pattern.
        """
        self._connection.add_watch(self._watcher_id, self)
        command = pb.CommandWatchTopicList(
            watcher_id=self._watcher_id, namespace=namespace, topics_pattern=pattern
        )
        answer = await self._connection.request(command, pb.CommandWatchTopicListSuccess)
        return list(answer.topic)

    async def changes(self) -> tuple[list[str], list[str]]:
        """Wait for announcements. Returns the new and the deleted names.

        For a name in both lists, the deletion came first. If the session has ended, raises its
        error, because announcements may be missing.
        """
        await self._changed.wait()
        if self._error is not None:
            raise self._error
        self._changed.clear()
        new, self._new = self._new, {}
        gone, self._gone = self._gone, {}
        return list(new), list(gone)

    def close(self) -> None:
        """End the watch, without waiting for the broker."""
        self._connection.remove_watch(self._watcher_id)
        self._connection.ask(
            pb.CommandWatchTopicListClose(watcher_id=self._watcher_id), lambda _: None
        )

    # The connection

    def on_topics(self, new: Sequence[str], deleted: Sequence[str]) -> None:
        for name in deleted:
            self._new.pop(name, None)
        self._gone.update(dict.fromkeys(deleted))
        self._new.update(dict.fromkeys(new))
        self._changed.set()

    def on_disconnected(self, error: PulsarException) -> None:
        self._error = error
        self._changed.set()
