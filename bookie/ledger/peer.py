"""BookiePeer: the seam between ledgers and one bookie: over TCP and gRPC, in process, simulated."""

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
        ReadRequest,
    )
    from magnetar.runtime.frames import Buffer, FrameStream


class BookiePeer(Protocol):
    """One incarnation of a bookie, as a caller sees it.

    Every call raises BookieUnavailable or StreamClosed when its answer does not come; both mean
    "unknown", never "no". Deadlines are the caller's: it cancels.
    """

    @property
    def member(self) -> Member: ...

    async def open_write(self, client_name: str) -> FrameStream:
        """A stream on which the hellos have been exchanged: adds go out, acks come in."""

    def read(self, request: ReadRequest) -> AsyncIterator[Buffer]:
        """Frames of read answers: the contiguous run that the bookie has; where an entry is missing
        or unreadable it is named with its code, and that is the last answer. A request that cannot
        be served at all gets one answer, for its first entry. Close the iterator when leaving it
        early."""

    async def last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        """With `fence`: not before the ledger is fenced, durably."""

    async def list_entries(self, ledger: int, first: int) -> EntryPage:
        """A page of the entries that are stored, from `first` on."""

    async def info(self) -> BookieInfo:
        """Who really answers there; the incarnation may be another one."""

    async def close(self) -> None:
        """Let go of connections. Idempotent, bounded in time."""


OpenPeer = Callable[[Member, BookieAddress], BookiePeer]
"""How a process reaches the bookies: makes the peer of a member at an address, without I/O."""
