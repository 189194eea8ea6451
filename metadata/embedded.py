"""MetadataStore in a directory of this process; standalone uses it instead of ZooKeeper.

All requests go to one thread, in order of the calls. They are carried out in groups: while the
thread writes and syncs one group, the next one gathers. So a busy store syncs once per group, not
once per request. The thread syncs a group before any of its requests is answered, reads included:
no caller sees a change that a power cut can undo.

The one session lasts until `close`, or as long as the process: it is never suspended and never
lost. When the disk fails, the store takes no more calls (StoreFailed), and the process should end.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from magnetar.metadata.disk import DiskNodes, Files
from magnetar.metadata.errors import MetadataError, StoreClosed, StoreFailed
from magnetar.metadata.node import Versioned, check_change, check_delete, check_path, check_prefix
from magnetar.metadata.store import SessionState
from magnetar.metadata.tree import Tree
from magnetar.metadata.watches import Watches
from magnetar.runtime.thread import WorkerThread

T = TypeVar("T")

_GROUP_REQUESTS_MAX: Final = 256
_GROUP_BYTES_MAX: Final = 256 * 1024
"""The thread holds the interpreter lock while RocksDB writes a group: 256 KiB take about 1 ms."""

_REQUESTS_MAX: Final = 100_000
"""The maximum number of waiting requests. More requests are a bug: a loop that does not wait."""


@dataclass(slots=True, eq=False)
class _Request:
    apply: Callable[[], Any]
    size: int
    answer: asyncio.Future[Any]


@dataclass(slots=True)
class _GroupResult:
    outcomes: list[Any]  # one for each request; a MetadataError: the request was refused
    touched: set[str]


class EmbeddedStore:
    """Made by `open`. Belongs to the loop that opened it."""

    def __init__(self, nodes: DiskNodes, thread: WorkerThread) -> None:
        self._nodes = nodes
        self._tree = Tree(nodes)
        self._thread = thread
        self._waiting: deque[_Request] = deque()
        self._group: asyncio.Future[_GroupResult] | None = None  # None: the thread is idle
        self._failure: StoreFailed | None = None
        self._watches = Watches()
        self._state = SessionState.CONNECTED
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def open(cls, directory: Path, *, files: Files = os) -> "EmbeddedStore":
        """Open the store in `directory`, making it if it is not there. Raises StoreBusy,
        StoreDamaged, StoreForeign, StoreFailed."""
        thread = WorkerThread("metadata")
        try:
            nodes = await thread.do(partial(DiskNodes.open, directory, files=files))
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(nodes, thread)

    @property
    def session_id(self) -> int:
        return self._nodes.session

    @property
    def session_state(self) -> SessionState:
        return self._state

    async def get(self, path: str) -> Versioned | None:
        check_path(path)
        return await self._request(lambda: self._tree.get(path))

    async def children(self, path: str) -> list[str]:
        check_path(path)
        return await self._request(lambda: self._tree.children(path))

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        check_change(path, value, expected)
        return await self._request(lambda: self._tree.put(path, value, expected), len(value))

    async def delete(self, path: str, *, expected: int) -> None:
        check_delete(path, expected)
        await self._request(lambda: self._tree.delete(path, expected))

    async def create_ephemeral(self, path: str, value: bytes) -> int:
        check_change(path, value, 0)
        session = self.session_id
        await self._request(lambda: self._tree.create(path, value, session), len(value))
        return 0

    async def create_sequential(self, path_prefix: str, value: bytes, *, ephemeral: bool) -> str:
        check_prefix(path_prefix, value)
        session = self.session_id if ephemeral else 0
        return await self._request(
            lambda: self._tree.create_sequential(path_prefix, value, session), len(value)
        )

    async def sync(self, path: str) -> None:
        check_path(path)
        await self._request(lambda: None)

    def watch(self, path: str, callback: Callable[[], None]) -> Callable[[], None]:
        check_path(path)
        return self._watches.add(path, callback)

    def watch_session(self, callback: Callable[[SessionState], None]) -> Callable[[], None]:
        return self._watches.add_session(callback)

    async def close(self) -> None:
        """Close the store. Waits for the requests that are being carried out, and refuses the
        others."""
        if self._state is SessionState.CLOSED:
            return
        self._state = SessionState.CLOSED
        while self._waiting:
            _refuse(self._waiting.popleft(), StoreClosed())
        await self._idle.wait()
        self._watches.fire_session(SessionState.CLOSED)
        self._watches.clear()
        with suppress(StoreFailed):  # the requests have raised it already
            await self._thread.do(self._nodes.close)
        self._thread.shutdown(wait=False)

    # ---- groups ----

    async def _request(self, apply: Callable[[], T], size: int = 0) -> T:
        if self._state is SessionState.CLOSED:
            raise StoreClosed
        if self._failure is not None:
            raise self._failure
        assert len(self._waiting) < _REQUESTS_MAX, "requests without end"
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(apply, size, answer))
        self._maybe_start_group()
        return await answer

    def _maybe_start_group(self) -> None:
        if self._group is not None or not self._waiting:
            return
        group: list[_Request] = []
        size = 0
        while self._waiting and len(group) < _GROUP_REQUESTS_MAX and size < _GROUP_BYTES_MAX:
            group.append(self._waiting.popleft())
            size += group[-1].size
        self._idle.clear()
        self._group = self._thread.do(partial(self._run_group, group))
        self._group.add_done_callback(partial(self._on_group, group))

    def _run_group(self, group: list[_Request]) -> _GroupResult:
        """Carry out a group, on the thread. Raises StoreFailed if the disk fails; then every
        request of the group fails."""
        outcomes = []
        for request in group:
            try:
                outcomes.append(request.apply())
            except StoreFailed:
                raise
            except MetadataError as refusal:
                outcomes.append(refusal)
        self._nodes.commit()
        return _GroupResult(outcomes, self._tree.take_touched())

    def _on_group(self, group: list[_Request], done: asyncio.Future[_GroupResult]) -> None:
        self._group = None
        error = done.exception()
        if error is None:
            result = done.result()
            for request, outcome in zip(group, result.outcomes, strict=True):
                _answer(request, outcome)
            self._maybe_start_group()
            if self._group is None:
                self._idle.set()
            self._watches.fire(result.touched)  # last: a callback with a bug may raise
        else:
            self._fail(group, error)
            self._idle.set()

    def _fail(self, group: list[_Request], error: BaseException) -> None:
        """End the store after a failed group. The outcome of the group is unknown; the waiting
        requests were not carried out."""
        failure = error if isinstance(error, StoreFailed) else None
        self._failure = failure or StoreFailed("", repr(error))
        for request in group:
            _refuse(request, error)
        while self._waiting:
            _refuse(self._waiting.popleft(), self._failure)


def _answer(request: _Request, outcome: Any) -> None:
    if request.answer.done():
        return  # the caller was cancelled; the change stands
    if isinstance(outcome, MetadataError):
        request.answer.set_exception(outcome)
    else:
        request.answer.set_result(outcome)


def _refuse(request: _Request, error: BaseException) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)
