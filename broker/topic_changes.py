"""Callbacks for topics that are opened at this broker or leave it.

A watch of a topic outlives the open topic, because an idle topic is unloaded and opened again
later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.protos.names import TopicName


class TopicChanges:
    """The watches of all topics. The broker calls `tell`; the callbacks run at once and do not
    fail."""

    def __init__(self) -> None:
        self._watchers: dict[TopicName, dict[object, Callable[[], None]]] = {}

    def watch(self, name: TopicName, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` after the topic was opened here, unloaded or deleted, or after this
        broker lost its bundle. Returns the function that ends the watch."""
        key = object()
        self._watchers.setdefault(name, {})[key] = on_change

        def unwatch() -> None:
            callbacks = self._watchers.get(name, {})
            callbacks.pop(key, None)
            if not callbacks:
                self._watchers.pop(name, None)

        return unwatch

    @property
    def watched(self) -> list[TopicName]:
        """The topics that are watched, open or not."""
        return list(self._watchers)

    def tell(self, name: TopicName) -> None:
        """Call the callbacks of the topic: it was opened or has left, or this broker lost its
        bundle."""
        for on_change in list(self._watchers.get(name, {}).values()):
            on_change()
