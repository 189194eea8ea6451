"""MetadataStore on an Apache ZooKeeper ensemble. The only module that imports kazoo.

kazoo runs three threads of its own. The store passes requests to kazoo on the event loop, each with
a future. kazoo's threads pass answers, watch events and session states to the loop by
`call_soon_threadsafe`. kazoo itself reconnects, and replaces an expired session.

Without a connection the store refuses a request (Unavailable). It does not queue the request,
because kazoo would send it at an unknown time. If the connection breaks after kazoo has accepted a
request, the request raises OutcomeUnknown.

ZooKeeper's watches fire once and end with the connection. This module arms the watches of a path
again after each event and each reconnect, and calls back *after* the arming. A callback that reads
the path therefore cannot miss a change.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import islice
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    KazooException,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    SessionExpiredError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.states import KazooState, KeeperState

from magnetar.metadata.errors import (
    BadVersion,
    MetadataError,
    NodeExists,
    NoNode,
    NotEmpty,
    OutcomeUnknown,
    ParentIsEphemeral,
    SessionLost,
    StoreClosed,
    Unavailable,
)
from magnetar.metadata.node import (
    ABSENT,
    Versioned,
    check_change,
    check_delete,
    check_path,
    check_prefix,
    parents_of,
)
from magnetar.metadata.store import UPDATE_PAUSE_S, SessionState
from magnetar.metadata.url import MetadataUrl
from magnetar.metadata.watches import Watches
from magnetar.runtime.log import get_logger

log = get_logger(__name__)

SESSION_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 15.0
"""Time limit of the first connection: the ensemble may be starting at the same time."""

_CLOSE_S: Final = 5.0
"""The time limit for ending the session. A session that was not ended expires later."""

_RETRY: Final = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0}
"""The pauses of kazoo after it could not connect to any host. Its default maximum is an hour."""

_AGAIN_S: Final = 1.0
"""The pause after a failure, before the store arms a watch again or starts kazoo again."""

_ARMS_PER_STEP: Final = 100
"""The number of watched paths that are armed again in one step of the loop: 20 ms. A broker watches
a path for each topic with policies of its own. After a reconnect, 10,000 paths take 2 s."""

_PARENT_ROUNDS_MAX: Final = 20
"""The maximum number of attempts to create parents that other processes delete meanwhile."""

_UNSIGNED: Final = (1 << 64) - 1
_LAST_SYSTEM_ERROR: Final = -100
"""ZooKeeper numbers its refusals from -100 downwards; for other codes the outcome is unknown."""


class ZooKeeperStore:
    """`connect` makes a store. All calls must run on the loop on which it was made."""

    def __init__(self, hosts: str, session_timeout_s: float, chroot: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._hosts = tuple(host.strip() for host in hosts.split(","))
        if "/" in hosts:
            raise Unavailable("hosts are host:port, without a path", hosts=self._hosts)
        self._chroot = "" if chroot == "/" else chroot
        # On a live connection every answer comes within the session's timeout. Otherwise kazoo's
        # pings fail, kazoo declares the connection dead, and no answer comes any more.
        self._request_s = session_timeout_s
        self._state = SessionState.SUSPENDED
        self._session = 0
        self._open: set[asyncio.Future[Any]] = set()  # answers that have not come yet
        self._watches = Watches()
        self._arms: dict[str, _Arm] = {}
        self._due: dict[_Arm, None] = {}  # to be armed in the next steps of the loop, in order
        try:
            self._client = KazooClient(
                hosts=hosts,
                timeout=session_timeout_s,
                handler=_Handler(session_timeout_s / len(self._hosts)),
                connection_retry=dict(_RETRY),
            )
        except ValueError as error:
            raise Unavailable(f"not a list of host:port: {error}", hosts=self._hosts) from error
        self._client.add_listener(self._hear_state)

    @classmethod
    async def connect(
        cls,
        hosts: str,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        chroot: str = "/magnetar",
    ) -> "ZooKeeperStore":
        """Connect to an ensemble. `hosts` is "host:port,host:port". Makes the chroot if it does not
        exist. Raises Unavailable, with the hosts, if no session begins within
        `connect_timeout_s`."""
        check_path(chroot)
        store = cls(hosts, session_timeout_s, chroot)
        try:
            async with asyncio.timeout(connect_timeout_s):
                store._client.start_async()
                await store._make_root()
        except BaseException as error:
            await store.close()
            if isinstance(error, TimeoutError):
                reason = f"no session within {connect_timeout_s:g} s. Is ZooKeeper running there?"
                raise Unavailable(reason, hosts=store._hosts) from None
            raise
        log.info("metadata session", hosts=hosts, session=f"{store.session_id:#x}", chroot=chroot)
        return store

    @classmethod
    async def connect_url(
        cls, url: str, *, session_timeout_s: float = SESSION_TIMEOUT_S
    ) -> "ZooKeeperStore":
        """`connect` to a metadata URL (url.py). Also raises InvalidMetadataUrl."""
        where = MetadataUrl.parse(url)
        return await cls.connect(
            where.hosts, session_timeout_s=session_timeout_s, chroot=where.chroot
        )

    @property
    def session_id(self) -> int:
        return self._session

    @property
    def session_state(self) -> SessionState:
        return self._state

    async def get(self, path: str) -> Versioned | None:
        check_path(path)
        full = self._full(path)
        try:
            value, stat = await self._request(path, lambda: self._client.get_async(full))
        except NoNodeError:
            return None
        return Versioned(value or b"", stat.version, stat.ephemeralOwner & _UNSIGNED)

    async def children(self, path: str) -> list[str]:
        check_path(path)
        full = self._full(path)
        try:
            names = await self._request(path, lambda: self._client.get_children_async(full))
        except NoNodeError:
            return []
        return sorted(names)

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        check_change(path, value, expected)
        if expected == ABSENT:
            await self._create(path, value)
            return 0
        full = self._full(path)
        try:
            stat = await self._request(path, lambda: self._client.set_async(full, value, expected))
        except (BadVersionError, NoNodeError):
            raise BadVersion(path, expected) from None
        version: int = stat.version
        return version

    async def delete(self, path: str, *, expected: int) -> None:
        check_delete(path, expected)
        full = self._full(path)
        try:
            await self._request(path, lambda: self._client.delete_async(full, expected))
        except NoNodeError:
            raise NoNode(path) from None
        except BadVersionError:
            raise BadVersion(path, expected) from None
        except NotEmptyError:
            raise NotEmpty(path) from None

    async def create_ephemeral(self, path: str, value: bytes) -> int:
        check_change(path, value, ABSENT)
        await self._create(path, value, ephemeral=True)
        return 0

    async def create_sequential(self, path_prefix: str, value: bytes, *, ephemeral: bool) -> str:
        check_prefix(path_prefix, value)
        return await self._create(path_prefix, value, ephemeral=ephemeral, sequence=True)

    async def sync(self, path: str) -> None:
        """Write to the root node: a majority must accept a write. ZooKeeper's own `sync` is not
        enough: it asks the leader that the server knows, and a deposed leader still answers for
        some seconds."""
        check_path(path)
        with suppress(NoNodeError):  # a NoNode answer also proves a majority
            await self._request(path, lambda: self._client.set_async(self._root, b"", -1))

    def watch(self, path: str, callback: Callable[[], None]) -> Callable[[], None]:
        check_path(path)
        remove_callback = self._watches.add(path, callback)
        arm = self._arms.get(path)
        if arm is None:
            arm = self._arms[path] = _Arm(self, path)
        # Arm the path even if it is watched already, because the new callback needs its first call.
        arm.maybe_arm()

        def remove() -> None:
            remove_callback()
            if path not in self._watches and self._arms.get(path) is arm:
                # kazoo keeps its callback until the watch at the server fires, without effect.
                del self._arms[path]

        return remove

    def watch_session(self, callback: Callable[[SessionState], None]) -> Callable[[], None]:
        return self._watches.add_session(callback)

    async def close(self) -> None:
        if self._state is SessionState.CLOSED:
            return
        self._state = SessionState.CLOSED
        for answer in list(self._open):
            _settle(answer, None, OutcomeUnknown("", "the store was closed"))
        self._watches.fire_session(SessionState.CLOSED)
        self._watches.clear()
        self._arms.clear()
        self._due.clear()
        stopped = self._in_thread(self._stop)
        if self._session:  # without a session there is nothing to wait for
            await asyncio.wait({stopped}, timeout=_CLOSE_S)

    # ---- requests ----

    @property
    def _root(self) -> str:
        return self._chroot or "/"

    def _full(self, path: str) -> str:
        return self._root if path == "/" else self._chroot + path

    async def _create(
        self, path: str, value: bytes, *, ephemeral: bool = False, sequence: bool = False
    ) -> str:
        full = self._full(path)
        send = partial(
            self._client.create_async, full, value, ephemeral=ephemeral, sequence=sequence
        )
        for _ in range(_PARENT_ROUNDS_MAX):
            try:
                made: str = await self._request(path, send)
                return made.removeprefix(self._chroot)
            except NodeExistsError:
                raise NodeExists(path) from None
            except NoChildrenForEphemeralsError:
                raise ParentIsEphemeral(path) from None
            except NoNodeError:
                await self._make_parents(path)
        raise Unavailable(f"other processes delete the parents of {path}", hosts=self._hosts)

    async def _make_parents(self, path: str) -> None:
        for parent in parents_of(self._full(path)):
            try:
                await self._request(path, partial(self._client.create_async, parent, b""))
            except NodeExistsError:
                continue
            except NoNodeError:
                return  # a parent was deleted meanwhile: begin again
            except NoChildrenForEphemeralsError:
                raise ParentIsEphemeral(path) from None
            except OutcomeUnknown as error:
                # The parent may have been made. The requested node was not: ZooKeeper refused it.
                reason = f"{path} has no parent: {error}"
                raise _Disconnected(reason, hosts=self._hosts) from error

    async def _make_root(self) -> None:
        """Make the root node as soon as there is a session. Try again after the connection has
        broken."""
        while True:
            await self._connected()
            try:
                if self._chroot:
                    await self._create("/", b"")
            except NodeExists:
                return
            except (OutcomeUnknown, _Disconnected):
                await asyncio.sleep(UPDATE_PAUSE_S)
            else:
                return

    async def _request(self, path: str, send: Callable[[], Any]) -> Any:
        """Send a request and wait for its answer. Raises kazoo's error if the caller must handle it
        (`_translate`), and MetadataError for every other failure."""
        if self._state is SessionState.CLOSED:
            raise StoreClosed
        # Check kazoo's own state, too: kazoo's reports reach the loop a moment later.
        if self._state is not SessionState.CONNECTED or not self._client.connected:
            raise _Disconnected(f"the session is {self._state}", hosts=self._hosts)
        session = self._session
        try:
            return await self._send(send)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(path, error.reason) from None
        except KazooException as error:
            translated = self._translate(path, session, error)
            if translated is None:
                raise
            raise translated from error

    def _translate(self, path: str, session: int, error: KazooException) -> MetadataError | None:
        """Return the MetadataError for an error of kazoo. None: the caller handles the error."""
        match error:
            case ConnectionClosedError():  # in kazoo a subclass of SessionExpiredError
                return OutcomeUnknown(path, "the connection was closed")
            case SessionExpiredError():
                return SessionLost(path, session)
            case (
                NoNodeError()
                | BadVersionError()
                | NodeExistsError()
                | NotEmptyError()
                | NoChildrenForEphemeralsError()
            ):
                return None
        name = type(error).__name__
        if getattr(error, "code", 0) <= _LAST_SYSTEM_ERROR:
            return Unavailable(f"ZooKeeper refused {path}: {name}", hosts=self._hosts)
        return OutcomeUnknown(path, name)

    def _send(self, send: Callable[[], Any]) -> asyncio.Future[Any]:
        """Send a request. The returned future is always settled, even if kazoo's thread dies and
        never answers."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._open.add(answer)
        late = OutcomeUnknown("", f"no answer within {self._request_s} s")
        timer = self._loop.call_later(self._request_s, _settle, answer, None, late)

        def forget(_: object) -> None:
            self._open.discard(answer)
            timer.cancel()

        answer.add_done_callback(forget)

        def hear(result: Any) -> None:  # called on a thread of kazoo; may be called twice
            error = result.exception
            if error is not None and not isinstance(error, KazooException):
                error = OutcomeUnknown("", f"kazoo failed: {error!r}")
            self._hop(_settle, answer, None if error else result.value, error)

        send().rawlink(hear)
        return answer

    # ---- reports of kazoo's threads ----

    def _hop(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)

    def _hear_state(self, state: KazooState) -> None:
        identity = self._client.client_id
        session = identity[0] & _UNSIGNED if identity and identity[0] else 0
        self._hop(self._on_state, state, session)

    def _on_state(self, state: KazooState, session: int) -> None:
        if self._state is SessionState.CLOSED:
            return
        if state == KazooState.CONNECTED:
            self._session = session
        elif state == KazooState.LOST and self._client.client_state == KeeperState.CLOSED:
            # kazoo's connection thread ended after an unexpected error.
            log.error("kazoo ended by itself and is started again", hosts=self._hosts)
            self._loop.call_later(_AGAIN_S, self._restart)
        self._state = _STATES[state]
        log.info("metadata session state", state=str(self._state), session=f"{self._session:#x}")
        self._watches.fire_session(self._state)
        if self._state is SessionState.CONNECTED:
            self._arm_soon(self._arms.values())

    def _on_event(self, path: str) -> None:
        arm = self._arms.get(path)
        if arm is not None:  # None: the path is no longer watched
            self._arm_soon([arm])

    def _arm_soon(self, arms: Iterable["_Arm"]) -> None:
        """Arm these watches in the next steps of the loop, _ARMS_PER_STEP in each. Many watches are
        due at once after a reconnect, and when many events or failures arrive together."""
        is_idle = not self._due
        self._due.update(dict.fromkeys(arms))
        if is_idle and self._due:
            self._loop.call_soon(self._arm_some)

    def _arm_some(self) -> None:
        if self._state is not SessionState.CONNECTED:
            self._due.clear()  # `_on_state` arms all watches when there is a connection
            return
        some = list(islice(self._due, _ARMS_PER_STEP))
        for arm in some:
            del self._due[arm]
        if self._due:
            self._loop.call_soon(self._arm_some)
        for arm in some:
            arm.maybe_arm()

    # ---- threads of our own, for kazoo's calls that block ----

    async def _connected(self) -> None:
        changed = asyncio.Event()
        remove = self.watch_session(lambda _: changed.set())
        while self._state is not SessionState.CONNECTED:
            await changed.wait()
            changed.clear()
        remove()

    def _restart(self) -> None:
        def on_started(done: asyncio.Future[None]) -> None:
            if done.exception() is not None:
                self._loop.call_later(_AGAIN_S, self._restart)

        if self._state is not SessionState.CLOSED:
            self._in_thread(self._client.start_async).add_done_callback(on_started)

    def _stop(self) -> None:
        self._client.stop()
        self._client.close()

    def _in_thread(self, call: Callable[[], object]) -> asyncio.Future[None]:
        """Run `call` in a thread of its own, not in the loop's executor. `asyncio.run` waits for
        the executor before it returns, and kazoo may take long. The returned future is always
        settled. An unexpected error also goes to the loop's exception handler."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            failure: BaseException | None = None
            try:
                call()
            except _THREAD_ERRORS as error:
                log.warning("starting or stopping kazoo failed", error=repr(error))
                failure = error
            except BaseException as error:  # report it on the loop: this thread ends here
                unexpected = {"message": "kazoo failed in its thread", "exception": error}
                self._hop(self._loop.call_exception_handler, unexpected)
                failure = error
            self._hop(_settle, done, None, failure)

        try:
            threading.Thread(target=run, name="zookeeper", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            _settle(done, None, error)
        return done


_THREAD_ERRORS: Final = (KazooException, OSError, RuntimeError, AttributeError)
"""The expected errors when kazoo starts or stops: its own errors, and a lack of descriptors or
threads. `stop` raises AttributeError for a client that could not start for lack of descriptors."""


class _Disconnected(Unavailable):
    """There is no connection at the moment."""


_STATES: Final = {
    KazooState.CONNECTED: SessionState.CONNECTED,
    KazooState.SUSPENDED: SessionState.SUSPENDED,
    KazooState.LOST: SessionState.LOST,
}


class _Arm:
    """The one-shot watches of one path at the server: one for its value and existence, one for its
    children."""

    def __init__(self, store: ZooKeeperStore, path: str) -> None:
        self._store = store
        self._path = path
        self._full = store._full(path)
        self._pending = 0  # requests of the present arming without an answer
        self._failed = False  # True: one of these requests failed
        self._again = False  # True: arm once more after this arming

    def maybe_arm(self) -> None:
        """Set both watches, then call the callbacks. If an arming is under way, arm once more after
        it."""
        store = self._store
        if store._arms.get(self._path) is not self:
            return
        if store._state is not SessionState.CONNECTED:
            return  # `_on_state` arms all watches when there is a connection
        if self._pending:
            self._again = True
            return
        self._again = self._failed = False
        client, hear = store._client, _Hear(store, self._path)
        for send in (client.exists_async, client.get_children_async):
            self._pending += 1
            answer = store._send(partial(send, self._full, watch=hear))
            answer.add_done_callback(self._on_answer)

    def _on_answer(self, answer: asyncio.Future[Any]) -> None:
        error = answer.exception()
        # NoNodeError is no failure: a missing node has no children, and `exists` watches for its
        # creation.
        self._failed |= error is not None and not isinstance(error, NoNodeError)
        self._pending -= 1
        if self._pending:
            return
        is_armed = not self._failed and self._store._arms.get(self._path) is self
        if self._failed and self._store._state is SessionState.CONNECTED:
            self._store._loop.call_later(_AGAIN_S, self._store._arm_soon, [self])
        if self._again:
            self._store._arm_soon([self])
        if is_armed:
            self._store._watches.fire([self._path])  # last: a callback with a bug may raise


@dataclass(frozen=True, slots=True)
class _Hear:
    """The callback that kazoo calls, on a thread of its own, when a watch of a path fires.

    kazoo keeps the callbacks of each path in a set, until the watch fires or the connection ends.
    All callbacks of a path are equal, so kazoo keeps one of them. Otherwise a path that never
    changes would get another callback each time that a caller watches the path again."""

    store: ZooKeeperStore
    path: str

    def __call__(self, _event: object) -> None:
        self.store._hop(self.store._on_event, self.path)


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo is untyped
    """Limits the time for the TCP connection to a host. Without this limit kazoo waits for a silent
    host until the session has expired. Also replaces the sockets that wake kazoo's thread."""

    def __init__(self, connect_s_max: float) -> None:
        super().__init__()
        self._connect_s_max = connect_s_max

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["timeout"] = min(kwargs["timeout"], self._connect_s_max)
        return super().create_connection(*args, **kwargs)

    def create_socket_pair(self) -> tuple[Any, Any]:
        if not hasattr(os, "eventfd"):  # only Linux has it: use kazoo's own pair elsewhere
            pair: tuple[Any, Any] = super().create_socket_pair()
            return pair
        both = _Wakeups()
        return both, both


class _Wakeups(FileIO):
    """Wakes kazoo's thread, once per request. kazoo's own pair of sockets is full after 278
    requests, if kazoo's thread waits for a reply or connects meanwhile. The next request would then
    block the loop. An eventfd only counts, and is never full."""

    def __init__(self) -> None:
        flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
        super().__init__(os.eventfd(0, flags), "r+")

    def send(self, data: bytes) -> None:
        os.eventfd_write(self.fileno(), len(data))

    def recv(self, _size: int) -> None:
        """Take one wake-up, if there is one. kazoo asks for one byte and ignores the result."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fileno())


def _settle(answer: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if answer.done():
        return  # the caller was cancelled, or the time limit has passed
    if error is not None:
        answer.set_exception(error)
        answer.exception()  # marks the error as retrieved: the caller may be gone
    else:
        answer.set_result(value)
