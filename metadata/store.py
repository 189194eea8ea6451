"""MetadataStore: the interface between Magnetar and the store of its metadata.

A tree of small versioned values, after ZooKeeper's model:

- A node has a value and a version. The version is 0 when the node is made and grows by one with
  each change. A node that was deleted and made again starts at 0 again.
- Every change but `create_sequential` is conditional on the version. So a caller that lost a
  reply can read the value again and compare it (see `update`).
- An ephemeral node lives as long as the session that made it, and has no children.
- Within one store, calls take effect in the order in which they were made. Reads may be stale with
  respect to *other* sessions until `sync`. After a change by this session, even a refused one,
  reads are at least as new as the value with which the change was compared.
- A session has one of four states. CONNECTED. SUSPENDED: there is no connection; the session and
  its ephemeral nodes may be alive. LOST: its ephemeral nodes are gone, and the store begins a new
  session with a new `session_id`. CLOSED: `close` was called, and no session follows.

Implementations: `memory` (tests and simulation), `embedded` (RocksDB, one process), `zookeeper`.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, StrEnum
from typing import Final, Protocol

from magnetar.metadata.errors import BadVersion, Contended, NoNode, OutcomeUnknown, Unavailable
from magnetar.metadata.node import ABSENT, VALUE_BYTES_MAX, Versioned

__all__ = [
    "MetadataStore",
    "SessionState",
    "Versioned",
    "ABSENT",
    "VALUE_BYTES_MAX",
    "update",
    "Change",
    "Verdict",
    "KEEP",
    "DELETE",
]

UPDATE_ATTEMPTS_MAX: Final = 1_000
"""The number of lost races after which `update` gives up. A lost race: another process changed the
value first."""

UPDATE_PAUSE_S: Final = 0.05
"""The pause of `update` between attempts while the store does not answer."""


class SessionState(StrEnum):
    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"
    CLOSED = "closed"


class MetadataStore(Protocol):
    """All calls may raise `Unavailable` (no effect), `OutcomeUnknown` (sent, reply lost; includes
    `SessionLost`) and `StoreClosed`, besides the errors in their docstrings. Callbacks run on the
    event loop."""

    @property
    def session_id(self) -> int: ...  # never 0; changes when a lost session is replaced

    @property
    def session_state(self) -> SessionState: ...

    async def get(self, path: str) -> Versioned | None:
        """The node's value and version; None: the node does not exist."""

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        """Create the node (`expected=ABSENT`; missing parents are made with empty values), or
        replace the value at version `expected`. Returns the new version. Raises BadVersion,
        NodeExists, ValueTooLarge, ParentIsEphemeral."""

    async def delete(self, path: str, *, expected: int) -> None:
        """Delete the node at version `expected`. Raises BadVersion, NoNode, NotEmpty."""

    async def children(self, path: str) -> list[str]:
        """The names (not paths) of the node's children, sorted. []: the node has no children, or
        does not exist."""

    async def create_ephemeral(self, path: str, value: bytes) -> int:
        """Create a node that ends with the present session. Missing parents are created as
        persistent nodes. Returns the version, 0. Raises NodeExists, ValueTooLarge,
        ParentIsEphemeral."""

    async def create_sequential(self, path_prefix: str, value: bytes, *, ephemeral: bool) -> str:
        """Create `path_prefix` + a number of ten digits, which grows with each call as long as the
        parent exists. Returns the path. A lost reply may leave a node behind. Raises ValueTooLarge,
        ParentIsEphemeral."""

    async def sync(self, path: str) -> None:
        """On return, reads of this store see every change that was committed before this call."""

    def watch(self, path: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` whenever the value, the existence or the set of children of `path` may
        have changed, and after each reconnect. A call may come without a change, but after each
        change there is a call. The callback must read the node again. The returned function ends
        the watch: no call comes afterwards. It may be called more than once."""

    def watch_session(self, callback: Callable[[SessionState], None]) -> Callable[[], None]:
        """Call `callback` with each new session state, in order. Returns the function that ends the
        watch."""

    async def close(self) -> None:
        """End the session, which deletes its ephemeral nodes. Idempotent, bounded in time."""


class Verdict(Enum):
    """The results of a change function other than a value to store."""

    KEEP = "keep"  # the change is done already, or no longer wanted
    DELETE = "delete"


KEEP: Final = Verdict.KEEP
DELETE: Final = Verdict.DELETE

Change = Callable[[bytes | None], bytes | Verdict]


async def update(
    store: MetadataStore,
    path: str,
    change: Change,
    *,
    deadline: float,
    known: Versioned | None = None,
) -> Versioned | None:
    """Change a value by compare-and-set, and retry until that succeeds. Returns the value that is
    then stored; None: the node is absent.

    `change` gets the stored value (None: absent). It returns the value to store, or DELETE, or KEEP
    when no change is needed (any more). `update` calls it again after each lost race and each lost
    reply, so `change` must recognise a value that it has changed already. It may raise an error to
    give up. Before KEEP, `change` may have got a stale value: if the decision must be fresh, call
    `store.sync(path)` first. If `change` returns DELETE and the node is absent, `update` reads the
    node again after a sync.

    `known` is the value that the caller believes to be stored: the first attempt uses it instead
    of a read. If `change` then returns KEEP or DELETE, `update` reads the node and calls
    `change` again.

    `deadline` is in loop time. When it passes, `update` raises OutcomeUnknown if a change may have
    been applied, else Unavailable. It raises Contended after UPDATE_ATTEMPTS_MAX lost races.
    """
    pending = False  # our change may have been applied, and the node was not read since
    absent = False  # the node did not exist; that read may have been stale
    lost_races = 0
    trouble = "the deadline passed"
    try:
        async with asyncio.timeout_at(deadline):
            while lost_races < UPDATE_ATTEMPTS_MAX:
                try:
                    is_fresh = pending or absent
                    if is_fresh:
                        # The server behind the next connection may lag behind our own change.
                        await store.sync(path)
                    believed, known = known, None
                    current = await store.get(path) if believed is None else believed
                    pending = absent = False
                    answer = change(current.value if current is not None else None)
                    if believed is not None and not isinstance(answer, bytes):
                        continue
                    if answer is DELETE and current is None and not is_fresh:
                        absent = True
                        continue
                    if answer is KEEP or (answer is DELETE and current is None):
                        return current
                    pending = True
                    try:
                        return await _apply(store, path, current, answer)
                    except (BadVersion, Unavailable):
                        pending = False  # refused, or not sent
                        raise
                except BadVersion:
                    lost_races += 1
                except (OutcomeUnknown, Unavailable) as error:
                    trouble = str(error)
                    await asyncio.sleep(UPDATE_PAUSE_S)
    except TimeoutError:
        if pending:
            raise OutcomeUnknown(path, trouble) from None
        raise Unavailable(f"{path}: {trouble}") from None
    raise Contended(path, lost_races)


async def _apply(
    store: MetadataStore, path: str, current: Versioned | None, answer: bytes | Verdict
) -> Versioned | None:
    expected = ABSENT if current is None else current.version
    if isinstance(answer, bytes):
        version = await store.put(path, answer, expected=expected)
        session = 0 if current is None else current.ephemeral_session
        return Versioned(answer, version, session)
    assert answer is DELETE
    with suppress(NoNode):  # another process deleted it, or our own request whose reply was lost
        await store.delete(path, expected=expected)
    return None
