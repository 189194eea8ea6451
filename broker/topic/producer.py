"""A producer of a topic: it accepts publishes, and answers their entries in send order.

A publish is a run of entries that the session has read from one frame. The publish passes the
topic's stages, and then the log appends its entries, all in the same step of the event loop. If a
stage waits for the outcome of another publish, the producer holds the rest of the run and all later
publishes until the outcome is known. Meanwhile the session does not read the next frame
(`wait_room`), so the producer holds one frame at most. If the producer waits only for the publish
rate, the session reads more frames until the producer holds HELD_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, assert_never, cast

from magnetar.broker.errors import LogError
from magnetar.broker.topic.answer_order import AnswerOrder
from magnetar.broker.topic.contract import AccessMode, CloseReason
from magnetar.broker.topic.meter import Meter
from magnetar.broker.topic.pipeline import Append, Decided, Duplicate, Gate, Held, Publish, Refuse
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from magnetar.broker.log.log import Log
    from magnetar.broker.log.outstanding import Appended
    from magnetar.broker.topic.contract import ProducerEvents, ProducerRequest
    from magnetar.broker.topic.holding import Holding
    from magnetar.broker.topic.pipeline import Pipeline
    from magnetar.protos.sends import SendRun

CLOSE_TIMEOUT_S: Final = 5.0
"""The longest time in seconds for which a closing producer waits for the outcome of its publishes.
The log answers appends within milliseconds, or fails by itself."""

log = get_logger(__name__)

ANSWERS_WAITING_MAX: Final = 1_000
"""The limit of refused entries and duplicates that wait for the outcome of earlier publishes.
Beyond this limit the broker closes the producer. The limit stops a client that sends only refused
publishes while the bookies do not answer."""


HELD_BYTES_MAX: Final = 256 << 10
"""The limit of bytes that a producer holds because of the topic's publish rate. At this limit, the
session stops reading the producer's connection. The limit is the size of a full frame, so that a
producer over the rate does not stop the other producers of its connection at once. If all producers
of the broker together hold more than HELD_SHARE allows (log/budget.py), the session does not wait
for this limit: it stops reading at once."""

AHEAD_LOOK_S: Final = 0.25
"""The interval in seconds at which `wait_room` checks the publish rate again while the topic
appends publishes beyond the rate, because the broker may hold no more of them (see `_wait_rate`).
"""


class ProducerState(Enum):
    WAITING = "waiting"  # waits for exclusive access; accepts no publishes yet
    OPEN = "open"
    CLOSING = "closing"  # accepts no more publishes; still sends receipts
    CLOSED = "closed"


class ProducerHandle:
    """A session's handle of a producer. Made by `Topic.add_producer`.

    `holding` has the producers of the topic that hold publishes. Each producer adds and removes
    itself.
    """

    def __init__(
        self,
        request: ProducerRequest,
        name: str,
        events: ProducerEvents,
        log: Log,
        pipeline: Pipeline,
        holding: Holding,
        *,
        connected_since: str,
        leave: Callable[[ProducerHandle], None],
        log_failed: Callable[[LogError], None],
        exceeds_rate: Callable[[], bool] = lambda: False,
        now: float,
    ) -> None:
        """`exceeds_rate` returns True while the topic's publish rate is exceeded."""
        self.request = request
        self.name = name
        self.events = events
        self.topic_epoch: int | None = None  # None: not exclusive
        self.last_sequence_id = -1
        self.state = ProducerState.OPEN
        self.meter = Meter(now)
        self.chunks = Meter(now)  # entries that are chunks
        self._connected_since = connected_since
        self._log = log
        self._pipeline = pipeline
        self._holding = holding
        self._leave = leave
        self._log_failed = log_failed
        self._exceeds_rate = exceeds_rate
        self._order = AnswerOrder()
        self._held: deque[Decided | Held] = deque()
        self._held_bytes = 0  # the held bytes that the producer last reported to the budget
        self._refused: set[type[Exception]] = set()  # types of errors that were logged already
        self._drained = asyncio.Event()
        self._released = asyncio.Event()

    @property
    def exclusive(self) -> bool:
        return self.request.access_mode is not AccessMode.SHARED

    @property
    def outstanding(self) -> int:
        """The number of entries that are not answered yet."""
        held = sum([len(each.publish.sends) for each in self._held])
        return self._order.outstanding + self._order.waiting + held

    @property
    def is_waiting(self) -> bool:
        """True when the producer waits for exclusive access."""
        return self.state is ProducerState.WAITING

    def publish(self, sends: SendRun, now: float) -> None:
        """Accept entries that the client sent. The producer reports their outcome through `events`.
        A producer that is not open ignores the entries. The client sends them again after it has
        reconnected."""
        if self.state is not ProducerState.OPEN:
            return
        publish = Publish(self, sends, len(sends.entries))
        if self._held:
            self._held.append(Held(publish))
        else:
            self._decide(publish, 0, now)
            if self._held:  # the outcome that the rest waits for may be known already
                self.resume(now)
        self._count_held()

    @property
    def has_room(self) -> bool:
        """True: `wait_room` returns at once. False: await `wait_room`. The session reads this
        property after each run, because it costs a fifth of `wait_room`."""
        if self._held or self._exceeds_rate():
            return False
        return self.state is not ProducerState.OPEN or self._log.has_room

    async def wait_room(self) -> None:
        """Return when the session may read more entries, or at once if the producer is not open."""
        while self._held and self.state is ProducerState.OPEN and not self._may_gather():
            self._released.clear()
            await self._released.wait()
        await self._wait_rate()
        if self.state is ProducerState.OPEN:
            await self._log.wait_room()

    async def close(self) -> None:
        """Close the producer for its client. Before that, wait CLOSE_TIMEOUT_S at most for the
        answers of the outstanding publishes."""
        if self.state is ProducerState.CLOSED:
            return
        self.state = ProducerState.CLOSING
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.wait_drained()
        except TimeoutError:
            pass  # the client gets no answer for the other publishes, as if the broker had died
        finally:
            self.close_nowait()

    def close_nowait(self) -> None:
        """End the producer without further answers, for example because its connection has closed.
        Remove it from the topic."""
        if self.state is not ProducerState.CLOSED:
            self._end()
            self._leave(self)

    async def wait_drained(self) -> None:
        """Return when no entry is outstanding, or the producer is closed."""
        while self.outstanding and self.state is not ProducerState.CLOSED:
            self._drained.clear()
            await self._drained.wait()

    # ---- called by the topic ---------------------------------------------------------------------

    def end(self) -> None:
        """End the producer. The caller tells the client."""
        if self.state is not ProducerState.CLOSED:
            self._end()

    def stop_taking(self) -> None:
        """Drop all later publishes: the topic is about to disconnect the producer. The client sends
        them again after it has reconnected."""
        if self.state is ProducerState.OPEN:
            self.state = ProducerState.CLOSING

    def resume(self, now: float) -> bool:
        """Continue with the held publishes, in order, up to the first publish that still waits.
        Returns True when at least one publish continued."""
        progressed = False
        outstanding = self._order.outstanding
        while self._held:
            first = self._held[0]
            if isinstance(first, Held):
                if not first.ready:
                    for_rate = isinstance(first.until, Gate)
                    # True: go to the end of the queue, so the topic's other producers are next.
                    appended = self._order.outstanding > outstanding
                    self._holding.add(self, for_rate=for_rate, last=appended)
                    if progressed:
                        self._count_held()
                    return progressed
                self._held.popleft()
                self._decide(first.publish, first.stage, now)
            else:
                self._held.popleft()
                self._carry_out([first], now)
            progressed = True
        self._count_held()
        self._holding.discard(self)
        self._released.set()
        if self.outstanding == 0:
            self._drained.set()
        return progressed

    def evict(self, reason: CloseReason) -> None:
        """Close the producer, remove it from the topic, and tell its client the reason."""
        if self.state is not ProducerState.CLOSED:
            self.close_nowait()
            self.events.closed(reason)

    def on_appended(self, parts: Sequence[Appended]) -> None:
        """Answer these entries in order. They are durable, and all in one ledger."""
        if self.state is ProducerState.CLOSED:
            return
        run: list[Appended] = []
        for answer in self._order.on_appended(parts):
            if isinstance(answer, Decided):
                self._give_receipts(run)
                run = []
                self._answer(answer)
            else:
                run.append(answer)
        self._give_receipts(run)
        if not self._held and self._order.outstanding == 0:
            self._drained.set()

    def describe(self, now: float) -> dict[str, Any]:
        """Return the statistics in the form of Pulsar's PublisherStats."""
        rates, meter = self.meter.rates(now), self.meter
        return {
            "producerName": self.name,
            "producerId": self.request.producer_id,
            "accessMode": self.request.access_mode.title,
            "supportsPartialProducer": self.request.client.supports_partial_producer,
            "msgRateIn": rates.messages,
            "msgThroughputIn": rates.bytes,
            "averageMsgSize": meter.bytes / meter.messages if meter.messages else 0.0,
            "chunkedMessageRate": self.chunks.rates(now).messages,
            "pendingPublishes": self.outstanding,
            "address": self.request.client.address,
            "clientVersion": self.request.client.version,
            "connectedSince": self._connected_since,
            "metadata": dict(self.request.metadata),
        }

    def _may_gather(self) -> bool:
        """Return whether the producer may hold more publishes: it waits only for the topic's rate,
        and it holds less than the limits allow."""
        first = self._held[0]
        if not (isinstance(first, Held) and isinstance(first.until, Gate)):
            return False
        return self._held_bytes < HELD_BYTES_MAX and self._log.budget.may_gather

    async def _wait_rate(self) -> None:
        """Return when the topic's rate allows more, or when the producers of the broker may hold
        publishes again (`PublishBudget.may_hold`). While they may not, the topic appends publishes
        that were read, although the rate is exceeded. So the session must not read more."""
        while True:
            is_open = self.state is ProducerState.OPEN
            if not is_open or not self._exceeds_rate() or self._log.budget.may_hold:
                return
            await asyncio.sleep(AHEAD_LOOK_S)

    def _count_held(self) -> None:
        """Report the change of the held bytes to the budget."""
        if not (self._held or self._held_bytes):
            return
        held = sum([sum(map(len, each.publish.sends.entries)) for each in self._held])
        self._log.budget.hold(held - self._held_bytes)
        self._held_bytes = held

    def _decide(self, publish: Publish, stage: int, now: float) -> None:
        decided = self._pipeline.decide(publish, now, first=stage)
        if decided:
            self._carry_out(decided, now)
        else:
            self._append(publish, now)

    def _carry_out(self, decided: Sequence[Decided | Held], now: float) -> None:
        for place, each in enumerate(decided):
            if self.state is ProducerState.CLOSED:
                _drop(decided[place:])
                return
            if isinstance(each, Held):
                self._held.extendleft(reversed(decided[place:]))
                self._holding.add(self, for_rate=isinstance(each.until, Gate))
                return
            if isinstance(each.answer, Append):
                self._append(each.publish, now)
            else:
                self._settle(each)
                if self.request.stops_at_refusal and isinstance(each.answer, Refuse):
                    self._stop_behind_refusal(decided[place + 1 :])
                    return

    def _stop_behind_refusal(self, following: Sequence[Decided | Held]) -> None:
        """Drop the publishes after a refused publish. The client learns of the refusal, and closes
        the producer. Earlier publishes still get their receipts."""
        if self.state is ProducerState.OPEN:
            self.state = ProducerState.CLOSING
        _drop(following)
        _drop(self._held)
        self._held.clear()

    def _append(self, publish: Publish, now: float) -> None:
        sends = publish.sends
        try:
            self._log.append(sends.entries, sends.views, publish, now=now)
        except LogError as error:
            self._log_failed(error)
        else:
            self._order.on_append(len(sends.entries))

    def _settle(self, decided: Decided) -> None:
        """Answer a publish whose outcome does not need the log."""
        decided.publish.on_outcome(decided.answer.count)
        if self._order.on_decided(decided):
            self._answer(decided)
        elif self._order.waiting > ANSWERS_WAITING_MAX:
            self.evict(CloseReason.ANSWERS_WAITING)

    def _answer(self, decided: Decided) -> None:
        sends, answer = decided.publish.sends, decided.answer
        match answer:
            case Refuse():
                if type(answer.error) not in self._refused:
                    self._refused.add(type(answer.error))
                    log.warning("entry refused", producer=self.name, error=str(answer.error))
                for sequence_id in sends.sequence_ids:
                    self.events.send_error(sequence_id, answer.error)
            case Duplicate():
                newest = max(chain(sends.sequence_ids, sends.highest_sequence_ids))
                assert newest <= answer.stored_sequence_id, "a duplicate that is not stored"
                unstored = repeat(-1, answer.count)
                numbers = zip(sends.sequence_ids, sends.highest_sequence_ids, unstored, strict=True)
                self.events.receipts(-1, numbers)
            case Append():
                raise AssertionError("the log answers what is appended")
            case _:
                assert_never(answer)

    def _give_receipts(self, parts: Sequence[Appended]) -> None:
        if len(parts) == 1:
            self.events.receipts(parts[0].ledger, _receipts_of(parts[0]))
        elif parts:
            self.events.receipts(
                parts[0].ledger, chain.from_iterable([_receipts_of(part) for part in parts])
            )

    def _end(self) -> None:
        self.state = ProducerState.CLOSED
        _drop(self._held)
        self._held.clear()
        self._count_held()
        self._holding.discard(self)
        self._order.clear()
        self._released.set()
        self._drained.set()


def _drop(parts: Iterable[Decided | Held]) -> None:
    """Report the outcome of these publishes: they are not appended. Publishes of another producer
    with the same name may wait for this outcome."""
    for each in parts:
        each.publish.on_outcome(each.publish.unknown)


def _receipts_of(part: Appended) -> Iterable[tuple[int, int, int]]:
    sends = cast("Publish", part.context).sends
    numbers, highest = sends.sequence_ids, sends.highest_sequence_ids
    if part.count != len(numbers):
        numbers = numbers[part.start : part.stop]
        highest = highest[part.start : part.stop]
    entries = range(part.first_entry, part.first_entry + part.count)
    return zip(numbers, highest, entries, strict=True)
