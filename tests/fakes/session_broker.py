"""Brokers in memory with the real session frames, for the client's tests.

They keep entries in lists, obey permits and acknowledgements, and fail when a test says so. They
have no durability and no backlog limits, and are not fast.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from magnetar.client.ids import bits_of, key_of, words_of
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import parse_entry
from magnetar.protos.framing import (
    encode_command,
    encode_payload_command,
    parse_command,
    split_frames,
)
from magnetar.protos.receipts import send_receipt_frames
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.frames import Outbox
from magnetar.runtime.memory_stream import memory_stream_pair, serve_memory_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.runtime.frames import FrameStream

Key = tuple[int, int]
UNASKED = 2**64 - 1


@dataclass
class Topic:
    """The entries of a topic and its subscriptions; shared by all brokers."""

    name: str
    entries: dict[Key, bytes] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    ledger: int = 1
    hold_receipts: bool = False
    send_errors: deque[int] = field(default_factory=deque)  # answers to the next SENDs
    unsubscribe_errors: deque[int] = field(default_factory=deque)

    def append(self, entry: bytes) -> Key:
        last = max(self.entries, default=(0, -1))
        key = (self.ledger, last[1] + 1 if last[0] == self.ledger else 0)
        self.entries[key] = entry
        for subscription in self.subscriptions.values():
            subscription.dispatch()
        return key

    def messages_of(self, key: Key) -> tuple[int, bool]:
        view = parse_entry(self.entries[key])
        return view.num_messages, view.is_batch


@dataclass
class Subscription:
    """The unacknowledged messages, and the consumers that hold them."""

    topic: Topic
    name: str
    shared: bool
    durable: bool
    unacked: dict[Key, int]  # bits of each entry's unacknowledged messages
    consumers: list[Consumer] = field(default_factory=list)
    out: dict[Key, Consumer] = field(default_factory=dict)  # delivered, not acknowledged
    deliveries: dict[Key, int] = field(default_factory=dict)
    acks: list[pb.CommandAck] = field(default_factory=list)

    def dispatch(self) -> None:
        last = max(self.unacked, default=self.mark)
        for key in sorted(self.topic.entries):
            if key not in self.unacked and key > last:
                self.unacked[key] = (1 << self.topic.messages_of(key)[0]) - 1
        waiting = [key for key in sorted(self.unacked) if key not in self.out]
        for key in waiting:
            able = [consumer for consumer in self.consumers if consumer.permits > 0]
            if not able:
                return
            consumer = max(able, key=lambda one: one.permits)
            self.out[key] = consumer
            consumer.deliver(key, self.unacked[key])

    mark: Key = (-1, -1)  # everything up to here was acknowledged before the subscription began

    def acknowledge(self, key: Key, unacked: int) -> None:
        left = self.unacked.get(key, 0) & unacked
        if left:
            self.unacked[key] = left
        else:
            self.mark = max(self.mark, key) if key == min(self.unacked, default=key) else self.mark
            self.unacked.pop(key, None)
            self.out.pop(key, None)

    def release(self, consumer: Consumer, keys: set[Key] | None = None) -> None:
        """Redeliver the entries that `consumer` holds."""
        for key in [key for key, holder in self.out.items() if holder is consumer]:
            if keys is None or key in keys:
                del self.out[key]


@dataclass(eq=False)
class Consumer:
    session: Session
    consumer_id: int
    subscription: Subscription
    epoch: int | None = None
    permits: int = 0

    def deliver(self, key: Key, unacked: int) -> None:
        topic = self.subscription.topic
        size, is_batch = topic.messages_of(key)
        seen = self.subscription.deliveries
        command = pb.CommandMessage(
            consumer_id=self.consumer_id,
            message_id=pb.MessageIdData(ledgerId=key[0], entryId=key[1]),
            redelivery_count=seen.get(key, 0) if self.subscription.shared else 0,
        )
        is_marked = self.session.broker.drains_consumers or not self.subscription.shared
        if self.epoch is not None and is_marked:
            command.consumer_epoch = self.epoch
        if is_batch and unacked != (1 << size) - 1:
            command.ack_set.extend(_words(unacked))
        seen[key] = seen.get(key, 0) + 1
        self.permits -= unacked.bit_count()
        entry = self.session.broker.cluster.damage(topic.entries[key])
        self.session.outbox.put(*encode_payload_command(command, [entry]))


class Session:
    """One stream of a client."""

    def __init__(self, broker: Broker, stream: FrameStream) -> None:
        self.broker = broker
        self.stream = stream
        self.outbox = Outbox(stream.send, pending_bytes_max=1 << 20)
        self.producers: dict[int, tuple[Topic, str]] = {}
        self.consumers: dict[int, Consumer] = {}
        self.watchers: list[int] = []  # ids of watches of topics
        self.commands: list[Any] = []  # bodies, in order

    async def serve(self, _: FrameStream) -> None:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self.outbox.run())
            try:
                while True:
                    frame = await self.stream.receive()
                    await self.broker.reads.wait()
                    for part in split_frames(frame):
                        command = parse_command(part)
                        self.commands.append(command.body)
                        self.handle(command.body, command.entry)
            except StreamClosed:
                pass
            finally:
                sending.cancel()
                self.end()

    def end(self) -> None:
        for consumer in list(self.consumers.values()):
            self.remove(consumer)

    def remove(self, consumer: Consumer) -> None:
        self.consumers.pop(consumer.consumer_id, None)
        subscription = consumer.subscription
        subscription.consumers.remove(consumer)
        subscription.release(consumer)
        subscription.dispatch()

    def send(self, body: Any) -> None:
        self.outbox.put_control(encode_command(body))

    def handle(self, body: Any, entry: memoryview | None) -> None:
        scripted = self.broker.scripted.get(type(body))
        if scripted:
            answer = scripted.popleft()
            if answer is not None:  # None: no answer at all
                if answer.DESCRIPTOR.fields_by_name.get("request_id"):
                    answer.request_id = body.request_id
                self.send(answer)
            return
        getattr(self, f"on_{type(body).__name__.removeprefix('Command').lower()}")(body, entry)
        then = self.broker.cluster.afterwards.pop(type(body), None)
        if then is not None:
            then(self, body)

    def on_connect(self, body: Any, _: object) -> None:
        flags = pb.FeatureFlags(
            supports_topic_watchers=self.broker.announces_topics,
            supports_drain_consumer=self.broker.drains_consumers,
            supports_ordered_negative_acks=self.broker.orders_negative_acks,
        )
        self.send(
            pb.CommandConnected(server_version="fake", protocol_version=21, feature_flags=flags)
        )

    def on_ping(self, body: Any, _: object) -> None:
        if not self.broker.silent:
            self.send(pb.CommandPong())

    def on_pong(self, body: Any, _: object) -> None:
        pass

    def on_partitionedtopicmetadata(self, body: Any, _: object) -> None:
        response = pb.CommandPartitionedTopicMetadataResponse
        cluster = self.broker.cluster
        partitions = cluster.partitions.get(body.topic, 0)
        if not (body.metadata_auto_creation_enabled or partitions or body.topic in cluster.topics):
            self.send(
                response(
                    request_id=body.request_id,
                    response=response.Failed,
                    error=pb.TopicNotFound,
                    message="no such topic",
                )
            )
            return
        self.send(
            response(request_id=body.request_id, partitions=partitions, response=response.Success)
        )

    def on_gettopicsofnamespace(self, body: Any, _: object) -> None:
        response = pb.CommandGetTopicsOfNamespaceResponse
        self.send(response(request_id=body.request_id, topics=sorted(self.broker.cluster.topics)))

    def on_watchtopiclist(self, body: Any, _: object) -> None:
        self.watchers.append(body.watcher_id)
        response = pb.CommandWatchTopicListSuccess
        names = sorted(self.broker.cluster.topics)
        self.send(
            response(
                request_id=body.request_id, watcher_id=body.watcher_id, topic=names, topics_hash=""
            )
        )

    def on_watchtopiclistclose(self, body: Any, _: object) -> None:
        self.watchers.remove(body.watcher_id)
        self.send(pb.CommandSuccess(request_id=body.request_id))

    def on_lookuptopic(self, body: Any, _: object) -> None:
        response = pb.CommandLookupTopicResponse
        owner = self.broker.cluster.owner(body.topic)
        is_here = owner == self.broker.url
        self.send(
            response(
                request_id=body.request_id,
                brokerServiceUrl=owner,
                response=response.Connect if is_here else response.Redirect,
                authoritative=True,
            )
        )

    def on_producer(self, body: Any, _: object) -> None:
        cluster = self.broker.cluster
        if not self.is_owner(body):
            return
        name = body.producer_name or f"fake-{next(cluster.names)}"
        self.producers[body.producer_id] = cluster.topic(body.topic), name
        version = self.version_of(body) if body.HasField("schema") else None
        self.send(
            pb.CommandProducerSuccess(
                request_id=body.request_id,
                producer_name=name,
                last_sequence_id=cluster.last_sequence_ids.get(name, -1),
                schema_version=version,
            )
        )

    def version_of(self, body: Any) -> bytes:
        """The version of the schema that a command presents; a new one is added."""
        versions = self.broker.cluster.schemas.setdefault(body.topic, [])
        if body.schema not in versions:
            versions.append(body.schema)
        return versions.index(body.schema).to_bytes(8)

    def on_getschema(self, body: Any, _: object) -> None:
        versions = self.broker.cluster.schemas.get(body.topic, [])
        number = int.from_bytes(body.schema_version)
        answer = pb.CommandGetSchemaResponse(request_id=body.request_id)
        if number < len(versions):
            answer.schema.CopyFrom(versions[number])
        else:
            answer.error_code, answer.error_message = pb.TopicNotFound, "no such version"
        self.send(answer)

    def on_getorcreateschema(self, body: Any, _: object) -> None:
        if self.is_owner(body):
            self.send(
                pb.CommandGetOrCreateSchemaResponse(
                    request_id=body.request_id, schema_version=self.version_of(body)
                )
            )

    def is_owner(self, body: Any) -> bool:
        if self.broker.cluster.owner(body.topic) == self.broker.url:
            return True
        self.error(body, pb.ServiceNotReady, "not the owner")
        return False

    def error(self, body: Any, error: Any, message: str) -> None:
        self.send(pb.CommandError(request_id=body.request_id, error=error, message=message))

    def on_send(self, body: Any, entry: memoryview | None) -> None:
        assert entry is not None
        producer = self.producers.get(body.producer_id)
        if producer is None:
            return
        topic, _ = producer
        self.broker.cluster.sends.append((body.sequence_id, bytes(entry)))
        if topic.send_errors:
            error = pb.CommandSendError(
                producer_id=body.producer_id, sequence_id=body.sequence_id, message="scripted"
            )
            error.error = topic.send_errors.popleft()  # type: ignore[assignment]
            self.send(error)
            return
        key = topic.append(bytes(entry))
        if not topic.hold_receipts:
            self.outbox.put_control(
                send_receipt_frames(
                    producer_id=body.producer_id,
                    ledger_id=key[0],
                    receipts=[(body.sequence_id, body.highest_sequence_id, key[1])],
                )
            )

    def on_closeproducer(self, body: Any, _: object) -> None:
        self.producers.pop(body.producer_id, None)
        self.send(pb.CommandSuccess(request_id=body.request_id))

    def on_subscribe(self, body: Any, _: object) -> None:
        if not self.is_owner(body):
            return
        topic = self.broker.cluster.topic(body.topic)
        subscription = topic.subscriptions.get(body.subscription)
        if subscription is None or not body.durable:
            subscription = Subscription(
                topic,
                body.subscription,
                body.subType == pb.CommandSubscribe.Shared,
                body.durable,
                {},
            )
            topic.subscriptions[body.subscription] = subscription
            if body.durable:
                earliest = body.initialPosition == pb.CommandSubscribe.Earliest
                self.place(subscription, (-1, -1) if earliest else (2**63 - 1, 0))
            else:
                self.place(subscription, key_of(body.start_message_id))
        elif subscription.consumers and not subscription.shared:
            self.error(body, pb.ConsumerBusy, "taken")
            return
        consumer = Consumer(self, body.consumer_id, subscription)
        if body.HasField("consumer_epoch"):
            consumer.epoch = body.consumer_epoch
        subscription.consumers.append(consumer)
        self.consumers[body.consumer_id] = consumer
        self.send(pb.CommandSuccess(request_id=body.request_id))

    def place(self, subscription: Subscription, first: Key) -> None:
        topic = subscription.topic
        subscription.out.clear()
        subscription.unacked = {
            key: (1 << topic.messages_of(key)[0]) - 1 for key in topic.entries if key >= first
        }
        before = [key for key in topic.entries if key < first]
        subscription.mark = max(before, default=(-1, -1))

    def on_flow(self, body: Any, _: object) -> None:
        consumer = self.consumers.get(body.consumer_id)
        if consumer is not None:
            consumer.permits += body.messagePermits
            consumer.subscription.dispatch()

    def on_ack(self, body: Any, _: object) -> None:
        consumer = self.consumers.get(body.consumer_id)
        if consumer is None:
            return
        subscription = consumer.subscription
        subscription.acks.append(body)
        for data in body.message_id:
            key, bits = key_of(data), bits_of(data.ack_set) if data.ack_set else 0
            if body.ack_type == pb.CommandAck.Cumulative:
                for before in [before for before in subscription.unacked if before < key]:
                    subscription.acknowledge(before, 0)
            subscription.acknowledge(key, bits)
        if body.HasField("request_id") and not self.broker.hold_acks:
            self.send(
                pb.CommandAckResponse(consumer_id=body.consumer_id, request_id=body.request_id)
            )

    def on_negativeack(self, body: Any, _: object) -> None:
        """Keep the returned entries until another entry is dispatched."""
        consumer = self.consumers[body.consumer_id]
        consumer.subscription.release(consumer, {(it.ledgerId, it.entryId) for it in body.returned})
        self.send(pb.CommandSuccess(request_id=body.request_id))

    def on_redeliverunacknowledgedmessages(self, body: Any, _: object) -> None:
        consumer = self.consumers[body.consumer_id]
        keys = {key_of(data) for data in body.message_ids} or None
        if body.HasField("consumer_epoch"):
            consumer.epoch = body.consumer_epoch
        consumer.subscription.release(consumer, keys)
        consumer.subscription.dispatch()

    def on_seek(self, body: Any, _: object) -> None:
        subscription = self.consumers[body.consumer_id].subscription
        consumers = list(subscription.consumers)
        subscription.consumers.clear()
        for consumer in consumers:
            del consumer.session.consumers[consumer.consumer_id]
            consumer.session.send(
                pb.CommandCloseConsumer(consumer_id=consumer.consumer_id, request_id=UNASKED)
            )
        self.place(subscription, key_of(body.message_id))
        self.send(pb.CommandSuccess(request_id=body.request_id))

    def on_getlastmessageid(self, body: Any, _: object) -> None:
        subscription = self.consumers[body.consumer_id].subscription
        topic = subscription.topic
        last = max(topic.entries, default=(-1, -1))
        index = -1
        if topic.entries and topic.messages_of(last)[1]:
            index = topic.messages_of(last)[0] - 1
        answer = pb.CommandGetLastMessageIdResponse(request_id=body.request_id)
        answer.last_message_id.CopyFrom(_data(last))
        answer.last_message_id.batch_index = index
        answer.consumer_mark_delete_position.CopyFrom(_data(subscription.mark))
        self.send(answer)

    def on_unsubscribe(self, body: Any, _: object) -> None:
        consumer = self.consumers[body.consumer_id]
        if errors := consumer.subscription.topic.unsubscribe_errors:
            refusal = pb.CommandError(request_id=body.request_id, message="x")
            refusal.error = errors.popleft()  # type: ignore[assignment]
            self.send(refusal)
            return
        self.remove(consumer)
        del consumer.subscription.topic.subscriptions[consumer.subscription.name]
        self.send(pb.CommandSuccess(request_id=body.request_id))

    def on_closeconsumer(self, body: Any, _: object) -> None:
        consumer = self.consumers.get(body.consumer_id)
        if consumer is not None:
            self.remove(consumer)
        self.send(pb.CommandSuccess(request_id=body.request_id))


class Broker:
    """A broker at one address."""

    def __init__(self, cluster: FakeBrokers, url: str) -> None:
        self.cluster = cluster
        self.url = url
        self.alive = True
        self.silent = False  # True: PING gets no answer
        self.reads = asyncio.Event()  # cleared: the broker does not read its connections
        self.reads.set()
        self.hold_acks = False
        self.announces_topics = True
        self.drains_consumers = False
        self.orders_negative_acks = True
        self.sessions: list[Session] = []
        self.scripted: dict[type, deque[Any]] = {}

    def script(self, command: type, *answers: Any) -> None:
        """Answer the next commands of this type with these bodies (None: no answer)."""
        self.scripted.setdefault(command, deque()).extend(answers)

    def commands(self, kind: type) -> list[Any]:
        """The bodies of this type that arrived, over all sessions."""
        return [
            body for session in self.sessions for body in session.commands if type(body) is kind
        ]

    def kill(self) -> None:
        """Kill the broker: its sessions break, and its port refuses connections."""
        self.alive = False
        for session in self.sessions:
            session.stream.abort("connection lost")  # type: ignore[attr-defined]
            session.end()


class FakeBrokers:
    """Brokers, their shared state, and a dialer to them.

    Inside `async with`, the object owns the brokers' tasks. Otherwise they belong to the loop that
    dials: in this way the thread of a synchronous client runs its brokers.
    """

    def __init__(self, *urls: str) -> None:
        self.brokers = {url: Broker(self, url) for url in urls}
        self.topics: dict[str, Topic] = {}
        self.owners: dict[str, str] = {}
        self.partitions: dict[str, int] = {}
        # Keyed by producer name, as with deduplication. The brokers drop no duplicates themselves.
        self.last_sequence_ids: dict[str, int] = {}
        self.schemas: dict[str, list[pb.Schema]] = {}  # the versions of each topic
        self.sends: list[tuple[int, bytes]] = []  # every SEND that arrived
        self.names = iter(range(1, 1000))
        # A change of each entry before its delivery.
        self.damage: Callable[[bytes], bytes] = lambda entry: entry
        # A further action of a session, after the next command of this type.
        self.afterwards: dict[type, Callable[[Session, Any], None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def topic(self, name: str) -> Topic:
        return self.topics.setdefault(name, Topic(name))

    def announce(self, *, new: Sequence[str] = (), deleted: Sequence[str] = ()) -> None:
        """Create and delete topics, and tell the clients that watch."""
        for name in new:
            self.topic(name)
        for name in deleted:
            del self.topics[name]
        for broker in self.brokers.values():
            for session in broker.sessions:
                for watcher_id in session.watchers:
                    session.send(
                        pb.CommandWatchTopicUpdate(
                            watcher_id=watcher_id,
                            new_topics=new,
                            deleted_topics=deleted,
                            topics_hash="",
                        )
                    )

    def owner(self, topic: str) -> str:
        return self.owners.get(topic, next(iter(self.brokers)))

    def take_over(self, url: str) -> None:
        """Move all topics to another broker."""
        for name, topic in self.topics.items():
            self.owners[name] = url
            topic.ledger += 1
            topic.hold_receipts = False
            for subscription in topic.subscriptions.values():
                for consumer in list(subscription.consumers):
                    if consumer.session.broker.url != url:
                        consumer.session.remove(consumer)

    def open(self, broker: str, _: object) -> FrameStream:
        """A dialer: returns a stream to the address."""
        client, server = memory_stream_pair("client", broker, frames_max=16)
        target = self.brokers.get(broker)
        if target is None or not target.alive:
            client.abort("connection refused")
            return client
        session = Session(target, server)
        target.sessions.append(session)
        owner = self._group or asyncio.get_running_loop()
        self._tasks.append(owner.create_task(serve_memory_stream(server, session.serve)))
        return client

    async def close(self) -> None:
        """A dialer without shared state to close."""

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._group is not None
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(*error)  # type: ignore[arg-type]


def _data(key: Key) -> pb.MessageIdData:
    return pb.MessageIdData(ledgerId=key[0] % 2**64, entryId=key[1] % 2**64)


def _words(bits: int) -> list[int]:
    return list(words_of(bits))
