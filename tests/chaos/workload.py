"""The workload: one producer of numbered messages, and consumers that acknowledge what they get.

The harness creates the producer once; the client alone keeps it attached. Consumers run in
sessions, one after the other. Closing a consumer confirms its acknowledgements, so a checker can
judge the deliveries of later sessions.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from checkers.history import Delivery, History, Outcome, Place, Read, Send, Session

from magnetar import ConsumerType, InitialPosition, MessageId, PulsarException, Result, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from magnetar.asyncio import Client, Consumer

TURN_S: Final = 0.005  # the pause between bursts of the producer
WINDOW_MESSAGES: Final = 900  # the limit of messages under way; the client's own limit is 1,000
MESSAGE_BYTES: Final = 100
# A consumer closes after a random number of messages in this range, and another consumer begins.
SESSION_MESSAGES: Final = (1_000, 6_000)
IDLE_S: Final = 2.0  # a drained subscription must deliver nothing this long
QUIET_MS: Final = 200  # a waiting consumer checks for the end this often
RETRY_S: Final = 0.2  # pause after a subscribe that failed
CLOSE_S: Final = 60.0  # the limit of the wait for a producer's last receipts
READ_S: Final = 60.0  # the limit of the wait for one message of a read
REFUSALS: Final = (  # errors after which the message is definitely not stored
    Result.ProducerQueueIsFull,
    Result.MemoryBufferIsFull,
    Result.MessageTooBig,
    Result.InvalidMessage,
    Result.ChecksumError,
    Result.NotAllowedError,
)


class Producing:
    """Sends messages 0, 1, 2, ... at a rate, until `ending` is set and `messages_min` were sent."""

    def __init__(self, history: History, *, topic: str, messages_min: int, rate: float) -> None:
        self.history = history
        self.topic = topic
        self.ending = asyncio.Event()
        self.acknowledged = 0
        self.last = Place(-1, -1)  # the place of the last acknowledged message
        self._messages_min = messages_min
        self._rate = rate
        self._under_way = 0
        self._moved = asyncio.Event()

    async def run(self, client: Client) -> None:
        producer = await client.create_producer(self.topic)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        held = 0.0  # no burst after a wait for a full window
        while not (self.ending.is_set() and len(self.history.sends) >= self._messages_min):
            due = int((loop.time() - begun - held) * self._rate) - len(self.history.sends)
            for _ in range(min(due, WINDOW_MESSAGES - self._under_way)):
                self._send(producer.send_async)
            if self._under_way >= WINDOW_MESSAGES:
                since = loop.time()
                self._moved.clear()
                await self._moved.wait()
                held += loop.time() - since
            else:
                await asyncio.sleep(TURN_S)
        async with asyncio.timeout(CLOSE_S):
            with suppress(PulsarException):  # messages without a receipt stay unknown
                await producer.close()

    async def wait_acknowledged(self, number: int) -> None:
        """Wait until this message or a later one has its receipt."""
        await _until(
            lambda: any(send.outcome is Outcome.OK for send in self.history.sends[number:])
        )

    async def wait_beyond(self, ledger: int) -> int:
        """Wait until a message is stored in a newer ledger. Returns the time of its receipt."""
        await _until(lambda: self.last.ledger > ledger)
        return next(
            send.answered_ns
            for send in self.history.sends
            if send.place is not None and send.place.ledger > ledger
        )

    def _send(self, send_async: object) -> None:
        assert callable(send_async)
        send = Send(len(self.history.sends), time.monotonic_ns())
        self.history.sends.append(send)
        self._under_way += 1

        def answered(result: Result, message_id: MessageId) -> None:
            send.answered_ns = time.monotonic_ns()
            self._under_way -= 1
            self._moved.set()
            if result is Result.Ok:
                send.outcome = Outcome.OK
                send.place = self.last = place_of(message_id)
                self.acknowledged += 1
            else:
                send.outcome = Outcome.FAIL if result in REFUSALS else Outcome.INFO
                send.error = result.name

        send_async(b"%08d" % send.number + b"." * (MESSAGE_BYTES - 8), answered)


class Consuming:
    """One consumer after the other on one subscription, `workers` at a time."""

    def __init__(
        self, history: History, *, topic: str, kind: ConsumerType, workers: int, random: Random
    ) -> None:
        self.history = history
        self.draining = asyncio.Event()  # nothing more will be sent
        self.seen: set[int] = set()
        self._topic = topic
        self._kind = kind
        self._workers = workers
        self._random = random
        self._drained = asyncio.Event()

    async def subscribe_first(self, client: Client) -> None:
        """Create the subscription before the first message is sent."""
        await (await self._subscribe(client)).close()

    async def run(self, client: Client) -> None:
        """Consume until every message with a receipt was delivered and no more deliveries
        arrive."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._work(client))
            await self.draining.wait()
            wanted = {s.number for s in self.history.sends if s.outcome is Outcome.OK}
            await _until(lambda: wanted <= self.seen)
            self._drained.set()
        # One more session, after all acknowledgements were answered.
        await self._session(client, 2**31)

    async def _work(self, client: Client) -> None:
        while not self._drained.is_set():
            await self._session(client, self._random.randint(*SESSION_MESSAGES))

    async def _session(self, client: Client, messages_max: int) -> None:
        session = Session(len(self.history.sessions), time.monotonic_ns())
        self.history.sessions.append(session)
        try:
            consumer = await self._subscribe(client)
        except PulsarException as error:
            session.error = repr(error)
            await asyncio.sleep(RETRY_S)
            return
        try:
            await self._consume(consumer, session, messages_max)
            await consumer.close()
            session.closed = Outcome.OK
        except PulsarException as error:
            session.error = repr(error)
        session.closed_ns = time.monotonic_ns()

    async def _consume(self, consumer: Consumer, session: Session, messages_max: int) -> None:
        loop = asyncio.get_running_loop()
        taken, quiet_since = 0, loop.time()
        while taken < messages_max:
            try:
                message = await consumer.receive(timeout_millis=QUIET_MS)
            except Timeout:
                if self._drained.is_set() and loop.time() - quiet_since > IDLE_S:
                    return
                continue
            number = number_of(message.data())
            place = place_of(message.message_id())
            self.history.deliveries.append(
                Delivery(number, place, session.session, time.monotonic_ns())
            )
            self.seen.add(number)
            await consumer.acknowledge(message)
            taken, quiet_since = taken + 1, loop.time()

    async def _subscribe(self, client: Client) -> Consumer:
        return await client.subscribe(
            self._topic,
            "chaos",
            consumer_type=self._kind,
            initial_position=InitialPosition.Earliest,
        )


async def read_all(client: Client, topic: str) -> list[Read]:
    """Read the whole topic, from its beginning to its present end. Raises Timeout."""
    records: list[Read] = []
    reader = await client.create_reader(topic, MessageId.earliest)
    while await reader.has_message_available():
        message = await reader.read_next(timeout_millis=int(READ_S * 1000))
        place = place_of(message.message_id())
        records.append(Read(number_of(message.data()), place))
    await reader.close()
    return records


async def _until(predicate: Callable[[], bool]) -> None:
    while not predicate():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(TURN_S)


def place_of(message_id: MessageId) -> Place:
    return Place(message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())


def number_of(data: bytes) -> int:
    return int(data[:8])
