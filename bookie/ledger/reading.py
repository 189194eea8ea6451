"""The services that a reader of ledgers needs from its process.

A broker gives the reader all its services (`Services`). A process without a metadata store gives
the reader less: records whose reads always fail, and a fixed list of bookies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from magnetar.bookie.ledger.bad_copies import BadCopies
    from magnetar.bookie.ledger.config import LedgerConfig
    from magnetar.bookie.ledger.health import BookieHealth
    from magnetar.bookie.ledger.peer import BookiePeer
    from magnetar.metadata.model import BookieRegistration, LedgerId, LedgerMetadata, Member


class Records(Protocol):
    """The metadata of ledgers."""

    async def get(self, ledger: LedgerId) -> LedgerMetadata | None:
        """Return the ledger's metadata. None: there is no such ledger now. Raises MetadataError."""


class Bookies(Protocol):
    """The bookies that serve, as far as is known."""

    @property
    def listed(self) -> Mapping[Member, BookieRegistration]: ...


class Peers(Protocol):
    """The connections to bookies."""

    def peer(self, member: Member) -> BookiePeer:
        """Return the connection to the member. Raises BookieUnavailable if the bookie is not
        known."""


class ReadServices(Protocol):
    """The part of `Services` that LedgerReader uses."""

    @property
    def config(self) -> LedgerConfig: ...

    @property
    def records(self) -> Records: ...

    @property
    def directory(self) -> Bookies: ...

    @property
    def pool(self) -> Peers: ...

    @property
    def health(self) -> BookieHealth: ...

    @property
    def bad_copies(self) -> BadCopies: ...

    @property
    def random(self) -> Random: ...
