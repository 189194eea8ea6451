"""BookieDirectory: which bookies there are, as the metadata store lists them.

The list is a hint. A bookie that has just died stays listed until its session expires, and one
whose session was lost may be serving; whoever uses a bookie learns the truth from the bookie. When
the store is away, the last list stands.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_registration
from magnetar.metadata.errors import InvalidRecord, OutcomeUnknown, Unavailable
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.metadata.model import BookieRegistration, Member
    from magnetar.metadata.store import MetadataStore

log = get_logger(__name__)

RETRY_S: Final = (
    0.5  # after a failed read of the list; the store calls back by itself when it is up
)


class BookieDirectory:
    """`run` must be running. Callbacks of `watch` run on the loop, after the list has changed."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._listed: dict[Member, BookieRegistration] = {}  # sorted by name
        self._last_seen: dict[Member, BookieRegistration] = {}  # one per incarnation ever listed
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._unwatch: dict[str, Callable[[], None]] = {}  # by bookie's path

    @property
    def writable(self) -> tuple[BookieRegistration, ...]:
        """The bookies that are listed and take normal adds, sorted by name."""
        return tuple(each for each in self._listed.values() if not each.read_only)

    def is_writable(self, member: Member) -> bool:
        registration = self._listed.get(member)
        return registration is not None and not registration.read_only

    def find(self, member: Member) -> BookieRegistration | None:
        """As listed, or else as last seen: a bookie that lost its session still answers reads.
        None: never seen."""
        return self._listed.get(member) or self._last_seen.get(member)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after each change of the list. Returns the function that ends it."""
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
        self._unwatch[""] = self._store.watch(paths.BOOKIES_AVAILABLE, self._changed.set)
        try:
            self._changed.set()
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    listed = await self._read()
                except (Unavailable, OutcomeUnknown) as error:
                    log.warning("list of bookies not read", error=str(error))
                    await asyncio.sleep(RETRY_S)
                    self._changed.set()
                else:
                    self._adopt(listed)
        finally:
            for unwatch in self._unwatch.values():
                unwatch()
            self._unwatch.clear()

    async def _read(self) -> dict[Member, BookieRegistration]:
        names = await self._store.children(paths.BOOKIES_AVAILABLE)
        bookie_paths = [f"{paths.BOOKIES_AVAILABLE}/{name}" for name in names]
        for gone in set(self._unwatch) - set(bookie_paths) - {""}:
            self._unwatch.pop(gone)()
        listed = {}
        for path in bookie_paths:
            if path not in self._unwatch:
                self._unwatch[path] = self._store.watch(path, self._changed.set)
            stored = await self._store.get(path)
            if stored is None:
                continue  # it went meanwhile
            try:
                registration = decode_bookie_registration(stored.value)
            except InvalidRecord as error:
                log.error("bookie's registration unreadable", path=path, error=str(error))
            else:
                listed[registration.member] = registration
        return listed

    def _adopt(self, listed: dict[Member, BookieRegistration]) -> None:
        changed = listed != self._listed
        self._listed = listed
        self._last_seen.update(listed)
        self._ready.set()
        if changed:
            log.info("bookies", listed=[each.bookie for each in listed.values()])
            for callback in list(self._callbacks.values()):
                callback()
