"""Leader election: whoever holds the one ephemeral node leads.

Every candidate tries to make the node; those who fail watch it. That wakes all of them when a
leader goes, which is cheap for the few dozen candidates that there are, and leaves one node to look
at; a queue of sequential nodes would wake one, and can strand a candidate whose lost reply made a
node it does not know of.

Two may believe to lead for a moment: one whose session the ensemble has given up, and which does
not know it yet, and its successor. So a leader stops acting when its connection is gone
(`is_leader` is False while the session is suspended), and whatever it does must be safe to do
twice: compare-and-set.
"""

from collections.abc import Callable

from magnetar.metadata.errors import LeaseTaken
from magnetar.metadata.lease import Lease
from magnetar.metadata.store import MetadataStore, SessionState


class Election:
    """`candidate` must differ from that of every other process, also of an earlier run of this one.
    `on_change(is_leader)` is called on the loop with every change."""

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
        """The candidate that was seen leading last. None: nobody, or not known yet."""
        return self._lease.holder

    async def run(self) -> None:
        """Stand for election for ever. Cancelling does not resign: closing the store does."""
        unwatch = self._store.watch_session(lambda state: self._tell())
        try:
            while True:
                try:
                    await self._lease.run()
                except LeaseTaken:
                    continue  # deposed by hand; back in line
        finally:
            unwatch()

    def _tell(self) -> None:
        if self.is_leader != self._told:
            self._told = self.is_leader
            self._on_change(self._told)
