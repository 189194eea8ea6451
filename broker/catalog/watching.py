"""Watched lists of topics: one list for each namespace that clients watch.

One task (`run`) reads the lists. When the metadata store reports a change, the namespace is queued.
The task waits GATHER_S, unless a new watcher waits for a list. Then the task reads the list and
tells each watcher which topics are new and which were deleted. Because of GATHER_S, a thousand
topics that are created together cause only a few reads and updates. The task repeats a failed read
after RETRY_S, and serves other namespaces meanwhile. A namespace without watchers is forgotten.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import ListUnavailable
from magnetar.metadata import paths
from magnetar.metadata.errors import MetadataError
from magnetar.protos.names import Domain
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from magnetar.broker.catalog.catalog import Catalog
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.names import NamespaceName, TopicName

    Names = Mapping[str, TopicName]  # keyed by full name
    Listener = Callable[[Names, Names], Awaitable[None]]  # new topics, deleted topics

GATHER_S: Final = 0.1
RETRY_S: Final = 1.0

NAMES_PER_SLICE: Final = 5_000
"""The names that one step of the event loop handles, in about 7 ms."""

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Watched:
    unwatch: Callable[[], None]
    names: Names = field(default_factory=dict)
    listeners: dict[Listener, None] = field(default_factory=dict)
    joining: dict[Listener, asyncio.Future[Names]] = field(default_factory=dict)
    retry: asyncio.TimerHandle | None = None  # None: no read is to be repeated after a failure

    @property
    def is_needed(self) -> bool:
        return bool(self.listeners or self.joining)


class WatchedLists:
    """The watched lists of one broker. `run` must be running. The lists contain persistent topics
    only, as in Pulsar."""

    def __init__(self, store: MetadataStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._watched: dict[NamespaceName, _Watched] = {}
        self._changed: dict[NamespaceName, None] = {}
        self._late: dict[Listener, None] = {}  # listeners to be called although nothing has changed
        self._wake = asyncio.Event()

    async def watch(self, namespace: NamespaceName, listener: Listener) -> Names:
        """Return the current list. `listener` is called for each later change, until `end` is
        called. Raises ListUnavailable; then the caller need not call `end`."""
        watched = self._watched.get(namespace)
        if watched is None:
            folder = paths.topics(namespace.tenant, namespace.namespace, Domain.PERSISTENT)
            unwatch = self._store.watch(folder, partial(self._on_changed, namespace))
            watched = self._watched[namespace] = _Watched(unwatch)
        joined: asyncio.Future[Names] = asyncio.get_running_loop().create_future()
        watched.joining[listener] = joined
        self._on_changed(namespace)
        try:
            return await joined
        except BaseException:
            self.end(namespace, listener)
            raise

    def call(self, listener: Listener) -> None:
        """Let `run` call a listener with an empty change. `run` makes one call at a time."""
        self._late[listener] = None
        self._wake.set()

    def end(self, namespace: NamespaceName, listener: Listener) -> None:
        """Stop calling the listener. If `watch` still waits for its list, `watch` raises
        ListUnavailable. Idempotent."""
        self._late.pop(listener, None)
        watched = self._watched.get(namespace)
        if watched is not None:
            watched.listeners.pop(listener, None)
            joined = watched.joining.pop(listener, None)
            if joined is not None and not joined.done():
                joined.set_exception(ListUnavailable(str(namespace), "the watcher has ended"))
            if not watched.is_needed:
                watched.unwatch()
                if watched.retry is not None:
                    watched.retry.cancel()
                del self._watched[namespace]

    async def run(self) -> None:
        """Read the changed lists and call the listeners, until cancelled."""
        self._changed |= dict.fromkeys(self._watched)  # namespaces that an earlier run left
        while True:
            while not (self._changed or self._late):
                self._wake.clear()
                await self._wake.wait()
            while self._late:
                listener = next(iter(self._late))
                del self._late[listener]
                await listener({}, {})
            if not self._changed:
                continue
            if not any(self._joins(namespace) for namespace in self._changed):
                await asyncio.sleep(GATHER_S)
            namespace = next(iter(self._changed))
            del self._changed[namespace]
            await self._read(namespace)

    def _joins(self, namespace: NamespaceName) -> bool:
        watched = self._watched.get(namespace)
        return watched is not None and bool(watched.joining)

    async def _read(self, namespace: NamespaceName) -> None:
        watched = self._watched.get(namespace)
        if watched is None:
            return
        joining = dict(watched.joining)  # listeners that join from here on need a later read
        try:
            found = await self._catalog.names(namespace, Domain.PERSISTENT)
        except MetadataError as error:
            log.warning("listing topics failed", namespace=str(namespace), error=str(error))
            for listener, joined in joining.items():
                watched.joining.pop(listener, None)
                if not joined.done():
                    joined.set_exception(ListUnavailable(str(namespace), str(error)))
            if watched.listeners and watched.retry is None:
                loop = asyncio.get_running_loop()
                watched.retry = loop.call_later(RETRY_S, self._retry, namespace, watched)
            return
        names: dict[str, TopicName] = {}
        for start in range(0, len(found), NAMES_PER_SLICE):
            names.update([(str(name), name) for name in found[start : start + NAMES_PER_SLICE]])
            await asyncio.sleep(0)
        before, watched.names = watched.names, names
        new = {text: names[text] for text in names.keys() - before.keys()}
        gone = {text: before[text] for text in before.keys() - names.keys()}
        if new or gone:
            for listener in tuple(watched.listeners):
                if listener in watched.listeners:
                    await listener(new, gone)
                await asyncio.sleep(0)
        for listener, joined in joining.items():
            if watched.joining.pop(listener, None) is not None and not joined.done():
                watched.listeners[listener] = None
                joined.set_result(names)

    def _retry(self, namespace: NamespaceName, watched: _Watched) -> None:
        watched.retry = None
        self._on_changed(namespace)

    def _on_changed(self, namespace: NamespaceName) -> None:
        self._changed[namespace] = None
        self._wake.set()
