"""MetadataStore in memory: for tests, and for simulated worlds with all failures of ZooKeeper.

One `MemoryTree` is the ensemble. Each `MemoryStore` is a client with a session of its own. A store
has no thread, no real time and no randomness of its own, so a run can be repeated exactly.

A request is queued and served after `delay_s()`, in the order of the calls. Its reply wakes the
caller. When the caller is cancelled, the request is still served, as with ZooKeeper. A test can
inject `faults` (per request), `suspend`, `expire`, `reconnect` and `fall_behind`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from magnetar.metadata.errors import (
    MetadataError,
    OutcomeUnknown,
    SessionLost,
    StoreClosed,
    Unavailable,
)
from magnetar.metadata.node import Versioned, check_change, check_delete, check_path, check_prefix
from magnetar.metadata.store import SessionState
from magnetar.metadata.tree import Node, Tree
from magnetar.metadata.watches import Watches

T = TypeVar("T")

_REQUESTS_MAX: Final = 10_000
"""The maximum number of queued requests of one store. More requests are a bug: a loop that does not
wait."""


class Fault(Enum):
    NOT_SENT = "not sent"  # Unavailable
    REQUEST_LOST = "request lost"  # OutcomeUnknown, and the request was not applied
    REPLY_LOST = "reply lost"  # OutcomeUnknown, and the request was applied


FaultChoice = Callable[[str, str], Fault | None]
"""(operation, path) -> the fault of this request. Operations are the method names."""


class MemoryNodes:
    """Nodes in dictionaries."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {"/": Node(b"")}
        self._children: dict[str, dict[str, None]] = {"/": {}}

    def get(self, path: str) -> Node | None:
        return self._nodes.get(path)

    def put(self, path: str, node: Node) -> None:
        if path not in self._nodes:
            parent, _, name = path.rpartition("/")
            self._children[parent or "/"][name] = None
            self._children[path] = {}
        self._nodes[path] = node

    def remove(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        del self._nodes[path]
        del self._children[path]
        del self._children[parent or "/"][name]

    def child_names(self, path: str) -> list[str]:
        return list(self._children.get(path, {}))

    def has_children(self, path: str) -> bool:
        return bool(self._children.get(path))

    def of_session(self, session: int) -> list[str]:
        return [path for path, node in self._nodes.items() if node.session == session]

    def copy(self) -> "MemoryNodes":
        twin = MemoryNodes()
        twin._nodes = dict(self._nodes)
        twin._children = {path: dict(names) for path, names in self._children.items()}
        return twin


class MemoryTree:
    """The state that all sessions share."""

    def __init__(self) -> None:
        self.nodes = MemoryNodes()
        self.tree = Tree(self.nodes)
        self.sessions: set[int] = set()
        self.stores: list[MemoryStore] = []
        self._session = 0

    def open_session(self) -> int:
        self._session += 1
        self.sessions.add(self._session)
        return self._session

    def end_session(self, session: int) -> None:
        """The ensemble ends a session. Its client may learn that later."""
        if session in self.sessions:
            self.sessions.remove(session)
            self.tree.end_session(session)
            self.publish()

    def publish(self) -> None:
        """Tell every store the paths that were touched since the last call."""
        touched = self.tree.take_touched()
        if touched:
            for store in list(self.stores):
                store.on_touched(touched)


@dataclass(slots=True, eq=False)
class _Request:
    path: str
    apply: Callable[[], Any]
    answer: asyncio.Future[Any]
    fault: Fault | None
    session: int
    is_fresh: bool  # a lagging follower catches up before it replies, even with a refusal


class MemoryStore:
    """A client of a MemoryTree. `tree` None: a new tree."""

    def __init__(
        self,
        tree: MemoryTree | None = None,
        *,
        delay_s: Callable[[], float] = lambda: 0.0,
        faults: FaultChoice = lambda operation, path: None,
    ) -> None:
        self._shared = tree if tree is not None else MemoryTree()
        self._delay_s = delay_s
        self._faults = faults
        self._state = SessionState.CONNECTED
        self._session = self._shared.open_session()
        self._requests: deque[_Request] = deque()
        self._timers: set[asyncio.Handle] = set()  # one per queued request
        self._watches = Watches()
        self._stale: Tree | None = None  # the tree that a lagging follower shows; None: up to date
        self._unseen: set[str] = set()  # touched since the follower began to lag
        self._shared.stores.append(self)

    @property
    def session_id(self) -> int:
        return self._session

    @property
    def session_state(self) -> SessionState:
        return self._state

    async def get(self, path: str) -> Versioned | None:
        check_path(path)
        return await self._request("get", path, lambda: self._view().get(path))

    async def children(self, path: str) -> list[str]:
        check_path(path)
        return await self._request("children", path, lambda: self._view().children(path))

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        check_change(path, value, expected)
        return await self._change("put", path, lambda tree: tree.put(path, value, expected))

    async def delete(self, path: str, *, expected: int) -> None:
        check_delete(path, expected)
        await self._change("delete", path, lambda tree: tree.delete(path, expected))

    async def create_ephemeral(self, path: str, value: bytes) -> int:
        check_change(path, value, 0)
        session = self._session
        await self._change("create_ephemeral", path, lambda tree: tree.create(path, value, session))
        return 0

    async def create_sequential(self, path_prefix: str, value: bytes, *, ephemeral: bool) -> str:
        check_prefix(path_prefix, value)
        session = self._session if ephemeral else 0
        return await self._change(
            "create_sequential",
            path_prefix,
            lambda tree: tree.create_sequential(path_prefix, value, session),
        )

    async def sync(self, path: str) -> None:
        check_path(path)
        await self._request("sync", path, lambda: None, is_fresh=True)

    def watch(self, path: str, callback: Callable[[], None]) -> Callable[[], None]:
        check_path(path)
        return self._watches.add(path, callback)

    def watch_session(self, callback: Callable[[SessionState], None]) -> Callable[[], None]:
        return self._watches.add_session(callback)

    async def close(self) -> None:
        if self._state is SessionState.CLOSED:
            return
        self._fail_requests(lambda request: OutcomeUnknown(request.path, "the store was closed"))
        self._shared.stores.remove(self)
        self._shared.end_session(self._session)
        self._enter(SessionState.CLOSED)
        self._watches.clear()

    # ---- faults that a test or a simulated world injects ----

    def suspend(self) -> None:
        """The connection breaks. The ensemble keeps the session until `expire` or `end_session`."""
        assert self._state is SessionState.CONNECTED, self._state
        self._fail_requests(lambda request: OutcomeUnknown(request.path))
        self._enter(SessionState.SUSPENDED)

    def expire(self) -> None:
        """The ensemble ends the session. A connected client is told at once, a disconnected client
        when it reconnects. LOST lasts until `reconnect`."""
        assert self._state in (SessionState.CONNECTED, SessionState.SUSPENDED), self._state
        self._shared.end_session(self._session)
        if self._state is SessionState.CONNECTED:
            self._lose_session()

    def reconnect(self) -> None:
        """The client connects again: the session resumes, or a new one begins. All watches fire."""
        assert self._state in (SessionState.SUSPENDED, SessionState.LOST), self._state
        if self._state is SessionState.SUSPENDED and self._session not in self._shared.sessions:
            self._lose_session()
        if self._state is SessionState.LOST:
            self._session = self._shared.open_session()
        self._stale = None
        self._unseen.clear()
        self._enter(SessionState.CONNECTED)
        self._fire_soon(set(self._watches.paths))

    def fall_behind(self) -> None:
        """The server of this session stops following the leader. Reads and watches show the state
        of this moment until the session reconnects, gets the reply to a change or to a `sync`, or
        until the test calls `catch_up`."""
        if self._stale is None:
            self._stale = Tree(self._shared.nodes.copy())

    def catch_up(self) -> None:
        self._stale = None
        unseen, self._unseen = self._unseen, set()
        self._fire_soon(unseen)

    def on_touched(self, paths: set[str]) -> None:
        """Called by the tree after each change by any session."""
        if self._stale is not None:
            self._unseen |= paths
        elif self._state is SessionState.CONNECTED:
            self._fire_soon(paths)

    # ---- mechanics ----

    def _view(self) -> Tree:
        return self._stale if self._stale is not None else self._shared.tree

    async def _change(self, operation: str, path: str, change: Callable[[Tree], T]) -> T:
        def apply() -> T:
            try:
                return change(self._shared.tree)
            finally:
                self._shared.publish()

        return await self._request(operation, path, apply, is_fresh=True)

    async def _request(
        self, operation: str, path: str, apply: Callable[[], T], *, is_fresh: bool = False
    ) -> T:
        if self._state is SessionState.CLOSED:
            raise StoreClosed
        fault = self._faults(operation, path)
        if self._state is not SessionState.CONNECTED or fault is Fault.NOT_SENT:
            raise Unavailable(f"session {self._state}")
        assert len(self._requests) < _REQUESTS_MAX, "requests without end"
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        request = _Request(path, apply, answer, fault, self._session, is_fresh)
        self._requests.append(request)
        self._serve_later(loop, self._delay_s())
        return await answer

    def _serve_later(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        def serve() -> None:
            self._timers.discard(timer)
            self._serve_next()

        timer = loop.call_later(delay_s, serve) if delay_s > 0 else loop.call_soon(serve)
        self._timers.add(timer)

    def _serve_next(self) -> None:
        """Serve the oldest request. Timers may fire out of order."""
        request = self._requests.popleft()
        error: MetadataError | None = None
        result = None
        if request.is_fresh and request.fault is None:
            # Not after a lost reply: the client's next request may reach a server that lags.
            self.catch_up()
        if request.fault is not Fault.REQUEST_LOST:
            try:
                result = request.apply()
            except MetadataError as raised:
                error = raised
        if request.fault is not None:
            error = OutcomeUnknown(request.path)
        if request.answer.done():
            return  # the caller was cancelled
        if error is not None:
            request.answer.set_exception(error)
        else:
            request.answer.set_result(result)

    def _fail_requests(self, error: Callable[[_Request], MetadataError]) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        requests, self._requests = self._requests, deque()
        for request in requests:
            if not request.answer.done():
                request.answer.set_exception(error(request))

    def _lose_session(self) -> None:
        self._fail_requests(lambda request: SessionLost(request.path, request.session))
        self._enter(SessionState.LOST)

    def _enter(self, state: SessionState) -> None:
        self._state = state
        self._watches.fire_session(state)

    def _fire_soon(self, paths: set[str]) -> None:
        paths = {path for path in paths if path in self._watches}
        if paths:
            asyncio.get_running_loop().call_soon(partial(self._watches.fire, paths))
