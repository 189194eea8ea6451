"""A producer, three consumers of a Key_Shared subscription, and their counts.

The key is the carrier: all flights of a carrier go to one consumer at a time, in order. After a
kill of the server, the broker may deliver flights again. `Order` checks that each carrier's flights
are processed in order; it ignores flights that were processed before.

The producer and each consumer run in a thread of their own. One lock guards all counts. The main
thread reads the counts to show the progress.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

import magnetar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from magnetar.demo.flights import FlightMessage

TOPIC: Final = "flights"
SUBSCRIPTION: Final = "departures"
CONSUMERS: Final = 3
PENDING_MAX: Final = 20_000  # unacknowledged messages of the producer
POLL_MS: Final = 200  # the interval at which an idle consumer checks for the end of the demo
# A consumer that gets no message for this long has received all messages: the broker redelivers the
# messages of a closed consumer immediately.
LEFT_OVER_MS: Final = 2_000


class Order:
    """Checks whether each carrier's flights are processed in order: a machine.

    When a flight is processed for the first time, all earlier rows of its carrier must have been
    processed before.
    """

    def __init__(self, carriers: Sequence[str]) -> None:
        """`carriers`: the carrier of each flight, by row."""
        self._carriers = carriers
        self._following: dict[str, deque[int]] = {}  # rows that were not processed, by carrier
        for row, carrier in enumerate(carriers):
            self._following.setdefault(carrier, deque()).append(row)
        self.violations = 0
        self.by_carrier: dict[str, set[int]] = {carrier: set() for carrier in self._following}

    def on_first_processed(self, row: int, consumer: int) -> None:
        """A consumer has processed a flight that was not processed before."""
        carrier = self._carriers[row]
        self.by_carrier[carrier].add(consumer)
        following = self._following[carrier]
        if following[0] == row:
            following.popleft()
        else:
            self.violations += 1
            following.remove(row)


class Traffic:
    """Publishes and consumes flights, also while the server is killed and restarted."""

    def __init__(self, client: magnetar.Client, carriers: Sequence[str]) -> None:
        """`carriers`: the carrier of each flight, by row."""
        total = len(carriers)
        self._client = client
        self.order = Order(carriers)
        self._processed = bytearray(total)  # 1: a consumer has processed the row
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._last_tenth = threading.Event()  # set: the producer may publish the last tenth
        self._threads: list[threading.Thread] = []
        self._counts = [0] * total  # acknowledgements by row
        self.total = total
        self.published = 0  # flights that the broker acknowledged
        self.acknowledged = 0  # flights, each counted once
        self.deliveries = 0  # acknowledged messages, redelivered ones included
        self.by_consumer = [0] * CONSUMERS
        self.failure: BaseException | None = None  # the error of a thread. None: no thread failed

    @property
    def duplicates(self) -> int:
        return self.deliveries - self.acknowledged

    @property
    def missing(self) -> list[int]:
        """The rows that no consumer acknowledged."""
        return [row for row, count in enumerate(self._counts) if not count]

    @property
    def finished(self) -> bool:
        return self.published == self.total == self.acknowledged

    def start(self, flights: Iterable[FlightMessage]) -> None:
        """Subscribe, then start the threads: no message is published before the subscription
        exists."""
        for number in range(CONSUMERS):
            consumer = self._client.subscribe(
                TOPIC,
                SUBSCRIPTION,
                consumer_type=magnetar.ConsumerType.KeyShared,
                consumer_name=f"desk-{number + 1}",
                initial_position=magnetar.InitialPosition.Earliest,
            )
            self._run(partial(self._consume, consumer, number))
        self._run(partial(self._publish, flights))

    def release_last_tenth(self) -> None:
        """Let the producer publish the last tenth of the flights. The producer waits for this call,
        so that the kill of the server always happens before the traffic ends."""
        self._last_tenth.set()

    def stop(self) -> None:
        """End the threads. A consumer closes when its acknowledgements are durable. Call this once,
        while the server runs: without a server, the call waits for it."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def left_over(self) -> int:
        """Return the number of messages that a new consumer of the subscription gets. It is 0 if
        no acknowledgement was lost."""
        consumer = self._client.subscribe(
            TOPIC, SUBSCRIPTION, consumer_type=magnetar.ConsumerType.KeyShared
        )
        found = 0
        try:
            while True:
                consumer.receive(LEFT_OVER_MS)
                found += 1
        except magnetar.Timeout:
            return found
        finally:
            consumer.close()

    def _publish(self, flights: Iterable[FlightMessage]) -> None:
        producer = self._client.create_producer(
            TOPIC,
            block_if_queue_full=True,
            max_pending_messages=PENDING_MAX,
            send_timeout_millis=0,  # wait for a restarted server without a limit
            batching_type=magnetar.BatchingType.KeyBased,  # a batch goes to one consumer
            batching_max_publish_delay_ms=20,
        )
        for number, flight in enumerate(flights):
            if number * 10 >= self.total * 9:
                self._last_tenth.wait()
            if self._done.is_set():
                return
            producer.send_async(
                flight.value,
                self._on_receipt,
                properties={"row": str(flight.row)},
                partition_key=flight.carrier,
                event_timestamp=flight.scheduled_ms,
            )
        producer.flush()
        producer.close()

    def _on_receipt(self, result: magnetar.Result, _: magnetar.MessageId) -> None:
        if result is magnetar.Result.Ok:
            with self._lock:
                self.published += 1
        else:
            self._fail(RuntimeError(f"a flight could not be published: {result}"))

    def _consume(self, consumer: magnetar.Consumer, number: int) -> None:
        while not self._done.is_set():
            try:
                message = consumer.receive(POLL_MS)
            except magnetar.Timeout:
                continue
            row = int(message.properties()["row"])
            self._on_processed(row, number)
            consumer.acknowledge(message)
            self._on_acknowledged(row, number)
        consumer.close()

    def _on_processed(self, row: int, number: int) -> None:
        """Note a processed flight. Call this before the acknowledgement, after which the flights of
        this carrier may go to another consumer."""
        with self._lock:
            if not self._processed[row]:
                self._processed[row] = 1
                self.order.on_first_processed(row, number)

    def _on_acknowledged(self, row: int, number: int) -> None:
        with self._lock:
            self._counts[row] += 1
            self.acknowledged += self._counts[row] == 1
            self.deliveries += 1
            self.by_consumer[number] += 1

    def _run(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._fail(error)

        thread = threading.Thread(target=guarded, name="demo-traffic", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fail(self, error: BaseException) -> None:
        """Keep the first failure; the main thread reports it."""
        with self._lock:
            self.failure = self.failure or error
