"""The synchronous client: it wraps the asyncio client, whose event loop runs in its own thread.

All methods may be called from any thread. `send`, `send_async`, `receive` and the methods that
acknowledge pass items to the loop through thread_bridge.py. A method that waits for the broker runs
a coroutine on the loop and waits for it. A send callback on the loop's thread must not wait for the
client.
"""

from __future__ import annotations

import atexit
import weakref
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, Self

from magnetar.client.asyncio import Client as AsyncClient
from magnetar.client.callbacks import SendCallback, report
from magnetar.client.consumer import (
    acknowledge,
    acknowledge_cumulative,
    acknowledge_each,
    acknowledgeable,
    check_cumulative,
    close_core,
    known,
    negative_acknowledge,
    seconds,
    seekable,
    slices_of,
)
from magnetar.client.consuming.listeners import Listener, ListenerThread
from magnetar.client.consuming.retry import RetrySubscriber, not_enabled
from magnetar.client.consuming.steps import YIELD_QUEUE_MIN, Call, Steps
from magnetar.client.environment import Environment
from magnetar.client.errors import (
    AlreadyClosed,
    InvalidConfiguration,
    Timeout,
)
from magnetar.client.guard import end_after_bug
from magnetar.client.interceptors import (
    ConsumerHooks,
    ProducerHooks,
    consumer_hooks,
)
from magnetar.client.message import Message, MessageId
from magnetar.client.options import (
    ClientOptions,
    ConsumerBatchReceivePolicy,
    ConsumerOptions,
    ProducerOptions,
    ReaderOptions,
    TableViewOptions,
)
from magnetar.client.producing.outgoing import (
    PendingLimit,
    message_maker,
    outgoing_message,
    send_async_parameters,
)
from magnetar.client.producing.thread_limit import ThreadLimit
from magnetar.client.rates import Rates
from magnetar.client.reader import begin_at_latest, reader_subscription
from magnetar.client.signature import sending, takes_parameters_of
from magnetar.client.thread_bridge import Life, LoopThread, Mailbox, Outcome

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from magnetar.client.consuming.retry import ConsumerCore
    from magnetar.client.consuming.statistics import ConsumerStatistics
    from magnetar.client.consuming.steps import Step
    from magnetar.client.producing.batching import Done
    from magnetar.client.producing.partitions import ProducerCore
    from magnetar.client.producing.statistics import ProducerStatistics
    from magnetar.client.service_info import ServiceInfo
    from magnetar.client.table_view import Changed, TableRows
    from magnetar.protos.message import OutgoingMessage


class Client:
    """A client creates producers, consumers and readers, and holds the connections that they share.

    The client connects at the first call that needs a broker, for example `create_producer`. All
    methods may be called from any thread. The parameters are those of ClientOptions.
    """

    _client: AsyncClient

    @takes_parameters_of(ClientOptions)
    def __init__(self, options: ClientOptions) -> None:
        self._set_up(options, Environment())

    @classmethod
    def in_environment(cls, options: ClientOptions, environment: Environment) -> Self:
        """Create a client with another network, clock and random source, for tests."""
        client = cls.__new__(cls)
        client._set_up(options, environment)
        return client

    @takes_parameters_of(ProducerOptions)
    def create_producer(self, options: ProducerOptions) -> Producer:
        """Create a producer on a topic. The parameters are those of ProducerOptions.

        Raises the broker's refusal, for example ProducerBusy, InvalidTopicName or NotAllowedError.
        Raises ConnectError or Timeout if no broker accepts the producer within
        `operation_timeout_seconds`.
        """
        return self._thread.call(self._create_producer(options))

    @takes_parameters_of(ConsumerOptions)
    def subscribe(self, options: ConsumerOptions) -> Consumer:
        """Create a consumer of a subscription. The broker creates the subscription if it does not
        exist. The parameters are those of ConsumerOptions.

        Raises the broker's refusal, for example ConsumerBusy, InvalidTopicName or NotAllowedError.
        Raises ConnectError or Timeout if no broker accepts the consumer within
        `operation_timeout_seconds`.
        """
        return self._thread.call(self._subscribe(options))

    @takes_parameters_of(ReaderOptions)
    def create_reader(self, options: ReaderOptions) -> Reader:
        """Create a reader of a topic. The parameters are those of ReaderOptions.

        Raises the same errors as `subscribe`. Raises OperationNotSupported if the topic has
        partitions and `start_message_id` is neither `MessageId.earliest` nor `MessageId.latest`.
        """
        return self._thread.call(self._create_reader(options))

    @takes_parameters_of(TableViewOptions)
    def create_table_view(self, options: TableViewOptions) -> TableView:
        """Create a table view: a dictionary with the last value of each key of a topic.

        The call returns when the view has read all messages that the topic held before the call.
        Raises the same errors as `subscribe`.
        """
        rows = self._thread.call(self._client.table_rows(options))
        return TableView(rows, self._life)

    def get_topic_partitions(self, topic: str) -> list[str]:
        """Return the names of the topic's partitions, or the topic's own name if it has none.

        Raises ConnectError or Timeout if no broker answers within `operation_timeout_seconds`.
        """
        return self._thread.call(self._client.get_topic_partitions(topic))

    def get_service_info(self) -> ServiceInfo:
        """Return the cluster that the client uses now."""
        return self._client.get_service_info()

    def close(self) -> None:
        """Close all producers, consumers and readers, then the connections.

        If some of them fail to close, the client closes the rest and raises the first error.
        Raises AlreadyClosed if the client was closed before.
        """
        if self._engine.is_closed:
            raise AlreadyClosed("the client was closed")
        self._thread.check_may_wait()
        self._engine.close()

    def shutdown(self) -> None:
        """End everything at once, without waiting for the brokers.

        Sends that have no receipt fail with Interrupted. Acknowledgements that the broker has not
        confirmed may be lost.
        """
        self._engine.shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._engine.is_closed:
            self.close()

    def _set_up(self, options: ClientOptions, environment: Environment) -> None:
        thread = LoopThread("magnetar-client", environment.new_loop)
        try:
            self._client = thread.call(_made(options, environment))
        except BaseException:
            thread.stop()
            raise
        self._client.wait_for_schemas = thread.call
        thread.ending = self._client.parts.scope.wait_ended
        self._engine = _Engine(thread, self._client, options.message_listener_threads)
        self._life = Life(thread, self._engine.drop)

    @property
    def _thread(self) -> LoopThread:
        return self._life.thread

    async def _create_producer(self, options: ProducerOptions) -> Producer:
        publisher = await self._client.publisher(options)
        producer = Producer(publisher, options, self._client, self._life)
        await self._client.opened(publisher)
        return producer

    async def _subscribe(self, options: ConsumerOptions) -> Consumer:
        mailbox = Mailbox(str(options.topic))
        inbox = _Inbox(self._thread, mailbox, await self._client.consumer_core(options, mailbox))
        policy = options.batch_receive_policy or ConsumerBatchReceivePolicy()
        consumer = Consumer(inbox, policy, consumer_hooks(options.interceptors), self._life)
        if options.message_listener is not None:
            self._listen(inbox, consumer, options.message_listener)
        try:
            await self._client.opened(inbox.subscriber)
        except BaseException:
            end_listening(consumer)
            raise
        return consumer

    async def _create_reader(self, options: ReaderOptions) -> Reader:
        subscription = self._client.decoding(
            reader_subscription(options, self._client.parts.random), options.schema
        )
        mailbox = Mailbox(options.topic)
        subscriber = await self._client.subscriber(options.topic, subscription, mailbox)
        inbox = _Inbox(self._thread, mailbox, subscriber)
        reader = Reader(inbox, self._life)
        await self._client.opened(inbox.subscriber)
        await begin_at_latest(inbox.subscriber)
        if options.reader_listener is not None:
            self._listen(inbox, reader, options.reader_listener)
        return reader

    def _listen(
        self, inbox: _Inbox, owner: Consumer | Reader, listener: Callable[[Any, Any], object]
    ) -> None:
        """Call `listener(owner, message)` for each message, always on the same thread."""
        taken, owner_of = inbox.was_taken, weakref.ref(owner)

        def deliver(message: Message) -> None:
            current = owner_of()
            if current is not None:  # None: the program has dropped the owner and the client
                taken(message)
                shown = current.shown(message) if isinstance(current, Consumer) else message
                listener(current, shown)

        self._life.listening.add(owner)
        owner.listener = self._engine.listen(inbox.mailbox, deliver)


class _Engine:
    """The parts that run for a client: the loop's thread, the asyncio client, listeners' threads.

    The engine holds no reference to the program's clients, producers and consumers. So Python can
    free these objects when the program drops them.
    """

    def __init__(self, thread: LoopThread, client: AsyncClient, listener_threads_max: int) -> None:
        self._thread = thread
        self._client = client
        self._listener_threads: list[ListenerThread] = []
        self._listener_threads_max = listener_threads_max
        self._listeners: set[Listener] = set()  # of open consumers and readers
        self._listened = 0  # listeners so far
        self.is_closed = False
        _RUNNING.add(self)

    def listen(self, mailbox: Mailbox, deliver: Callable[[Message], None]) -> Listener:
        if len(self._listener_threads) < self._listener_threads_max:
            name = f"magnetar-listener-{len(self._listener_threads)}"
            self._listener_threads.append(ListenerThread(name))
        thread = self._listener_threads[self._listened % len(self._listener_threads)]
        self._listened += 1
        made = Listener(mailbox, deliver, thread)
        self._listeners.add(made)
        made.on_closed = partial(self._listeners.discard, made)
        return made

    def close(self) -> None:
        self.is_closed = True
        timeout_s = self._client.parts.timeout_s
        try:
            self._stop_listeners(timeout_s)  # first, so that their last acks become durable
            self._thread.call(self._client.close())
        finally:
            self._stop(timeout_s)

    def shut_down(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._thread.call_soon(self._client.shutdown)
            self._stop(0.0)

    def drop(self) -> None:
        """End everything without waiting.

        `Life` calls this when the program has dropped the client and all objects that it created.
        """
        if not self.is_closed:
            self.is_closed = True
            _RUNNING.discard(self)
            self._thread.call_soon(self._client.shutdown)
            self._thread.stop_soon()
            for thread in self._listener_threads:
                thread.stop_soon()

    def _stop_listeners(self, timeout_s: float) -> None:
        """Stop the listeners. Each thread gets `timeout_s` to finish its current message."""
        for listener in list(self._listeners):
            listener.pause()
        for thread in self._listener_threads:
            thread.stop(timeout_s)

    def _stop(self, listeners_timeout_s: float) -> None:
        _RUNNING.discard(self)
        self._thread.stop()
        self._stop_listeners(listeners_timeout_s)


class Producer:
    """A producer publishes messages on a topic. `Client.create_producer` creates it."""

    def __init__(
        self,
        publisher: ProducerCore,
        options: ProducerOptions,
        client: AsyncClient,
        life: Life,
    ) -> None:
        self._life = life
        self._publisher = publisher
        self._thread = life.thread
        self._message = message_maker(options.schema, client.parts.clock)
        limit = PendingLimit(
            publisher.pending_messages_max, publisher.pending_bytes_max, topic=publisher.topic
        )
        self._limit = ThreadLimit(limit, life.thread, blocks=options.block_if_queue_full)
        publisher.producer = self._limit
        self._bridge = life.thread.bridge(partial(_submit, publisher))
        self._hooks = ProducerHooks(options.interceptors) if options.interceptors else None
        self._closed = False
        self._rates = Rates(monotonic())

    @sending(outgoing_message)
    def send(self, *args: Any, **kwargs: Any) -> MessageId:
        """Publish a message and wait until it is stored. Returns its id.

        The producer sends the message's batch at once, without waiting for more messages.

        - `content`: the payload, or the value that the schema encodes. None: no value. On a
          compacted topic, a message without a value deletes its key.
        - `properties`: texts that the application attaches to the message.
        - `partition_key`: the key of the message.
        - `ordering_key`: the key that Key_Shared subscriptions use instead of `partition_key`.
        - `sequence_id`: the number of the message. None: the producer chooses the number.
        - `event_timestamp`: the application's own time, in milliseconds since 1970.
        - `deliver_at`: the time when Shared and Key_Shared subscriptions deliver the message, in
          milliseconds since 1970. Other subscriptions deliver it at once.
        - `deliver_after`: the delay from this call to the delivery, a `timedelta`.

        At the limit of pending messages, the call waits if the producer has `block_if_queue_full`.
        Otherwise it raises ProducerQueueIsFull or MemoryBufferIsFull. Raises Timeout if no receipt
        arrives within `send_timeout_millis`; the message may still be stored. Raises MessageTooBig,
        InvalidMessage, and AlreadyClosed if the producer is closed.
        """
        self._thread.check_may_wait()
        outcome = Outcome()
        done: Done = outcome.settle
        if self._hooks is None:
            message, size = self._message(*args, **kwargs)
        else:
            message, size, done = self._hooks.prepared(self, self._message, done, *args, **kwargs)
        self._hand_over(message, size, done, waits=True)
        return outcome.wait()

    @sending(send_async_parameters)
    def send_async(
        self, content: bytes | None, callback: SendCallback | None, *args: Any, **kwargs: Any
    ) -> None:
        """Publish a message without waiting, and call `callback(result, message_id)` later.

        `result` is a `Result`. If it is not `Result.Ok`, the ledger and entry ids of `message_id`
        are -1. The other parameters are those of `send`. The client calls the callback on its own
        thread; the callback must not wait for the client.

        At the limit of pending messages, the call waits if the producer has `block_if_queue_full`,
        except in a callback of the client. If it does not wait at the limit, it calls the callback
        itself, in the caller's thread, with ProducerQueueIsFull or MemoryBufferIsFull. Raises
        InvalidMessage if the message is invalid, and AlreadyClosed if the client is closed.
        """
        self._thread.check_not_forked()
        done: Done = partial(report, callback)
        if self._hooks is None:
            message, size = self._message(content, *args, **kwargs)
        else:
            make = self._message
            message, size, done = self._hooks.prepared(self, make, done, content, *args, **kwargs)
        self._hand_over(message, size, done, waits=False)

    def flush(self) -> None:
        """Send all pending messages and wait until they are stored.

        Raises the first error of a message that failed, and AlreadyClosed if the producer is
        closed. If an error such as ProducerFenced has ended the producer, raises this error.
        """
        self._thread.call(self._publisher.flush())

    def close(self) -> None:
        """Wait for the receipts of all pending messages, and close the producer.

        Raises Timeout if receipts or the broker's answer are missing after
        `operation_timeout_seconds`; the producer is then closed nevertheless. Raises AlreadyClosed
        if the producer was closed before.
        """
        if self._closed:
            raise AlreadyClosed("the producer was closed", topic=self.topic())
        self._thread.check_not_in_callback()  # an error here leaves the object open
        self._closed = True
        try:
            self._thread.call(self._publisher.close())
        finally:
            if self._hooks is not None:
                self._hooks.close()

    def get_stats(self) -> ProducerStatistics:
        """Return what the producer counted since it was created, and its rates."""
        stats = self._thread.call(_counted(self._publisher))
        stats.messages_per_second, stats.bytes_per_second = self._rates.rates(
            stats.messages_sent, stats.bytes_sent, monotonic()
        )
        return stats

    def topic(self) -> str:
        """Return the full name of the topic."""
        return self._publisher.topic

    def producer_name(self) -> str:
        """Return the name given in `producer_name`, or the name that the broker chose."""
        return self._publisher.name

    def last_sequence_id(self) -> int:
        """Return the sequence id of the last stored message. Before the first one, return
        `initial_sequence_id`, or the last id that the broker has stored for the producer's name, or
        -1."""
        return self._publisher.last_sequence_id

    def is_connected(self) -> bool:
        """Return whether the producer is attached now; with partitions, to each that it uses."""
        return self._publisher.is_attached

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_once(self)

    def _hand_over(self, message: OutgoingMessage, size: int, done: Done, *, waits: bool) -> None:
        """Pass a message to the loop if the limit admits it. Otherwise call `done` with the error.

        An interrupt (Ctrl-C) may arrive between any two steps; see `ThreadLimit.reserve`. If the
        interrupt prevents the passing, this method takes the reservation of the message back.
        """
        reserved = False
        late: BaseException | None = None  # an interrupt after the message was passed on
        try:
            error = self._limit.reserve(size)
            if error is None:
                reserved = True
                late = self._bridge.pass_on((message, size, done, waits))
        except BaseException:
            if reserved:
                self._limit.take_back(size)
            raise
        if error is not None:
            done(error, None)
        if late is not None:
            raise late


def _submit(publisher: ProducerCore, sends: deque[tuple[OutgoingMessage, int, Done, bool]]) -> None:
    """Submit messages to the publisher. Called on the loop.

    If a thread waits for the receipt of one of them, send the open batches at once.
    """
    submit = publisher.submit
    any_waits = False
    for message, size, done, waits in sends:
        try:
            submit(message, size, done)
        except Exception as bug:  # the other sends get an outcome, too
            done(end_after_bug(publisher, bug), None)
        any_waits |= waits
    if any_waits:
        publisher.seal()


class Consumer:
    """A consumer receives the messages of a subscription. `Client.subscribe` creates it."""

    def __init__(
        self,
        inbox: _Inbox,
        policy: ConsumerBatchReceivePolicy,
        hooks: ConsumerHooks | None,  # None: no interceptors
        life: Life,
    ) -> None:
        self._hooks = hooks
        self._life = life
        self._inbox = inbox
        self._subscriber = inbox.subscriber
        self._acknowledge = partial(acknowledge, inbox.subscriber)
        self._policy = policy
        self._thread = life.thread
        self._orders_negative_acks = inbox.subscriber.subscription.orders_negative_acks
        self._closed = False
        self._rates = Rates(monotonic())
        self.listener: Listener | None = None  # None: the user calls receive()

    def receive(self, timeout_millis: int | None = None) -> Message:
        """Return the next message; wait until there is one.

        `timeout_millis`: the time limit in milliseconds; None: no limit. Raises Timeout if no
        message arrives within that time, and AlreadyClosed if the consumer is closed.
        Raises InvalidConfiguration if the consumer has a `message_listener`.
        """
        if self.listener is not None:
            refuse_beside_listener(self.listener)
        timeout_s = None if timeout_millis is None else seconds(timeout_millis)
        message = self._inbox.take(timeout_s)
        return message if self._hooks is None else self.shown(message)

    def batch_receive(self) -> list[Message]:
        """Return messages as soon as one limit of the consumer's `batch_receive_policy` is reached.

        The list can be empty if the time limit of the policy is reached first. If the call raises
        an error, its messages go back to the queue for the next call. Raises AlreadyClosed if the
        consumer is closed, and InvalidConfiguration if it has a `message_listener`.
        """
        refuse_beside_listener(self.listener)
        policy = self._policy
        end_at = None if policy.timeout_s is None else monotonic() + policy.timeout_s
        messages: list[Message] = []
        size = 0
        try:
            while len(messages) < policy.messages_max and size < policy.bytes_max:
                left_s = None if end_at is None else max(end_at - monotonic(), 0)
                message = self._inbox.take(left_s)
                messages.append(message)
                size += message.payload_bytes
        except Timeout:
            pass
        except BaseException:
            self._inbox.put_back(messages)
            raise
        return [self.shown(message) for message in messages]

    def acknowledge(self, message: Message | MessageId | Sequence[Message | MessageId]) -> None:
        """Acknowledge a message, or a list of messages. The broker does not deliver them again.

        The call does not wait for the broker. The client sends acknowledgements in groups within
        100 ms. After a reconnection, the client sends unconfirmed acknowledgements again. `close`
        waits until all acknowledgements are durable.

        The client sends a list in commands of at most 1,000 ids. If one message of the list cannot
        be acknowledged, the client acknowledges none of them. Raises AlreadyClosed if the consumer
        is closed. Raises OperationNotSupported for an id in a batch without the batch size. If the
        consumer has several topics, raises it also for an id without a topic.
        """
        if isinstance(message, Message) and message.delivery.key is not None:
            self._inbox.acknowledge(message)
        elif isinstance(message, (Message, MessageId)):
            self._inbox.do(self._acknowledge, acknowledgeable(message, self._subscriber))
        else:
            self._subscriber.check_open()
            each = partial(acknowledge_each, self._subscriber)
            for some in slices_of(message, self._subscriber):
                self._inbox.do(each, some)
        if self._hooks is not None:
            self._hooks.on_acknowledge(self, message)

    def acknowledge_cumulative(self, message: Message | MessageId) -> None:
        """Acknowledge a message and all messages before it in its topic or partition.

        Raises CumulativeAcknowledgementNotAllowedError on Shared and Key_Shared subscriptions, and
        AlreadyClosed if the consumer is closed.
        """
        check_cumulative(self._subscriber.subscription)
        given = acknowledgeable(message, self._subscriber)
        self._inbox.do(partial(acknowledge_cumulative, self._subscriber), given)
        if self._hooks is not None:
            self._hooks.on_acknowledge_cumulative(self, message)

    def negative_acknowledge(self, message: Message | MessageId) -> None:
        """Ask the broker to redeliver a message after `negative_ack_redelivery_delay_ms`, or after
        the delay of `negative_ack_redelivery_backoff`.

        Raises AlreadyClosed if the consumer is closed.
        """
        given = known(message, self._subscriber)
        if self._orders_negative_acks and not self._thread.is_current:
            # Wait: the thread must not take a later message of the key before the client knows of
            # this negative acknowledgement.
            self._thread.call(self._negative_acknowledge(given))
        else:
            self._inbox.do(partial(negative_acknowledge, self._subscriber), given)
        if self._hooks is not None:
            self._hooks.on_negative_acknowledge(self, message)

    async def _negative_acknowledge(self, message: Message | MessageId) -> None:
        self._subscriber.check_open()
        negative_acknowledge(self._subscriber, message)

    def redeliver_unacknowledged_messages(self) -> None:
        """Ask the broker to redeliver all messages that this consumer has not acknowledged."""
        self._inbox.do(self._subscriber.redeliver_unacknowledged, None)

    def pause(self) -> None:
        """Request no more messages from the broker. `receive` still returns queued messages."""
        self._inbox.do(self._subscriber.pause, None)

    def resume(self) -> None:
        """Request messages again after `pause`."""
        self._inbox.do(self._subscriber.resume, None)

    def get_stats(self) -> ConsumerStatistics:
        """Return what the consumer counted since it was created, and its rates."""
        stats = self._thread.call(self._subscriber.statistics())
        stats.messages_per_second, stats.bytes_per_second = self._rates.rates(
            stats.messages_received, stats.bytes_received, monotonic()
        )
        return stats

    def reconsume_later(
        self,
        message: Message,
        delay: timedelta,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Publish a copy of the message on the retry topic, then acknowledge the message.

        The consumer receives the copy after `delay`. The copy has the properties of the message and
        `properties`. After `max_redeliver_count` copies, the message goes to the dead-letter topic.
        Raises OperationNotSupported unless the consumer has `enable_retry=True`. Raises the errors
        of `Producer.send`; the message then stays unacknowledged.
        """
        if not isinstance(self._subscriber, RetrySubscriber):
            raise not_enabled()
        self._thread.call(self._subscriber.reconsume_later(message, delay, properties))

    def pause_message_listener(self) -> None:
        """Stop calling the listener. Messages that arrive wait in the queue."""
        if self.listener is not None:
            self.listener.pause()

    def resume_message_listener(self) -> None:
        """Call the listener again."""
        if self.listener is not None:
            self.listener.resume()

    def seek(self, messageid: MessageId | int) -> None:
        """Move the subscription to a message id or to a publish time.

        - A message id: the consumer next receives the message after this id. With
          `start_message_id_inclusive`, it next receives the message with this id.
        - A time in milliseconds since 1970: the consumer next receives the first
          message that was published at that time or later.

        With several topics, a time, `MessageId.earliest` and `MessageId.latest` apply to all
        topics. Any other id applies to its own topic only. Raises OperationNotSupported if the id
        does not name one of the topics. Raises Timeout if the broker does not answer within
        `operation_timeout_seconds`, and AlreadyClosed if the consumer is closed.
        """
        self._thread.call(self._subscriber.seek(seekable(messageid)))

    def get_last_message_id(self) -> MessageId:
        """Return the id of the topic's last message. For an empty topic, ledger and entry
        are -1.

        Raises OperationNotSupported if the consumer has several topics or partitions, as in
        Apache's client. Raises Timeout if the broker does not answer within
        `operation_timeout_seconds`, and AlreadyClosed if the consumer is closed.
        """
        last, _ = self._thread.call(self._subscriber.last_message_id())
        return last

    def get_last_message_ids(self) -> list[MessageId]:
        """Return the id of the last message of each topic. The ids have their `topic_name()`.

        With `enable_retry`, the ids of the retry topic come last.

        The method is named as in Apache's Java client; Apache's Python client does not have it.
        Raises Timeout and AlreadyClosed as `get_last_message_id` does.
        """
        return self._thread.call(self._subscriber.last_message_ids())

    def unsubscribe(self) -> None:
        """Delete the subscription and close the consumer.

        Raises the broker's refusal if the subscription has other consumers.
        """
        self._thread.call(self._subscriber.unsubscribe())
        end_listening(self)

    def close(self, *, drain: bool = False) -> None:
        """Wait until all acknowledgements are durable, then close the consumer.

        With `drain`, the consumer first asks the broker for no more messages. It then waits until
        the program has acknowledged all delivered messages, so that the broker has nothing to
        redeliver. Meanwhile, the listener or other threads must receive and acknowledge the
        messages. Without a connection, the consumer does not wait for the program: the broker
        redelivers the messages.

        Raises Timeout if one of these steps takes longer than `operation_timeout_seconds`:

        - with `drain`: the program acknowledges all delivered messages;
        - the broker confirms the acknowledgements and answers the request to close, and the
          producer of dead letters closes.

        Raises the broker's error if the broker rejected acknowledgements. Raises
        OperationNotSupported for `drain` if the broker is not Magnetar's. The consumer is closed in
        all these cases. Raises AlreadyClosed if `close` was called before.
        """
        if self._closed:
            raise AlreadyClosed("the consumer was closed", topic=self.topic())
        self._thread.check_not_in_callback()  # an error here leaves the object open
        self._closed = True
        pause = self.pause_message_listener
        try:
            self._thread.call(close_core(self._subscriber, drain=drain, before_close=pause))
        finally:
            end_listening(self)
            if self._hooks is not None:
                self._hooks.close()

    def topic(self) -> str:
        """Return the full name of the topic. A consumer of a list returns all names, separated by
        commas; a consumer of a pattern returns the pattern."""
        return self._subscriber.topic

    def subscription_name(self) -> str:
        """Return the name of the subscription."""
        return self._subscriber.subscription.name

    def consumer_name(self) -> str:
        """Return the name given in `consumer_name`, or the name that the client generated."""
        return self._subscriber.subscription.consumer_name or ""

    def is_connected(self) -> bool:
        """Return whether the consumer is attached to the brokers of all its topics now."""
        return self._subscriber.is_attached

    def is_active(self) -> bool:
        """Return whether the broker delivers messages to this consumer now.

        A Failover subscription has one active consumer. Its other consumers stand by.
        """
        return self._subscriber.is_active

    def shown(self, message: Message) -> Message:
        """Return the message that the program gets. Internal to the client."""
        return message if self._hooks is None else self._hooks.before_consume(self, message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_once(self)


class Reader:
    """A reader reads a topic from a chosen message. `Client.create_reader` creates it."""

    def __init__(self, inbox: _Inbox, life: Life) -> None:
        self._life = life
        self._inbox = inbox
        self._subscriber = inbox.subscriber
        self._thread = life.thread
        self._closed = False
        self.listener: Listener | None = None  # None: the user calls read_next()

    def read_next(self, timeout_millis: int | None = None) -> Message:
        """Return the next message; wait until there is one.

        `timeout_millis`: the time limit in milliseconds; None: no limit. Raises Timeout if no
        message arrives within that time, and AlreadyClosed if the reader is closed.
        Raises InvalidConfiguration if the reader has a `reader_listener`.
        """
        refuse_beside_listener(self.listener)
        return self._inbox.take(seconds(timeout_millis))

    def has_message_available(self) -> bool:
        """Return whether there is a message after the last one that was read.

        If its queue is empty, the reader asks the broker. Raises Timeout if the broker does not
        answer within `operation_timeout_seconds`, and AlreadyClosed if the reader is closed.
        """
        return self._thread.call(self._subscriber.has_message_available())

    def seek(self, messageid: MessageId | int) -> None:
        """Move the reader to a message id or to a publish time.

        - A message id: the reader next reads the message after this id. With
          `start_message_id_inclusive`, it next reads the message with this id.
        - A time in milliseconds since 1970: the reader next reads the first message
          that was published at that time or later.

        Raises Timeout if the broker does not answer within `operation_timeout_seconds`, and
        AlreadyClosed if the reader is closed.
        """
        self._thread.call(self._subscriber.seek(seekable(messageid)))

    def close(self) -> None:
        """Close the reader. The broker deletes its subscription.

        Raises AlreadyClosed if the reader was closed before.
        """
        if self._closed:
            raise AlreadyClosed("the reader was closed", topic=self.topic())
        self._thread.check_not_in_callback()  # an error here leaves the object open
        self._closed = True
        try:
            self._thread.call(self._subscriber.close())
        finally:
            end_listening(self)

    def topic(self) -> str:
        """Return the full name of the topic."""
        return self._subscriber.topic

    def is_connected(self) -> bool:
        """Return whether the reader is attached to the brokers of all its topics now."""
        return self._subscriber.is_attached

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_once(self)


class TableView:
    """The last value of each key of a topic, in memory. `Client.create_table_view` creates it.

    Reads do not use the network: the view follows the topic in the background.
    """

    def __init__(self, rows: TableRows, life: Life) -> None:
        self._life = life
        self._rows = rows
        self._thread = life.thread
        self._closed = False

    def get(self, key: str) -> Any:
        """Return the value of the key, or None if the table does not have the key."""
        return self._rows.get(key)

    def for_each(self, callback: Changed) -> None:
        """Call `callback(key, value)` for each key of the table, in the caller's thread."""
        self._rows.for_each(callback)

    def for_each_and_listen(self, callback: Changed) -> None:
        """Call `callback(key, value)` for each key of the table, and later for each change.

        For a deleted key, `value` is b"". The client calls the callback on its own thread, in the
        order of the messages in the topic. The callback must not wait for the client.
        """
        self._thread.call(self._rows.for_each_and_listen(callback))

    def close(self) -> None:
        """Close the table view. The values that it has read stay available.

        Raises AlreadyClosed if the view was closed before.
        """
        if self._closed:
            raise AlreadyClosed(f"{self} was closed")
        self._thread.check_not_in_callback()  # an error here leaves the object open
        self._closed = True
        self._thread.call(self._rows.close())

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        return str(self._rows)

    __repr__ = __str__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_once(self)


class _Inbox:
    """The common part of consumers and readers: the mailbox of messages and the bridge to the loop.

    Create an inbox on the loop's thread.
    """

    def __init__(self, thread: LoopThread, mailbox: Mailbox, subscriber: ConsumerCore) -> None:
        self._thread = thread
        messages_max = subscriber.subscription.queue_messages_max
        self._prefetches = messages_max > 0
        # The loop asks for more messages when the queue is half empty.
        self._half = messages_max // 2 if messages_max >= YIELD_QUEUE_MIN else 0
        # True: the queue was longer than `_half` when the thread began to take the latest delivery.
        self._is_above = False
        self._yields = False  # True: the next `take` lets the loop run before it takes a message
        self._bridge = thread.add(Steps(thread.loop, self._carry_out))
        self.mailbox = mailbox
        self.mailbox.on_waiting = self._on_waiting
        self.subscriber = subscriber

    def take(self, timeout_s: float | None) -> Message:
        """Return the next message; wait until there is one.

        Raises Timeout after `timeout_s` seconds, and the error that ended the consumer.
        """
        if self._thread.is_forked:
            self._thread.check_not_forked()
        if self._yields:
            self._yields = False
            if not self._thread.is_current:
                self._bridge.let_loop_run()
        message = self.mailbox.maybe_take()
        if message is None:
            self._thread.check_may_wait()
            message = self.mailbox.take(timeout_s)
        if self._bridge.on_taken(message):
            self._on_new_delivery()
        if not self._prefetches and self.mailbox.is_awaited:
            self._on_waiting()  # request the message of the next waiting thread
        return message

    def was_taken(self, message: Message) -> None:
        self._bridge.on_taken(message)

    def _on_new_delivery(self) -> None:
        if self._half:
            was_above, self._is_above = self._is_above, len(self.mailbox) > self._half
            self._yields = was_above and not self._is_above

    def acknowledge(self, message: Message) -> None:
        """Acknowledge a delivered message. Raises AlreadyClosed if the consumer is closed."""
        if self._thread.is_forked:
            self._thread.check_not_forked()
        self.subscriber.check_open()
        self._bridge.on_acknowledged(message)

    def put_back(self, messages: list[Message]) -> None:
        """Return taken messages to the front of the queue."""
        self.mailbox.put_back(messages)
        with suppress(AlreadyClosed):
            self._bridge.put(Call(self.subscriber.on_returned, messages))

    def do(self, function: Callable[[Any], None], argument: object) -> None:
        """Call `function(argument)` on the loop. Raises AlreadyClosed if the consumer is closed."""
        self._thread.check_not_forked()
        self.subscriber.check_open()
        self._bridge.put(Call(function, argument))

    def _on_waiting(self) -> None:
        if not self._prefetches:
            self._bridge.put(Call(self.subscriber.on_waiting, None))

    def _carry_out(self, steps: deque[Step]) -> None:
        subscriber = self.subscriber
        if subscriber.is_over:
            return
        for step in steps:
            try:
                _carry_out(step, subscriber)
            except Exception as bug:
                end_after_bug(subscriber, bug)


def _carry_out(step: Step, subscriber: ConsumerCore) -> None:
    if isinstance(step, Call):
        step.function(step.argument)
        return
    if step.taken:
        subscriber.on_taken(step.taken)
    if step.acknowledged:
        subscriber.on_acknowledged(step.acknowledged)


async def _counted(publisher: ProducerCore) -> ProducerStatistics:
    return publisher.statistics()


class _Closable(Protocol):
    _closed: bool

    def close(self) -> None: ...


def close_once(one: _Closable) -> None:
    """Close an object at the end of its `with` block, unless the block has closed it."""
    if not one._closed:
        with suppress(AlreadyClosed):  # the client was closed
            one.close()


def end_listening(owner: Consumer | Reader) -> None:
    """Let Python free a consumer or reader with a listener: it was closed."""
    if owner.listener is not None:
        owner.listener.close()
        owner._life.listening.discard(owner)


def refuse_beside_listener(listener: Listener | None) -> None:
    if listener is not None:
        raise InvalidConfiguration("not possible with a listener, which gets all messages")


async def _made(options: ClientOptions, environment: Environment) -> AsyncClient:
    """Create the asyncio client, on its loop."""
    return AsyncClient.in_environment(options, environment)


_RUNNING: set[_Engine] = set()
"""The engines of all clients that are not closed. `_end_open_clients` shuts them down when the
program exits. Otherwise the program could hang or crash in the engines' threads."""


@atexit.register
def _end_open_clients() -> None:
    for engine in list(_RUNNING):
        engine.shut_down()
