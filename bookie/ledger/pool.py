"""PeerPool: this process's peers and streams of adds, by bookie."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from magnetar.bookie.ledger.add_stream import AddStream
from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import Backoff
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from random import Random

    from magnetar.bookie.ledger.bookie_registry import BookieRegistry
    from magnetar.bookie.ledger.peer import BookiePeer, OpenPeer
    from magnetar.metadata.model import BookieAddress, Member

log = get_logger(__name__)

# A lost connection is retried within a tenth of a second; retries at a dead bookie cost little.
# A change of the bookie list, as after a restart, triggers a retry at once.
RECONNECT_S_FIRST: Final = 0.1
RECONNECT_S_MAX: Final = 2.0

_PURPOSES: Final = ("adds", "recovery", "copies")


class PeerPool:
    """`run` must be running. Keeps one peer and up to three streams for each member for which a
    caller ever asked. Bookies seldom change their incarnation, so members are few."""

    def __init__(
        self,
        directory: BookieRegistry,
        open_peer: OpenPeer,
        *,
        client_name: str,
        random: Random,
        connect_timeout_s: float,
    ) -> None:
        self._directory = directory
        self._open_peer = open_peer
        self._client_name = client_name
        self._backoff = Backoff(RECONNECT_S_FIRST, RECONNECT_S_MAX, random)
        self._connect_timeout_s = connect_timeout_s
        self._turns = Turns()
        self._peers: dict[Member, tuple[BookieAddress, BookiePeer]] = {}
        self._streams: dict[tuple[Member, str], AddStream] = {}
        self._group: asyncio.TaskGroup | None = None  # None: not running

    def peer(self, member: Member) -> BookiePeer:
        """Return the peer of a bookie, at its present address. Raises BookieUnavailable if the
        bookie was never listed."""
        registration = self._directory.find(member)
        if registration is None:
            raise BookieUnavailable(member.bookie, BookieCode.CONNECTION_LOST, "it is not listed")
        address, peer = self._peers.get(member, (None, None))
        if peer is None or address != registration.address:
            if peer is not None:
                self._spawn(peer.close())
            peer = self._open_peer(member, registration.address)
            self._peers[member] = registration.address, peer
        return peer

    def adds(self, member: Member) -> AddStream:
        """Return the stream for ledgers that this process writes."""
        return self._stream(member, "adds")

    def write_backs(self, member: Member) -> AddStream:
        """Return the stream for recoveries. This process may still have a writer for a ledger that
        it recovers, and the acks of the two must stay apart."""
        return self._stream(member, "recovery")

    def copies(self, member: Member) -> AddStream:
        """Return the stream for copies that a repair makes. Its acks must stay apart, too."""
        return self._stream(member, "copies")

    @property
    def longest_outbox(self) -> int:
        """Bytes in the longest outbox of all streams."""
        return max([stream.pending_bytes for stream in self._streams.values()], default=0)

    async def run(self) -> None:
        """Keep the streams open until cancelled, then close everything."""
        unwatch = self._directory.watch(self._hurry)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for stream in self._streams.values():
                    self._begin(stream)
                try:
                    await asyncio.get_running_loop().create_future()  # until cancelled
                finally:
                    self._group = None  # ledgers may still ask for streams while they end
        finally:
            unwatch()
            peers = [peer for _, peer in self._peers.values()]
            self._peers.clear()
            for peer in peers:
                await peer.close()

    def _stream(self, member: Member, purpose: str) -> AddStream:
        stream = self._streams.get((member, purpose))
        if stream is None:
            stream = AddStream(
                member,
                lambda: self.peer(member),
                client_name=f"{self._client_name}/{purpose}",
                backoff=self._backoff,
                open_timeout_s=self._connect_timeout_s,
                turns=self._turns,
            )
            self._streams[member, purpose] = stream
            self._begin(stream)
        return stream

    def _begin(self, stream: AddStream) -> None:
        if self._group is not None:  # otherwise `run` starts the task, or has ended
            task = self._group.create_task(stream.run())
            task.add_done_callback(partial(self._on_end, stream))

    def _on_end(self, stream: AddStream, task: asyncio.Task[None]) -> None:
        """The stream's task ended. If the task was cancelled but the pool was not, restart the
        task: the stream's ledgers wait for acks. (A task that fails ends the pool.)"""
        if self._group is None or not task.cancelled():
            return
        log.error("a stream's task was cancelled", bookie=stream.member.bookie)
        stream.on_end()
        # Wait before the restart. If the whole group is ending, its tasks are cancelled before
        # `run` clears `_group`. The pause also limits how often a stream is restarted.
        asyncio.get_running_loop().call_later(RECONNECT_S_FIRST, self._begin, stream)

    def _hurry(self) -> None:
        """The list has changed: listed bookies may be back."""
        for member in self._directory.listed:
            for purpose in _PURPOSES:
                stream = self._streams.get((member, purpose))
                if stream is not None:
                    stream.hurry()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that `run` ends; do nothing after `run` has ended."""
        if self._group is None:
            work.close()
        else:
            self._group.create_task(work)
