"""The options of clients, producers, consumers and readers: frozen values, checked at creation.

The first fields of each class are the parameters of Apache's Python client, in the same order and
with the same defaults, so calls need no change. Three defaults differ. Batching is on, with the
limits of Apache's Java client. Batch index acknowledgement is on, because batching is on. The
client validates the host's name if it uses TLS.

The client does not ignore a parameter of an unsupported feature: it raises an error that names the
parameter. The client accepts some parameters that have no effect; each class names them.

Some parameters do not exist in Apache's Python client: `hashing_scheme`, which Apache's Java and
C++ clients have, and others that follow a comment in their class.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from magnetar.client.authentication import Authentication
from magnetar.client.encryption import ENCRYPTION_KEYS_MAX, CryptoKeyReader
from magnetar.client.enums import CompressionType, NamedEnum
from magnetar.client.errors import InvalidConfiguration, NotAllowedError, WrongType
from magnetar.client.interceptors import ConsumerInterceptor, ProducerInterceptor
from magnetar.client.loggers import ClientLogger, ConsoleLogger, FileLogger
from magnetar.client.message import MessageId
from magnetar.client.policies import ConsumerDeadLetterPolicy, RedeliveryBackoff
from magnetar.client.schema.schema import Schema, SchemaType
from magnetar.client.service_info import AutoClusterFailover, ServiceInfoProvider

if TYPE_CHECKING:
    from magnetar.client.message import Message
    from magnetar.client.service_info import ServiceUrl

LISTED_TOPICS_MAX: Final = 10_000
"""The maximum number of topics in one list. Each topic has its own consumer at its broker."""


class ConsumerType(NamedEnum):
    """The way in which the consumers of a subscription share its messages.

    Exclusive: the subscription has one consumer. Shared: each message goes to one of the consumers.
    Failover: one consumer gets all messages, and the others stand by. KeyShared: all messages of a
    key go to the same consumer.
    """

    Exclusive = 0
    Shared = 1
    Failover = 2
    KeyShared = 3


class InitialPosition(NamedEnum):
    """The place where a subscription begins when `subscribe` creates it.

    Latest: after the last message of the topic. Earliest: at the first message.
    """

    Latest = 0
    Earliest = 1


class BatchingType(NamedEnum):
    """The messages that share a batch.

    Default: messages with any keys. KeyBased: only messages with the same key.
    """

    Default = 0
    KeyBased = 1


class PartitionsRoutingMode(NamedEnum):
    """The choice of a partition for a message without a key.

    UseSinglePartition: the producer sends all messages to one partition, which it chooses at
    random. RoundRobinDistribution: each partition gets one batch in turn. In both modes, the key of
    a message with a key determines its partition. CustomPartition: `message_router` chooses the
    partition of all messages.
    """

    UseSinglePartition = 0
    RoundRobinDistribution = 1
    CustomPartition = 2


class HashingScheme(NamedEnum):
    """The hash function with which a producer computes the partition of a key.

    Producers that must agree on the partition of a key need the same function. JavaStringHash is
    the default of Apache's Java client and of Magnetar. Apache's Python and C++ clients use
    BoostHash.
    """

    Murmur3_32Hash = 0
    BoostHash = 1
    JavaStringHash = 2


class ProducerAccessMode(NamedEnum):
    """The access of a producer to its topic.

    Shared: other producers can have access, too. Exclusive: `create_producer` fails if another
    producer is connected. ExclusiveWithFencing: the broker closes the other producers at once.
    WaitForExclusive: `create_producer` waits, without a time limit, until no other producer is
    connected.
    """

    Shared = 0
    Exclusive = 1
    WaitForExclusive = 2
    ExclusiveWithFencing = 3


class RegexSubscriptionMode(NamedEnum):
    """The kinds of topics that a pattern matches."""

    PersistentOnly = 0
    NonPersistentOnly = 1
    AllTopics = 2


class KeySharedMode(NamedEnum):
    """The assignment of keys to the consumers of a KeyShared subscription.

    AutoSplit: the broker splits the hashes of keys among the consumers. Sticky: each consumer asks
    for its own hash ranges.
    """

    AutoSplit = 0
    Sticky = 1


HASH_SLOTS: Final = 65_536
"""The number of hash slots of a KeyShared subscription: 0 to 65535. No key has the hash 0."""


class KeySharedPolicy:
    """The values of a ConsumerKeySharedPolicy. Apache's extension module uses the same names."""

    def __init__(self) -> None:
        self._mode = KeySharedMode.AutoSplit
        self._allow_out_of_order_delivery = False
        self._sticky_ranges: list[tuple[int, int]] = []

    def get_key_shared_mode(self) -> KeySharedMode:
        return self._mode

    def set_key_shared_mode(self, mode: KeySharedMode) -> KeySharedPolicy:
        self._mode = mode
        return self

    def is_allow_out_of_order_delivery(self) -> bool:
        return self._allow_out_of_order_delivery

    def set_allow_out_of_order_delivery(self, allow: bool) -> KeySharedPolicy:
        self._allow_out_of_order_delivery = allow
        return self

    def get_sticky_ranges(self) -> list[tuple[int, int]]:
        return list(self._sticky_ranges)

    def set_sticky_ranges(self, ranges: Sequence[tuple[int, int]]) -> KeySharedPolicy:
        self._sticky_ranges = list(ranges)
        return self


class ConsumerKeySharedPolicy:
    """The keys of a KeyShared consumer, and the order of their messages.

    - `key_shared_mode`: the assignment of keys. All consumers of a subscription must use the same
      mode.
    - `sticky_ranges`: pairs of a first and a last hash, both inclusive. The hash of a key is its
      Murmur3 hash modulo 65536; the hash 0 counts as 1.
    - `allow_out_of_order_delivery`: True: a new consumer gets its keys at once. It does not wait
      until other consumers have acknowledged their messages of these keys. The option has an effect
      only if all consumers of the subscription set it. Otherwise the broker keeps the order of each
      key.
    - `ordered_negative_acks`: a negatively acknowledged message holds back the later messages of
      its key until the message is acknowledged. All consumers of a subscription must use the same
      value. Only Magnetar's brokers have this feature: with other brokers, `subscribe` raises
      OperationNotSupported.

    Raises InvalidConfiguration for invalid or missing ranges, and if both
    `allow_out_of_order_delivery` and `ordered_negative_acks` are True.
    """

    def __init__(
        self,
        key_shared_mode: KeySharedMode = KeySharedMode.AutoSplit,
        allow_out_of_order_delivery: bool = False,
        sticky_ranges: Sequence[tuple[int, int]] | None = None,
        *,
        ordered_negative_acks: bool = False,
    ) -> None:
        _expect("ordered_negative_acks", ordered_negative_acks, bool)
        if ordered_negative_acks and allow_out_of_order_delivery:
            raise InvalidConfiguration(
                "ordered_negative_acks needs the order that allow_out_of_order_delivery gives up"
            )
        _expect("key_shared_mode", key_shared_mode, KeySharedMode)
        _expect("allow_out_of_order_delivery", allow_out_of_order_delivery, bool)
        if key_shared_mode is KeySharedMode.Sticky and not sticky_ranges:
            raise InvalidConfiguration("KeySharedMode.Sticky needs sticky_ranges")
        ranges = sorted(sticky_ranges or ())
        for first, last in ranges:
            if not 0 <= first <= last < HASH_SLOTS:
                raise InvalidConfiguration(
                    f"sticky_ranges: ({first}, {last}) is no range within 0..{HASH_SLOTS - 1}"
                )
        for one, two in pairwise(ranges):
            if two[0] <= one[1]:
                raise InvalidConfiguration(f"sticky_ranges: {one} and {two} overlap")
        self._ordered_negative_acks = ordered_negative_acks
        self._policy = KeySharedPolicy()
        self._policy.set_key_shared_mode(key_shared_mode)
        self._policy.set_allow_out_of_order_delivery(allow_out_of_order_delivery)
        self._policy.set_sticky_ranges(ranges)

    @property
    def key_shared_mode(self) -> KeySharedMode:
        """The mode of assigning keys to consumers."""
        return self._policy.get_key_shared_mode()

    @property
    def allow_out_of_order_delivery(self) -> bool:
        """True when a new consumer gets its keys at once."""
        return self._policy.is_allow_out_of_order_delivery()

    @property
    def ordered_negative_acks(self) -> bool:
        """True when a negatively acknowledged message holds back the later messages of its key."""
        return self._ordered_negative_acks

    @property
    def sticky_ranges(self) -> list[tuple[int, int]]:
        """The hash ranges that the consumer asks for, in ascending order."""
        return self._policy.get_sticky_ranges()

    def policy(self) -> KeySharedPolicy:
        """Return the values of the policy."""
        return self._policy


class ConsumerCryptoFailureAction(NamedEnum):
    """A consumer's action for a message that it cannot decrypt.

    FAIL: the message stays unacknowledged, the client logs an error, and the next `receive` raises
    CryptoError. DISCARD: the client acknowledges the message and logs an error. CONSUME: the
    program gets the encrypted payload, and the client logs a warning.
    """

    FAIL = 0
    DISCARD = 1
    CONSUME = 2


class ConsumerDecodeFailureAction(NamedEnum):
    """A consumer's action for an entry whose checksum, layout or compression is wrong.

    DISCARD: the client logs an error and reports the entry to the broker, which acknowledges it.
    FAIL: the entry stays unacknowledged, and the next `receive` raises the error. With FAIL, the
    same applies to an incomplete chunked message that the client would otherwise acknowledge.
    Apache's clients always discard.
    """

    DISCARD = 0
    FAIL = 1


class ConsumerBatchReceivePolicy:
    """The limits of `batch_receive`. The call returns as soon as it reaches one of the limits.

    - `max_num_message`: the number of messages.
    - `max_num_bytes`: the bytes of all payloads.
    - `timeout_ms`: the time since the beginning of the call, in milliseconds.

    A limit below 1 does not apply. Raises InvalidConfiguration if no limit applies.
    """

    def __init__(
        self,
        max_num_message: int = -1,
        max_num_bytes: int = 10 * 1024 * 1024,
        timeout_ms: int = 100,
    ) -> None:
        if max(max_num_message, max_num_bytes, timeout_ms) < 1:
            raise InvalidConfiguration("a batch receive policy needs at least one limit")
        self._limits = BatchReceivePolicy(max_num_message, max_num_bytes, timeout_ms)
        self.messages_max = max_num_message if max_num_message > 0 else 2**31
        self.bytes_max = max_num_bytes if max_num_bytes > 0 else 2**63
        self.timeout_s = timeout_ms / 1000 if timeout_ms > 0 else None  # None: no limit

    def policy(self) -> BatchReceivePolicy:
        """Return the limits as the program gave them."""
        return self._limits


@dataclass(frozen=True, slots=True)
class BatchReceivePolicy:
    """The values of a ConsumerBatchReceivePolicy. Apache's extension module uses the same names."""

    max_num_messages: int = -1
    max_num_bytes: int = 10 * 1024 * 1024
    timeout_ms: int = 100

    def getMaxNumMessages(self) -> int:
        return self.max_num_messages

    def getMaxNumBytes(self) -> int:
        return self.max_num_bytes

    def getTimeoutMs(self) -> int:
        return self.timeout_ms


ACK_TIMEOUT_TICK_MS_MIN: Final = 100
"""The minimum of `ack_timeout_tick_ms`, as in Apache's client."""

PRIORITY_LEVEL_MAX: Final = (1 << 31) - 1
"""The maximum of `priority_level` in the protocol."""

UNACKED_TIMEOUT_MS_MIN: Final = 10_000
"""The minimum of `unacked_messages_timeout_ms`, as in Apache's client. With a shorter time, the
broker would redeliver messages that the program is still processing."""

MessageRouter = Callable[["Message", int], int]
"""Called on the client's loop as `message_router(message, partitions)`. `partitions` is the number
of partitions. Returns the number of the chosen partition, from 0."""

MessageListener = Callable[[Any, Any], object]
"""Called as `listener(consumer, message)`, or `listener(reader, message)` for a reader."""


_OPTIONAL_TEXTS: Final = (
    "log_conf_file_path",
    "tls_trust_certs_file_path",
    "listener_name",
    "tls_private_key_file_path",
    "tls_certificate_file_path",
)


@dataclass(frozen=True)
class ClientOptions:
    """The brokers of a client, its credentials, TLS, time limits and logs.

    - `service_url`: the URL of the brokers. Its scheme selects the transport: gRPC with
      `grpc://host:6660[,host2:6660]`, Pulsar's TCP framing with `pulsar://host:6650[,…]`. The
      schemes `grpcs://` and `pulsar+ssl://` add TLS. An AutoClusterFailover or a
      ServiceInfoProvider in place of the URL chooses among several clusters. In this case, pass
      `authentication` and `tls_trust_certs_file_path` to each ServiceInfo.
    - `authentication`: the credentials of the client. None: the client has no credentials.
    - `operation_timeout_seconds`: the time limit of each request, for example of
      `create_producer`, `subscribe`, `seek` and `close`. For sends, the time limit is the
      producer's `send_timeout_millis`.
    - `connection_timeout_ms`: the time limit for opening a connection to a broker.
    - `message_listener_threads`: the maximum number of threads that call the listeners of a
      synchronous client. One thread makes all calls of a listener.
    - `use_tls`: True selects TLS for a URL without TLS.
    - `tls_trust_certs_file_path`: a PEM file with the certificate authorities to trust. None or an
      empty text: the authorities that the system trusts.
    - `tls_allow_insecure_connection`: True accepts any certificate. Over gRPC, True raises
      NotAllowedError.
    - `tls_validate_hostname`: True checks the host's name in the broker's certificate. The default
      of Apache's client is False. Over gRPC, the client always checks the name.
    - `tls_certificate_file_path`, `tls_private_key_file_path`: PEM files of the client's own
      certificate and of its private key.
    - `logger`: the destination of the logs of all clients of the process. None: the client logs
      through Python's loggers `magnetar.client.*`.
    - `listener_name`: the name of a listener of the brokers. The client connects to the addresses
      that the brokers advertise under this name. None: the default addresses.

    `io_threads`, `concurrent_lookup_requests`, `log_conf_file_path` and `stats_interval_in_seconds`
    have no effect.
    """

    service_url: ServiceUrl
    authentication: Authentication | None = None
    operation_timeout_seconds: int = 30
    io_threads: int = 1
    message_listener_threads: int = 1
    concurrent_lookup_requests: int = 50000
    log_conf_file_path: str | None = None
    stats_interval_in_seconds: int = 600
    use_tls: bool = False
    tls_trust_certs_file_path: str | None = None
    tls_allow_insecure_connection: bool = False
    tls_validate_hostname: bool = True
    logger: ClientLogger | None = None
    connection_timeout_ms: int = 10000
    listener_name: str | None = None
    tls_private_key_file_path: str | None = None
    tls_certificate_file_path: str | None = None

    def __post_init__(self) -> None:
        _expect("service_url", self.service_url, str, AutoClusterFailover, ServiceInfoProvider)
        for name in ("authentication", "tls_trust_certs_file_path"):
            if not isinstance(self.service_url, str) and getattr(self, name) is not None:
                raise InvalidConfiguration(f"{name}: give it to each ServiceInfo instead")
        _expect("authentication", self.authentication, Authentication, type(None))
        for name in _OPTIONAL_TEXTS:
            _expect(name, getattr(self, name), str, type(None))
        for name in ("use_tls", "tls_allow_insecure_connection", "tls_validate_hostname"):
            _expect(name, getattr(self, name), bool)
        _expect("logger", self.logger, logging.Logger, ConsoleLogger, FileLogger, type(None))
        _expect_at_least(1, "operation_timeout_seconds", self.operation_timeout_seconds)
        _expect_at_least(1, "connection_timeout_ms", self.connection_timeout_ms)
        _expect_at_least(1, "message_listener_threads", self.message_listener_threads)
        _expect_at_least(1, "concurrent_lookup_requests", self.concurrent_lookup_requests)
        _expect_at_least(1, "io_threads", self.io_threads)
        _expect_at_least(0, "stats_interval_in_seconds", self.stats_interval_in_seconds)

    @property
    def url(self) -> str:
        """The service URL of options for one cluster."""
        assert isinstance(self.service_url, str)
        return self.service_url


@dataclass(frozen=True)
class ProducerOptions:
    """The topic of a producer, its limits, batching, routing and encryption.

    - `topic`: the name of the topic. A short name is in `persistent://public/default`.
    - `producer_name`: the name of the producer. None: the broker chooses a name.
    - `schema`: the schema of the values that the program sends. None: the program sends bytes.
    - `initial_sequence_id`: the first message gets this number plus 1 as its sequence id. None: the
      last sequence id that the broker has stored for `producer_name`, or -1 if there is none.
    - `send_timeout_millis`: the time limit from the encoding of a message's entry to its receipt.
      For a message that is sent before the producer has attached to its partition, the time begins
      with the send. 0: no limit.
    - `compression_type`: the compression of messages and batches.
    - `max_pending_messages`: the maximum number of messages without a receipt. With partitions, the
      limit is this number times the number of partitions. 0: no limit.
    - `max_pending_messages_across_partitions`: the maximum number of messages without a receipt in
      all partitions together. 0: no limit.
    - `block_if_queue_full`: True: a send at a limit waits. False: the send fails.
    - `batching_enabled`: True packs several messages into one entry. None: True, unless
      `chunking_enabled` is True.
    - `batching_max_messages`, `batching_max_allowed_size_in_bytes`,
      `batching_max_publish_delay_ms`: the producer sends a batch as soon as the batch reaches one
      of these limits.
    - `batching_type`: the messages that share a batch.
    - `chunking_enabled`: True sends a message that is larger than the broker's limit in chunks.
      Chunking needs a persistent topic, and excludes batching.
    - `message_routing_mode`: the choice of the partition for messages without a key.
    - `message_router`: a function that chooses the partition of each message.
    - `hashing_scheme`: the hash function that computes the partition of a key.
    - `lazy_start_partitioned_producers`: True: `create_producer` attaches to one partition. The
      producer attaches to each other partition when it sends the first message to this partition.
      The option needs the access mode Shared.
    - `properties`: texts that describe the producer.
    - `access_mode`: the access of the producer to its topic.
    - `encryption_key`, `encryption_keys`: the names of the public keys that encrypt the messages.
    - `crypto_key_reader`: the reader of these keys.
    - `initial_subscription_name`: the name of a subscription. If the subscription does not exist
      when the producer attaches, the broker creates it. The subscription
      begins at the first message of the topic.
    - `stops_at_refusal`: True: after the broker has refused one entry of this producer, the broker
      stores no later entry of the producer.
    - `interceptors`: hooks that the client calls for each send, in this order.
    """

    topic: str
    producer_name: str | None = None
    schema: Schema | None = None
    initial_sequence_id: int | None = None
    send_timeout_millis: int = 30000
    compression_type: CompressionType = CompressionType.NONE
    max_pending_messages: int = 1000
    max_pending_messages_across_partitions: int = 50000
    block_if_queue_full: bool = False
    batching_enabled: bool | None = None  # None: on, unless chunking is on
    batching_max_messages: int = 1000
    batching_max_allowed_size_in_bytes: int = 128 * 1024
    batching_max_publish_delay_ms: int = 1
    chunking_enabled: bool = False
    message_routing_mode: PartitionsRoutingMode = PartitionsRoutingMode.RoundRobinDistribution
    lazy_start_partitioned_producers: bool = False
    properties: Mapping[str, str] | None = None
    batching_type: BatchingType = BatchingType.Default
    encryption_key: str | None = None
    crypto_key_reader: CryptoKeyReader | None = None
    access_mode: ProducerAccessMode = ProducerAccessMode.Shared
    message_router: MessageRouter | None = None
    hashing_scheme: HashingScheme = HashingScheme.JavaStringHash
    # Apache's Python client does not have the following parameters. Spark's sink uses
    # `stops_at_refusal`.
    initial_subscription_name: str | None = None
    stops_at_refusal: bool = False
    encryption_keys: Sequence[str] = ()
    interceptors: Sequence[ProducerInterceptor] = ()

    def __post_init__(self) -> None:
        _expect("topic", self.topic, str)
        _expect("schema", self.schema, Schema, type(None))
        schema = self.schema
        if schema is not None and schema.schema_info().schema_type() is SchemaType.AUTO_CONSUME:
            raise InvalidConfiguration("schema: AutoConsumeSchema only reads")
        if self.message_router is not None and not callable(self.message_router):
            raise InvalidConfiguration(f"message_router must be callable: {self.message_router!r}")
        _expect("message_routing_mode", self.message_routing_mode, PartitionsRoutingMode)
        _expect("hashing_scheme", self.hashing_scheme, HashingScheme)
        _expect("producer_name", self.producer_name, str, type(None))
        _expect("encryption_key", self.encryption_key, str, type(None))
        _expect("encryption_keys", self.encryption_keys, list, tuple)
        for name in self.encryption_keys:
            _expect("every name of encryption_keys", name, str)
        _expect("crypto_key_reader", self.crypto_key_reader, CryptoKeyReader, type(None))
        if bool(self.key_names) != (self.crypto_key_reader is not None):
            raise InvalidConfiguration(
                "encryption needs both a key name (encryption_key) and a crypto_key_reader"
            )
        _expect_all("interceptors", self.interceptors, ProducerInterceptor)
        if len(self.key_names) > ENCRYPTION_KEYS_MAX:
            raise InvalidConfiguration(f"encryption_keys: at most {ENCRYPTION_KEYS_MAX} keys")
        _expect("batching_enabled", self.batching_enabled, bool, type(None))
        _expect("chunking_enabled", self.chunking_enabled, bool)
        _expect("block_if_queue_full", self.block_if_queue_full, bool)
        _expect("lazy_start_partitioned_producers", self.lazy_start_partitioned_producers, bool)
        if self.batching_enabled and self.chunking_enabled:
            raise InvalidConfiguration(
                "chunking_enabled: batching and chunking cannot be enabled together; "
                "set batching_enabled=False"
            )
        if self.batching_enabled is None:
            object.__setattr__(self, "batching_enabled", not self.chunking_enabled)
        _expect("initial_subscription_name", self.initial_subscription_name, str, type(None))
        _expect("compression_type", self.compression_type, CompressionType)
        _expect("batching_type", self.batching_type, BatchingType)
        _expect("access_mode", self.access_mode, ProducerAccessMode)
        _expect_properties("properties", self.properties)
        if self.initial_sequence_id is not None:
            _expect_at_least(-1, "initial_sequence_id", self.initial_sequence_id)
        _expect_at_least(0, "send_timeout_millis", self.send_timeout_millis)
        _expect_at_least(0, "max_pending_messages", self.max_pending_messages)
        _expect_at_least(
            0, "max_pending_messages_across_partitions", self.max_pending_messages_across_partitions
        )
        _expect_at_least(1, "batching_max_messages", self.batching_max_messages)
        _expect_at_least(
            1, "batching_max_allowed_size_in_bytes", self.batching_max_allowed_size_in_bytes
        )
        _expect_at_least(0, "batching_max_publish_delay_ms", self.batching_max_publish_delay_ms)

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the public keys that wrap the data key. Empty: no encryption."""
        first = (self.encryption_key,) if self.encryption_key else ()
        return (*first, *(name for name in self.encryption_keys if name not in first))

    def pending_messages_max(self, partitions: int = 1) -> int:
        """Return the limit of pending messages of a topic with this number of partitions.

        The limit is `max_pending_messages` times `partitions`, or
        `max_pending_messages_across_partitions` if this is smaller. A limit of 0 does not apply.
        """
        limits = (
            self.max_pending_messages * partitions,
            self.max_pending_messages_across_partitions,
        )
        return min((limit for limit in limits if limit), default=2**31)


@dataclass(frozen=True)
class ConsumerOptions:
    """The topics and the subscription of a consumer, its queue, redeliveries and schema.

    - `topic`: a name, a list of names, or a compiled regular expression. A regular expression must
      match `tenant/namespace/name` as a whole. An expression without slashes matches names in
      `public/default`.
    - `subscription_name`: the name of the subscription.
    - `consumer_type`: the type of the subscription.
    - `schema`: the schema that decodes `Message.value()`. None: the value is the payload.
    - `message_listener`: a function that the synchronous client calls as
      `message_listener(consumer, message)` for each message. The program cannot call `receive`
      then.
    - `receiver_queue_size`: the maximum number of messages in the consumer's queue. 0: the consumer
      requests one message for each `receive`.
    - `max_total_receiver_queue_size_across_partitions`: the maximum number of messages in the
      queues of all topics and partitions together.
    - `consumer_name`: the name of the consumer. None: the client generates a name.
    - `unacked_messages_timeout_ms`: the client requests the redelivery of a message that the
      program has not acknowledged within this time; at least 10,000. None or 0: no time limit.
    - `negative_ack_redelivery_delay_ms`: the time from a negative acknowledgement to the
      redelivery.
    - `properties`: texts that describe the consumer.
    - `pattern_auto_discovery_period`: the time in seconds after which the client searches for new
      topics of a regular expression. The broker usually announces them earlier.
    - `initial_position`: the place where the subscription begins if this consumer creates it.
    - `crypto_key_reader`: the reader of the private keys that decrypt messages.
    - `crypto_failure_action`: the action for a message that the client cannot decrypt.
    - `max_pending_chunked_message`: the maximum number of incomplete chunked messages. 0: no limit.
      Beyond the maximum, the client drops the oldest incomplete message, and requests its
      redelivery later.
    - `auto_ack_oldest_chunked_message_on_queue_full`: True: beyond this maximum, the client
      acknowledges the oldest incomplete message instead. The message is then lost.
    - `expire_time_of_incomplete_chunked_message_ms`: if no further chunk arrives within this time,
      the client acknowledges the incomplete message. The message is then lost. 0: no time limit.
    - `start_message_id_inclusive`: True: after a `seek` to an id, the consumer receives the message
      with this id, too.
    - `batch_receive_policy`: the limits of `batch_receive`.
    - `key_shared_policy`: the keys of a KeyShared consumer.
    - `batch_index_ack_enabled`: True: the broker records acknowledgements of single messages of a
      batch. False: it records only batches of which all messages are acknowledged.
    - `regex_subscription_mode`: the kinds of topics that a regular expression matches.
    - `dead_letter_policy`: the rule for moving a message to a dead-letter topic. None: the consumer
      moves no message.
    - `priority_level`: the broker prefers consumers with a lower number.
    - `negative_ack_redelivery_backoff`: growing delays in place of
      `negative_ack_redelivery_delay_ms`.
    - `ack_timeout_redelivery_backoff`: growing delays that are added to
      `unacked_messages_timeout_ms`.
    - `ack_timeout_tick_ms`: the interval in which the client checks `unacked_messages_timeout_ms`;
      at least 100.
    - `enable_retry`: True: the consumer also subscribes to a retry topic, which `reconsume_later`
      needs.
    - `decode_failure_action`: the action for a corrupt entry.
    - `interceptors`: hooks that the client calls for each message, in this order.

    `broker_consumer_stats_cache_time_ms` has no effect. `is_read_compacted` and
    `replicate_subscription_state_enabled` are not supported: True raises NotAllowedError.
    """

    topic: str | list[str] | re.Pattern[str]
    subscription_name: str
    consumer_type: ConsumerType = ConsumerType.Exclusive
    schema: Schema | None = None
    message_listener: MessageListener | None = None
    receiver_queue_size: int = 1000
    max_total_receiver_queue_size_across_partitions: int = 50000
    consumer_name: str | None = None
    unacked_messages_timeout_ms: int | None = None
    broker_consumer_stats_cache_time_ms: int = 30000
    negative_ack_redelivery_delay_ms: int = 60000
    is_read_compacted: bool = False
    properties: Mapping[str, str] | None = None
    pattern_auto_discovery_period: int = 60
    initial_position: InitialPosition = InitialPosition.Latest
    crypto_key_reader: CryptoKeyReader | None = None
    replicate_subscription_state_enabled: bool = False
    max_pending_chunked_message: int = 10
    auto_ack_oldest_chunked_message_on_queue_full: bool = False
    start_message_id_inclusive: bool = False
    batch_receive_policy: ConsumerBatchReceivePolicy | None = None
    key_shared_policy: ConsumerKeySharedPolicy | None = None
    batch_index_ack_enabled: bool = True
    regex_subscription_mode: RegexSubscriptionMode = RegexSubscriptionMode.PersistentOnly
    dead_letter_policy: ConsumerDeadLetterPolicy | None = None
    crypto_failure_action: ConsumerCryptoFailureAction = ConsumerCryptoFailureAction.FAIL
    # Parameters that Apache's Python client does not have. The names follow Apache's Java
    # client, except `decode_failure_action`, which Apache's clients lack.
    priority_level: int = 0
    negative_ack_redelivery_backoff: RedeliveryBackoff | None = None
    ack_timeout_redelivery_backoff: RedeliveryBackoff | None = None
    ack_timeout_tick_ms: int = 1000
    expire_time_of_incomplete_chunked_message_ms: int = 60000
    enable_retry: bool = False
    decode_failure_action: ConsumerDecodeFailureAction = ConsumerDecodeFailureAction.DISCARD
    interceptors: Sequence[ConsumerInterceptor] = ()

    def __post_init__(self) -> None:
        _expect_topics(self.topic)
        _expect("schema", self.schema, Schema, type(None))
        _refuse(
            "is_read_compacted",
            "replicate_subscription_state_enabled",
            options=self,
        )
        _expect("subscription_name", self.subscription_name, str)
        if not self.subscription_name:
            raise InvalidConfiguration("subscription_name must not be empty")
        _expect("consumer_type", self.consumer_type, ConsumerType)
        _expect_at_least(0, "priority_level", self.priority_level)
        if self.priority_level > PRIORITY_LEVEL_MAX:
            raise InvalidConfiguration(f"priority_level must be at most {PRIORITY_LEVEL_MAX}")
        _expect("key_shared_policy", self.key_shared_policy, ConsumerKeySharedPolicy, type(None))
        _expect("regex_subscription_mode", self.regex_subscription_mode, RegexSubscriptionMode)
        _expect_at_least(1, "pattern_auto_discovery_period", self.pattern_auto_discovery_period)
        _expect("initial_position", self.initial_position, InitialPosition)
        _expect("consumer_name", self.consumer_name, str, type(None))
        _expect("start_message_id_inclusive", self.start_message_id_inclusive, bool)
        _expect("batch_index_ack_enabled", self.batch_index_ack_enabled, bool)
        _expect_listener("message_listener", self.message_listener)
        _expect_at_least(
            0, "broker_consumer_stats_cache_time_ms", self.broker_consumer_stats_cache_time_ms
        )
        _expect_properties("properties", self.properties)
        _expect_at_least(0, "receiver_queue_size", self.receiver_queue_size)
        _expect_at_least(
            1,
            "max_total_receiver_queue_size_across_partitions",
            self.max_total_receiver_queue_size_across_partitions,
        )
        _expect_at_least(
            0, "negative_ack_redelivery_delay_ms", self.negative_ack_redelivery_delay_ms
        )
        _expect_at_least(0, "max_pending_chunked_message", self.max_pending_chunked_message)
        _expect_at_least(
            0,
            "expire_time_of_incomplete_chunked_message_ms",
            self.expire_time_of_incomplete_chunked_message_ms,
        )
        _expect(
            "auto_ack_oldest_chunked_message_on_queue_full",
            self.auto_ack_oldest_chunked_message_on_queue_full,
            bool,
        )
        _expect(
            "batch_receive_policy",
            self.batch_receive_policy,
            ConsumerBatchReceivePolicy,
            type(None),
        )
        _expect("dead_letter_policy", self.dead_letter_policy, ConsumerDeadLetterPolicy, type(None))
        keys = () if self.dead_letter_policy is None else self.dead_letter_policy.encryption_keys
        if keys and self.crypto_key_reader is None:
            raise InvalidConfiguration(
                "dead_letter_policy: encryption_keys needs a crypto_key_reader of the consumer"
            )
        if len(keys) > ENCRYPTION_KEYS_MAX:
            raise InvalidConfiguration(f"encryption_keys: at most {ENCRYPTION_KEYS_MAX} keys")
        _expect("enable_retry", self.enable_retry, bool)
        _expect("crypto_key_reader", self.crypto_key_reader, CryptoKeyReader, type(None))
        _expect("crypto_failure_action", self.crypto_failure_action, ConsumerCryptoFailureAction)
        _expect_all("interceptors", self.interceptors, ConsumerInterceptor)
        _expect("decode_failure_action", self.decode_failure_action, ConsumerDecodeFailureAction)
        _expect_at_least(ACK_TIMEOUT_TICK_MS_MIN, "ack_timeout_tick_ms", self.ack_timeout_tick_ms)
        for name in ("negative_ack_redelivery_backoff", "ack_timeout_redelivery_backoff"):
            backoff = getattr(self, name)
            if backoff is not None and not callable(getattr(backoff, "next", None)):
                raise InvalidConfiguration(f"{name} must have a method next(), not {backoff!r}")
        if self.unacked_messages_timeout_ms is not None:
            _expect_at_least(0, "unacked_messages_timeout_ms", self.unacked_messages_timeout_ms)
        if self.unacked_messages_timeout_ms:
            _expect_at_least(
                UNACKED_TIMEOUT_MS_MIN,
                "unacked_messages_timeout_ms",
                self.unacked_messages_timeout_ms,
            )

    @property
    def queue_messages_max(self) -> int:
        """The smaller one of the two limits of the queue, in messages."""
        return min(self.receiver_queue_size, self.max_total_receiver_queue_size_across_partitions)


@dataclass(frozen=True)
class AsyncConsumerOptions(ConsumerOptions):
    """The options of a consumer of the asyncio client.

    `is_pattern_topic`: True: `topic` is the text of a regular expression. Raises
    InvalidConfiguration if the text is not a regular expression.
    """

    is_pattern_topic: bool = False

    def __post_init__(self) -> None:
        _expect("is_pattern_topic", self.is_pattern_topic, bool)
        if self.is_pattern_topic and isinstance(self.topic, str):
            try:
                object.__setattr__(self, "topic", re.compile(self.topic))
            except re.error as error:
                raise InvalidConfiguration(f"topic {self.topic!r}: {error}") from None
        super().__post_init__()


@dataclass(frozen=True)
class ReaderOptions:
    """The topic of a reader, the message where it begins, its queue and its schema.

    - `topic`: the name of the topic.
    - `start_message_id`: the reader begins with the message after this id.
    - `start_message_id_inclusive`: True: the reader begins with the message that has this id. The
      same applies to a `seek` to an id.
    - `schema`: the schema that decodes `Message.value()`. None: the value is the payload.
    - `reader_listener`: a function that the synchronous client calls as
      `reader_listener(reader, message)` for each message. The program cannot call `read_next` then.
    - `receiver_queue_size`: the maximum number of messages in the reader's queue. 0: the reader
      requests one message for each `read_next`.
    - `reader_name`: the name of the reader.
    - `subscription_role_prefix`: the prefix of the name of the reader's temporary subscription.
    - `crypto_key_reader`: the reader of the private keys that decrypt messages.
    - `crypto_failure_action`: the action for a message that the client cannot decrypt.

    `is_read_compacted` is not supported: True raises NotAllowedError.
    """

    topic: str
    start_message_id: MessageId
    schema: Schema | None = None
    reader_listener: MessageListener | None = None
    receiver_queue_size: int = 1000
    reader_name: str | None = None
    subscription_role_prefix: str | None = None
    is_read_compacted: bool = False
    crypto_key_reader: CryptoKeyReader | None = None
    start_message_id_inclusive: bool = False
    crypto_failure_action: ConsumerCryptoFailureAction = ConsumerCryptoFailureAction.FAIL

    def __post_init__(self) -> None:
        _expect("topic", self.topic, str)
        _expect("start_message_id", self.start_message_id, MessageId)
        _expect("schema", self.schema, Schema, type(None))
        _refuse(
            "is_read_compacted",
            options=self,
        )
        _expect("reader_name", self.reader_name, str, type(None))
        _expect("start_message_id_inclusive", self.start_message_id_inclusive, bool)
        _expect_listener("reader_listener", self.reader_listener)
        _expect("crypto_key_reader", self.crypto_key_reader, CryptoKeyReader, type(None))
        _expect("crypto_failure_action", self.crypto_failure_action, ConsumerCryptoFailureAction)
        _expect("subscription_role_prefix", self.subscription_role_prefix, str, type(None))
        _expect_at_least(0, "receiver_queue_size", self.receiver_queue_size)


@dataclass(frozen=True)
class TableViewOptions:
    """The topic of a table view, its subscription (None: a random name), and its schema."""

    topic: str
    subscription_name: str | None = None
    schema: Schema | None = None

    def __post_init__(self) -> None:
        _expect("topic", self.topic, str)
        _expect("subscription_name", self.subscription_name, str, type(None))
        _expect("schema", self.schema, Schema, type(None))


def _expect_topics(topic: object) -> None:
    if isinstance(topic, list):
        if not topic:
            raise InvalidConfiguration("topic: the list is empty")
        if len(topic) > LISTED_TOPICS_MAX:
            raise InvalidConfiguration(f"topic: at most {LISTED_TOPICS_MAX} topics can be listed")
        for name in topic:
            _expect("every topic of the list", name, str)
    elif not isinstance(topic, re.Pattern) or not isinstance(topic.pattern, str):
        _expect("topic", topic, str)


def _refuse(*names: str, options: object) -> None:
    """Raise NotAllowedError if a parameter of an unsupported feature differs from its default."""
    for name in names:
        value = getattr(options, name)
        if value != getattr(type(options), name):
            raise NotAllowedError(f"{name}={value!r}: not supported yet")


def _expect(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise WrongType(f"{name} must be {wanted}, not {type(value).__name__}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidConfiguration(f"{name}: {value!r} cannot be encoded as UTF-8") from None


def _expect_all(name: str, values: object, kind: type) -> None:
    _expect(name, values, list, tuple)
    assert isinstance(values, list | tuple)
    for one in values:
        _expect(f"every one of {name}", one, kind)


def _expect_listener(name: str, listener: object) -> None:
    if listener is not None and not callable(listener):
        raise WrongType(f"{name} must be callable, not {listener!r}")


def _expect_at_least(least: int, name: str, value: object) -> None:
    if type(value) is int and value >= least:
        return
    kind = InvalidConfiguration if type(value) is int else WrongType
    raise kind(f"{name} must be an integer of at least {least}, not {value!r}")


def _expect_properties(name: str, value: Mapping[str, str] | None) -> None:
    if not isinstance(value, Mapping | None):
        raise WrongType(f"{name} must be a mapping of texts, not {type(value).__name__}")
    for text in (*(value or {}).keys(), *(value or {}).values()):
        _expect(f"every key and value of {name}", text, str)
