"""One session with one broker: requests and answers, receipts, deliveries.

A client holds at most two sessions with a broker: for producers and for consumers. With one
session, small answers would wait tens of milliseconds behind bulk deliveries. Lookups use the
producers' session.

The task that reads the stream calls producers and consumers directly, in the order of the commands.
At the end of a frame, the task calls `on_frame_end` of each producer and consumer that got
receipts, send errors or messages. That method does the work that is needed only once for a frame.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from magnetar.client.authentication import NoCredentials
from magnetar.client.errors import (
    AuthenticationError,
    ClosedDuringCall,
    ConnectError,
    InvalidUrl,
    PulsarException,
    from_server_error,
)
from magnetar.client.guard import Guarded, end_after_bug
from magnetar.client.session.service_url import host_and_port, parse_service_url, scheme_of
from magnetar.client.session.silence import ASK_AFTER_S, PING_AFTER_S, Silence, Step
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import UNCOMPRESSED_BYTES_MAX, UNCOMPRESSED_FACTOR
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.protos.errors import ProtocolError, UnknownCommand
from magnetar.protos.framing import (
    COMMAND_FRAME_BYTES_MAX,
    encode_command,
    first_delivery,
    first_frame,
    frame_bytes_max,
    parse_command,
)
from magnetar.protos.receipts import is_receipt, read_receipts
from magnetar.runtime.awake import STALL_S
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.frames import Outbox
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from google.protobuf.message import Message as Body

    from magnetar.client.authentication import Credentials
    from magnetar.protos.receipts import ReceiptRun
    from magnetar.runtime.frames import FrameStream

log = get_logger(__name__)

KEEPALIVE_S: Final = 30.0
"""The seconds between two keep-alive PINGs, as in Pulsar. silence.py decides on further PINGs."""

SILENT_INTERVALS_MAX: Final = 2
"""The client ends a session if the broker sends nothing for this many keep-alive intervals."""

OUTBOX_BYTES_MAX: Final = 64 << 20
"""The bytes in the outbox at which `Outbox.wait_room` waits. The client does not call this method.
Each producer bounds the outbox instead. Its entries that wait for a receipt have at most
`Publisher.pending_bytes_max` bytes; if its timed-out entries reach the same number before they are
sent, it ends the session (`Publisher._bound_emptied`)."""

TAKEN_BYTES_MAX: Final = 32 << 20
"""The largest message in bytes that a client accepts from a broker, even if the broker's own limit
is higher. The broker's limit in Apache Pulsar is `maxMessageSize`, by default 5 MiB."""

CLOSE_S: Final = 1.0
"""The longest time in seconds for which a close waits until the outbox is sent."""

PROTOCOL_VERSION: Final = pb.v21
CLIENT_VERSION: Final = "Magnetar-Python-0.1"

_UNASKED: Final = 2**64 - 1  # the request id of an ERROR that answers no request

Answer = TypeVar("Answer", bound="Body")


class ProducerSession(Guarded, Protocol):
    """The calls that a connection makes to a producer.

    After the producer was removed, or after `on_closed_by_broker` or `on_disconnected`, the
    connection calls at most `on_frame_end`, at the end of the current frame.

    An unexpected exception of a call ends only the producer.
    """

    @property
    def awaits_receipts(self) -> bool: ...
    def on_receipts(
        self, sequence_ids: Sequence[int], ledger_id: int, entry_ids: Sequence[int]
    ) -> None: ...
    def on_send_error(self, sequence_id: int, error: PulsarException) -> None: ...
    def on_closed_by_broker(self, assigned_url: str | None) -> None: ...
    def on_disconnected(self, error: PulsarException) -> None: ...
    def on_frame_end(self) -> None:
        """Called at the end of a frame with receipts or send errors."""


class ConsumerSession(Guarded, Protocol):
    """The calls that a connection makes to a consumer, under the rules of ProducerSession."""

    def on_message(self, command: pb.CommandMessage, entry: memoryview) -> None: ...
    def on_active_changed(self, *, active: bool) -> None: ...
    def on_closed_by_broker(self, assigned_url: str | None) -> None: ...
    def on_disconnected(self, error: PulsarException) -> None: ...
    def on_frame_end(self) -> None:
        """Called at the end of a frame with messages."""


class WatchSession(Protocol):
    """The calls that a connection makes to a watch of a namespace's topics."""

    def on_topics(self, new: Sequence[str], deleted: Sequence[str]) -> None: ...
    def on_disconnected(self, error: PulsarException) -> None: ...


class OtherBrokers(Protocol):
    """The brokers of the service URL, which the client asks about the topics of a silent broker."""

    def knows_others(self, broker: str) -> bool:
        """Return whether the service URL names another address than `broker`."""

    async def owner_besides(self, topic: str, broker: str) -> str | None:
        """Ask the brokers other than `broker` which broker serves the topic. Return its URL.

        None: no other broker answers. Takes a bounded time.
        """


class Connection:
    """A session: opening, open or ended. `run` opens it and reads it to its end."""

    def __init__(
        self,
        stream: FrameStream,
        broker: str,
        *,
        open_timeout_s: float,
        keepalive_s: float,
        ping_after_s: float = PING_AFTER_S,
        ask_after_s: float = ASK_AFTER_S,
        is_proxied: bool = False,
        credentials: Credentials | None = None,
        others: OtherBrokers | None = None,
    ) -> None:
        """`is_proxied`: the stream leads to a proxy, which connects to `broker`.

        `others`: the brokers to ask when `broker` is silent. None: the client asks no broker.
        """
        self.broker = broker
        # The limit of a message, batch or chunk that is sent.
        self.max_message_bytes = MESSAGE_BYTES_MAX
        # The limit of a message, batch or chunk that is received, after decompression.
        self.uncompressed_bytes_max = UNCOMPRESSED_BYTES_MAX
        self._frame_bytes_max = COMMAND_FRAME_BYTES_MAX
        self.drains_consumers = False  # the broker knows DRAIN_CONSUMER, Magnetar's extension
        self.orders_negative_acks = False  # the broker knows NEGATIVE_ACK, Magnetar's extension
        self.error: PulsarException | None = None  # why the session ended; None: it has not
        self.server_version = ""  # the broker's own name; "": no answer yet
        # The lower version of both sides; 0: the broker has not answered yet.
        self.protocol_version = 0
        self.watches_topics = False  # the broker knows WATCH_TOPIC_LIST
        self._credentials = credentials or NoCredentials()
        self._group: asyncio.TaskGroup
        self._challenge: asyncio.Task[None] | None = None  # answers a challenge; None: no such task
        self._tasks: list[asyncio.Task[None]] = []  # all end with the session
        self._stream = stream
        self._proxy_to = host_and_port(broker) if is_proxied else None
        self._open_timeout_s = open_timeout_s
        self._keepalive_s = keepalive_s
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(
            self._loop.time(), ping_after_s=ping_after_s, ask_after_s=ask_after_s
        )
        self._outbox = Outbox(stream.send, pending_bytes_max=OUTBOX_BYTES_MAX)
        # Sends a SEND: its header and the parts of its entry. No effect after the session's end.
        self.send_entry: Callable[..., None] = self._outbox.put
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        self._asked: dict[int, Callable[[Body | PulsarException], None]] = {}
        self._queued: dict[int, Callable[[], None]] = {}
        self._last_request_id = 0
        self._producers: dict[int, ProducerSession] = {}
        self._consumers: dict[int, ConsumerSession] = {}
        self._watches: dict[int, WatchSession] = {}
        self._touched: dict[ProducerSession | ConsumerSession, None] = {}
        self._silent_intervals = 0
        self._given_up = asyncio.Event()

    @property
    def unsent_bytes(self) -> int:
        """The bytes in the outbox."""
        return self._outbox.pending_bytes

    async def wait_opened(self) -> None:
        """Return when the broker has accepted the session. Raises the error if it does not."""
        await asyncio.shield(self._opened)

    async def run(self) -> None:
        """Open the session and read it to its end. Afterwards `error` holds the reason."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for work in (self._introduce, self._outbox.run, self._watch, self._mind_silence):
                    self._tasks.append(self._group.create_task(work()))
                await self._read()
                for task in self._tasks:
                    task.cancel()
        except Exception as bug:  # the producers and consumers open a new session
            log.error("internal error: a session ends", broker=self.broker, exc_info=bug)
            await self._abort(f"internal error: {bug!r}")
        finally:
            self._end(ClosedDuringCall("the client was closed", broker=self.broker))

    async def close(self) -> None:
        """Send the outbox, then end the session. Bounded by CLOSE_S and the stream's own limit."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._outbox.wait_sent()
        except (StreamClosed, TimeoutError):
            pass
        await self._stream.close()

    def give_up(self, reason: str) -> None:
        """End the session at once and drop the outbox."""
        self._end(ConnectError(reason, broker=self.broker))
        self._given_up.set()

    # Credentials

    async def _introduce(self) -> None:
        """Send CONNECT. If fetching the credentials fails, the session does not open."""
        try:
            data = await self._credentials.data()
        except PulsarException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            return
        self.send_control(connect_command(self._credentials.method, data, proxy_to=self._proxy_to))

    async def _authenticate_again(self) -> None:
        """Answer a challenge of the broker with new credentials."""
        self._credentials.on_refused()
        try:
            data = await self._credentials.data()
        except PulsarException as error:
            self.give_up(f"no credentials to answer the broker: {error.reason}")
            return
        self.send_control(
            pb.CommandAuthResponse(
                client_version=CLIENT_VERSION,
                protocol_version=PROTOCOL_VERSION,
                response=pb.AuthData(auth_method_name=self._credentials.method, auth_data=data),
            )
        )

    # Requests

    def ask(self, body: Body, done: Callable[[Body | PulsarException], None]) -> int:
        """Send a request and call `done` once, with the answer or the error.

        `body` must have a field `request_id`. This method sets and returns it.
        """
        request_id = self._last_request_id = self._last_request_id + 1
        if self.error is not None:
            done(self.error)
            return request_id
        cast("pb.CommandSuccess", body).request_id = request_id
        self._asked[request_id] = done
        self.send_control(body)
        return request_id

    async def request(
        self, body: Body, answer: type[Answer], *, on_queued: Callable[[], None] | None = None
    ) -> Answer:
        """Send a request and wait for its answer. The caller sets the deadline.

        The method calls `on_queued` if the broker queues the request to answer it later. Raises
        the broker's error. Raises ConnectError or ClosedDuringCall if the session ends before
        the answer arrives; the broker may have executed the request.
        """
        self.check_alive()
        answered: asyncio.Future[Body] = asyncio.get_running_loop().create_future()

        def settle(result: Body | PulsarException) -> None:
            if answered.done():
                return
            if isinstance(result, PulsarException):
                answered.set_exception(result)
            else:
                answered.set_result(result)

        request_id = self.ask(body, settle)
        if on_queued is not None:
            self._queued[request_id] = on_queued
        try:
            result = await answered
        finally:
            self._asked.pop(request_id, None)
            self._queued.pop(request_id, None)
        if not isinstance(result, answer):
            reason = f"the broker answered with an unexpected {type(result).__name__}"
            raise ConnectError(reason, broker=self.broker)
        return result

    def check_alive(self) -> None:
        """Raise ConnectError if the session has ended."""
        if self.error is not None:
            raise ConnectError(self.error.reason, broker=self.broker)

    def check_holds(self, owner_id: int) -> None:
        """Raise ConnectError if the session has ended or the broker has closed the producer or
        consumer.

        The broker's close may arrive in the same frame as its answer to the creation.
        """
        self.check_alive()
        if owner_id not in self._producers and owner_id not in self._consumers:
            reason = "the broker closed the producer or consumer at once"
            raise ConnectError(reason, broker=self.broker)

    def send_control(self, body: Body) -> None:
        """Send a command before the entries that wait in the outbox. No effect after the session's
        end."""
        self._outbox.put_control(encode_command(body))

    # Producers and consumers

    def add_producer(self, producer_id: int, producer: ProducerSession) -> None:
        self._producers[producer_id] = producer

    def remove_producer(self, producer_id: int) -> None:
        self._producers.pop(producer_id, None)

    def add_consumer(self, consumer_id: int, consumer: ConsumerSession) -> None:
        self._consumers[consumer_id] = consumer

    def remove_consumer(self, consumer_id: int) -> None:
        self._consumers.pop(consumer_id, None)

    def add_watch(self, watcher_id: int, watch: WatchSession) -> None:
        self._watches[watcher_id] = watch

    def remove_watch(self, watcher_id: int) -> None:
        self._watches.pop(watcher_id, None)

    # Reading

    async def _read(self) -> None:
        """Handle frames until the stream ends. Afterwards `error` holds the reason."""
        try:
            while True:
                self._on_frame(await self._stream.receive())
        except StreamClosed as error:
            self._end(ConnectError(error.reason, broker=self.broker))
        except ProtocolError as error:
            reason = f"the broker broke the protocol: {error}"
            self._end(ConnectError(reason, broker=self.broker))
        await self._stream.close()

    def _on_frame(self, frame: memoryview) -> None:
        self._silent_intervals = 0
        self._silence.on_heard(self._loop.time())
        data, at = b"", 0  # `data`: a copy of the frame; b"" until the first receipt
        while at < len(frame):
            if is_receipt(frame, at):
                data = data or bytes(frame)
                receipts = read_receipts(data, at)
                self._on_receipts(receipts)
                at = receipts.end
            elif delivery := first_delivery(frame, at, bytes_max=self._frame_bytes_max):
                body, entry, at = delivery
                self._on_message(body, entry)
            else:
                part, at = first_frame(frame, at, bytes_max=self._frame_bytes_max)
                self._on_command(part)
        if self._touched:
            touched, self._touched = self._touched, {}
            for session in touched:
                try:
                    session.on_frame_end()
                except Exception as bug:
                    end_after_bug(session, bug)

    def _on_command(self, part: memoryview) -> None:
        try:
            command = parse_command(part)
        except UnknownCommand as error:
            log.warning("unknown command", broker=self.broker, type=error.number)
            return
        kind, body, entry = command.type, command.body, command.entry
        handle = _HANDLERS.get(kind)
        if handle is None:
            log.warning("unexpected command", broker=self.broker, type=kind)
        elif entry is None:
            handle(self, body)
        else:
            self._on_message(cast("pb.CommandMessage", body), entry)

    def _on_connected(self, body: pb.CommandConnected) -> None:
        if body.max_message_size > 0:
            # The client takes larger messages from a broker with a higher limit, but sends none.
            self.max_message_bytes = min(body.max_message_size, MESSAGE_BYTES_MAX)
            taken_bytes = min(max(body.max_message_size, MESSAGE_BYTES_MAX), TAKEN_BYTES_MAX)
            self._frame_bytes_max = frame_bytes_max(taken_bytes)
            self.uncompressed_bytes_max = UNCOMPRESSED_FACTOR * taken_bytes
        self.server_version = body.server_version
        self.protocol_version = min(body.protocol_version, PROTOCOL_VERSION)
        self.watches_topics = body.feature_flags.supports_topic_watchers
        self.drains_consumers = body.feature_flags.supports_drain_consumer
        self.orders_negative_acks = body.feature_flags.supports_ordered_negative_acks
        if not self._opened.done():
            self._opened.set_result(None)

    def _on_auth_challenge(self, _: pb.CommandAuthChallenge) -> None:
        task = self._challenge
        if task is None or task.done():  # otherwise the running task answers this challenge, too
            self._challenge = self._group.create_task(self._authenticate_again())
            self._tasks = [task for task in self._tasks if not task.done()] + [self._challenge]

    def _on_receipts(self, run: ReceiptRun) -> None:
        producer = self._producers.get(run.producer_id)
        if producer is None:
            return  # the producer was closed, or attached again with another id
        self._touched[producer] = None
        try:
            producer.on_receipts(run.sequence_ids, run.ledger_id, run.entry_ids)
        except Exception as bug:
            end_after_bug(producer, bug)

    def _on_send_error(self, body: pb.CommandSendError) -> None:
        producer = self._producers.get(body.producer_id)
        if producer is not None:
            self._touched[producer] = None
            error = from_server_error(body.error, body.message, broker=self.broker)
            try:
                producer.on_send_error(body.sequence_id, error)
            except Exception as bug:
                end_after_bug(producer, bug)

    def _on_message(self, body: pb.CommandMessage, entry: memoryview) -> None:
        consumer = self._consumers.get(body.consumer_id)
        if consumer is not None:
            self._touched[consumer] = None
            try:
                consumer.on_message(body, entry)
            except Exception as bug:
                end_after_bug(consumer, bug)

    def _on_active_changed(self, body: pb.CommandActiveConsumerChange) -> None:
        consumer = self._consumers.get(body.consumer_id)
        if consumer is not None:
            try:
                consumer.on_active_changed(active=body.is_active)
            except Exception as bug:
                end_after_bug(consumer, bug)

    def _on_close_producer(self, body: pb.CommandCloseProducer) -> None:
        producer = self._producers.pop(body.producer_id, None)
        if producer is not None:
            self._close(producer, body)

    def _on_close_consumer(self, body: pb.CommandCloseConsumer) -> None:
        consumer = self._consumers.pop(body.consumer_id, None)
        if consumer is not None:
            self._close(consumer, body)

    def _close(
        self,
        session: ProducerSession | ConsumerSession,
        body: pb.CommandCloseProducer | pb.CommandCloseConsumer,
    ) -> None:
        try:
            session.on_closed_by_broker(self._assigned(body))
        except Exception as bug:
            end_after_bug(session, bug)

    def _assigned(self, body: pb.CommandCloseProducer | pb.CommandCloseConsumer) -> str | None:
        """Return the URL of the broker to use next.

        None: look the owner up, because the broker named no URL for the transport of this session.
        """
        scheme = scheme_of(self.broker)
        named = body.assignedBrokerServiceUrlTls if scheme.is_tls else body.assignedBrokerServiceUrl
        try:
            (url,) = parse_service_url(named)
        except (InvalidUrl, ValueError):
            url = ""
        if url and scheme_of(url) is scheme:
            return url
        if named:
            log.warning("the broker named an owner that cannot be used", url=named)
        return None

    def _on_topic_update(self, body: pb.CommandWatchTopicUpdate) -> None:
        watch = self._watches.get(body.watcher_id)
        if watch is not None:
            watch.on_topics(body.new_topics, body.deleted_topics)

    def _on_error(self, body: pb.CommandError) -> None:
        error = from_server_error(body.error, body.message, broker=self.broker)
        if not self._opened.done():
            if isinstance(error, AuthenticationError):
                self._credentials.on_refused()
            self._opened.set_exception(error)
        elif body.request_id == _UNASKED:
            log.warning("the broker reports an error", broker=self.broker, error=str(error))
        else:
            self._answer(body.request_id, error)

    def _on_ack_response(self, body: pb.CommandAckResponse) -> None:
        if body.HasField("error"):
            error = from_server_error(body.error, body.message, broker=self.broker)
            self._answer(body.request_id, error)
        else:
            self._answer(body.request_id, body)

    def _on_answer(self, body: pb.CommandSuccess) -> None:
        # `body` may have another type that has a `request_id`: see _HANDLERS.
        self._answer(body.request_id, body)

    def _on_producer_success(self, body: pb.CommandProducerSuccess) -> None:
        if body.producer_ready:
            self._answer(body.request_id, body)
        elif body.request_id in self._queued:
            self._queued[body.request_id]()

    def _on_ping(self, _: pb.CommandPing) -> None:
        self.send_control(pb.CommandPong())

    def _ignore(self, _: Any) -> None:
        """Ignore a command that needs no action. `_on_frame` has noted that the broker is alive."""

    def _answer(self, request_id: int, result: Body | PulsarException) -> None:
        done = self._asked.pop(request_id, None)
        if done is not None:  # None: the request was cancelled
            done(result)

    # Ending

    async def _watch(self) -> None:
        """End the session if the broker does not accept it or is silent for too long."""
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await self.wait_opened()
        except TimeoutError:
            await self._abort(f"the broker did not answer within {self._open_timeout_s:g} s")
            return
        except PulsarException as error:
            await self._abort(error.reason)
            return
        loop = asyncio.get_running_loop()
        while self._silent_intervals < SILENT_INTERVALS_MAX:
            self._silent_intervals += 1
            self.send_control(pb.CommandPing())
            due_s = loop.time() + self._keepalive_s
            with suppress(TimeoutError):
                async with asyncio.timeout(self._keepalive_s):
                    await self._given_up.wait()
                break
            if loop.time() - due_s > STALL_S:  # this process stood still, not the broker
                self._silent_intervals = 0
        silent_s = self._silent_intervals * self._keepalive_s
        await self._abort(f"the broker sent nothing for {silent_s:g} s")

    async def _mind_silence(self) -> None:
        """Ask other brokers about this broker when it is silent: see silence.py."""
        others, loop = self._others, self._loop
        if others is None or not others.knows_others(self.broker):
            return
        with suppress(PulsarException):  # `_watch` ends a session that is not accepted
            await self.wait_opened()
        asked = 0
        while self.error is None:
            due_s = self._silence.timer_at
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if loop.time() - due_s > STALL_S:  # this process stood still, not the broker
                self._silence.on_heard(loop.time())
            match self._silence.on_timer(loop.time(), self._awaits):
                case Step.PING:
                    self.send_control(pb.CommandPing())
                case Step.ASK:
                    await self._ask_others(others, asked)
                    asked += 1
                case Step.WAIT:
                    pass

    def _awaits(self) -> bool:
        """Return whether the client awaits something from the broker."""
        return bool(self._asked or self._consumers) or (
            self.error is None
            and any(producer.awaits_receipts for producer in self._producers.values())
        )

    async def _ask_others(self, others: OtherBrokers, number: int) -> None:
        """Ask other brokers about a topic of the session. If the topic's owner has changed, end the
        session.

        A session without topics ends at once, because every broker can answer its requests.
        `number`: the number of the question; it selects the topic.
        """
        topics = [it.topic for it in self._consumers.values()]
        topics += [it.topic for it in self._producers.values()]
        began, owner = self._loop.time(), None
        if topics:
            owner = await others.owner_besides(topics[number % len(topics)], self.broker)
            if owner is None or owner == self.broker:
                return
        silent_s = self._silence.silent_s(self._loop.time())
        if silent_s < self._loop.time() - began:  # the broker sent something meanwhile
            return
        reason = f"the broker sent nothing for {silent_s:.1f} s"
        if owner is not None:
            reason += f", and {owner} serves its topics"
        await self._abort(reason)

    async def _abort(self, reason: str) -> None:
        self._end(ConnectError(reason, broker=self.broker))
        await self._stream.close()

    def _end(self, error: PulsarException) -> None:
        """End the session, and report the error to all calls that wait. Idempotent: the first error
        stays."""
        if self.error is not None:
            return
        self.error = error
        if not self._opened.done():
            self._opened.set_exception(error)
        producers, self._producers = self._producers, {}
        consumers, self._consumers = self._consumers, {}
        sessions: list[ProducerSession | ConsumerSession] = [*producers.values()]
        sessions += consumers.values()
        for session in sessions:
            try:
                session.on_disconnected(error)
            except Exception as bug:
                end_after_bug(session, bug)
        watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.on_disconnected(error)
        asked, self._asked = self._asked, {}
        # Last: a callback must find its producer or consumer detached.
        for done in asked.values():
            done(error)


def connect_command(
    method: str, data: bytes | None, *, proxy_to: str | None = None
) -> pb.CommandConnect:
    """Return the CONNECT with these credentials.

    `proxy_to`: the broker behind a proxy, as host:port. None: no proxy.
    """
    return pb.CommandConnect(
        client_version=CLIENT_VERSION,
        protocol_version=PROTOCOL_VERSION,
        auth_method_name=method,
        auth_data=data,
        proxy_to_broker_url=proxy_to,
        feature_flags=pb.FeatureFlags(
            supports_auth_refresh=True,
            supports_broker_entry_metadata=True,
            supports_topic_watchers=True,
        ),
    )


_HANDLERS: dict[int, Callable[[Connection, Any], None]] = {
    pb.BaseCommand.CONNECTED: Connection._on_connected,
    pb.BaseCommand.AUTH_CHALLENGE: Connection._on_auth_challenge,
    pb.BaseCommand.SEND_ERROR: Connection._on_send_error,
    pb.BaseCommand.MESSAGE: Connection._ignore,  # `_on_command` handles a MESSAGE with an entry
    pb.BaseCommand.CLOSE_PRODUCER: Connection._on_close_producer,
    pb.BaseCommand.CLOSE_CONSUMER: Connection._on_close_consumer,
    pb.BaseCommand.ERROR: Connection._on_error,
    pb.BaseCommand.ACK_RESPONSE: Connection._on_ack_response,
    pb.BaseCommand.SUCCESS: Connection._on_answer,
    pb.BaseCommand.PRODUCER_SUCCESS: Connection._on_producer_success,
    pb.BaseCommand.PARTITIONED_METADATA_RESPONSE: Connection._on_answer,
    pb.BaseCommand.LOOKUP_RESPONSE: Connection._on_answer,
    pb.BaseCommand.GET_LAST_MESSAGE_ID_RESPONSE: Connection._on_answer,
    pb.BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE: Connection._on_answer,
    pb.BaseCommand.GET_SCHEMA_RESPONSE: Connection._on_answer,
    pb.BaseCommand.GET_OR_CREATE_SCHEMA_RESPONSE: Connection._on_answer,
    pb.BaseCommand.WATCH_TOPIC_LIST_SUCCESS: Connection._on_answer,
    pb.BaseCommand.WATCH_TOPIC_UPDATE: Connection._on_topic_update,
    pb.BaseCommand.PING: Connection._on_ping,
    pb.BaseCommand.PONG: Connection._ignore,
    pb.BaseCommand.ACTIVE_CONSUMER_CHANGE: Connection._on_active_changed,
    pb.BaseCommand.REACHED_END_OF_TOPIC: Connection._ignore,
}
