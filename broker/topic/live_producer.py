"""A producer of a non-persistent topic: each publish is answered in the step in which it is read.

The stages of the topic check an entry as those of a persistent topic do. An entry that passes gets
a receipt at once, with Pulsar's message ids: 0:0, or -1:-1 if the entry was dropped because the
connection has too many entries under way.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.log.entry import StoredEntry
from magnetar.broker.log.position import Position
from magnetar.broker.topic.meter import Meter
from magnetar.broker.topic.pipeline import Decided, Publish, Refuse
from magnetar.protos.entry import parse_stored_entry
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.log.outstanding import Appended
    from magnetar.broker.topic.contract import CloseReason, ProducerEvents, ProducerRequest
    from magnetar.broker.topic.live_delivery import LiveDelivery
    from magnetar.broker.topic.pausing_rate import PausingRate
    from magnetar.broker.topic.pipeline import Pipeline
    from magnetar.protos.sends import SendRun

    CallSoon = Callable[[Callable[[], None]], object]

POSITION: Final = Position(0, 0)
"""The position of every message, as in Pulsar: the message cannot be read again."""

log = get_logger(__name__)


class Cap:
    """Limits the non-persistent entries that each connection has under way. An entry is under way
    from the step in which it is read until the next step of the loop, even if it is queued for
    longer (live_delivery.py)."""

    def __init__(self, per_connection: int, call_soon: CallSoon) -> None:
        self._per_connection = per_connection
        self._call_soon = call_soon
        self._under_way: dict[str, int] = {}

    def admit(self, connection: str, entries: int) -> int:
        """Count these entries. Returns the number of them that may be delivered; the caller drops
        the rest."""
        if not self._under_way:
            self._call_soon(self._under_way.clear)
        before = self._under_way.get(connection, 0)
        admitted = min(entries, max(0, self._per_connection - before))
        self._under_way[connection] = before + admitted
        return admitted


class LiveProducer:
    """A session's handle of a producer."""

    def __init__(
        self,
        request: ProducerRequest,
        name: str,
        events: ProducerEvents,
        pipeline: Pipeline,
        cap: Cap,
        *,
        connected_since: str,
        deliver: Callable[[Sequence[StoredEntry], float], None],
        leave: Callable[[LiveProducer], None],
        rate: PausingRate,
        delivery: LiveDelivery,
        now_ms: Callable[[], int],
        now: float,
    ) -> None:
        self.request = request
        self.name = name
        self.events = events
        self.topic_epoch: int | None = None  # None: not exclusive
        self.last_sequence_id = -1
        self.is_waiting = False
        self.meter = Meter(now)
        self.chunks = Meter(now)
        self.dropped = Meter(now)
        self._pipeline = pipeline
        self._cap = cap
        self._connected_since = connected_since
        self._deliver = deliver
        self._leave = leave
        self._rate = rate
        self._delivery = delivery
        self._now_ms = now_ms
        self._open = True

    def publish(self, sends: SendRun, now: float) -> None:
        """Accept entries that the client sent. The producer reports their outcome through
        `events`."""
        if not self._open:
            return
        publish = Publish(self, sends, len(sends.entries))
        decided = self._pipeline.decide(publish, now)
        if not decided:
            self._take(sends, now)
        for each in decided:
            assert isinstance(each, Decided), "no stage of a non-persistent topic waits"
            part = each.publish.sends
            if isinstance(each.answer, Refuse):
                log.warning("entry refused", producer=self.name, error=str(each.answer.error))
                for sequence_id in part.sequence_ids:
                    self.events.send_error(sequence_id, each.answer.error)
            else:
                self._take(part, now)

    def _take(self, sends: SendRun, now: float) -> None:
        count = self._cap.admit(self.request.client.address, len(sends))
        now_ms = self._now_ms()
        views = [
            sends.views.get(place) or parse_stored_entry(sends.entries[place])
            for place in range(len(sends))
        ]
        if count:
            entries = [StoredEntry(POSITION, 0, now_ms, view) for view in views[:count]]
            messages = sum([view.num_messages for view in views[:count]])
            self.meter.count(messages, sum(map(len, sends.entries[:count])), now)
            self._deliver(entries, now)
            self._receipts(sends, 0, count, 0)
        if count < len(sends):
            self.dropped.count(sum([view.num_messages for view in views[count:]]), 0, now)
            self._receipts(sends, count, len(sends), -1)

    def _receipts(self, sends: SendRun, start: int, stop: int, number: int) -> None:
        numbers = sends.sequence_ids[start:stop], sends.highest_sequence_ids[start:stop]
        self.events.receipts(number, [(*ids, number) for ids in zip(*numbers, strict=True)])

    @property
    def has_room(self) -> bool:
        """True when `wait_room` would return at once."""
        now = asyncio.get_running_loop().time()
        return self._delivery.is_idle and self._rate.wait_s(now) <= 0

    async def wait_room(self) -> None:
        """Wait until the publish rate of the topic allows more, and the entries so far are
        delivered."""
        await self._rate.wait()
        await self._delivery.wait_idle()

    async def close(self) -> None:
        """The client closes the producer. Every publish is answered already."""
        self.close_nowait()

    def close_nowait(self) -> None:
        """The connection has closed, or the client closes the producer."""
        if self._open:
            self._open = False
            self._leave(self)

    def evict(self, reason: CloseReason) -> None:
        """Close the producer and tell its client the reason."""
        if self._open:
            self._open = False
            self._leave(self)
            self.events.closed(reason)

    def on_appended(self, parts: Sequence[Appended]) -> None:
        raise AssertionError("a non-persistent topic has no log")

    def describe(self, now: float) -> dict[str, Any]:
        """The statistics in the form of Pulsar's NonPersistentPublisherStats."""
        rates, meter = self.meter.rates(now), self.meter
        return {
            "producerName": self.name,
            "producerId": self.request.producer_id,
            "accessMode": self.request.access_mode.title,
            "msgRateIn": rates.messages,
            "msgThroughputIn": rates.bytes,
            "msgDropRate": self.dropped.rates(now).messages,
            "msgDropCount": self.dropped.messages,
            "averageMsgSize": meter.bytes / meter.messages if meter.messages else 0.0,
            "pendingPublishes": 0,
            "address": self.request.client.address,
            "clientVersion": self.request.client.version,
            "connectedSince": self._connected_since,
            "metadata": dict(self.request.metadata),
        }
