"""The bookie's entry in the list of those that serve: an ephemeral node, kept alive.

It is entered after the store has been replayed and this start is in the cookie. When the metadata
session is lost it is entered again in the next one; the bookie goes on serving meanwhile: writers
that know it need no metadata to reach it, and safety never rests on this list.
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
        """Whether brokers can find the bookie, as far as it knows."""
        return self._held.is_set()

    async def wait_held(self) -> None:
        await self._held.wait()

    async def run(self) -> None:
        """Stay registered, until cancelled. Raises LeaseTaken: another process runs on this very
        incarnation, so this one must end."""
        await self._lease.run()

    def set_read_only(self, read_only: bool) -> None:
        """Tell brokers, soon, by another value of the same node."""
        self._registration = replace(self._registration, read_only=read_only)
        self._lease.set_value(encode_bookie_registration(self._registration))

    def _is_leftover(self, value: bytes) -> bool:
        """Whether an earlier start of this bookie left it; its session has not expired yet.

        Also one of a former incarnation: epochs count on over incarnations, and who has the later
        one has the cookie."""
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
        log.info("registration", bookie=self._registration.bookie, held=held)
