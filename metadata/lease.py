"""A lease: one ephemeral node that registers this process, or marks it as the elected process.

The lease creates the node again when the node is gone: after a new session has begun, or after
another process deleted the node. The lease replaces a leftover, which is a node of an earlier
session; otherwise the node would disappear when that session expires. A leftover has this lease's
value, or a value that `replaces` accepts. Any other node belongs to another process, and the lease
waits until that node is gone.

The lease replaces a leftover in three steps, each a compare-and-set: set its value to this lease's
value, delete it, create it again. If the owner of the node is alive, the first step tells the owner
that it was replaced. So the owner does not mistake the deletion for an accident.

The lease is `held` while the session that holds the node is not known to be lost. A suspended
session is not lost. The report of a loss may be late (the ensemble expires a silent session before
its client knows). So a lease is a hint to other processes, and the safety of data never depends on
it.
"""

import asyncio
from collections.abc import Callable

from magnetar.metadata.errors import BadVersion, LeaseTaken, NoNode, OutcomeUnknown, Unavailable
from magnetar.metadata.store import UPDATE_PAUSE_S, MetadataStore, SessionState


class Lease:
    """`on_change(held)` is called on the loop at every change, never twice with the same value.
    Call `run` once at a time; it may be called again after it raised. Closing the store ends the
    lease."""

    def __init__(
        self,
        store: MetadataStore,
        path: str,
        value: bytes,
        *,
        replaces: Callable[[bytes], bool],
        on_change: Callable[[bool], None],
    ) -> None:
        self._store = store
        self._path = path
        self._value = value
        self._replaces = replaces
        self._on_change = on_change
        self._offered = {value}  # all values that our node may have: one per `set_value`
        # The session in which our node was seen last; 0: never, or another node has replaced it.
        self._session = 0
        self._holder: bytes | None = None
        self._told = False
        self._wake = asyncio.Event()

    @property
    def held(self) -> bool:
        alive = self._store.session_state in (SessionState.CONNECTED, SessionState.SUSPENDED)
        ours = self._holder in self._offered and self._session == self._store.session_id
        return alive and ours

    @property
    def holder(self) -> bytes | None:
        """The value that was read last at the path. None: there was no node, or none was read."""
        return self._holder

    async def run(self) -> None:
        """Take the lease and keep it, until cancelled; the node stays after a cancellation. Raises
        LeaseTaken when another process replaced our node while our session was alive. If the node
        registers a process, both processes have the same identity, and this process must end."""
        unwatch = self._store.watch(self._path, self._wake.set)
        unwatch_session = self._store.watch_session(lambda state: self._tell())
        try:
            while True:
                self._wake.clear()
                if not await self._look():
                    await self._wake.wait()
        finally:
            unwatch()
            unwatch_session()

    def set_value(self, value: bytes) -> None:
        """Give the node another value, soon. `holder` returns that value when the node has it."""
        self._value = value
        self._offered.add(value)
        self._wake.set()

    async def _look(self) -> bool:
        """Read the node, and change it if necessary. Returns whether to read again at once."""
        if self._store.session_state is not SessionState.CONNECTED:
            return False  # the watch is called when there is a connection again
        try:
            return await self._maybe_change_node()
        except (BadVersion, NoNode):
            return True  # another process was faster
        except (OutcomeUnknown, Unavailable):
            await asyncio.sleep(UPDATE_PAUSE_S)
            return True

    async def _maybe_change_node(self) -> bool:
        """One step from the stored node to this lease's node. Returns whether to read again."""
        store = self._store
        stored = await store.get(self._path)
        if stored is None:
            self._see(None, self._session)
            await store.create_ephemeral(self._path, self._value)
            return True
        ours = stored.ephemeral_session == store.session_id and stored.value in self._offered
        taken = not ours and self._session == store.session_id
        self._see(stored.value, store.session_id if ours else 0)
        if taken:
            raise LeaseTaken(self._path, stored.value)
        if ours and stored.value == self._value:
            return False
        if ours or (stored.value != self._value and self._replaces(stored.value)):
            await store.put(self._path, self._value, expected=stored.version)
        elif stored.value == self._value:
            await store.delete(self._path, expected=stored.version)
        else:
            return False
        return True

    def _see(self, holder: bytes | None, session: int) -> None:
        self._holder = holder
        self._session = session
        self._tell()

    def _tell(self) -> None:
        if self.held != self._told:
            self._told = self.held
            self._on_change(self._told)
