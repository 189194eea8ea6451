"""The asyncio client. The synchronous client (sync.py) wraps it."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from magnetar.client.asking import asking, partitions_of
from magnetar.client.authentication import credentials_of
from magnetar.client.blocking import in_thread
from magnetar.client.cipher import check_public_keys
from magnetar.client.clusters import ClusterWatch, in_cluster, service_info_of
from magnetar.client.consumer import Consumer, LoopQueue, subscription_of
from magnetar.client.consuming.letter_topics import (
    dead_letter_producer,
    first_of,
    letter_topics,
    letter_topics_of,
    retry_producer,
)
from magnetar.client.consuming.letters import generated_consumer_name
from magnetar.client.consuming.many import (
    DEFAULT_MANY,
    ManyOptions,
    ManySubscriber,
    TopicsCore,
    many_of,
)
from magnetar.client.consuming.retry import ConsumerCore, RetrySubscriber
from magnetar.client.consuming.sources import (
    Partitions,
    Pattern,
    Source,
    TopicList,
    namespace_of,
)
from magnetar.client.consuming.subscriber import Subscriber
from magnetar.client.decoding import Decoder
from magnetar.client.environment import Core, Environment, Parts
from magnetar.client.errors import (
    AlreadyClosed,
    Interrupted,
    InvalidConfiguration,
    NotAllowedError,
    PulsarException,
    Timeout,
    without_frames,
)
from magnetar.client.guard import end_after_bug
from magnetar.client.interceptors import consumer_hooks
from magnetar.client.loggers import install
from magnetar.client.message_queue import SourceQueue
from magnetar.client.options import (
    AsyncConsumerOptions,
    ClientOptions,
    ConsumerBatchReceivePolicy,
    ConsumerOptions,
    InitialPosition,
    ProducerOptions,
    ReaderOptions,
    TableViewOptions,
)
from magnetar.client.producer import Producer
from magnetar.client.producing.partitions import PartitionedPublisher, ProducerCore
from magnetar.client.producing.publisher import Publisher
from magnetar.client.reader import Reader, begin_at_latest, reader_subscription
from magnetar.client.schema.wire import schema_info
from magnetar.client.scope import Scope
from magnetar.client.session.lookup import Lookup
from magnetar.client.session.pool import Dialer, MovableDialer, Pool
from magnetar.client.session.transport import dialer_of, service_url_of
from magnetar.client.signature import takes_parameters_of
from magnetar.client.table_view import TableRows, TableView, table_subscription
from magnetar.client.together import together
from magnetar.client.topic import topic_name
from magnetar.protos.names import NamespaceName, TopicName

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from magnetar.client.consuming.letter_producer import LetterProducer
    from magnetar.client.consuming.subscription import Subscription
    from magnetar.client.message_queue import MessageQueue, SharedQueue
    from magnetar.client.schema.schema import Schema, SchemaInfo
    from magnetar.client.service_info import ServiceInfo

__all__ = ["Client", "Consumer", "Producer", "Reader", "TableView"]


class Client:
    """A client creates producers, consumers and readers, and holds the connections that they share.

    The client belongs to the event loop on which it is first used. It connects at the first call
    that needs a broker, for example `create_producer`. The parameters are those of ClientOptions.
    """

    wait_for_schemas: Callable[[Coroutine[Any, Any, None]], None] | None = None  # see Decoder
    _failure: PulsarException | None  # None: the client is open
    _parts: Parts

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
    async def create_producer(self, options: ProducerOptions) -> Producer:
        """Create a producer on a topic. The parameters are those of ProducerOptions.

        Raises the broker's refusal, for example ProducerBusy, InvalidTopicName or NotAllowedError.
        Raises ConnectError or Timeout if no broker accepts the producer within
        `operation_timeout_seconds`.
        """
        return await self.open_producer(options)

    @takes_parameters_of(AsyncConsumerOptions)
    async def subscribe(self, options: AsyncConsumerOptions) -> Consumer:
        """Create a consumer of a subscription. The broker creates the subscription if it does not
        exist. The parameters are those of ConsumerOptions and `is_pattern_topic`. With
        `is_pattern_topic=True`, `topic` is the text of a regular expression.

        Raises the broker's refusal, for example ConsumerBusy, InvalidTopicName or NotAllowedError.
        Raises ConnectError or Timeout if no broker accepts the consumer within
        `operation_timeout_seconds`.
        """
        if options.message_listener is not None:
            raise NotAllowedError(
                "message_listener: the asyncio client has no listeners; call receive() in a task"
            )
        queue = LoopQueue()
        subscriber = await self.consumer_core(options, queue)
        await self.opened(subscriber)
        policy = options.batch_receive_policy or ConsumerBatchReceivePolicy()
        return Consumer(subscriber, queue, policy, consumer_hooks(options.interceptors))

    @takes_parameters_of(ReaderOptions)
    async def create_reader(self, options: ReaderOptions) -> Reader:
        """Create a reader of a topic. The parameters are those of ReaderOptions.

        Raises the same errors as `subscribe`. Raises OperationNotSupported if the topic has
        partitions and `start_message_id` is neither `MessageId.earliest` nor `MessageId.latest`.
        """
        if options.reader_listener is not None:
            raise NotAllowedError(
                "reader_listener: the asyncio client has no listeners; call read_next() in a task"
            )
        queue = LoopQueue()
        subscription = self.decoding(
            reader_subscription(options, self._parts.random), options.schema
        )
        subscriber = await self.subscriber(options.topic, subscription, queue)
        await self.opened(subscriber)
        await begin_at_latest(subscriber)
        return Reader(subscriber, queue)

    @takes_parameters_of(TableViewOptions)
    async def create_table_view(self, options: TableViewOptions) -> TableView:
        """Create a table view: a dictionary with the last value of each key of a topic.

        The call returns when the view has read all messages that the topic held before the call.
        Raises the same errors as `subscribe`.
        """
        rows = await self.table_rows(options)
        return TableView(rows)

    async def get_topic_partitions(self, topic: str) -> list[str]:
        """Return the names of the topic's partitions, or the topic's own name if it has none.

        Raises ConnectError or Timeout if no broker answers within `operation_timeout_seconds`.
        """
        self._check_open()
        name = topic_name(topic)
        await self._begin()
        self._check_open()
        count = await partitions_of(str(name), self._parts)
        return [str(name.with_partition(index)) for index in range(count)] or [str(name)]

    def get_service_info(self) -> ServiceInfo:
        """Return the cluster that the client uses now."""
        return self._service

    async def close(self) -> None:
        """Close all producers, consumers and readers, then the connections.

        If some of them fail to close, the client closes the rest and raises the first error.
        Raises AlreadyClosed if the client was closed before.
        """
        if self._failure is not None:
            raise AlreadyClosed("the client was closed")
        self._failure = AlreadyClosed("the client was closed")
        errors: list[Exception] = []
        try:
            for close in (self._close_cores, self._parts.pool.close, self._parts.scope.close):
                try:
                    await close()
                except Exception as error:  # even after a bug, close the rest
                    errors.append(error)
        except asyncio.CancelledError:  # the caller no longer waits for an orderly end
            self.shutdown()
            raise
        if errors:
            raise errors[0]

    def shutdown(self) -> None:
        """End everything at once, without waiting for the brokers.

        Sends that have no receipt fail with Interrupted. Acknowledgements that the broker has not
        confirmed may be lost.
        """
        self._shut_down(AlreadyClosed("the client was shut down"))
        self._parts.scope.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._failure is None:
            await self.close()

    # For the synchronous client

    @property
    def parts(self) -> Parts:
        return self._parts

    async def open_producer(self, options: ProducerOptions) -> Producer:
        """Create a producer. Internal to the client."""
        publisher = await self.publisher(options)
        producer = Producer(publisher, options, self._parts.clock)
        await self.opened(publisher)
        return producer

    async def publisher(self, options: ProducerOptions) -> ProducerCore:
        """Create the core of a producer. The caller opens it."""
        self._check_open()
        topic = topic_name(options.topic)
        if options.crypto_key_reader is not None:
            await in_thread(check_public_keys, options.key_names, options.crypto_key_reader)
        partitions = await self._partitions(topic)
        if partitions:
            return PartitionedPublisher(topic, partitions, options, self._parts)
        return Publisher(str(topic), options, self._parts)

    async def subscriber(
        self,
        topics: str | list[str] | re.Pattern[str],
        subscription: Subscription,
        queue: SharedQueue,
        many: ManyOptions = DEFAULT_MANY,
    ) -> TopicsCore:
        """Create the core of a consumer or reader. The caller opens it."""
        self._check_open()
        if subscription.key_reader is not None:
            await in_thread(subscription.key_reader.prefetch)
        subscription = self._named(subscription)
        return await self._topics_core(topics, subscription, queue, many, lambda _: queue)

    async def _topics_core(
        self,
        topics: str | list[str] | re.Pattern[str],
        subscription: Subscription,
        queue: SharedQueue,
        many: ManyOptions,
        queue_of: Callable[[str], MessageQueue],
    ) -> TopicsCore:
        """Create the core of a consumer or reader.

        `queue_of` returns the queue of a single topic that has no partitions.
        """
        parts = self._parts
        if isinstance(topics, re.Pattern):
            source: Source = Pattern(
                topics, many.regex_mode, many.period_s, parts, letter_topics_of(subscription)
            )
        elif isinstance(topics, list):
            source = TopicList([topic_name(topic) for topic in topics], parts)
        else:
            topic = topic_name(topics)
            partitions = await self._partitions(topic)
            if not partitions:
                letters = self._letters(str(topic), subscription)
                only = queue_of(str(topic))
                return Subscriber(str(topic), subscription, only, parts, letters)
            source = Partitions(topic, partitions, parts)
        return ManySubscriber(
            source, subscription, many.total_messages_max, queue, parts, self._letters
        )

    def decoding(self, subscription: Subscription, schema: Schema | None) -> Subscription:
        """Return the subscription with a decoder of the schema's values."""
        if schema is None:
            return subscription
        decoder = Decoder(schema, self.schema_of, self.wait_for_schemas)
        return replace(subscription, decoder=decoder)

    async def schema_of(self, topic: str, version: bytes) -> SchemaInfo:
        """Return one version of a topic's schema. `version` b"" means the newest version.

        Raises TopicNotFound if the topic does not have the version, and the errors of `asking`.
        """
        self._check_open()
        await self._begin()
        lookup = self._parts.lookup
        found = await asking(lambda: lookup.schema(topic, version), self._parts, topic)
        return schema_info(found)

    async def consumer_core(self, options: ConsumerOptions, queue: SharedQueue) -> ConsumerCore:
        """Create the core of a consumer. The caller opens it."""
        subscription = self.decoding(subscription_of(options), options.schema)
        if options.enable_retry:
            return await self._retry_subscriber(
                options.topic, subscription, queue, many_of(options)
            )
        return await self.subscriber(options.topic, subscription, queue, many_of(options))

    async def table_rows(self, options: TableViewOptions) -> TableRows:
        """Create the core of a table view, and read the messages that the topic holds."""
        queue = LoopQueue()
        subscription = self.decoding(
            table_subscription(options, self._parts.random), options.schema
        )
        subscriber = await self.subscriber(options.topic, subscription, queue)
        await self.opened(subscriber)
        rows = TableRows(subscriber, queue, options)
        await rows.open(self._parts.scope)
        return rows

    async def _retry_subscriber(
        self,
        topics: str | list[str] | re.Pattern[str],
        subscription: Subscription,
        queue: SharedQueue,
        many: ManyOptions,
    ) -> RetrySubscriber:
        """Create the core of a consumer with a retry topic. The caller opens it.

        Raises InvalidConfiguration for a queue of size 0: the main topic and the retry topic each
        need room for one message.
        """
        if subscription.queue_messages_max == 0:
            raise InvalidConfiguration("receiver_queue_size: enable_retry needs at least 1")
        policy = subscription.dead_letters
        assert policy is not None
        self._check_open()
        if subscription.key_reader is not None:
            await in_thread(subscription.key_reader.prefetch)
        if isinstance(topics, re.Pattern):
            named: list[TopicName] | NamespaceName = namespace_of(topics)
        else:
            named = [topic_name(it) for it in (topics if isinstance(topics, list) else [topics])]
        await self._begin()
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                policy = await letter_topics(named, subscription.name, policy, self._parts)
        except TimeoutError:
            raise Timeout(
                "no broker answered the request for the letter topics", topic=str(topics)
            ) from None
        subscription = replace(self._named(subscription), dead_letters=policy)
        # The retry topic is read from its first message: it holds only messages that this
        # subscription has put there.
        later = replace(
            subscription, initial_position=InitialPosition.Earliest, presents_schema=False
        )
        sources = queue.share()

        def part(topic: str) -> MessageQueue:
            return SourceQueue(topic, queue, sources, lambda _, error: queue.fail(error))

        if isinstance(topics, list):  # drop the retry topic: it gets a core of its own
            topics = [it for it in topics if str(topic_name(it)) != policy.retry_letter_topic]
            if not topics:
                raise InvalidConfiguration("topic: the list holds only the retry topic")
        main = await self._topics_core(topics, subscription, queue, many, part)
        retry = policy.retry_letter_topic
        first = str(named) if isinstance(named, NamespaceName) else str(first_of(named))
        return RetrySubscriber(
            main,
            await self._topics_core(retry, later, queue, many, part),
            retry_producer(retry, subscription, self.open_producer, self._parts),
            dead_letter_producer(first, subscription, self.open_producer, self._parts),
            self._parts,
        )

    def _letters(self, topic: str, subscription: Subscription) -> LetterProducer | None:
        """Create the producer of a topic's dead letters. None: the subscription has no dead-letter
        policy."""
        if subscription.dead_letters is None:
            return None
        return dead_letter_producer(topic, subscription, self.open_producer, self._parts)

    def _named(self, subscription: Subscription) -> Subscription:
        """Return the subscription with the consumer name that a durable subscription needs."""
        if not subscription.is_durable or subscription.consumer_name is not None:
            return subscription
        return replace(subscription, consumer_name=generated_consumer_name(self._parts.random))

    async def _partitions(self, topic: TopicName) -> int:
        """Return the number of a topic's partitions; 0 if it has none or is a partition."""
        await self._begin()
        self._check_open()  # the client may have been closed during the wait
        if topic.partition is not None:
            return 0
        count = await partitions_of(str(topic), self._parts)
        self._check_open()
        return count

    async def opened(self, core: ProducerCore | ConsumerCore) -> None:
        """Open a core. From then on, closing the client closes the core."""
        await self._begin()
        self._check_open()  # the client may have been closed during the wait
        await core.open()

    # Mechanics

    def _set_up(self, options: ClientOptions, environment: Environment) -> None:
        install(options.logger)
        self._watch: ClusterWatch | None = None  # None: the client has one cluster
        self._watching = False
        if not isinstance(options.service_url, str):
            timeout_s = options.connection_timeout_ms / 1000
            self._watch = ClusterWatch(
                options.service_url, self._move, environment.probe, timeout_s
            )
            options = in_cluster(options, self._watch.initial)
        self._options, self._environment = options, environment
        dialer = self._dialer = MovableDialer(self._new_dialer(options))
        scope = Scope(on_failure=self._on_failure, at_end=dialer.close)
        pool = Pool(
            scope,
            dialer,
            open_timeout_s=options.connection_timeout_ms / 1000,
            keepalive_s=environment.keepalive_s,
            ping_after_s=environment.ping_after_s,
            ask_after_s=environment.ask_after_s,
            credentials=credentials_of(options.authentication),
        )
        self._failure = None
        self._service = service_info_of(options)
        timeout_s = float(options.operation_timeout_seconds)
        lookup = Lookup(
            service_url_of(options),
            pool,
            timeout_s=timeout_s,
            silence_s=environment.ask_after_s,
            listener_name=options.listener_name,
        )
        pool.others = lookup
        self._parts = Parts(
            scope=scope,
            pool=pool,
            lookup=lookup,
            clock=environment.clock,
            random=environment.random,
            timeout_s=timeout_s,
            silence_s=environment.ask_after_s,
            pending_bytes_max=environment.pending_bytes_max,
            partitions_update_s=environment.partitions_update_s,
            ids=itertools.count(1),
            live=set(),
        )

    def _new_dialer(self, options: ClientOptions) -> Dialer:
        made = self._environment.dialer
        return dialer_of(options) if made is None else made()

    async def _begin(self) -> None:
        """Start the tasks of the client if they have not started."""
        await self._parts.scope.open()
        if self._watch is not None and not self._watching and self._failure is None:
            self._watching = True
            self._parts.scope.start(self._watch.run(), "choice of a cluster")

    def _move(self, info: ServiceInfo) -> bool:
        """Move to another cluster. Returns False if the client is closed.

        Producers send their pending messages to the new cluster. Consumers continue with the
        subscription of the new cluster. Readers and table views begin at the earliest message of
        their topics there. Raises InvalidUrl or InvalidConfiguration if the client cannot use the
        new cluster; the client then stays in the previous cluster.
        """
        if self._failure is not None:
            return False
        options = in_cluster(self._options, info)
        dialer = self._new_dialer(options)
        self._parts.lookup.move(service_url_of(options))
        former = self._dialer.move(dialer)
        self._service = info
        for core in list(self._parts.live):
            if isinstance(core, Subscriber | Publisher):
                core.on_moved()
        reason = "the client moves to another cluster"
        self._parts.pool.move(credentials_of(options.authentication), reason)
        self._parts.scope.start(former.close(), "end of the former cluster's connections")
        return True

    def _check_open(self) -> None:
        if self._failure is not None:
            raise without_frames(self._failure)

    async def _close_cores(self) -> None:
        """Close all cores, also those that begin meanwhile. Raises the first error."""
        errors: list[Exception] = []
        closed: set[Core] = set()
        while cores := self._parts.live - closed:
            closed |= cores
            try:
                await together(_close(core) for core in cores)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _shut_down(self, error: PulsarException) -> None:
        self._failure = self._failure or error
        for core in list(self._parts.live):
            core.shut_down(error)

    def _on_failure(self, error: BaseException) -> None:
        self._shut_down(Interrupted(f"the client failed: {error!r}"))


async def _close(core: Core) -> None:
    """Close a core. After an unexpected exception, the core ends at once."""
    try:
        await core.close()
    except PulsarException:
        raise
    except Exception as bug:
        raise end_after_bug(core, bug) from bug
