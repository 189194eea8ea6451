"""BookieRegistry: the cluster's bookies, as the metadata store lists them.

The list is a hint. A bookie that just died stays listed until its session expires. A bookie that
lost its session may still be serving. Only the bookie itself knows its state. While the metadata
store is unreachable, the last list stays valid. An operator may set a bookie to draining: it still
serves, but gets no seat in new ledgers or segments.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_drain, decode_bookie_registration
from magnetar.metadata.errors import InvalidRecord, OutcomeUnknown, Unavailable
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from magnetar.metadata.model import BookieId, BookieRegistration, Member
    from magnetar.metadata.store import MetadataStore

log = get_logger(__name__)

# The pause in seconds after a failed read of the list, before the next read.
RETRY_S: Final = 0.5

_FOLDERS: Final = (paths.BOOKIES_AVAILABLE, paths.BOOKIES_DRAINING)


class BookieRegistry:
    """`run` must be running. The callbacks of `watch` run on the loop, after each change of the
    list."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._listed: dict[Member, BookieRegistration] = {}  # sorted by name
        # True: the bookie is being decommissioned
        self._draining: dict[BookieId, bool] = {}
        self._last_seen: dict[BookieId, BookieRegistration] = {}  # each bookie that was ever listed
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._unwatch: dict[str, Callable[[], None]] = {}  # keyed by path

    @property
    def writable(self) -> tuple[BookieRegistration, ...]:
        """The bookies that may get seats in new ledgers and segments, sorted by name: listed,
        neither read-only nor draining."""
        return tuple(each for member, each in self._listed.items() if self.is_writable(member))

    @property
    def listed(self) -> Mapping[Member, BookieRegistration]:
        """The registrations of all listed members."""
        return self._listed

    @property
    def draining(self) -> frozenset[BookieId]:
        """The bookies that an operator drains or decommissions: they get no new seats."""
        return frozenset(self._draining)

    @property
    def decommissioned(self) -> frozenset[BookieId]:
        """The bookies that an operator decommissions: their ledgers are moved away."""
        return frozenset(bookie for bookie, leaves in self._draining.items() if leaves)

    def is_writable(self, member: Member) -> bool:
        """Return whether the member may get seats in new ledgers and segments."""
        registration = self._listed.get(member)
        full = registration is None or registration.read_only
        return not full and member.bookie not in self._draining

    def find(self, member: Member) -> BookieRegistration | None:
        """Return the registration with the member's address; None: this process never saw its
        bookie listed. If the member is not listed, this is the last registration of its bookie,
        perhaps under another incarnation. A bookie that lost its session still answers reads. A
        bookie with a new incarnation may still serve the store of its former incarnation."""
        return self._listed.get(member) or self._last_seen.get(member.bookie)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each change of the list. Returns the function that ends the
        watch."""
        key = object()
        self._callbacks[key] = callback

        def unwatch() -> None:
            self._callbacks.pop(key, None)

        return unwatch

    async def wait_ready(self) -> None:
        """Return when the list was read once."""
        await self._ready.wait()

    async def run(self) -> None:
        """Follow the list, until cancelled."""
        for path in _FOLDERS:
            self._unwatch[path] = self._store.watch(path, self._changed.set)
        try:
            self._changed.set()
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    listed = await self._read()
                    draining = await self._read_draining()
                except (Unavailable, OutcomeUnknown) as error:
                    log.warning("bookie list not read", error=str(error))
                    await asyncio.sleep(RETRY_S)
                    self._changed.set()
                else:
                    self._adopt(listed, draining)
        finally:
            for unwatch in self._unwatch.values():
                unwatch()
            self._unwatch.clear()

    async def _read(self) -> dict[Member, BookieRegistration]:
        listed = {}
        for path in await self._followed(paths.BOOKIES_AVAILABLE):
            stored = await self._store.get(path)
            if stored is None:
                continue  # the node was removed after the listing
            try:
                registration = decode_bookie_registration(stored.value)
            except InvalidRecord as error:
                log.error("bookie registration unreadable", path=path, error=str(error))
            else:
                listed[registration.member] = registration
        return listed

    async def _read_draining(self) -> dict[BookieId, bool]:
        draining = {}
        for path in await self._followed(paths.BOOKIES_DRAINING):
            stored = await self._store.get(path)
            if stored is None:
                continue
            try:
                drain = decode_bookie_drain(stored.value)
            except InvalidRecord as error:
                log.error("drain record unreadable", path=path, error=str(error))
            else:
                draining[drain.bookie] = drain.decommission
        return draining

    async def _followed(self, folder: str) -> list[str]:
        """Return the nodes of the folder. Watch each of them, and end the watches of removed
        nodes."""
        nodes = [f"{folder}/{name}" for name in await self._store.children(folder)]
        watched = {path for path in self._unwatch if path.startswith(folder + "/")}
        for gone in watched - set(nodes):
            self._unwatch.pop(gone)()
        for path in nodes:
            if path not in watched:
                self._unwatch[path] = self._store.watch(path, self._changed.set)
        return nodes

    def _adopt(
        self, listed: dict[Member, BookieRegistration], draining: dict[BookieId, bool]
    ) -> None:
        changed = (listed, draining) != (self._listed, self._draining)
        self._listed, self._draining = listed, draining
        self._last_seen.update({each.bookie: each for each in listed.values()})
        self._ready.set()
        if changed:
            log.info(
                "bookie list changed",
                listed=[each.bookie for each in listed.values()],
                draining=list(draining),
            )
            for callback in list(self._callbacks.values()):
                callback()
