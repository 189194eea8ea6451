"""The bookie's registration: an ephemeral node in the list of serving bookies, kept alive.

The bookie registers after it has replayed its store and recorded this start in its cookie. When the
metadata session is lost, the bookie registers again in the next session. It keeps serving in
between: writers that know its address need no metadata, and safety never depends on this list.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_registration, encode_bookie_registration
from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.lease import Lease
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.metadata.model import BookieRegistration
    from magnetar.metadata.store import MetadataStore

log = get_logger(__name__)


class Registration:
    def __init__(self, store: MetadataStore, registration: BookieRegistration) -> None:
        self._held = asyncio.Event()
        self._registration = registration
        self._lease = Lease(
            store,
            paths.bookie_available(registration.bookie),
            encode_bookie_registration(registration),
            replaces=self._is_leftover,
            on_change=self._on_change,
        )

    @property
    def held(self) -> bool:
        """True when the bookie is registered, as far as it knows."""
        return self._held.is_set()

    async def wait_held(self) -> None:
        await self._held.wait()

    async def run(self) -> None:
        """Stay registered, until cancelled. Raises LeaseTaken if another process of the same bookie
        has replaced the node. This process must then end."""
        await self._lease.run()

    def set_read_only(self, read_only: bool) -> None:
        """Update the registration in the background, so that brokers see the change."""
        self._registration = replace(self._registration, read_only=read_only)
        self._lease.set_value(encode_bookie_registration(self._registration))

    def _is_leftover(self, value: bytes) -> bool:
        """Return whether an earlier start of this bookie created the node. The node exists until
        the metadata session of that start expires.

        The start with the highest boot epoch owns the cookie. This also holds if the earlier start
        belongs to a former incarnation: a new incarnation continues the count of boot epochs."""
        try:
            stored = decode_bookie_registration(value)
        except InvalidRecord:
            return False
        ours = self._registration
        return stored.bookie == ours.bookie and stored.boot_epoch < ours.boot_epoch

    def _on_change(self, held: bool) -> None:
        if held:
            self._held.set()
        else:
            self._held.clear()
        log.info("registration changed", bookie=self._registration.bookie, held=held)
