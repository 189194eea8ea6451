"""A later version of Magnetar in the cluster. It adds fields to records, and writes some records in
a format that this version does not know (T49). This version must keep the added fields through its
own changes, and must not change records of an unknown format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.metadata.codec import FORMAT
from magnetar.protos import metadata_pb2 as pb

if TYPE_CHECKING:
    from world.cluster import World

FIELD = b"\xc2\x3e\x05later"  # number 1000, a string


class LaterVersion:
    def __init__(self, world: World) -> None:
        self._world = world
        self._extended: set[str] = set()  # paths of records that have the added field
        self._beyond: dict[str, bytes] = {}  # records in the later format, by path
        self._working = False  # the later version is making a change now

    def extend(self, path: str) -> bool:
        """Add a field to the record at `path`. Returns False if there is no record."""
        stored = self._world.meta.tree.tree.get(path)
        if stored is None:
            return False
        if path not in self._extended:
            self._put(path, stored.value + FIELD, stored.version)
            self._extended.add(path)
            self._world.trace.fault("later", "record of a later version", path)
        return True

    def take(self, path: str) -> None:
        """Write a ledger's record in a format of its own."""
        stored = self._world.meta.tree.tree.get(path)
        assert stored is not None
        message = pb.LedgerMetadata.FromString(stored.value)
        message.format = FORMAT + 1
        self._beyond[path] = message.SerializeToString(deterministic=True)
        self._put(path, self._beyond[path], stored.version)
        self._world.trace.fault("later", "record of a later format", path)

    def give_back(self, path: str) -> None:
        """Write the record in this version's format again."""
        stored = self._world.meta.tree.tree.get(path)
        assert stored is not None
        message = pb.LedgerMetadata.FromString(self._beyond.pop(path))
        message.format = FORMAT
        self._put(path, message.SerializeToString(deterministic=True), stored.version)

    def on_path(self, path: str, value: bytes | None) -> bool:
        """The record at `path` has changed. Returns whether other oracles must ignore the
        change."""
        oracle = self._world.oracle
        if self._working:
            return path in self._beyond
        oracle.hold(
            path not in self._beyond or value == self._beyond[path],
            "T49",
            lambda: f"{path} is of a later format, and was changed",
        )
        if value is None:
            self._extended.discard(path)
        oracle.hold(
            value is None or path not in self._extended or FIELD in value,
            "T49",
            lambda: f"{path} has lost what a later version had written",
        )
        return path in self._beyond

    def _put(self, path: str, value: bytes, version: int) -> None:
        tree = self._world.meta.tree
        self._working = True
        try:
            tree.tree.put(path, value, version)
            tree.publish()
        finally:
            self._working = False
