"""The registered brokers: a view that a watch on the metadata store keeps fresh."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from magnetar.metadata import codec, paths
from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.model import BrokerId, BrokerRegistration
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.metadata.store import MetadataStore

log = get_logger(__name__)


class BrokerDirectory:
    """The registered brokers by id. `run` follows their changes; `refresh` reads them now."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._live: dict[BrokerId, BrokerRegistration] = {}
        self._changed = asyncio.Event()

    @property
    def live(self) -> Mapping[BrokerId, BrokerRegistration]:
        """The registered brokers, as last read."""
        return self._live

    async def run(self) -> None:
        """Follow the registrations until cancelled.

        Raises MetadataError after a failed read; the caller (`supervise`) then calls `run` again.
        """
        unwatch = self._store.watch(paths.BROKERS_AVAILABLE, self._changed.set)
        try:
            self._changed.set()
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self.refresh()
        finally:
            unwatch()

    async def refresh(self) -> None:
        """Read the registrations now. Raises MetadataError; `live` is then unchanged."""
        live: dict[BrokerId, BrokerRegistration] = {}
        for name in await self._store.children(paths.BROKERS_AVAILABLE):
            broker = BrokerId(paths.unquoted(name))
            registration = await self._read(broker)
            if registration is not None:
                live[broker] = registration
        self._live = live

    async def registration(self, broker: BrokerId) -> BrokerRegistration | None:
        """One broker's registration, read now; None: the broker is not registered, or its
        registration cannot be read. Raises MetadataError."""
        registration = await self._read(broker)
        if registration is None:
            self._live.pop(broker, None)
        else:
            self._live[broker] = registration
        return registration

    async def _read(self, broker: BrokerId) -> BrokerRegistration | None:
        stored = await self._store.get(paths.broker_available(broker))
        if stored is None:
            return None
        try:
            return codec.decode_broker_registration(stored.value)
        except InvalidRecord as error:
            log.error("a broker's registration cannot be read", broker=broker, error=str(error))
            return None
