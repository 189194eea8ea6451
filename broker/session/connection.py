"""The shell of a session: reads frames, feeds the machine, carries out what comes back.

One reader (this task), one writer (the outbox) and one timer live as long as the connection.
Requests that may wait (LOOKUP, PRODUCER, SUBSCRIBE, …) run beside each other, each in its own task;
SEND, ACK and FLOW are handled in the reader's own step, a frame at a time, without a task or a
queue between.

Back-pressure: while a topic has too much on its way to the bookies, the reader of whoever publishes
to it waits. Toward a consumer at most DELIVERY_BYTES_MAX wait here; its subscription is told when
there is room again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import ConsumerNotFound, NotAllowed
from magnetar.broker.log.position import Position
from magnetar.broker.session import reply, request
from magnetar.broker.session.events import ConsumerEvents, ProducerEvents
from magnetar.broker.session.refusal import OPERATING_ERRORS, code_of
from magnetar.broker.session.session import Carry, Close, Discard, Publish, Send, Session, Start
from magnetar.broker.topic.contract import (
    ClientInfo,
    CloseReason,
)
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.protos.errors import CommandError, FrameError, MalformedCommand
from magnetar.protos.names import NamespaceName
from magnetar.protos.sends import SendRun, read_sends, run_of
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.frames import Outbox
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.broker import Broker
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.session.session import Action
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.producer import ProducerHandle
    from magnetar.metadata.model import BrokerRegistration
    from magnetar.protos.framing import Command
    from magnetar.protos.names import TopicName
    from magnetar.runtime.frames import Buffer, FrameStream

DELIVERY_BYTES_MAX: Final = 1 << 20  # toward a consumer: four full frames keep a stream busy
STALL_BYTES: Final = 16 << 20  # for a client that takes nothing: stop reading from it
REQUEST_TIMEOUT_S: Final = 60.0  # Pulsar's topicLoadTimeoutSeconds; no request may take longer
REQUESTS_READ_MAX: Final = (
    1_000  # requests under way at which reading pauses; a program that opens all its producers at
    # once sends thousands, and an error would cost Apache's C++ client its whole connection
)
PROBE_TIMEOUT_S: Final = 5.0  # Pulsar's connectionLivenessCheckTimeoutMillis
SERVER_VERSION: Final = "Magnetar 0.1.0"

log = get_logger(__name__)


class Transport(StrEnum):
    """Over which of the two a client came; a lookup answers with the owner's address for it."""

    GRPC = "grpc"
    PULSAR = "pulsar"


class Connection:
    """One client's connection. `run` serves it until either side ends it."""

    def __init__(self, stream: FrameStream, broker: Broker, transport: Transport) -> None:
        loop = asyncio.get_running_loop()
        self._stream = stream
        self._broker = broker
        self._transport = transport
        self._session = Session(loop.time(), SERVER_VERSION, MESSAGE_BYTES_MAX)
        self._outbox = Outbox(self._send, pending_bytes_max=DELIVERY_BYTES_MAX)
        self._producers: dict[int, ProducerHandle] = {}
        self._consumers: dict[int, ConsumerHandle] = {}
        self._published: set[int] = set()  # producers that published in the frame being read
        self._starved: set[int] = set()  # consumers that were told there is no room
        self._starving = asyncio.Event()
        self._heard = asyncio.Event()
        self._answered = asyncio.Event()  # a request has ended
        self._paused = False  # we do not read: a topic of this client has too much on its way
        self._draining = False  # we do not read: too much waits for this client
        self._requests: asyncio.TaskGroup
        self._over = False

    async def run(self) -> None:
        """Serve until the client leaves or is sent away. Never raises operating errors."""
        try:
            async with asyncio.TaskGroup() as self._requests:
                lasting = [
                    self._requests.create_task(self._write()),
                    self._requests.create_task(self._keep_alive()),
                    self._requests.create_task(self._offer_room()),
                ]
                try:
                    await self._read()
                finally:
                    self._leave()
                    for task in lasting:
                        task.cancel()
                    await self._stream.close()
        finally:
            self._leave()

    # ---- reading ---------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while not self._over:
                frame = await self._stream.receive()
                if not self._over:  # it may have ended meanwhile
                    self._take(frame)
                    await self._wait_room()
        except StreamClosed as end:
            if not (end.clean or self._over):
                log.info("connection lost", peer=self._stream.peer, reason=end.reason)

    def _take(self, frame: memoryview) -> None:
        """One transport frame: whole Pulsar frames, one after the other."""
        now = asyncio.get_running_loop().time()
        self._heard.set()
        at = 0
        try:
            while at < len(frame) and not self._over:
                run = read_sends(frame, at)
                if run is not None and self._session.takes_send(run.producer_id, now):
                    self._publish(run, now)
                    at = run.end
                    continue
                part, at = framing.first_frame(frame, at)
                try:
                    command = framing.parse_command(part)
                except CommandError as error:
                    self._refuse(error)
                else:
                    self._obey(command, now)
        except FrameError as error:
            self._end(str(error))

    def _obey(self, command: Command, now: float) -> None:
        body = command.body
        if type(body) is pb.CommandSend and self._session.takes_send(body.producer_id, now):
            self._publish(run_of(command, 0), now)
            return
        for action in self._session.on_command(command, now):
            self._do(action)

    async def _wait_room(self) -> None:
        """Read on only when there is room for what comes. Raises StreamClosed."""
        self._paused = True
        for producer_id in self._published:
            while not await self._has_room(producer_id):
                self._outbox.put_control(reply.PING)  # a connection that is gone fails at this
        self._published.clear()
        while self._session.requests >= REQUESTS_READ_MAX and not self._over:
            self._answered.clear()
            await self._answered.wait()
        self._paused = False
        if self._outbox.pending_bytes > STALL_BYTES:
            self._draining = True
            await self._outbox.wait_room()
            self._draining = False

    async def _has_room(self, producer_id: int) -> bool:
        """Wait a while until its topic takes more, or the producer is gone."""
        producer = self._producers.get(producer_id)
        if producer is not None:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await producer.wait_room()
            except TimeoutError:
                return False
        return True

    def _refuse(self, error: CommandError) -> None:
        """A command that did not parse costs its sender an error, not the connection, if it can be
        answered at all."""
        request_id = error.request_id if isinstance(error, MalformedCommand) else None
        if request_id is None or not self._session.connected:
            self._end(str(error))
            return
        log.warning("malformed command", peer=self._stream.peer, error=str(error))
        self._outbox.put_control(reply.error(request_id, pb.NotAllowedError, str(error)))

    # ---- carrying out ----------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        match action:
            case Publish():
                raise AssertionError("what an open producer sends is published before")
            case Send():
                self._outbox.put_control(action.data)
            case Carry():
                self._carry(action.command)
            case Start():
                self._requests.create_task(self._answer(action.command))
            case Discard():
                raise AssertionError("only opening answers with Discard")
            case Close():
                self._end(action.reason)

    def _publish(self, sends: SendRun, now: float) -> None:
        self._published.add(sends.producer_id)
        self._producers[sends.producer_id].publish(sends, now)

    def _carry(self, command: Command) -> None:
        body = command.body
        assert isinstance(
            body, pb.CommandFlow | pb.CommandAck | pb.CommandRedeliverUnacknowledgedMessages
        )
        handle = self._consumers[body.consumer_id]
        try:
            match body:
                case pb.CommandFlow():
                    handle.flow(body.messagePermits)
                case pb.CommandAck():
                    self._acknowledge(handle, body)
                case pb.CommandRedeliverUnacknowledgedMessages() as redeliver:
                    epoch = (
                        redeliver.consumer_epoch if redeliver.HasField("consumer_epoch") else None
                    )
                    ids = [request.position(item) for item in redeliver.message_ids]
                    handle.redeliver(ids or None, epoch)
        except OPERATING_ERRORS as error:
            log.warning("consumer's command refused", consumer=handle.name, error=str(error))

    def _acknowledge(self, handle: ConsumerHandle, ack: pb.CommandAck) -> None:
        done = None
        if ack.HasField("request_id"):
            consumer_id, request_id = ack.consumer_id, ack.request_id

            def done(error: BrokerError | None) -> None:
                failure = None if error is None else (code_of(error), str(error))
                self._outbox.put_control(reply.ack_response(consumer_id, request_id, failure))

        if ack.HasField("validation_error"):
            kind = pb.CommandAck.ValidationError.Name(ack.validation_error)
            log.error("a consumer discarded an entry", consumer=handle.name, reason=kind)
        try:
            if ack.HasField("txnid_least_bits") or ack.HasField("txnid_most_bits"):
                raise NotAllowed("acknowledging in a transaction", "transactions are not supported")
            if ack.ack_type == pb.CommandAck.Cumulative:
                if len(ack.message_id) != 1:
                    why = f"it must name one message id, not {len(ack.message_id)}"
                    raise NotAllowed("cumulative acknowledgement", why)
                [item] = ack.message_id
                handle.acknowledge_cumulative(request.position(item), tuple(item.ack_set), done)
                return
            whole = [request.position(item) for item in ack.message_id if not item.ack_set]
            partial = [
                (request.position(item), tuple(item.ack_set))
                for item in ack.message_id
                if item.ack_set
            ]
            handle.acknowledge(whole, partial, done)
        except OPERATING_ERRORS as error:
            if done is None:
                raise
            self._outbox.put_control(
                reply.ack_response(ack.consumer_id, ack.request_id, (code_of(error), str(error)))
            )

    # ---- requests --------------------------------------------------------------------------------

    async def _answer(self, command: Command) -> None:
        """One request in its own task: it ends with exactly one answer."""
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await self._carry_out(command)
        except OPERATING_ERRORS as error:
            answer = self._refusal(command, error)
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            answer = self._refusal(command, TimeoutError("what it waited for was cancelled"))
        self._session.on_request_ended()
        self._answered.set()
        self._outbox.put_control(answer)

    def _refusal(self, command: Command, error: Exception) -> bytes:
        self._forget(command)
        kind = pb.BaseCommand.Type.Name(command.type)
        log.info("request refused", command=kind, error=repr(error))
        text = str(error) or f"{kind} took longer than {REQUEST_TIMEOUT_S:.0f} s"
        return reply.error_for(command, code_of(error), text)

    async def _carry_out(self, command: Command) -> bytes:
        match command.body:
            case pb.CommandPartitionedTopicMetadata() as body:
                request.topic_name(body.topic)
                return reply.partitions(body.request_id, 0)
            case pb.CommandLookupTopic() as body:
                return await self._lookup(body)
            case pb.CommandProducer() as body:
                return await self._open_producer(body)
            case pb.CommandSubscribe() as body:
                return await self._subscribe(body)
            case pb.CommandCloseProducer() as body:
                await self._close_producer(body.producer_id)
                return reply.success(body.request_id)
            case pb.CommandCloseConsumer() as body:
                await self._close_consumer(body.consumer_id)
                return reply.success(body.request_id)
            case pb.CommandUnsubscribe() as body:
                consumer = self._consumer(body.consumer_id)
                await consumer.unsubscribe(force=body.force)
                self._lose_consumer(body.consumer_id, consumer)
                return reply.success(body.request_id)
            case pb.CommandSeek() as body:
                return await self._seek(body)
            case pb.CommandGetLastMessageId() as body:
                last = await self._consumer(body.consumer_id).last_message_id()
                ledger, entry = last.position
                message_id = reply.message_id(ledger, entry, last.batch_index)
                return reply.last_message_id(body.request_id, message_id, last.mark_delete)
            case pb.CommandConsumerStats() as body:
                stats = self._consumer(body.consumer_id).stats()
                return reply.consumer_stats(body.request_id, stats)
            case pb.CommandGetTopicsOfNamespace() as body:
                namespace = NamespaceName.parse(body.namespace)
                persistent = body.mode != pb.CommandGetTopicsOfNamespace.NON_PERSISTENT
                names = await self._broker.topics_of(namespace) if persistent else []
                return reply.topics_of_namespace(body.request_id, names)
        raise AssertionError(f"no way to answer {command}")

    async def _lookup(self, body: pb.CommandLookupTopic) -> bytes:
        name = request.topic_name(body.topic)
        if body.advertised_listener_name:
            # Not ServiceNotReady as in Pulsar: it will not pass, and Apache's C++ client closes its
            # connection for that, with all that is on it, and asks again for half a minute.
            listener = body.advertised_listener_name
            text = f"the broker do not have {listener} listener"  # clients look for these words
            raise NotAllowed("lookup", text)
        located = await self._broker.locate(name, authoritative=body.authoritative)
        return reply.lookup(
            body.request_id,
            self._url(located.broker),
            connect=located.serves,
            authoritative=not located.serves,
        )

    async def _open_producer(self, body: pb.CommandProducer) -> bytes:
        name, wanted = request.producer(body, self._client_info())
        topic = await self._broker.topic(name)
        if body.initial_subscription_name:
            await topic.ensure_subscription(
                body.initial_subscription_name, Position(-1, -1), properties={}
            )
        events = ProducerEvents(self, body.producer_id, name)
        handle = await topic.add_producer(wanted, events)
        if self._over or self._session.on_producer_opened(body.producer_id):
            handle.close_nowait()
            return reply.error(body.request_id, pb.ServiceNotReady, "closed while it was opening")
        self._producers[body.producer_id] = handle
        return reply.producer_success(
            body.request_id, handle.name, handle.last_sequence_id, handle.topic_epoch
        )

    async def _subscribe(self, body: pb.CommandSubscribe) -> bytes:
        name, wanted = request.subscribe(body, self._client_info())
        topic = await self._broker.topic(name, create=body.force_topic_creation)
        events = ConsumerEvents(self, body.consumer_id, name)
        handle = await topic.subscribe(wanted, events)
        if self._over or self._session.on_consumer_opened(body.consumer_id):
            handle.close_nowait()
            return reply.error(body.request_id, pb.ServiceNotReady, "closed while it was opening")
        self._consumers[body.consumer_id] = events.handle = handle
        success = reply.success(body.request_id)
        return success + events.take_active()

    async def _seek(self, body: pb.CommandSeek) -> bytes:
        handle = self._consumer(body.consumer_id)
        if body.HasField("message_publish_time"):
            await handle.seek_to_time(body.message_publish_time)
        elif body.HasField("message_id"):
            await handle.seek(request.position(body.message_id))
        else:
            raise NotAllowed("seek", "it names neither a message id nor a publish time")
        return reply.success(body.request_id)

    async def _close_producer(self, producer_id: int) -> None:
        handle = self._producers.get(producer_id)
        if handle is None:
            return  # the topic closed it just now
        await handle.close()
        if self._producers.get(producer_id) is handle:  # the id may be another one's by now
            del self._producers[producer_id]
            self._session.on_producer_gone(producer_id)

    async def _close_consumer(self, consumer_id: int) -> None:
        handle = self._consumers.get(consumer_id)
        try:
            if handle is not None:
                await handle.close()
        finally:
            # It is closed, even if its last acks may be lost.
            self._lose_consumer(consumer_id, handle)

    def _consumer(self, consumer_id: int) -> ConsumerHandle:
        """Raises ConsumerNotFound: the subscription closed it after the request was admitted."""
        try:
            return self._consumers[consumer_id]
        except KeyError:
            raise ConsumerNotFound(consumer_id) from None

    # ---- ends ------------------------------------------------------------------------------------

    def _forget(self, command: Command) -> None:
        """A request failed: what was to be opened is not there."""
        match command.body:
            case pb.CommandProducer() as body:
                self._session.on_producer_gone(body.producer_id)
            case pb.CommandSubscribe() as body:
                self._session.on_consumer_gone(body.consumer_id)

    def _lose_consumer(self, consumer_id: int, handle: ConsumerHandle | None) -> None:
        if handle is None or self._consumers.get(consumer_id) is not handle:
            return  # it is gone already, and the id may be another one's by now
        del self._consumers[consumer_id]
        self._starved.discard(consumer_id)
        self._session.on_consumer_gone(consumer_id)

    def _end(self, reason: str) -> None:
        """Send the client away."""
        if not self._over:
            log.warning("closing a connection", peer=self._stream.peer, reason=reason)
            self._over = True
            self._requests.create_task(self._stream.close())

    def _leave(self) -> None:
        """The connection is gone: so are its producers and consumers. Sync, idempotent."""
        self._over = True
        for producer in self._producers.values():
            producer.close_nowait()
        for consumer in self._consumers.values():
            consumer.close_nowait()
        self._producers.clear()
        self._consumers.clear()
        self._heard.set()

    # ---- beside the reader -----------------------------------------------------------------------

    async def _write(self) -> None:
        await self._outbox.run()
        self._leave()  # whatever the reader waits for

    async def _send(self, parts: Sequence[Buffer]) -> None:
        await self._stream.send(parts)
        if self._draining:  # each frame that it takes is a sign of life: 4 KB/s are enough
            self._session.on_paused(asyncio.get_running_loop().time())

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._over:
            await asyncio.sleep(max(0.0, self._session.timer_at() - loop.time()))
            if self._paused:
                self._session.on_paused(loop.time())
            for action in self._session.on_timer(loop.time()):
                self._do(action)

    async def _offer_room(self) -> None:
        """Tell subscriptions that were refused when there is room again."""
        with suppress(StreamClosed):
            while True:
                await self._starving.wait()
                self._starving.clear()
                await self._outbox.wait_room()
                starved, self._starved = self._starved, set()
                for consumer_id in starved:
                    handle = self._consumers.get(consumer_id)
                    if handle is not None:
                        handle.on_writable()

    def writable(self, consumer_id: int) -> bool:
        """Whether a subscription may deliver; if not, it will be called when it may."""
        if self._outbox.pending_bytes < DELIVERY_BYTES_MAX:
            return True
        self._starved.add(consumer_id)
        self._starving.set()
        return False

    async def probe(self) -> bool:
        """Whether the client answers a PING. While it is not read, nobody knows: it is taken to be
        alive as long as the connection is."""
        if self._over:
            return False
        self._heard.clear()
        self._outbox.put_control(reply.PING)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._heard.wait()
        except TimeoutError:
            if not (self._paused or self._draining):
                self._end(f"no answer to a PING for {PROBE_TIMEOUT_S:.0f} s")
        return not self._over

    @property
    def wants_broker_metadata(self) -> bool:
        """Whether deliveries begin with what the broker knows of the entry."""
        return self._session.wants_broker_metadata

    def put(self, *parts: bytes | memoryview) -> None:
        """A delivery."""
        self._outbox.put(*parts)

    def put_control(self, data: bytes) -> None:
        """A command, before deliveries."""
        self._outbox.put_control(data)

    def producer_closed(self, producer_id: int, topic: TopicName, reason: CloseReason) -> None:
        """The topic closed it; its client looks the topic up again."""
        self._producers.pop(producer_id, None)
        self._session.on_producer_gone(producer_id)
        log.info("producer closed", topic=str(topic), reason=reason.value)
        self._outbox.put_control(reply.close_producer(producer_id, self._next_owner_url(topic)))

    def consumer_closed(self, consumer_id: int, topic: TopicName, reason: CloseReason) -> None:
        """The subscription closed it; its client looks the topic up again."""
        self._lose_consumer(consumer_id, self._consumers.get(consumer_id))
        log.info("consumer closed", topic=str(topic), reason=reason.value)
        self._outbox.put_control(reply.close_consumer(consumer_id, self._next_owner_url(topic)))

    def _next_owner_url(self, topic: TopicName) -> str:
        heir = self._broker.next_owner_of(topic)
        return self._url(heir) if heir is not None else ""

    def _client_info(self) -> ClientInfo:
        return ClientInfo(address=self._stream.peer, version=self._session.client_version)

    def _url(self, broker: BrokerRegistration) -> str:
        return broker.grpc_url if self._transport is Transport.GRPC else broker.pulsar_url
