"""Leader election: the candidate that holds the one ephemeral node leads.

Each candidate watches the node, and tries to create it while it is absent. All candidates wake when
a leader ends, which is cheap for a few dozen candidates. A queue of sequential nodes would wake
only one candidate. But after a lost reply, the queue could hold a node that its candidate does not
know.

For a moment two processes may act as leader: a process that does not know yet that its session has
expired, and the next leader. So a leader stops when it loses its connection (`is_leader` is False
while the session is suspended). Each action of a leader must be safe to do twice: compare-and-set.
"""

from collections.abc import Callable

from magnetar.metadata.errors import LeaseTaken
from magnetar.metadata.lease import Lease
from magnetar.metadata.store import MetadataStore, SessionState


class Election:
    """`candidate` must differ from that of every other process, and from that of an earlier run of
    this process. `on_change(is_leader)` is called on the loop at every change."""

    def __init__(
        self,
        store: MetadataStore,
        path: str,
        candidate: bytes,
        *,
        on_change: Callable[[bool], None],
    ) -> None:
        self._store = store
        self._on_change = on_change
        self._told = False
        self._lease = Lease(
            store,
            path,
            candidate,
            replaces=lambda other: False,
            on_change=lambda held: self._tell(),
        )

    @property
    def is_leader(self) -> bool:
        return self._lease.held and self._store.session_state is SessionState.CONNECTED

    @property
    def leader(self) -> bytes | None:
        """The leader that was seen last. None: there was no leader, or the node was not read
        yet."""
        return self._lease.holder

    async def run(self) -> None:
        """Take part until cancelled. Cancelling keeps the node; closing the store gives it up."""
        unwatch = self._store.watch_session(lambda state: self._tell())
        try:
            while True:
                try:
                    await self._lease.run()
                except LeaseTaken:
                    continue  # our node was replaced, for example by an operator: try again
        finally:
            unwatch()

    def _tell(self) -> None:
        if self.is_leader != self._told:
            self._told = self.is_leader
            self._on_change(self._told)
