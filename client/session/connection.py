"""One session with one broker: requests and their answers, producers' receipts, deliveries.

A client holds two sessions with a broker, one that publishes and one that consumes: small answers
would wait for tens of milliseconds behind bulk deliveries. Lookups go over the publishing one.

The task that reads the stream calls producers and consumers directly, command by command, and tells
them when a frame ends, so that whatever is done once per burst is done there.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from magnetar.client.errors import (
    AlreadyClosed,
    ConnectError,
    PulsarException,
    from_server_error,
)
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.protos.errors import ProtocolError, UnknownCommand
from magnetar.protos.framing import encode_command, first_frame, parse_command
from magnetar.protos.receipts import is_receipt, read_receipts
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.frames import Outbox
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from google.protobuf.message import Message as Body

    from magnetar.protos.receipts import ReceiptRun
    from magnetar.runtime.frames import FrameStream

log = get_logger(__name__)

KEEPALIVE_S: Final = 30.0
"""How often each side says that it is there: Pulsar's interval."""

SILENT_INTERVALS_MAX: Final = 2
"""A broker that said nothing for this many intervals is taken for dead."""

OUTBOX_BYTES_MAX: Final = 64 << 20
"""Nobody waits at it: what is put here is bounded by the producers' limits on pending messages, and
on those that timed out unread (see publisher.py)."""

CLOSE_S: Final = 1.0
"""How long a close waits for what is still in the outbox."""

PROTOCOL_VERSION: Final = pb.v21
CLIENT_VERSION: Final = "Magnetar-Python-0.1"

_UNASKED: Final = 2**64 - 1  # the request id of what answers nothing

Answer = TypeVar("Answer", bound="Body")


class ProducerSession(Protocol):
    """A producer, as seen by its connection. Nothing is called after it was removed, or after
    `on_closed_by_broker` or `on_disconnected`."""

    def on_receipts(
        self, sequence_ids: Sequence[int], ledger_id: int, entry_ids: Sequence[int]
    ) -> None: ...
    def on_send_error(self, sequence_id: int, error: PulsarException) -> None: ...
    def on_closed_by_broker(self, assigned_url: str | None) -> None: ...
    def on_disconnected(self, error: PulsarException) -> None: ...
    def on_frame_end(self) -> None:
        """The frame with the receipts before is over."""


class ConsumerSession(Protocol):
    """A consumer, as seen by its connection; as for ProducerSession."""

    def on_message(self, command: pb.CommandMessage, entry: memoryview) -> None: ...
    def on_closed_by_broker(self, assigned_url: str | None) -> None: ...
    def on_disconnected(self, error: PulsarException) -> None: ...
    def on_frame_end(self) -> None:
        """The frame with the messages before is over."""


class Connection:
    """A session that is being opened, open or over. `run` is its life."""

    def __init__(
        self, stream: FrameStream, broker: str, *, open_timeout_s: float, keepalive_s: float
    ) -> None:
        self.broker = broker
        self.max_message_bytes = MESSAGE_BYTES_MAX
        self.error: PulsarException | None = None  # None: it is not over
        self._stream = stream
        self._open_timeout_s = open_timeout_s
        self._keepalive_s = keepalive_s
        self._outbox = Outbox(stream.send, pending_bytes_max=OUTBOX_BYTES_MAX)
        # Sends a SEND, header and parts of its entry. Nothing happens when the session is over.
        self.send_entry: Callable[..., None] = self._outbox.put
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        self._asked: dict[int, Callable[[Body | PulsarException], None]] = {}
        self._last_request_id = 0
        self._producers: dict[int, ProducerSession] = {}
        self._consumers: dict[int, ConsumerSession] = {}
        self._touched: dict[ProducerSession | ConsumerSession, None] = {}
        self._silent_intervals = 0
        self._given_up = asyncio.Event()

    @property
    def unsent_bytes(self) -> int:
        """What waits to be sent."""
        return self._outbox.pending_bytes

    async def wait_opened(self) -> None:
        """Return when the broker has accepted the session. Raises what came instead."""
        await asyncio.shield(self._opened)

    async def run(self) -> None:
        """Open the session and read it to its end, whatever that is; then `error` says why."""
        connect = pb.CommandConnect(
            client_version=CLIENT_VERSION,
            protocol_version=PROTOCOL_VERSION,
            auth_method_name="none",
            feature_flags=pb.FeatureFlags(supports_broker_entry_metadata=True),
        )
        self.send_control(connect)
        try:
            async with asyncio.TaskGroup() as group:
                helpers = (
                    group.create_task(self._outbox.run()),
                    group.create_task(self._watch()),
                )
                await self._read()
                for helper in helpers:
                    helper.cancel()
        finally:
            self._end(AlreadyClosed("the client was closed", broker=self.broker))

    async def close(self) -> None:
        """Send what is pending, then end the session. Bounded by CLOSE_S and the stream's own."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._outbox.wait_sent()
        except (StreamClosed, TimeoutError):
            pass
        await self._stream.close()

    def give_up(self, reason: str) -> None:
        """End the session at once, with what was to be sent."""
        self._end(ConnectError(reason, broker=self.broker))
        self._given_up.set()

    # Requests

    def ask(self, body: Body, done: Callable[[Body | PulsarException], None]) -> int:
        """Send a request; `done` is called once, with the answer or with what came instead.

        `body` has a `request_id`, which is set here and returned.
        """
        request_id = self._last_request_id = self._last_request_id + 1
        if self.error is not None:
            done(self.error)
            return request_id
        cast("pb.CommandSuccess", body).request_id = request_id
        self._asked[request_id] = done
        self.send_control(body)
        return request_id

    async def request(self, body: Body, answer: type[Answer]) -> Answer:
        """Send a request and wait for its answer. Raises what the broker says instead, and
        ConnectError (indefinite) when the connection breaks first. The caller has the deadline."""
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
        try:
            result = await answered
        finally:
            self._asked.pop(request_id, None)
        if not isinstance(result, answer):
            raise ConnectError(f"unexpected {type(result).__name__}", broker=self.broker)
        return result

    def check_alive(self) -> None:
        """Raises ConnectError when the session is over."""
        if self.error is not None:
            raise ConnectError(self.error.reason, broker=self.broker)

    def check_holds(self, owner_id: int) -> None:
        """Raises ConnectError when the session is over, or the broker has closed the producer or
        consumer: that may come in one frame with the answer which made it."""
        self.check_alive()
        if owner_id not in self._producers and owner_id not in self._consumers:
            raise ConnectError("the broker closed it at once", broker=self.broker)

    def send_control(self, body: Body) -> None:
        """Send a command ahead of entries. Nothing happens when the session is over."""
        self._outbox.put_control(encode_command(body))

    # Who is called

    def add_producer(self, producer_id: int, producer: ProducerSession) -> None:
        self._producers[producer_id] = producer

    def remove_producer(self, producer_id: int) -> None:
        self._producers.pop(producer_id, None)

    def add_consumer(self, consumer_id: int, consumer: ConsumerSession) -> None:
        self._consumers[consumer_id] = consumer

    def remove_consumer(self, consumer_id: int) -> None:
        self._consumers.pop(consumer_id, None)

    # Reading

    async def _read(self) -> None:
        """Handle frames until the stream ends; `error` says why it did."""
        try:
            while True:
                self._on_frame(await self._stream.receive())
        except StreamClosed as error:
            self._end(ConnectError(error.reason, broker=self.broker))
        except ProtocolError as error:
            self._end(ConnectError(f"the broker sent nonsense: {error}", broker=self.broker))
        await self._stream.close()

    def _on_frame(self, frame: memoryview) -> None:
        self._silent_intervals = 0
        data, at = b"", 0  # `data`: all of the frame, once there are receipts in it
        while at < len(frame):
            if is_receipt(frame, at):
                data = data or bytes(frame)
                receipts = read_receipts(data, at)
                self._on_receipts(receipts)
                at = receipts.end
            else:
                part, at = first_frame(frame, at)
                self._on_command(part)
        if self._touched:
            touched, self._touched = self._touched, {}
            for session in touched:
                session.on_frame_end()

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
            self.max_message_bytes = body.max_message_size
        if not self._opened.done():
            self._opened.set_result(None)

    def _on_receipts(self, run: ReceiptRun) -> None:
        producer = self._producers.get(run.producer_id)
        if producer is None:
            return  # closed, or attached anew
        self._touched[producer] = None
        producer.on_receipts(run.sequence_ids, run.ledger_id, run.entry_ids)

    def _on_send_error(self, body: pb.CommandSendError) -> None:
        producer = self._producers.get(body.producer_id)
        if producer is not None:
            self._touched[producer] = None
            error = from_server_error(body.error, body.message, broker=self.broker)
            producer.on_send_error(body.sequence_id, error)

    def _on_message(self, body: pb.CommandMessage, entry: memoryview) -> None:
        consumer = self._consumers.get(body.consumer_id)
        if consumer is not None:
            self._touched[consumer] = None
            consumer.on_message(body, entry)

    def _on_close_producer(self, body: pb.CommandCloseProducer) -> None:
        producer = self._producers.pop(body.producer_id, None)
        if producer is not None:
            producer.on_closed_by_broker(body.assignedBrokerServiceUrl or None)

    def _on_close_consumer(self, body: pb.CommandCloseConsumer) -> None:
        consumer = self._consumers.pop(body.consumer_id, None)
        if consumer is not None:
            consumer.on_closed_by_broker(body.assignedBrokerServiceUrl or None)

    def _on_error(self, body: pb.CommandError) -> None:
        error = from_server_error(body.error, body.message, broker=self.broker)
        if not self._opened.done():
            self._opened.set_exception(error)
        elif body.request_id == _UNASKED:
            log.warning("the broker complains", broker=self.broker, error=str(error))
        else:
            self._answer(body.request_id, error)

    def _on_ack_response(self, body: pb.CommandAckResponse) -> None:
        if body.HasField("error"):
            error = from_server_error(body.error, body.message, broker=self.broker)
            self._answer(body.request_id, error)
        else:
            self._answer(body.request_id, body)

    def _on_answer(self, body: pb.CommandSuccess) -> None:  # or any other with a request_id
        self._answer(body.request_id, body)

    def _on_ping(self, _: pb.CommandPing) -> None:
        self.send_control(pb.CommandPong())

    def _ignore(self, _: Any) -> None:
        """PONG has done its work by arriving; that a consumer is active shows in its messages."""

    def _answer(self, request_id: int, result: Body | PulsarException) -> None:
        done = self._asked.pop(request_id, None)
        if done is not None:  # None: nobody waits any more
            done(result)

    # Ending

    async def _watch(self) -> None:
        """Give up on a broker that does not accept the session, or falls silent."""
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await self.wait_opened()
        except TimeoutError:
            await self._abort(f"no answer within {self._open_timeout_s} s")
            return
        except PulsarException as error:
            await self._abort(error.reason)
            return
        while self._silent_intervals < SILENT_INTERVALS_MAX:
            self._silent_intervals += 1
            self.send_control(pb.CommandPing())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._keepalive_s):
                    await self._given_up.wait()
                break
        await self._abort(f"silent for {self._silent_intervals * self._keepalive_s} s")

    async def _abort(self, reason: str) -> None:
        self._end(ConnectError(reason, broker=self.broker))
        await self._stream.close()

    def _end(self, error: PulsarException) -> None:
        """Tell everybody who waits. The first reason counts."""
        if self.error is not None:
            return
        self.error = error
        if not self._opened.done():
            self._opened.set_exception(error)
        producers, self._producers = self._producers, {}
        consumers, self._consumers = self._consumers, {}
        for producer in producers.values():
            producer.on_disconnected(error)
        for consumer in consumers.values():
            consumer.on_disconnected(error)
        asked, self._asked = self._asked, {}
        for done in asked.values():  # last: whoever is told must not count on this connection
            done(error)


_HANDLERS: dict[int, Callable[[Connection, Any], None]] = {
    pb.BaseCommand.CONNECTED: Connection._on_connected,
    pb.BaseCommand.SEND_ERROR: Connection._on_send_error,
    pb.BaseCommand.MESSAGE: Connection._ignore,  # has an entry, so it is not handled through here
    pb.BaseCommand.CLOSE_PRODUCER: Connection._on_close_producer,
    pb.BaseCommand.CLOSE_CONSUMER: Connection._on_close_consumer,
    pb.BaseCommand.ERROR: Connection._on_error,
    pb.BaseCommand.ACK_RESPONSE: Connection._on_ack_response,
    pb.BaseCommand.SUCCESS: Connection._on_answer,
    pb.BaseCommand.PRODUCER_SUCCESS: Connection._on_answer,
    pb.BaseCommand.PARTITIONED_METADATA_RESPONSE: Connection._on_answer,
    pb.BaseCommand.LOOKUP_RESPONSE: Connection._on_answer,
    pb.BaseCommand.GET_LAST_MESSAGE_ID_RESPONSE: Connection._on_answer,
    pb.BaseCommand.PING: Connection._on_ping,
    pb.BaseCommand.PONG: Connection._ignore,
    pb.BaseCommand.ACTIVE_CONSUMER_CHANGE: Connection._ignore,
    pb.BaseCommand.REACHED_END_OF_TOPIC: Connection._ignore,
}
