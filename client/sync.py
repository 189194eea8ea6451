"""The synchronous client: a thin face over the asyncio one, whose loop runs in a thread.

All methods may be called from any thread. `send_async`, `acknowledge` and `receive` cross to the
loop through thread_bridge.py; every other method runs a coroutine on the loop and waits for it.
Send callbacks run on the loop's thread and must not wait for the client.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from magnetar.client.asyncio import Client as AsyncClient
from magnetar.client.callbacks import SendCallback, report
from magnetar.client.consumer import (
    acknowledgeable,
    check_cumulative,
    id_of,
    subscription_of,
)
from magnetar.client.consuming.listeners import Listener, ListenerThread
from magnetar.client.environment import Environment
from magnetar.client.errors import (
    AlreadyClosed,
    OperationNotSupported,
    PulsarException,
    Timeout,
)
from magnetar.client.options import (
    ClientOptions,
    ConsumerBatchReceivePolicy,
    ConsumerOptions,
    ProducerOptions,
    ReaderOptions,
)
from magnetar.client.producing.outgoing import (
    PENDING_BYTES_MAX,
    Room,
    outgoing_message,
    send_async_parameters,
)
from magnetar.client.reader import begin_at_latest, reader_subscription
from magnetar.client.signature import sending, taking
from magnetar.client.thread_bridge import LoopThread, Mailbox, Outcome, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.client.consuming.subscription import Subscription
    from magnetar.client.message import Message, MessageId
    from magnetar.client.producing.batching import Done
    from magnetar.client.producing.publisher import Publisher
    from magnetar.protos.message import OutgoingMessage


class Client:
    """Makes producers, consumers and readers, and holds the connections that they share.

    Connects when something is made. The parameters are those of ClientOptions.
    """

    _thread: LoopThread
    _client: AsyncClient
    _closed: bool

    @taking(ClientOptions)
    def __init__(self, options: ClientOptions) -> None:
        self._set_up(options, Environment())

    @classmethod
    def in_world(cls, options: ClientOptions, world: Environment) -> Self:
        """A client with another network, clock and chance: for tests and simulations."""
        client = cls.__new__(cls)
        client._set_up(options, world)
        return client

    @taking(ProducerOptions)
    def create_producer(self, options: ProducerOptions) -> Producer:
        """A producer on a topic. The parameters are those of ProducerOptions; errors as those of
        the asyncio client."""
        return self._thread.call(self._create_producer(options))

    @taking(ConsumerOptions)
    def subscribe(self, options: ConsumerOptions) -> Consumer:
        """A consumer of a subscription, which is made unless it exists. The parameters are those of
        ConsumerOptions; errors as those of the asyncio client."""
        return self._thread.call(self._subscribe(options))

    @taking(ReaderOptions)
    def create_reader(self, options: ReaderOptions) -> Reader:
        """A reader of a topic from a place in it. The parameters are those of ReaderOptions; errors
        as those of the asyncio client."""
        return self._thread.call(self._create_reader(options))

    def get_topic_partitions(self, topic: str) -> list[str]:
        """The names of the topic's partitions; its own name if it has none."""
        return self._thread.call(self._client.get_topic_partitions(topic))

    def close(self) -> None:
        """Close all producers and consumers as their `close` does, then the connections.

        Raises the first error of those; everything is closed all the same. Closing a closed client
        does nothing.
        """
        if self._closed:
            return
        self._thread.check_may_wait()
        self._closed = True
        timeout_s = self._client.parts.timeout_s
        try:
            self._stop_listeners(timeout_s)  # first: what a listener acknowledges is to be durable
            self._thread.call(self._client.close())
        finally:
            self._stop(timeout_s)

    def shutdown(self) -> None:
        """End everything at once. What has no receipt is told Interrupted, and acknowledgements
        that were not answered may be lost."""
        if not self._closed:
            self._closed = True
            self._thread.call_soon(self._client.shutdown)
            self._stop(0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_up(self, options: ClientOptions, world: Environment) -> None:
        self._thread = LoopThread("magnetar-client")
        self._closed = False
        self._listener_threads: list[ListenerThread] = []
        self._listener_threads_max = options.message_listener_threads
        self._listeners: list[Listener] = []
        try:
            self._client = self._thread.call(_made(options, world))
        except BaseException:
            self._thread.stop()
            raise
        _OPEN.add(self)

    async def _create_producer(self, options: ProducerOptions) -> Producer:
        publisher = self._client.publisher(options)
        producer = Producer(publisher, options, self._client, self._thread)
        await self._client.opened(publisher)
        return producer

    async def _subscribe(self, options: ConsumerOptions) -> Consumer:
        subscription = subscription_of(options)
        inbox = _Inbox(self._client, self._thread, options.topic, subscription)
        policy = options.batch_receive_policy or ConsumerBatchReceivePolicy()
        consumer = Consumer(inbox, policy, self._thread)
        if options.message_listener is not None:
            consumer.listener = self._listener(inbox, consumer, options.message_listener)
        await self._client.opened(inbox.subscriber)
        return consumer

    async def _create_reader(self, options: ReaderOptions) -> Reader:
        subscription = reader_subscription(options, self._client.parts.random)
        inbox = _Inbox(self._client, self._thread, options.topic, subscription)
        reader = Reader(inbox, self._thread)
        await self._client.opened(inbox.subscriber)
        await begin_at_latest(inbox.subscriber)
        if options.reader_listener is not None:
            self._listener(inbox, reader, options.reader_listener)
        return reader

    def _listener(
        self, inbox: _Inbox, owner: object, listener: Callable[[Any, Any], object]
    ) -> Listener:
        """Have `listener(owner, message)` called, always on the same thread."""
        if len(self._listener_threads) < self._listener_threads_max:
            name = f"magnetar-listener-{len(self._listener_threads)}"
            self._listener_threads.append(ListenerThread(name))
        thread = self._listener_threads[len(self._listeners) % len(self._listener_threads)]

        def deliver(message: Message) -> None:
            inbox.was_taken(message)
            listener(owner, message)

        made = Listener(inbox.mailbox, deliver, thread)
        self._listeners.append(made)
        return made

    def _stop_listeners(self, timeout_s: float) -> None:
        """Let them finish the message that they are at."""
        for listener in self._listeners:
            listener.pause()
        for thread in self._listener_threads:
            thread.stop(timeout_s)

    def _stop(self, listeners_timeout_s: float) -> None:
        _OPEN.discard(self)
        self._thread.stop()
        self._stop_listeners(listeners_timeout_s)


class Producer:
    """Publishes messages on a topic. Made by `Client.create_producer`."""

    def __init__(
        self,
        publisher: Publisher,
        options: ProducerOptions,
        client: AsyncClient,
        thread: LoopThread,
    ) -> None:
        publisher.face = self
        self._publisher = publisher
        self._thread = thread
        self._clock = client.parts.clock
        self._blocks = options.block_if_queue_full
        self._room = Room(options.pending_messages_max, PENDING_BYTES_MAX, topic=publisher.topic)
        self._room_lock = threading.Lock()
        self._room_changed = threading.Condition(self._room_lock)
        self._waiting: deque[object] = deque()  # a ticket of each who waits for room
        self._crossing = thread.crossing(self._submit)

    @sending(outgoing_message)
    def send(self, *args: Any, **kwargs: Any) -> MessageId:
        """Publish a message and wait until it is stored; gives its id. Closes its batch at once.

        Raises Timeout (indefinite), MessageTooBig, AlreadyClosed, ...; with a full queue waits
        (`block_if_queue_full`) or raises ProducerQueueIsFull or MemoryBufferIsFull.
        """
        self._thread.check_may_wait()
        message, size = outgoing_message(self._clock, *args, **kwargs)
        error = self._take_room(size)
        if error is not None:
            raise error
        outcome = Outcome()
        self._hand_over(message, size, outcome.settle, waits=True)
        return outcome.wait()

    @sending(send_async_parameters)
    def send_async(
        self, content: bytes | None, callback: SendCallback | None, *args: Any, **kwargs: Any
    ) -> None:
        """Publish a message; `callback(result, message_id)` is called with the outcome, on the
        client's own thread. With a full queue waits (`block_if_queue_full`), or the outcome is
        ProducerQueueIsFull or MemoryBufferIsFull at once."""
        message, size = outgoing_message(self._clock, content, *args, **kwargs)
        error = self._take_room(size)
        if error is None:
            self._hand_over(message, size, partial(report, callback), waits=False)
        else:
            report(callback, error, None)

    def flush(self) -> None:
        """Send what has gathered and wait until all of it is stored. Raises the first error."""
        self._thread.call(self._publisher.flush())

    def close(self) -> None:
        """Wait for the receipts of what was sent, and end. Raises Timeout if they do not come."""
        self._thread.call(self._publisher.close())

    def topic(self) -> str:
        """The full name of the topic."""
        return self._publisher.topic

    def producer_name(self) -> str:
        """The name that was given, or that the broker chose."""
        return self._publisher.name

    def last_sequence_id(self) -> int:
        """Of the last message that was stored; -1: none was."""
        return self._publisher.last_sequence_id

    def is_connected(self) -> bool:
        """Whether a broker has it at the moment."""
        return self._publisher.is_attached

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the user's thread

    def _take_room(self, size: int) -> PulsarException | None:
        """Why there is no room. None: it was taken, by who waits in the order of their coming:
        small messages would leave none for a large one."""
        with self._room_lock:  # which the condition takes ten times as long for
            if not self._waiting and self._room.maybe_take(size):
                return None
            if not self._blocks or self._thread.is_current:
                return self._room.refusal()
            ticket = object()
            self._waiting.append(ticket)
            try:
                wait_for(
                    self._room_changed,
                    lambda: self._waiting[0] is ticket and self._room.maybe_take(size),
                )
            finally:
                self._waiting.remove(ticket)
                self._room_changed.notify_all()  # it is the next one's turn
        return None

    def _hand_over(self, message: OutgoingMessage, size: int, done: Done, *, waits: bool) -> None:
        """A message that has room. Raises AlreadyClosed, and then others may have it."""
        try:
            self._crossing.put((message, size, done, waits))
        except AlreadyClosed:
            self.on_released(1, size)
            self.on_burst_end()
            raise

    # On the loop

    def on_released(self, messages: int, message_bytes: int) -> None:
        with self._room_lock:
            self._room.give(messages, message_bytes)

    def on_burst_end(self) -> None:
        if self._waiting:
            with self._room_changed:
                self._room_changed.notify_all()

    def _submit(self, sends: deque[tuple[OutgoingMessage, int, Done, bool]]) -> None:
        """A burst. Whoever waits for one of them gets its batch closed at once."""
        submit = self._publisher.submit
        somebody_waits = False
        for message, size, done, waits in sends:
            submit(message, size, done)
            somebody_waits |= waits
        if somebody_waits:
            self._publisher.seal()


class Consumer:
    """Receives the messages of a subscription. Made by `Client.subscribe`."""

    def __init__(
        self, inbox: _Inbox, policy: ConsumerBatchReceivePolicy, thread: LoopThread
    ) -> None:
        self._inbox = inbox
        self._subscriber = inbox.subscriber
        self._policy = policy
        self._thread = thread
        self.listener: Listener | None = None  # None: the user calls receive()

    def receive(self, timeout_millis: int | None = None) -> Message:
        """The next message, as soon as there is one. Raises Timeout, AlreadyClosed."""
        if self.listener is not None:
            raise OperationNotSupported("messages go to the message_listener")
        return self._inbox.take(None if timeout_millis is None else timeout_millis / 1000)

    def batch_receive(self) -> list[Message]:
        """As many messages as the policy says, or fewer, even none, when its time is up.
        Interrupted (Ctrl-C), it leaves those that it has for the next call."""
        policy = self._policy
        end_at = None if policy.timeout_s is None else monotonic() + policy.timeout_s
        messages: list[Message] = []
        size = 0
        try:
            while len(messages) < policy.messages_max and size < policy.bytes_max:
                left_s = None if end_at is None else max(end_at - monotonic(), 0)
                message = self._inbox.take(left_s)
                messages.append(message)
                size += len(message.data())
        except Timeout:
            return messages
        except BaseException:
            self._inbox.put_back(messages)
            raise
        return messages

    def acknowledge(self, message: Message | MessageId) -> None:
        """This message is done. Does not wait: acknowledgements are sent together within 100 ms,
        again on another connection if need be, and `close` waits until they are durable."""
        self._inbox.do(self._subscriber.acknowledge, acknowledgeable(message))

    def acknowledge_cumulative(self, message: Message | MessageId) -> None:
        """This message and all before it are done. Raises CumulativeAcknowledgementNotAllowedError
        on Shared and Key_Shared subscriptions."""
        check_cumulative(self._subscriber.subscription)
        self._inbox.do(self._subscriber.acknowledge_cumulative, acknowledgeable(message))

    def negative_acknowledge(self, message: Message | MessageId) -> None:
        """This message is to come again after `negative_ack_redelivery_delay_ms`."""
        self._inbox.do(self._subscriber.negative_acknowledge, id_of(message))

    def redeliver_unacknowledged_messages(self) -> None:
        """Everything that was delivered and not acknowledged is to come again."""
        self._inbox.do(self._subscriber.redeliver_unacknowledged, None)

    def pause_message_listener(self) -> None:
        """Stop calling the listener; what comes meanwhile waits in the queue."""
        if self.listener is not None:
            self.listener.pause()

    def resume_message_listener(self) -> None:
        """Call the listener again."""
        if self.listener is not None:
            self.listener.resume()

    def seek(self, messageid: MessageId | int) -> None:
        """Go on after that message (at it, with `start_message_id_inclusive`), or with the first
        one that was published at that time in milliseconds or later."""
        self._thread.call(self._subscriber.seek(messageid))

    def get_last_message_id(self) -> MessageId:
        """Of the last message of the topic; (-1, -1) when it is empty."""
        last, _ = self._thread.call(self._subscriber.last_message_id())
        return last

    def unsubscribe(self) -> None:
        """Delete the subscription, of which this must be the only consumer, and close."""
        self._thread.call(self._subscriber.unsubscribe())

    def close(self) -> None:
        """End, once the acknowledgements given before are durable. Raises Timeout if they may not
        be."""
        self.pause_message_listener()
        self._thread.call(self._subscriber.close())

    def topic(self) -> str:
        """The full name of the topic."""
        return self._subscriber.topic

    def subscription_name(self) -> str:
        return self._subscriber.subscription.name

    def consumer_name(self) -> str:
        """The name that was given; "": none was."""
        return self._subscriber.subscription.consumer_name or ""

    def is_connected(self) -> bool:
        """Whether a broker has it at the moment."""
        return self._subscriber.is_attached

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Reader:
    """Reads a topic from a place that the user chooses. Made by `Client.create_reader`."""

    def __init__(self, inbox: _Inbox, thread: LoopThread) -> None:
        self._inbox = inbox
        self._subscriber = inbox.subscriber
        self._thread = thread

    def read_next(self, timeout_millis: int | None = None) -> Message:
        """The next message, as soon as there is one. Raises Timeout, AlreadyClosed."""
        return self._inbox.take(None if timeout_millis is None else timeout_millis / 1000)

    def has_message_available(self) -> bool:
        """Whether there is a message after the last that was read. Asks the broker if need be."""
        return self._thread.call(self._subscriber.has_message_available())

    def seek(self, messageid: MessageId | int) -> None:
        """Go on after that message (at it, with `start_message_id_inclusive`), or with the first
        one that was published at that time in milliseconds or later."""
        self._thread.call(self._subscriber.seek(messageid))

    def close(self) -> None:
        self._thread.call(self._subscriber.close())

    def topic(self) -> str:
        """The full name of the topic."""
        return self._subscriber.topic

    def is_connected(self) -> bool:
        """Whether a broker has it at the moment."""
        return self._subscriber.is_attached

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Inbox:
    """What a consumer and a reader have in common here: messages one way, what becomes of them the
    other. Made on the loop."""

    def __init__(
        self, client: AsyncClient, thread: LoopThread, topic: str, subscription: Subscription
    ) -> None:
        self._thread = thread
        self._prefetches = subscription.queue_messages_max > 0
        self._crossing = thread.crossing(self._carry_out)
        self.mailbox = Mailbox(topic, self._on_waiting)
        self.subscriber = client.subscriber(topic, subscription, self.mailbox)

    def take(self, timeout_s: float | None) -> Message:
        """The next message. Raises Timeout, and why there is no more."""
        message = self.mailbox.maybe_take()
        if message is None:
            self._thread.check_may_wait()
            message = self.mailbox.take(timeout_s)
        self.was_taken(message)
        return message

    def was_taken(self, message: Message) -> None:
        self._crossing.put((self.subscriber.on_taken, message))

    def put_back(self, messages: list[Message]) -> None:
        """They were taken and are not wanted now."""
        self.mailbox.put_back(messages)
        with suppress(AlreadyClosed):
            self._crossing.put((self.subscriber.on_returned, messages))

    def do(self, function: Callable[[Any], None], argument: object) -> None:
        """Have the subscriber do something. Raises AlreadyClosed."""
        self.subscriber.check_open()
        self._crossing.put((function, argument))

    def _on_waiting(self) -> None:
        if not self._prefetches:
            self._crossing.put((self.subscriber.on_waiting, None))

    def _carry_out(self, items: deque[tuple[Callable[[Any], None], Any]]) -> None:
        if not self.subscriber.is_over:
            for function, argument in items:
                function(argument)


async def _made(options: ClientOptions, world: Environment) -> AsyncClient:
    """Where there is a running loop."""
    return AsyncClient.in_world(options, world)


_OPEN: set[Client] = set()
"""Clients that were not closed. A program that ends without closing them must not hang or crash in
their threads, so they are ended first."""


@atexit.register
def _end_open_clients() -> None:
    for client in list(_OPEN):
        client.shutdown()
