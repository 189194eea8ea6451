"""The options of clients, producers, consumers and readers: frozen values, checked at creation.

The fields are the parameters of Apache's Python client, in its order and with its defaults. So
calls need no change. Three defaults differ. Batching is on, with the limits of Apache's Java
client. Batch index acknowledgement is on, because batching is on. The host's name is validated if
TLS is used.

The client does not ignore a parameter of an unsupported feature: it raises an error that names the
parameter. The client accepts some parameters that have no effect here: those of I/O threads (it has
one such thread) and of client statistics. `hashing_scheme` is a parameter of Apache's Java and C++
clients.
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
"""Topics in one list: each has a consumer of its own at its broker."""


class ConsumerType(NamedEnum):
    """How the consumers of a subscription share its messages."""

    Exclusive = 0
    Shared = 1
    Failover = 2
    KeyShared = 3


class InitialPosition(NamedEnum):
    """The place where a subscription begins when `subscribe` creates it."""

    Latest = 0
    Earliest = 1


class BatchingType(NamedEnum):
    """Default: messages with different keys share a batch. KeyBased: a batch holds one key."""

    Default = 0
    KeyBased = 1


class PartitionsRoutingMode(NamedEnum):
    """The choice of a partition for a message without a key. A key decides its message's partition.

    UseSinglePartition: all messages get one partition, which is chosen at random.
    RoundRobinDistribution: a partition gets a batch, then the next partition has its turn.
    CustomPartition: `message_router` decides for all messages, also for those with a key.
    """

    UseSinglePartition = 0
    RoundRobinDistribution = 1
    CustomPartition = 2


class HashingScheme(NamedEnum):
    """How a producer computes the partition of a key; see `create_producer`.

    Producers that must agree on the partition of a key need the same scheme. JavaStringHash is the
    default of Apache's Java client and of Magnetar. Apache's Python and C++ clients use BoostHash.
    """

    Murmur3_32Hash = 0
    BoostHash = 1
    JavaStringHash = 2


class ProducerAccessMode(NamedEnum):
    """Whether a producer shares its topic with others.

    Exclusive: creating the producer fails if others are connected. ExclusiveWithFencing: the others
    are closed at once. WaitForExclusive: `create_producer` waits, without a time limit, until no
    other producer is connected.
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
    """How the keys of a KeyShared subscription are assigned. AutoSplit: the broker splits the
    hashes among the consumers. Sticky: each consumer asks for its own hash ranges."""

    AutoSplit = 0
    Sticky = 1


HASH_SLOTS: Final = 65_536
"""The hashes of keys are 0..65535."""


class KeySharedPolicy:
    """The values of a ConsumerKeySharedPolicy, with the names of Apache's extension module."""

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
    """How a KeyShared consumer gets its keys. All consumers of a subscription use one mode.

    `sticky_ranges` are pairs of a first and a last hash, both included: the hash of a key is the
    remainder of its Murmur3 hash by 65536.

    If all consumers of a subscription have `allow_out_of_order_delivery`, a new consumer gets its
    keys at once, although another consumer has unacknowledged messages of these keys. As long as
    one consumer does not have this option, the order of keys is kept.

    With `ordered_negative_acks`, a negatively acknowledged message holds back the later messages of
    its key until it is acknowledged. All consumers of a subscription must agree on this option.
    Only Magnetar's brokers know it: with other brokers `subscribe` raises OperationNotSupported.
    Raises InvalidConfiguration.
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
        """Return the mode in which keys are assigned."""
        return self._policy.get_key_shared_mode()

    @property
    def allow_out_of_order_delivery(self) -> bool:
        """Return whether a new consumer gets its keys at once."""
        return self._policy.is_allow_out_of_order_delivery()

    @property
    def ordered_negative_acks(self) -> bool:
        """Return whether a negative acknowledgement withholds the later messages of its key."""
        return self._ordered_negative_acks

    @property
    def sticky_ranges(self) -> list[tuple[int, int]]:
        """Return the hash ranges that the consumer asks for, in order."""
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
    """A consumer's action for a corrupt entry: its checksum, its layout or its codec is wrong.

    DISCARD: the client logs an error and reports the entry to the broker, which acknowledges it.
    FAIL: the entry stays unacknowledged, and the next `receive` raises the reason. Apache's clients
    always discard.
    """

    DISCARD = 0
    FAIL = 1


class ConsumerBatchReceivePolicy:
    """When `batch_receive` returns: as soon as one limit is reached.

    The limits are a number of messages, bytes of payload, and milliseconds. A limit below 1 does
    not apply. Raises InvalidConfiguration if no limit applies.
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
        """Return the limits as they were given."""
        return self._limits


@dataclass(frozen=True, slots=True)
class BatchReceivePolicy:
    """The values of a ConsumerBatchReceivePolicy, with the names of Apache's extension module."""

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
"""Apache's lower limit."""

PRIORITY_LEVEL_MAX: Final = (1 << 31) - 1
"""The maximum of the protocol."""

UNACKED_TIMEOUT_MS_MIN: Final = 10_000
"""Apache's lower limit. Below it, messages that are still being processed would be redelivered."""

MessageRouter = Callable[["Message", int], int]
"""Called as `message_router(message, partitions)`, on the client's loop; returns the partition."""

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
    """How to reach the brokers and how long to try.

    `service_url` names the brokers and the transport: `grpc://host:6660[,host2:6660]`,
    `pulsar://host:6650[,…]`, with TLS `grpcs://` and `pulsar+ssl://`. With
    `use_tls`, a URL without TLS means the one with TLS. `tls_validate_hostname` is on by default,
    unlike in Apache's client; gRPC always validates the host's name. An AutoClusterFailover or a
    ServiceInfoProvider in place of the URL chooses among clusters.
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
    """The name, the batching and the limits of a producer.

    With `send_timeout_millis` 0, a message waits for its receipt without a time limit.
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
    # Not a parameter of Apache's client: a subscription that is created together with the topic.
    initial_subscription_name: str | None = None
    # Also not a parameter of Apache's client. Spark's sink uses it: after the broker has refused
    # an entry, it stores no later entry of this producer.
    stops_at_refusal: bool = False
    encryption_keys: Sequence[str] = ()  # more names of public keys, as in Apache's Java client
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
                "encryption_key and crypto_key_reader: give both, or no message is encrypted"
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
        """The names of the public keys that wrap the data key. Empty: nothing is encrypted."""
        first = (self.encryption_key,) if self.encryption_key else ()
        return (*first, *(name for name in self.encryption_keys if name not in first))

    def pending_messages_max(self, partitions: int = 1) -> int:
        """The limit on pending messages of a topic with this many partitions: that of each
        partition or that across partitions, whichever is smaller. A limit of 0 does not apply."""
        limits = (
            self.max_pending_messages * partitions,
            self.max_pending_messages_across_partitions,
        )
        return min((limit for limit in limits if limit), default=2**31)


@dataclass(frozen=True)
class ConsumerOptions:
    """The topics and the subscription of a consumer, its queue's size, its redelivery delays.

    `topic`: a name, a list of names, or a compiled regular expression: the consumer gets all topics
    whose names match it. A pattern covers the names without the domain.
    `pattern_auto_discovery_period`: seconds between two searches for new topics, if the broker does
    not announce them.
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
    # Parameters that Apache's Python client does not have; the names follow its Java client.
    priority_level: int = 0  # a lower number is served first
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
        if self.unacked_messages_timeout_ms:
            _expect_at_least(
                UNACKED_TIMEOUT_MS_MIN,
                "unacked_messages_timeout_ms",
                self.unacked_messages_timeout_ms,
            )

    @property
    def queue_messages_max(self) -> int:
        """The smaller of the two limits on queued messages."""
        return min(self.receiver_queue_size, self.max_total_receiver_queue_size_across_partitions)


@dataclass(frozen=True)
class AsyncConsumerOptions(ConsumerOptions):
    """The options of a consumer of the asyncio client.

    `is_pattern_topic`: `topic` is the text of a regular expression. Raises InvalidConfiguration if
    it is none.
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
    """The topic of a reader, the message where it begins, and the size of its queue."""

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
    """The topic of a table view, and the name of its subscription (None: a random name)."""

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
    """Refuse parameters of unsupported features, unless they have their default values."""
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
