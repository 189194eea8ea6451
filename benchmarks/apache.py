"""Loads by Apache's own client (the C++ engine) over Pulsar's TCP protocol."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import pulsar

from benchmarks.figures import Figure, Shape
from benchmarks.processes import cpu_s

if TYPE_CHECKING:
    from collections.abc import Sequence

RECEIVE_TIMEOUT_MS: Final = 30_000


def publish_one_at_a_time(url: str, topic: str, shape: Shape) -> Figure:
    """Send each message after the receipt of the one before."""
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    producer = client.create_producer(topic, batching_enabled=False)
    content = bytes(shape.bytes)
    for _ in range(100):
        producer.send(content)
    latencies = []
    began_s = time.perf_counter()
    for _ in range(shape.count):
        sent_s = time.perf_counter()
        producer.send(content)
        latencies.append(time.perf_counter() - sent_s)
    seconds = time.perf_counter() - began_s
    client.close()
    return Figure.of(shape, seconds, latencies)


def publish_and_consume(
    url: str, topic: str, shape: Shape, rate: float, servers: Sequence[int]
) -> tuple[Figure, float]:
    """Publish `rate` unbatched messages per second beside a consumer that acknowledges each.

    Returns latencies from send to receive, and the CPU of the processes `servers` per message in
    milliseconds.
    """
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumer = client.subscribe(topic, "benchmark")
    producer = client.create_producer(topic, batching_enabled=False)
    warm_up = int(rate)
    count = warm_up + shape.count
    sent_s = [0.0] * count
    received_s = [0.0] * count
    warm = threading.Event()

    def receive() -> None:
        for number in range(count):
            message = consumer.receive(RECEIVE_TIMEOUT_MS)
            received_s[number] = time.perf_counter()
            consumer.acknowledge(message)
            if number == warm_up - 1:
                warm.set()

    receiver = threading.Thread(target=receive)
    receiver.start()
    content = bytes(shape.bytes)

    def send(first: int, number: int) -> None:
        began_s = time.perf_counter()
        for place in range(number):
            pause_s = began_s + place / rate - time.perf_counter()
            if pause_s > 0:
                time.sleep(pause_s)
            sent_s[first + place] = time.perf_counter()
            producer.send_async(content, _ignore)

    send(0, warm_up)
    warm.wait()
    before_s = sum(cpu_s(pid) for pid in servers)
    began_s = time.perf_counter()
    send(warm_up, shape.count)
    receiver.join()
    seconds = time.perf_counter() - began_s
    cpu_ms = (sum(cpu_s(pid) for pid in servers) - before_s) * 1e3 / shape.count
    client.close()
    latencies = [
        received - sent
        for received, sent in zip(received_s[warm_up:], sent_s[warm_up:], strict=True)
    ]
    return Figure.of(shape, seconds, latencies), cpu_ms


def _ignore(_result: object, _message_id: object) -> None: ...
