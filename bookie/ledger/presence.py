"""Presence: a broker tells every listed bookie that it is alive, and asks them about other brokers.

A broker sends a beat every BEAT_S to each bookie, on a connection of its own. If a beat has no
answer within ANSWER_S, the broker closes the connection and opens another. TCP would wait much
longer after a partition before it tries again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.bookie.contract import BEAT_S
from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.protos.envelope import BEAT, FrameDamaged, check_beat
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import Backoff

if TYPE_CHECKING:
    from random import Random

    from magnetar.bookie.contract import LastHeard
    from magnetar.bookie.ledger.bookie_registry import BookieRegistry
    from magnetar.bookie.ledger.pool import PeerPool
    from magnetar.metadata.model import Member
    from magnetar.runtime.frames import FrameStream

log = get_logger(__name__)

ANSWER_S: Final = 2.0
"""Time limit of a bookie's answer to a beat, and for opening a connection to the bookie. A bookie's
loop is never busy for so long."""

ASK_S: Final = 0.25
"""Time limit of a bookie's answer about another broker, including a new connection. A lookup waits
for the answers, so the time is short. A later answer counts as no answer."""

RETRY_S_FIRST: Final = 0.1
RETRY_S_MAX: Final = 1.0


class Presence:
    """While `run` runs and the event loop does not stand still, the bookies hear this broker."""

    def __init__(
        self,
        directory: BookieRegistry,
        peers: PeerPool,
        *,
        broker: str,
        incarnation: str,
        random: Random,
    ) -> None:
        self._directory = directory
        self._peers = peers
        self._broker = broker
        self._incarnation = incarnation
        self._backoff = Backoff(RETRY_S_FIRST, RETRY_S_MAX, random)
        self._attended: set[Member] = set()  # the members that have a task

    async def run(self) -> None:
        """Beat to all listed bookies until cancelled."""
        self._attended.clear()
        changed = asyncio.Event()
        unwatch = self._directory.watch(changed.set)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for member in self._directory.listed:
                        if member not in self._attended:
                            self._attended.add(member)
                            group.create_task(self._attend(member))
                    await changed.wait()
                    changed.clear()
        finally:
            unwatch()

    async def ask(self, broker: str, incarnation: str) -> list[LastHeard | None]:
        """Ask every listed bookie when it last heard that broker. None: no answer within ASK_S, or
        the bookie cannot tell."""
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(self._ask(member, broker, incarnation))
                for member in self._directory.listed
            ]
        return [task.result() for task in asked]

    async def _ask(self, member: Member, broker: str, incarnation: str) -> LastHeard | None:
        try:
            async with asyncio.timeout(ASK_S):
                return await self._peers.peer(member).last_heard(broker, incarnation)
        except (BookieUnavailable, StreamClosed, TimeoutError) as error:
            log.info(
                "bookie did not say when it heard the broker",
                bookie=member.bookie,
                error=repr(error),
            )
            return None

    async def _attend(self, member: Member) -> None:
        """Beat to one bookie as long as it is listed."""
        delays = self._backoff.delays()
        try:
            while member in self._directory.listed:
                stream = await self._open(member)
                if stream is not None:
                    delays = self._backoff.delays()
                    await self._beat(stream, member)
                await asyncio.sleep(next(delays))
        finally:
            self._attended.discard(member)

    async def _open(self, member: Member) -> FrameStream | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                peer = self._peers.peer(member)
                return await peer.open_presence(self._broker, self._incarnation)
        except (BookieUnavailable, StreamClosed, FrameDamaged, TimeoutError) as error:
            log.info("presence connection not opened", bookie=member.bookie, error=repr(error))
            return None

    async def _beat(self, stream: FrameStream, member: Member) -> None:
        try:
            while member in self._directory.listed:
                await asyncio.sleep(BEAT_S)
                async with asyncio.timeout(ANSWER_S):
                    await stream.send([BEAT])
                    check_beat(await stream.receive())
        except (StreamClosed, FrameDamaged, TimeoutError) as error:
            log.info("presence connection lost", bookie=member.bookie, error=repr(error))
        finally:
            await stream.close()
