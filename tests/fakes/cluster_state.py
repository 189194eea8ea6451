"""The state that outlives a broker: the ledgers on their bookies, and the metadata."""

from __future__ import annotations

from fakes.ledgers import SharedLedgers
from support import ManualClock

from magnetar.metadata.memory import MemoryStore, MemoryTree


class ClusterState:
    """Shared by the brokers of a test, one after the other or at once."""

    def __init__(self, tree: MemoryTree | None = None) -> None:
        self.ledgers = SharedLedgers()
        self.tree = tree if tree is not None else MemoryTree()
        self.clock = ManualClock()

    def store(self) -> MemoryStore:
        """Open another session with the metadata store."""
        return MemoryStore(self.tree)
