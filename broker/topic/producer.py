"""A producer of a topic: takes publishes, answers each of them once, in the order of sending."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.errors import EntryTooLarge, LogError
from magnetar.broker.topic.contract import AccessMode, CloseReason
from magnetar.broker.topic.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.contract import ProducerEvents, ProducerRequest
    from magnetar.protos.entry import EntryView

CLOSE_TIMEOUT_S: Final = 5.0
"""How long a closing producer waits for the outcome of what it sent: appends are answered within
milliseconds, or the log fails by itself."""


REFUSALS_MAX: Final = 1_000
"""Refused publishes that wait for the outcome of what was sent before them. A client whose every
publish is refused while the bookies are silent is disconnected."""


@dataclass(slots=True)
class Publish:
    """One publish on its way through the log. Not frozen: there is one per entry."""

    handle: ProducerHandle
    sequence_id: int
    highest_sequence_id: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Refusal:
    behind: int  # how many publishes were accepted before it
    sequence_id: int
    error: Exception


class ProducerState(Enum):
    OPEN = "open"
    CLOSING = "closing"  # takes nothing more, still gives receipts
    CLOSED = "closed"


class ProducerHandle:
    """What a session holds of a producer. Made by `Topic.add_producer`."""

    def __init__(
        self,
        request: ProducerRequest,
        name: str,
        events: ProducerEvents,
        log: Log,
        *,
        connected_since: str,
        leave: Callable[[ProducerHandle], None],
        log_failed: Callable[[LogError], None],
        now: float,
    ) -> None:
        self.request = request
        self.name = name
        self.events = events
        self.topic_epoch: int | None = None  # None: not exclusive
        self.last_sequence_id = -1
        self.state = ProducerState.OPEN
        self.meter = Meter(now)
        self._connected_since = connected_since
        self._log = log
        self._leave = leave
        self._log_failed = log_failed
        self._accepted = 0
        self._answered = 0
        self._refusals: deque[_Refusal] = deque()  # at most REFUSALS_MAX
        self._drained = asyncio.Event()

    @property
    def exclusive(self) -> bool:
        return self.request.access_mode is not AccessMode.SHARED

    @property
    def outstanding(self) -> int:
        """Publishes whose outcome is not known yet."""
        return self._accepted - self._answered

    def publish_nowait(self, sequence_id: int, highest_sequence_id: int, view: EntryView) -> None:
        """Append an entry. The outcome comes by the events; after the end of the producer nothing
        happens, and the client will send it again."""
        if self.state is not ProducerState.OPEN:
            return
        messages, size = view.num_messages, len(view.data)
        publish = Publish(self, sequence_id, highest_sequence_id, messages, size)
        try:
            self._log.append_nowait(view, publish)
        except EntryTooLarge as error:
            self.refuse(sequence_id, error)
        except LogError as error:
            self._log_failed(error)
        else:
            self._accepted += 1

    def publish_plain(self, sequence_ids: Sequence[int], entries: Sequence[bytes]) -> None:
        """As `publish_nowait`, entries of one message each that `parse_entry` accepts."""
        if self.state is not ProducerState.OPEN:
            return
        publishes = [
            Publish(self, sequence_id, 0, 1, len(entry))
            for sequence_id, entry in zip(sequence_ids, entries, strict=True)
        ]
        try:
            self._log.append_plain(entries, publishes)
        except LogError as error:
            self._log_failed(error)
        else:
            self._accepted += len(publishes)

    def refuse(self, sequence_id: int, error: Exception) -> None:
        """Answer an entry that is not appended: in its turn, behind what was published before."""
        if self.state is not ProducerState.OPEN:
            return
        if len(self._refusals) >= REFUSALS_MAX:
            self._leave(self)
            self.evict(CloseReason.LOG_FAILED)
        elif self.outstanding:
            self._refusals.append(_Refusal(self._accepted, sequence_id, error))
        else:
            self.events.send_error(sequence_id, error)

    async def wait_room(self) -> None:
        """Return when the topic takes more, or at once when the producer has ended."""
        if self.state is ProducerState.OPEN:
            await self._log.wait_room()

    async def close(self) -> None:
        """The client closes. What it sent is answered first, within CLOSE_TIMEOUT_S."""
        if self.state is ProducerState.CLOSED:
            return
        self.state = ProducerState.CLOSING
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.wait_drained()
        except TimeoutError:
            pass  # the client learns nothing of the rest, as if the broker had died
        finally:
            self.close_nowait()

    def close_nowait(self) -> None:
        """The connection is gone: nothing is answered any more."""
        if self.state is not ProducerState.CLOSED:
            self._end()
            self._leave(self)

    async def wait_drained(self) -> None:
        """Return when nothing is outstanding."""
        while self.outstanding and self.state is not ProducerState.CLOSED:
            self._drained.clear()
            await self._drained.wait()

    # ---- called by the topic ---------------------------------------------------------------------

    def stop_taking(self) -> None:
        """The topic closes. What comes from here on is dropped: the client sends it again once it
        is told."""
        if self.state is ProducerState.OPEN:
            self.state = ProducerState.CLOSING

    def evict(self, reason: CloseReason) -> None:
        """The broker closes it. The topic has forgotten it already."""
        if self.state is not ProducerState.CLOSED:
            self._end()
            self.events.closed(reason)

    def on_appended(self, receipts: Sequence[tuple[Publish, Position]]) -> None:
        """The log has these, in order."""
        if self.state is ProducerState.CLOSED:
            return
        if self._refusals:
            self._answer_in_turn(receipts)
        else:
            self._answered += len(receipts)
            self.events.receipts(receipts)
        if self.outstanding == 0:
            self._drained.set()

    def describe(self, now: float) -> dict[str, Any]:
        """Pulsar's PublisherStats."""
        rates, meter = self.meter.rates(now), self.meter
        return {
            "producerName": self.name,
            "producerId": self.request.producer_id,
            "accessMode": self.request.access_mode.title,
            "msgRateIn": rates.messages,
            "msgThroughputIn": rates.bytes,
            "averageMsgSize": meter.bytes / meter.messages if meter.messages else 0.0,
            "pendingPublishes": self.outstanding,
            "address": self.request.client.address,
            "clientVersion": self.request.client.version,
            "connectedSince": self._connected_since,
            "metadata": dict(self.request.metadata),
        }

    def _answer_in_turn(self, receipts: Sequence[tuple[Publish, Position]]) -> None:
        start = 0
        while self._refusals:
            count = self._refusals[0].behind - self._answered
            if count > len(receipts) - start:
                break
            if count:
                self.events.receipts(receipts[start : start + count])
                start += count
                self._answered += count
            refusal = self._refusals.popleft()
            self.events.send_error(refusal.sequence_id, refusal.error)
        if start < len(receipts):
            self._answered += len(receipts) - start
            self.events.receipts(receipts[start:])

    def _end(self) -> None:
        self.state = ProducerState.CLOSED
        self._refusals.clear()
        self._drained.set()
