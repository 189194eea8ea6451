"""The health check: this broker publishes a message to its own heartbeat topic and reads it.

The topic is `non-persistent://pulsar/<host:port>/heartbeat`, as in Pulsar. No other request can
create this topic. Lists without system topics leave it out. Its messages are not stored.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from magnetar.broker.catalog.reserved import HEARTBEAT, SYSTEM_TENANT
from magnetar.broker.errors import BrokerError
from magnetar.broker.operations.errors import NamespaceExists, TenantExists
from magnetar.broker.operations.namespaces import create_namespace, create_tenant
from magnetar.broker.operations.topics import require_owner
from magnetar.broker.topic.contract import (
    ClientInfo,
    ProducerRequest,
    SubscribeRequest,
    SubscriptionType,
)
from magnetar.metadata.policies import Policies, TenantRecord
from magnetar.protos.framing import send_header
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_message
from magnetar.protos.names import Domain, TopicName
from magnetar.protos.sends import read_sends

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from magnetar.broker.broker import Broker
    from magnetar.broker.dispatch.dispatcher import EntryDetail
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.topic.contract import CloseReason
    from magnetar.protos.sends import SendRun

TIMEOUT_S: Final = 10.0

_HERE: Final = ClientInfo("health check", "")


class Unhealthy(BrokerError):
    """The message of a health check did not come back."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"health check: {topic}: {why}")
        self.topic = topic
        self.why = why


class _Ends:
    """The events of the producer and of the consumer. `came` is set when the message has arrived or
    the check has failed."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.error: Exception | None = None

    def receipts(self, ledger: int, receipts: Iterable[tuple[int, int, int]]) -> None:
        """Ignored: the arrival of the message proves more."""

    def send_error(self, sequence_id: int, error: Exception) -> None:
        self.error = error
        self.came.set()

    def writable(self) -> bool:
        return True

    def deliver(self, entries: Sequence[StoredEntry], details: Mapping[int, EntryDetail]) -> None:
        self.came.set()

    def ready(self, producer: object) -> None:
        """Ignored: the producer does not wait for exclusive access."""

    def refused(self, error: Exception) -> None:
        """Ignored: only a producer that waits for exclusive access can be refused later."""

    def active_changed(self, active: bool) -> None:
        """Ignored: there is only one consumer."""

    def reached_end(self) -> None:
        """Ignored: the topic has no end."""

    def closed(self, reason: CloseReason) -> None:
        self.error = Unhealthy(HEARTBEAT, reason.value)
        self.came.set()

    async def probe(self) -> bool:
        return True


async def check_health(broker: Broker) -> None:
    """Publish a message and read it. Raises Unhealthy, ServedElsewhere, and the errors of opening a
    topic."""
    name = heartbeat_of(broker)
    await _ensure_namespace(broker, name)
    await require_owner(broker, name)
    topic = await broker.topic(name)
    ends = _Ends()
    producer = await topic.add_producer(ProducerRequest(0, "", _HERE), ends)
    try:
        exclusive = SubscriptionType.EXCLUSIVE
        request = SubscribeRequest(0, producer.name, exclusive, _HERE, durable=False)
        consumer = await topic.subscribe(request, ends)
        try:
            consumer.flow(1)
            producer.publish(_heartbeat(producer.name), asyncio.get_running_loop().time())
            async with asyncio.timeout(TIMEOUT_S):
                await ends.came.wait()
        except TimeoutError:
            raise Unhealthy(str(name), f"no message within {TIMEOUT_S:g} s") from None
        finally:
            consumer.close_nowait()
    finally:
        producer.close_nowait()
    if ends.error is not None:
        raise Unhealthy(str(name), str(ends.error))


def heartbeat_of(broker: Broker) -> TopicName:
    address = urlsplit(broker.me.http_url).netloc or str(broker.me.broker)
    namespace = re.sub(r"[^-=:.\w]", "-", address, flags=re.ASCII)
    return TopicName(Domain.NON_PERSISTENT, SYSTEM_TENANT, namespace, HEARTBEAT)


def _heartbeat(producer: str) -> SendRun:
    header = EntryHeader(producer, publish_time_ms=0)
    entry = b"".join(encode_message(OutgoingMessage(b"heartbeat", 0), header))
    frame = send_header(producer_id=0, sequence_id=0, entry_size=len(entry)) + entry
    run = read_sends(memoryview(frame), 0)
    assert run is not None
    return run


async def _ensure_namespace(broker: Broker, name: TopicName) -> None:
    with suppress(TenantExists):
        await create_tenant(broker, SYSTEM_TENANT, TenantRecord())
    with suppress(NamespaceExists):
        await create_namespace(broker, name.namespace_name, 1, Policies())
