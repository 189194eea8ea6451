"""Measures the cost of publishing to one topic, to 1,000 topics at once, and with deduplication.

Run it with `python -m benchmarks.publishing`. One connection sends unbatched messages of 1 KB to
`magnetar standalone`, with WINDOW messages in flight. The cases take turns. The frames are encoded
before the measurement, so the rates and the CPU time are those of the server. Each of the 1,000
topics in turn gets one message, or IN_A_ROW messages, as from a client with a queue for each
producer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import httpx

from benchmarks.processes import cpu_s
from magnetar.local_process import standalone
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_message

if TYPE_CHECKING:
    from collections.abc import Sequence

TOPICS: Final = 1_000
MESSAGES: Final = 20_000
WINDOW: Final = 10_000
IN_A_ROW: Final = 10
BYTES: Final = 1_024
ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Published:
    per_s: float
    cpu_us: float  # the CPU time of the server, for one message


class Connection:
    """One connection with producers, each on a topic of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = framing.FrameDecoder()
        self._sent: dict[int, int] = {}  # producer id -> sequence ids used

    @classmethod
    async def open(cls, url: str, topics: Sequence[str]) -> Connection:
        """Connect, with producer n on the n-th topic."""
        address = urlsplit(url)
        made = cls(*await asyncio.open_connection(address.hostname, address.port))
        connect = pb.CommandConnect(client_version="bench", protocol_version=20)
        made._writer.write(framing.encode_command(connect))
        await made._count(pb.BaseCommand.CONNECTED, 1)
        for topic in topics:  # the first lookup takes the bundle
            lookup = pb.CommandLookupTopic(topic=topic, request_id=1)
            made._writer.write(framing.encode_command(lookup))
        await made._count(pb.BaseCommand.LOOKUP_RESPONSE, len(topics))
        for number, topic in enumerate(topics):
            body = pb.CommandProducer(
                topic=topic, producer_id=number, request_id=number, producer_name=f"p{number}"
            )
            made._writer.write(framing.encode_command(body))
        await made._count(pb.BaseCommand.PRODUCER_SUCCESS, len(topics))
        return made

    def encoded(self, producers: Sequence[int], count: int, in_a_row: int = 1) -> list[bytes]:
        """The SENDs of `count` messages: `in_a_row` of each producer in turn."""
        payload = os.urandom(BYTES)
        frames = []
        for number in range(count):
            producer = producers[number // in_a_row % len(producers)]
            sequence_id = self._sent.get(producer, 0)
            self._sent[producer] = sequence_id + 1
            header = EntryHeader(f"p{producer}", int(time.time_ns() // 1_000_000))
            entry = b"".join(encode_message(OutgoingMessage(payload, sequence_id), header))
            body = pb.CommandSend(producer_id=producer, sequence_id=sequence_id)
            frames.append(b"".join(framing.encode_payload_command(body, [entry])))
        return frames

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send the frames. Returns when all messages are stored."""
        sent = stored = 0
        while stored < len(frames):
            more = frames[sent : stored + WINDOW]
            self._writer.writelines(more)
            sent += len(more)
            stored += await self._some(pb.BaseCommand.SEND_RECEIPT)

    async def _count(self, kind: int, count: int) -> None:
        while count > 0:
            count -= await self._some(kind)

    async def _some(self, kind: int) -> int:
        """Read once. Returns the number of commands of this kind in the read."""
        found = 0
        data = await self._reader.read(1 << 20)
        assert data, "the server closed the connection"
        for frame in self._decoder.feed(data):
            command = framing.parse_command(frame)
            if command.type == pb.BaseCommand.PING:
                self._writer.write(framing.encode_command(pb.CommandPong()))
                continue
            assert command.type == kind, command.body
            found += 1
        return found

    def close(self) -> None:
        self._writer.close()


async def measure(
    connection: Connection, producers: Sequence[int], in_a_row: int, pid: int
) -> Published:
    frames = connection.encoded(producers, MESSAGES, in_a_row)
    began_s, before_s = time.perf_counter(), cpu_s(pid)
    await connection.send(frames)
    spent_s = time.perf_counter() - began_s
    return Published(MESSAGES / spent_s, (cpu_s(pid) - before_s) / MESSAGES * 1e6)


async def measure_all(url: str, admin_url: str, pid: int) -> None:
    many = [f"persistent://public/default/many-{number}" for number in range(TOPICS)]
    plain, dedup = "persistent://public/default/plain", "persistent://public/default/dedup"
    connection = await Connection.open(url, [plain, dedup, *many])
    path = "admin/v2/persistent/public/default/dedup"
    async with httpx.AsyncClient(base_url=admin_url, timeout=60) as admin:
        switched = await admin.post(f"{path}/deduplicationEnabled", json=True)
        switched.raise_for_status()
        while (await admin.get(f"{path}/stats")).json()["deduplicationStatus"] != "Enabled":  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    every = range(2, TOPICS + 2)
    cases: dict[str, tuple[Sequence[int], int]] = {
        "one topic": ([0], 1),
        "one topic, deduplicated": ([1], 1),
        f"{TOPICS} topics, one message of each in turn": (every, 1),
        f"{TOPICS} topics, {IN_A_ROW} messages of each in turn": (every, IN_A_ROW),
    }
    found: dict[str, list[Published]] = {name: [] for name in cases}
    for producers, _ in cases.values():  # the topics create their ledgers
        await connection.send(connection.encoded(producers, MESSAGES))
    for _ in range(ROUNDS):
        for name, (producers, in_a_row) in cases.items():
            found[name].append(await measure(connection, producers, in_a_row, pid))
    connection.close()
    base = found["one topic"]
    for name, runs in found.items():
        rate = statistics.median(run.per_s for run in runs)
        cpu = statistics.median(run.cpu_us for run in runs)
        rates = [run.per_s / other.per_s for run, other in zip(runs, base, strict=True)]
        costs = [run.cpu_us / other.cpu_us for run, other in zip(runs, base, strict=True)]
        print(
            f"{name:<44} {rate:>9,.0f}/s ({statistics.median(rates):.2f} of one topic),"
            f" {cpu:.0f} us of CPU a message ({statistics.median(costs):.2f})",
            flush=True,
        )


def report() -> None:
    """Run and print all cases."""
    print(
        "\npublishing of 1 KB, unbatched, embedded metadata (targets: 0.50 of the rate of one topic"
        " with 1,000 topics, 0.95 with deduplication)"
    )
    folder = Path(tempfile.mkdtemp(prefix="magnetar-bench-"))
    process = standalone(folder)
    try:
        process.start()
        assert process.pid is not None
        pulsar, admin = (process.ports[port] for port in ("pulsar", "http"))
        urls = f"pulsar://127.0.0.1:{pulsar}", f"http://127.0.0.1:{admin}"
        asyncio.run(measure_all(*urls, process.pid))
    finally:
        process.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    report()
