"""The part of `magnetar.bookie.ledger` that a log uses, as a seam.

The async methods may raise LedgerError and MetadataError. `append_nowait` may raise LedgerError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.bookie.ledger.errors import LedgerError
    from magnetar.bookie.ledger.quorum import Quorum
    from magnetar.metadata.model import EntryId, LedgerId, LedgerMetadata

    Buffer = bytes | bytearray | memoryview


class ReadEntry(Protocol):
    """One entry as it was appended; the payload is a copy."""

    @property
    def entry(self) -> EntryId: ...

    @property
    def payload(self) -> memoryview: ...


class Appender(Protocol):
    """The writing end of an open ledger."""

    progress: Callable[[], None]
    """The appender calls this function on the event loop after `confirmed` has moved or `failure`
    was set. It never calls the function during `append_nowait`."""

    @property
    def ledger(self) -> LedgerId: ...

    @property
    def confirmed(self) -> EntryId: ...  # -1: none yet

    @property
    def appended(self) -> EntryId: ...

    @property
    def failure(self) -> LedgerError | None: ...

    @property
    # True: entries get too few copies, or may soon, or a bookie of the ledger is being drained.
    def degraded(self) -> bool: ...

    @property
    # For error texts: the bookies that failed, and the reason; "": none.
    def trouble(self) -> str: ...

    def append_nowait(self, payloads: Sequence[Sequence[Buffer]]) -> EntryId: ...

    @property
    def has_room(self) -> bool: ...  # True: `wait_room` would return at once

    async def wait_room(self) -> None: ...

    async def read(
        self, first: EntryId, last: EntryId, *, bytes_max: int
    ) -> Sequence[ReadEntry]: ...

    async def close(self) -> LedgerMetadata: ...

    def abandon(self) -> None: ...


class Reader(Protocol):
    """The reading end of a closed ledger."""

    async def read(
        self, first: EntryId, last: EntryId, *, bytes_max: int
    ) -> Sequence[ReadEntry]: ...


class LedgerStore(Protocol):
    async def create(
        self, *, newer_than: LedgerId, custom: Mapping[str, bytes], quorum: Quorum | None = None
    ) -> Appender:
        """Create a ledger with an id above `newer_than`. `quorum` None: the quorum of this
        process."""

    async def recover(self, ledger: LedgerId) -> LedgerMetadata: ...

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None: ...

    def reader(self, metadata: LedgerMetadata) -> Reader: ...

    async def delete(self, ledger: LedgerId) -> None: ...

    def full_ensemble_possible(self, quorum: Quorum | None = None) -> bool: ...
