"""A producer, three consumers of a Shared subscription, and what they have done so far.

Each has a thread and uses the client as any program would. What they count is kept in one place
under one lock, and read by whoever shows it.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Final

import magnetar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from magnetar.demo.flights import FlightMessage

TOPIC: Final = "flights"
SUBSCRIPTION: Final = "departures"
CONSUMERS: Final = 3
PENDING_MAX: Final = 20_000  # messages on the way: some batches more than are lost with a server
POLL_MS: Final = 200  # how soon an idle consumer sees that all is done
# A consumer left without messages for this long has none: redelivery after a consumer that closed
# is immediate.
LEFT_OVER_MS: Final = 2_000


class Traffic:
    """Publishes `total` flights and works them off, through whatever happens to the server."""

    def __init__(self, client: magnetar.Client, total: int) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._midst_over = threading.Event()  # the last tenth may be published
        self._threads: list[threading.Thread] = []
        self._counts = [0] * total  # by row: how often it was acknowledged
        self.total = total
        self.published = 0  # with a receipt
        self.acknowledged = 0  # flights, each counted once
        self.deliveries = 0  # acknowledged, with those that came again
        self.by_consumer = [0] * CONSUMERS
        self.failure: BaseException | None = None  # of a thread. None: all is well

    @property
    def duplicates(self) -> int:
        return self.deliveries - self.acknowledged

    @property
    def missing(self) -> list[int]:
        """Rows that were never acknowledged."""
        return [row for row, count in enumerate(self._counts) if not count]

    @property
    def finished(self) -> bool:
        return self.published == self.total == self.acknowledged

    def start(self, flights: Iterable[FlightMessage]) -> None:
        """Subscribe first, so that nothing is published before; then let them run."""
        for number in range(CONSUMERS):
            consumer = self._client.subscribe(
                TOPIC,
                SUBSCRIPTION,
                consumer_type=magnetar.ConsumerType.Shared,
                consumer_name=f"desk-{number + 1}",
                initial_position=magnetar.InitialPosition.Earliest,
            )
            self._run(partial(self._consume, consumer, number))
        self._run(partial(self._publish, flights))

    def pass_midst(self) -> None:
        """Let the last tenth be published. Until then it waits, so that what is to happen in the
        midst of the traffic does, however fast that goes."""
        self._midst_over.set()

    def stop(self) -> None:
        """The consumers leave when their acknowledgements are durable. Call once, and only when all
        is well: while the server is away this waits for it."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def left_over(self) -> int:
        """What a newcomer to the subscription still gets: nothing, if every acknowledgement that
        was answered is kept."""
        consumer = self._client.subscribe(
            TOPIC, SUBSCRIPTION, consumer_type=magnetar.ConsumerType.Shared
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
            send_timeout_millis=0,  # a server that is away is waited for
        )
        for number, flight in enumerate(flights):
            if number * 10 >= self.total * 9:
                self._midst_over.wait()
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

    def _on_receipt(self, result: magnetar.Result, _: magnetar.MessageId | None) -> None:
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
            consumer.acknowledge(message)
            self._on_acknowledged(int(message.properties()["row"]), number)
        consumer.close()

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
        """The first failure counts; it is reported by the main thread, which watches."""
        with self._lock:
            self.failure = self.failure or error
