"""The honest clients, in a process of their own: `python -m siege.honest URLS` until SIGTERM.

One producer with a consumer on each transport. Prints one line of JSON at the end.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import asdict, dataclass, field

from siege.programs import Target
from siege.stuck import describe_on_signal

from magnetar.protos import pulsar_pb2 as pb

TRANSPORTS = ("pulsar", "grpc")
PAUSE_S = 0.02  # the pause between two messages


@dataclass
class Service:
    """The results of an honest client."""

    transport: str
    sent: int = 0
    latencies: list[float] = field(default_factory=list)
    slowest: list[float] = field(default_factory=list)  # latency, its parts: sent, receipt, message
    trouble: str = ""

    def describe(self) -> str:
        ordered = sorted(self.latencies) or [0.0]
        p50, p99 = (ordered[int(part * (len(ordered) - 1))] * 1_000 for part in (0.5, 0.99))
        return (
            f"honest client over {self.transport}: {len(self.latencies)} of {self.sent} delivered,"
            f" p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {ordered[-1] * 1_000:.0f} ms {self.trouble}"
            f" (slowest: {self._slowest_text()})"
        )

    def add(self, began: float, sent: float, receipt: float, message: float) -> None:
        parts = [max(receipt, message) - began, sent - began, receipt - began, message - began]
        self.latencies.append(parts[0])
        self.slowest = max(self.slowest, parts)

    def _slowest_text(self) -> str:
        names = ("sent", "receipt", "delivered")
        pairs = zip(names, self.slowest[1:], strict=False)
        return ", ".join(f"{name} after {after * 1_000:.0f} ms" for name, after in pairs)


async def be_honest(target: Target, service: Service, stop: asyncio.Event) -> None:
    """Repeat: publish a message, wait for its receipt and its delivery, acknowledge it."""
    loop = asyncio.get_running_loop()
    topic = f"persistent://public/default/honest-{service.transport}"
    try:
        async with target.wire(service.transport) as client:
            await client.connect()
            await client.produce(topic, producer_name="honest")
            await client.subscribe(topic)
            await client.flow(1_000_000)
            print("ready", flush=True)
            while not stop.is_set():
                began = loop.time()
                await client.publish(f"m{service.sent}", sequence_id=service.sent)
                service.sent += 1
                sent, receipt, message = loop.time(), 0.0, 0.0
                while not (receipt and message):
                    command = await client.receive()
                    if isinstance(command.body, pb.CommandSendReceipt):
                        receipt = loop.time()
                    elif isinstance(command.body, pb.CommandMessage):
                        message = loop.time()
                        ack = pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual)
                        ack.message_id.append(command.body.message_id)
                        await client.send(ack)
                    else:
                        raise EOFError(f"the broker said {command.body}")
                service.add(began, sent, receipt, message)
                await asyncio.sleep(PAUSE_S)
    except (OSError, EOFError, TimeoutError, AssertionError) as error:
        service.trouble = f"{type(error).__name__}: {error}"


async def main(urls: dict[str, str]) -> None:
    stop = asyncio.Event()
    describe_on_signal()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    services = [Service(transport) for transport in TRANSPORTS]
    async with asyncio.TaskGroup() as group:
        for service in services:
            group.create_task(be_honest(Target(urls), service, stop))
    print(json.dumps([asdict(service) for service in services]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
