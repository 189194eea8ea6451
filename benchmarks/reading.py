"""Measures the CPU cost of a client that reads a backlog: `python -m benchmarks.reading`.

A server process replays one encoded batch of 1 KB messages to each subscriber, over Pulsar's
framing, as often as the permits allow. The server does nothing else, so the client is the limit.
Magnetar's client and Apache's client take turns; the CPU is that of the client's process. A row
ends when the last message was received and acknowledged.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import socket
import statistics
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from benchmarks.peers.pulsar.loads import connect
from benchmarks.processes import alone
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.framing import encode_command, message_header, parse_command
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch, encode_message

if TYPE_CHECKING:
    from collections.abc import Sequence

MESSAGES: Final = 400_000
WARM_UP: Final = 2_400
BATCH: Final = 120
BODY: Final = os.urandom(1024)
RECEIVE_TIMEOUT_MS: Final = 60_000

Measured = tuple[float, float]  # messages per second, microseconds of CPU per message


class Replay:
    """One connection of a client, which gets the same entry again and again."""

    def __init__(self, connection: socket.socket, url: str, entry: bytes, messages: int) -> None:
        self._connection = connection
        self._url = url
        self._entry = entry
        self._messages = messages
        self._sent: dict[int, int] = {}  # entries, by consumer
        self._permits: dict[int, int] = {}

    def run(self) -> None:
        try:
            while True:
                (size,) = struct.unpack(">I", self._exactly(4))
                self._on_command(parse_command(memoryview(self._exactly(size))).body)
        except (ConnectionError, EOFError):
            self._connection.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._connection.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def _send(self, body: Any) -> None:
        self._connection.sendall(encode_command(body))

    def _on_command(self, body: Any) -> None:
        match body:
            case pb.CommandConnect():
                self._send(pb.CommandConnected(server_version="replay", protocol_version=pb.v19))
            case pb.CommandPing():
                self._send(pb.CommandPong())
            case pb.CommandPartitionedTopicMetadata():
                self._send(
                    pb.CommandPartitionedTopicMetadataResponse(
                        request_id=body.request_id,
                        partitions=0,
                        response=pb.CommandPartitionedTopicMetadataResponse.Success,
                    )
                )
            case pb.CommandLookupTopic():
                self._send(
                    pb.CommandLookupTopicResponse(
                        request_id=body.request_id,
                        brokerServiceUrl=self._url,
                        response=pb.CommandLookupTopicResponse.Connect,
                        authoritative=True,
                    )
                )
            case pb.CommandSubscribe():
                self._sent[body.consumer_id] = self._permits[body.consumer_id] = 0
                self._send(pb.CommandSuccess(request_id=body.request_id))
            case pb.CommandFlow():
                self._permits[body.consumer_id] += body.messagePermits
                self._deliver(body.consumer_id)
            case pb.CommandAck() if body.HasField("request_id"):
                self._send(
                    pb.CommandAckResponse(consumer_id=body.consumer_id, request_id=body.request_id)
                )
            case pb.CommandCloseConsumer():
                self._send(pb.CommandSuccess(request_id=body.request_id))

    def _deliver(self, consumer_id: int) -> None:
        parts: list[bytes] = []
        while self._permits[consumer_id] > 0:
            number = self._sent[consumer_id]
            self._sent[consumer_id] += 1
            self._permits[consumer_id] -= self._messages
            header = message_header(
                consumer_id=consumer_id, ledger_id=1, entry_id=number, entry_size=len(self._entry)
            )
            parts += [header, self._entry]
        if parts:
            self._connection.sendall(b"".join(parts))


def entry_of(messages: int) -> bytes:
    header = EntryHeader("producer", 1_700_000_000_000)
    if messages == 1:
        return b"".join(encode_message(OutgoingMessage(BODY, 0), header))
    batch = [OutgoingMessage(BODY, 20_000 + number) for number in range(messages)]
    return b"".join(encode_batch(batch, header))


def serve(listener: socket.socket, url: str, messages: int) -> None:
    entry = entry_of(messages)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        replay = Replay(connection, url, entry, messages)
        threading.Thread(target=replay.run, daemon=True).start()


def read(client: str, url: str, kind: str, count: int) -> Measured:
    """Receive and acknowledge `count` messages. A `kind` of "Reader" only receives them."""
    module = importlib.import_module(client)
    with_client = connect(client, url)
    if kind == "Reader":
        take = with_client.create_reader("t", module.MessageId.earliest).read_next

        def receive(messages: int) -> None:
            for _ in range(messages):
                take(RECEIVE_TIMEOUT_MS)
    else:
        consumer = with_client.subscribe("t", "s", getattr(module.ConsumerType, kind))

        def receive(messages: int) -> None:
            for _ in range(messages):
                consumer.acknowledge(consumer.receive(RECEIVE_TIMEOUT_MS))

    receive(WARM_UP)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    receive(count)
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    with_client.close()
    return count / seconds, cpu_s / count * 1e6


def measure(kinds: Sequence[str], batches: Sequence[int], rounds: int) -> None:
    for messages in batches:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"pulsar://127.0.0.1:{listener.getsockname()[1]}"
            server = multiprocessing.Process(
                target=serve, args=(listener, url, messages), daemon=True
            )
            server.start()
            for kind in kinds:
                _compare(url, kind, messages, rounds)
            server.terminate()
            server.join()


def _compare(url: str, kind: str, messages: int, rounds: int) -> None:
    count = MESSAGES if messages > 1 else MESSAGES // 10
    found: dict[str, list[Measured]] = {"pulsar": [], "magnetar": []}
    for _ in range(rounds):
        for client, measured in found.items():
            measured.append(alone(read, client, url, kind, count))
    theirs = statistics.median(rate for rate, _ in found["pulsar"])
    for client, measured in found.items():
        rate = statistics.median(rate for rate, _ in measured)
        cpu_us = statistics.median(cpu_us for _, cpu_us in measured)
        print(
            f"{kind:<10} entries of {messages:>3}  {client:<9} {rate:>9,.0f} messages/s"
            f"  {rate / theirs:.2f}  client CPU {cpu_us:5.2f} us",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", default=["Reader", "Exclusive", "Shared"])
    parser.add_argument("--batches", type=int, nargs="*", default=[BATCH, 1])
    options = parser.parse_args()
    measure(options.kinds, options.batches, options.rounds)
