"""Loads by a Python client: Magnetar's or Apache's. Both clients have the same interface, so each
load is written once. `client` is the name of the module: "magnetar" or "pulsar"."""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any, Final

from benchmarks.processes import cpu_s

WARM_UP: Final = 200
RECEIVE_TIMEOUT_MS: Final = 60_000
BODY: Final = bytes(1024)

Latencies = tuple[float, float]  # p50 and p99 in ms


def connect(client: str, url: str) -> Any:
    module = importlib.import_module(client)
    if client == "pulsar":
        return module.Client(url, logger=module.ConsoleLogger(module.LoggerLevel.Error))
    return module.Client(url)


def one_at_a_time(client: str, url: str, topic: str, count: int) -> tuple[Latencies, float]:
    """Return the latencies of `send`, and the client's CPU per message in microseconds."""
    with_client = connect(client, url)
    producer = with_client.create_producer(topic, batching_enabled=False)
    for _ in range(WARM_UP):
        producer.send(BODY)
    latencies = []
    began_s = time.process_time()
    for _ in range(count):
        sent_s = time.perf_counter()
        producer.send(BODY)
        latencies.append(time.perf_counter() - sent_s)
    cpu_us = (time.process_time() - began_s) / count * 1e6
    with_client.close()
    return _percentiles(latencies), cpu_us


def publish(client: str, url: str, topic: str, count: int, *, batched: bool) -> float:
    """Publish `count` + 1 messages. Return the messages per second until the last receipt."""
    with_client = connect(client, url)
    producer = with_client.create_producer(
        topic, batching_enabled=batched, max_pending_messages=1_000, block_if_queue_full=True
    )
    producer.send(BODY)
    began_s = time.perf_counter()
    for _ in range(count):
        producer.send_async(BODY, _refuse_failure)
    producer.flush()
    seconds = time.perf_counter() - began_s
    with_client.close()
    return count / seconds


def end_to_end(
    client: str, url: str, topic: str, count: int, rate: float, servers: list[int]
) -> tuple[Latencies, float, float]:
    """Publish `rate` unbatched messages per second beside a consumer that acknowledges each.

    Return the latencies from publish to receive, and the CPU per message in milliseconds: of the
    processes `servers`, and of the client.
    """
    with_client = connect(client, url)
    consumer = with_client.subscribe(topic, "benchmark")
    producer = with_client.create_producer(topic, batching_enabled=False, block_if_queue_full=True)
    warm_up = int(rate)
    sent_s, received_s = [0.0] * (warm_up + count), [0.0] * (warm_up + count)
    servers_s = client_s = 0.0

    def receive() -> None:
        for number in range(warm_up + count):
            message = consumer.receive(RECEIVE_TIMEOUT_MS)
            received_s[number] = time.perf_counter()
            consumer.acknowledge(message)

    receiver = threading.Thread(target=receive)
    receiver.start()
    began_s = time.perf_counter()
    for number in range(warm_up + count):
        if number == warm_up:
            servers_s, client_s = sum(map(cpu_s, servers)), time.process_time()
        pause_s = began_s + number / rate - time.perf_counter()
        if pause_s > 0:
            time.sleep(pause_s)
        sent_s[number] = time.perf_counter()
        producer.send_async(BODY, _refuse_failure)
    receiver.join()
    servers_s, client_s = sum(map(cpu_s, servers)) - servers_s, time.process_time() - client_s
    with_client.close()
    pairs = zip(received_s[warm_up:], sent_s[warm_up:], strict=True)
    latencies = _percentiles([received - sent for received, sent in pairs])
    return latencies, servers_s / count * 1e3, client_s / count * 1e3


def subscribe(client: str, url: str, topic: str, names: list[str]) -> None:
    """Create subscriptions, so that the topic keeps the messages that are published later."""
    with_client = connect(client, url)
    for name in names:
        with_client.subscribe(topic, name)
    with_client.close()


def backlog(client: str, url: str, topic: str, count: int, kind: str) -> float:
    """Read `count` messages by a "Reader", or a consumer of an "Exclusive" or "Shared" subscription
    that acknowledges each. Return messages per second."""
    module = importlib.import_module(client)
    with_client = connect(client, url)
    if kind == "Reader":
        reader = with_client.create_reader(topic, module.MessageId.earliest)
        take = reader.read_next
    else:
        consumer_type = getattr(module.ConsumerType, kind)
        consumer = with_client.subscribe(topic, kind, consumer_type)
        take = consumer.receive
    first = take(RECEIVE_TIMEOUT_MS)
    began_s = time.perf_counter()
    if kind == "Reader":
        for _ in range(count - 1):
            take(RECEIVE_TIMEOUT_MS)
    else:
        consumer.acknowledge(first)
        for _ in range(count - 1):
            consumer.acknowledge(take(RECEIVE_TIMEOUT_MS))
    seconds = time.perf_counter() - began_s
    with_client.close()
    return (count - 1) / seconds


def _percentiles(latencies_s: list[float]) -> Latencies:
    ordered = sorted(latencies_s)
    return ordered[len(ordered) // 2] * 1e3, ordered[int(len(ordered) * 0.99)] * 1e3


def _refuse_failure(result: Any, _message_id: Any) -> None:
    assert result.name == "Ok", f"a send failed: {result}"
