"""BookiePeer: the calls to one bookie: over TCP and gRPC, in process, or simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from magnetar.metadata.model import BookieAddress, Member

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.bookie.contract import (
        BookieInfo,
        EntryPage,
        LastConfirmed,
        LastConfirmedRequest,
        LastHeard,
        ReadRequest,
    )
    from magnetar.runtime.frames import Buffer, FrameStream


class BookiePeer(Protocol):
    """One incarnation of a bookie, as a caller sees it.

    Every call raises BookieUnavailable or StreamClosed when no answer comes; both mean "unknown",
    never "no". Callers set deadlines by cancelling.
    """

    @property
    def member(self) -> Member: ...

    async def open_write(self, client_name: str) -> FrameStream:
        """Open a stream and exchange the hellos. The caller sends adds and receives acks.
        Raises FrameDamaged for a damaged reply."""

    def read(self, request: ReadRequest) -> AsyncIterator[Buffer]:
        """Yield frames of read answers: the requested entries, up to the first one that is missing
        or unreadable. This entry is named with its code, and ends the answer. A request that cannot
        be served gets one answer, for its first entry. Close the iterator when leaving it early.
        """

    async def last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        """Return the bookie's last entry of the ledger, and the "confirmed" in its envelope. With
        `fence`, the bookie answers after the ledger is durably fenced."""

    async def list_entries(self, ledger: int, first: int) -> EntryPage:
        """Return a page of the stored entries, from `first` on."""

    async def info(self) -> BookieInfo:
        """Return the identity of the bookie that answers. It may be another incarnation."""

    async def open_presence(self, broker: str, incarnation: str) -> FrameStream:
        """Open a stream on which this broker sends BEATs, each of which the bookie answers.
        Raises FrameDamaged for a damaged answer to the first one."""

    async def last_heard(self, broker: str, incarnation: str) -> LastHeard | None:
        """Return when the bookie last heard that broker; None: the bookie cannot tell. Raises
        BookieUnavailable also if the bookie has another incarnation."""

    async def close(self) -> None:
        """Close all connections. Idempotent; ends within a second or two."""


OpenPeer = Callable[[Member, BookieAddress], BookiePeer]
"""The function that makes the peer of a member at an address, without I/O."""
