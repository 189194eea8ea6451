"""The metadata store: one tree, a session for each process, and ZooKeeper's faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.metadata import paths
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.store import SessionState
from magnetar.metadata.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from world.loop import SimLoop
    from world.net import Host
    from world.trace import Trace

    from magnetar.metadata.node import Versioned


class Session(MemoryStore):
    """A session with faults: listings may lack names (T25), and the store may be a wrong one.

    A `sync` does not end these faults.
    """

    hides: Callable[[str, list[str]], list[str]] = staticmethod(lambda path, names: names)
    shown: Tree | None = None  # the cluster's identity and its ledgers

    async def get(self, path: str) -> Versioned | None:
        shown = self.shown
        if shown is None or not path.startswith((paths.CLUSTER, paths.LEDGERS, _COUNTER)):
            return await super().get(path)
        return await self._request("get", path, lambda: shown.get(path))

    async def children(self, path: str) -> list[str]:
        shown = self.shown
        if shown is None or not path.startswith(paths.LEDGERS):
            return self.hides(path, await super().children(path))
        return await self._request("children", path, lambda: shown.children(path))


_COUNTER = paths.NEXT_LEDGER_ID


class WatchedTree(MemoryTree):
    """Reports each change to an oracle at the moment it is committed."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        super().__init__()
        self._on_change = on_change

    def publish(self) -> None:
        for path in sorted(self.tree.touched):
            self._on_change(path)
        super().publish()


class Troubles:
    """Probabilities per request."""

    delay_s = 0.0008
    not_sent = 0.0
    request_lost = 0.0
    reply_lost = 0.0
    names_lost = 0.0  # the probability that a listing of ledgers lacks some


class Ensemble:
    """The metadata store of the processes of a world."""

    def __init__(
        self, loop: SimLoop, random: Random, trace: Trace, on_change: Callable[[str], None]
    ) -> None:
        self.tree = WatchedTree(on_change)
        self.troubles = Troubles()
        self.session_timeout_s = 4.0
        self._loop = loop
        self._random = random
        self._trace = trace
        self.on_request: Callable[[Host, str, str], None] = lambda host, operation, path: None
        self._cut: set[str] = set()  # hosts that cannot reach it

    def open_store(self, host: Host) -> MemoryStore:
        """Open a session for the process. Behind a cut, the session begins suspended."""

        def faults(operation: str, path: str) -> Fault | None:
            return self._fault(host, operation, path)

        store = Session(self.tree, delay_s=self._delay_s, faults=faults)
        store.hides = lambda path, names: self._hide(host, path, names)
        if host.name in self._cut:
            store.suspend()
        return store

    def cut(self, host: Host, store: MemoryStore) -> None:
        """The process loses its connection. The session ends if it does not return in time."""
        if host.name in self._cut:
            return
        self._cut.add(host.name)
        self._trace.fault(host.name, "cut from metadata")
        if store.session_state is SessionState.CONNECTED:
            store.suspend()
        self._loop.later(self.session_timeout_s, self._maybe_end, host, store)

    def heal(self, host: Host, store: MemoryStore | None) -> None:
        if host.name not in self._cut:
            return
        self._cut.discard(host.name)
        self._trace.note(host.name, "metadata in reach")
        if store is not None and host.alive:
            self.reconnect(store)

    def expire(self, host: Host, store: MemoryStore) -> None:
        """The session ends, the process learns that at once, and it gets another session."""
        if store.session_state is SessionState.CONNECTED:
            self._trace.fault(host.name, "session expired")
            store.expire()
            self._loop.later(self._random.uniform(0.01, 1.0), self._maybe_reconnect, host, store)

    def image(self) -> Tree:
        """The present tree. The caller may change it."""
        return Tree(self.tree.nodes.copy())

    def show(self, host: Host, store: MemoryStore, shown: Tree) -> None:
        """Connect the process to another store: that of another cluster, or an old image."""
        assert isinstance(store, Session)
        self._trace.fault(host.name, "wrong metadata shown")
        store.shown = shown

    def fall_behind(self, host: Host, store: MemoryStore, for_s: float) -> None:
        """Reads of the process are stale for a while."""
        if store.session_state is SessionState.CONNECTED:
            self._trace.fault(host.name, "stale follower", round(for_s, 3))
            store.fall_behind()
            self._loop.later(for_s, self._maybe_catch_up, store)

    def abandon(self, store: MemoryStore) -> None:
        """The process was killed: its requests under way may or may not arrive. Its session ends
        after the session timeout."""
        if store.session_state is SessionState.CONNECTED and self._random.random() < 0.5:
            store.suspend()

        def end() -> None:
            if store.session_state is SessionState.CONNECTED:
                store.suspend()
            self.tree.end_session(store.session_id)
            if store in self.tree.stores:
                self.tree.stores.remove(store)

        self._loop.later(self._random.uniform(0.0, self.session_timeout_s), end)

    def freeze(self, host: Host, store: MemoryStore) -> None:
        """The process is stopped: it sends nothing, so its session may end."""
        session = store.session_id

        def end() -> None:
            if host.paused and store.session_id == session:
                self.tree.end_session(session)

        self._loop.later(self.session_timeout_s, end)

    def thaw(self, host: Host, store: MemoryStore) -> None:
        """The process continues: it learns whether its session still exists."""
        if store.session_id not in self.tree.sessions:
            self._trace.fault(host.name, "session expired while paused")
            if store.session_state is SessionState.CONNECTED:
                store.suspend()
            if host.name not in self._cut:
                self.reconnect(store)

    def recover(self, store: MemoryStore) -> None:
        """No lag, a connection, and the right store."""
        assert isinstance(store, Session)
        store.shown = None
        self.reconnect(store)
        self._maybe_catch_up(store)

    @staticmethod
    def reconnect(store: MemoryStore) -> None:
        if store.session_state in (SessionState.SUSPENDED, SessionState.LOST):
            store.reconnect()

    def _delay_s(self) -> float:
        return self._random.expovariate(1 / self.troubles.delay_s)

    def _fault(self, host: Host, operation: str, path: str) -> Fault | None:
        if not host.alive:
            return Fault.NOT_SENT
        self.on_request(host, operation, path)
        troubles = self.troubles
        total = troubles.not_sent + troubles.request_lost + troubles.reply_lost
        if not total or self._random.random() >= total:
            return None
        choices = (Fault.NOT_SENT, Fault.REQUEST_LOST, Fault.REPLY_LOST)
        weights = (troubles.not_sent, troubles.request_lost, troubles.reply_lost)
        fault = self._random.choices(choices, weights)[0]
        self._trace.fault(host.name, f"metadata: {fault.value}", operation, path)
        return fault

    def _hide(self, host: Host, path: str, names: list[str]) -> list[str]:
        lost, random = self.troubles.names_lost, self._random
        if not lost or not path.startswith(paths.LEDGERS) or random.random() >= lost:
            return names
        shown = [name for name in names if random.random() < 0.5]
        if shown != names:
            self._trace.fault(host.name, "listing lacks names", path)
        return shown

    def _maybe_end(self, host: Host, store: MemoryStore) -> None:
        if host.name in self._cut and store.session_state is SessionState.SUSPENDED:
            self._trace.note(host.name, "session ends")
            self.tree.end_session(store.session_id)

    def _maybe_reconnect(self, host: Host, store: MemoryStore) -> None:
        if host.alive and host.name not in self._cut:
            self.reconnect(store)

    @staticmethod
    def _maybe_catch_up(store: MemoryStore) -> None:
        if store.session_state is SessionState.CONNECTED:
            store.catch_up()
