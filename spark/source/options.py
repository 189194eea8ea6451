"""The options of `spark.read.format("magnetar")` and `spark.readStream.format("magnetar")`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from magnetar.client.session.service_url import host_and_port, scheme_of
from magnetar.protos.errors import InvalidNamespaceName, InvalidTopicName
from magnetar.protos.names import DEFAULT_NAMESPACE, Domain, NamespaceName, TopicName
from magnetar.spark import access
from magnetar.spark.access import ANONYMOUS, Access, parse_access
from magnetar.spark.errors import InvalidOption
from magnetar.spark.planner import TARGET_BYTES_PER_TASK, TASKS_MAX
from magnetar.spark.service_url import brokers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.spark.source.filters import Pushed

COMMON: Final = (
    "service.url",
    "admin.url",
    "topic",
    "topics",
    "topicsPattern",
    "startingOffsets",
    "startingTime",
    "failOnDataLoss",
    "valueFormat",
    "valueSchema",
    "keyFormat",
    "keySchema",
    "keyValueEncoding",
    "mode",
    "deadLetterTopic",
    "targetBytesPerTask",
    "maxPartitions",
    "readTimeoutMs",
    "readFromBookies",
    *access.OPTIONS,
)
ONLY_BATCH: Final = ("endingOffsets", "endingTime", "filterPushdown")
ONLY_STREAM: Final = (
    "subscription",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "minRowsPerTrigger",
    "maxTriggerDelay",
    "waitingForNonExistedTopic",
    "pollIntervalMs",
    "discoveryIntervalMs",
)

# Another broker usually serves a dead broker's topics within 3 s. In the worst case, it first waits
# for the session timeout of 10 s. A minute is also enough for the restart of a whole cluster during
# a job.
READ_TIMEOUT_MS: Final = 60_000
# Spark asks an idle query's source 100 times a second for new data. The source polls the brokers at
# most once in this time.
POLL_INTERVAL_MS: Final = 50
DISCOVERY_INTERVAL_MS: Final = 5_000
# Spark's Kafka source has the same default.
MAX_TRIGGER_DELAY_S: Final = 15 * 60
DURATION_S_MAX: Final = 366 * 86_400
TOPICS_MAX: Final = 10_000  # the topics of one option
PATTERN_CHARACTERS_MAX: Final = 1_024
SUBSCRIPTION_CHARACTERS_MAX: Final = 256
SCHEMA_CHARACTERS_MAX: Final = 1_000_000  # a Protobuf definition includes its imports
NUMBER_MAX: Final = (1 << 63) - 1

Choice = TypeVar("Choice", bound=Enum)

_OWN = {False: ONLY_BATCH, True: ONLY_STREAM, None: (*ONLY_BATCH, *ONLY_STREAM)}
_ID = re.compile(r"([0-9]{1,18}):([0-9]{1,18})(?::([0-9]{1,9}))?")
_PARTITION = re.compile(r"[0-9]{1,9}")
_PLAIN = re.compile(r"[0-9]{1,19}")
_DURATION = re.compile(r"([0-9]{1,12}) ?(ms|s|m|h|d)")
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class ValueFormat(Enum):
    """The format of the payloads, or of their keys and values."""

    BYTES = "bytes"
    STRING = "string"
    JSON = "json"
    AVRO = "avro"
    PROTOBUF = "protobuf"
    AUTO = "auto"  # from the topic's schema, in the version of each message
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT = "float"
    DOUBLE = "double"
    BOOLEAN = "boolean"
    DATE = "date"
    TIME = "time"
    TIMESTAMP = "timestamp"


class KeyValueEncoding(Enum):
    """The place of the key in a message of a KeyValue schema. The values are Pulsar's names."""

    INLINE = "inline"  # the key is in the payload, before the value
    SEPARATED = "separated"  # the key is the message's key


class Mode(Enum):
    """The handling of a payload that does not fit the format or schema. All values but `dlq` are
    Spark's names."""

    FAILFAST = "failfast"  # the query fails, and the error names the message
    PERMISSIVE = "permissive"  # the value is null, and two columns say why
    DROPMALFORMED = "dropmalformed"  # the row is left out and counted in the log
    DLQ = "dlq"  # the row is left out and published to deadLetterTopic


class Edge(Enum):
    """An end of a topic."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """A message that the user names by `ledger:entry[:batch index]`."""

    ledger: int
    entry: int
    batch_index: int = 0


@dataclass(frozen=True, slots=True)
class Time:
    """The first message published at this time or later."""

    ms: int


Bound = Edge | MessagePlace | Time


@dataclass(frozen=True, slots=True)
class Bounds:
    """The place in each topic where a read begins, or where it ends."""

    default: Bound
    topics: Mapping[str, Bound]  # keyed by the full name of a topic or partition
    text: str  # the option in a normal form, for the checkpoint

    def of(self, topic: TopicName) -> Bound:
        """Return the bound of a topic or partition. A partition without a bound has the bound of
        its partitioned topic; a topic without a bound has the default."""
        base = self.topics.get(str(topic.base), self.default)
        return self.topics.get(str(topic), base)


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """The topics of one namespace whose name within the namespace fully matches a regular
    expression."""

    namespace: NamespaceName
    pattern: re.Pattern[str]

    def matches(self, name: TopicName) -> bool:
        """Return whether the pattern matches a topic of the namespace. For a partition, the pattern
        must match the name of the partitioned topic."""
        return self.pattern.fullmatch(name.base.topic) is not None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The parsed options of one read."""

    brokers: tuple[str, ...]  # grpc:// or grpcs:// URLs, one broker each
    topics: tuple[TopicName, ...]  # empty: there is a pattern
    pattern: TopicPattern | None
    start: Bounds
    end: Bounds
    fail_on_data_loss: bool
    target_bytes_per_task: int
    tasks_max: int
    read_timeout_s: float  # the longest time that a read may make no progress
    value_format: ValueFormat = ValueFormat.BYTES
    value_schema: str = ""  # the schema of JSON, Avro and Protobuf
    key_format: ValueFormat | None = None  # None: the payload is the value
    key_schema: str = ""
    key_value_encoding: KeyValueEncoding = KeyValueEncoding.INLINE
    mode: Mode = Mode.FAILFAST
    dead_letter_topic: TopicName | None = None  # the topic of mode dlq
    subscription: str = ""  # "": no subscription keeps messages for the query
    reads_from_bookies: bool = True  # executors read sealed ledgers from bookies
    rows_max: int | None = None  # the rows of one batch; None: no limit
    bytes_max: int | None = None
    rows_min: int = 1  # the minimum rows of a batch, until `trigger_delay_s` has passed
    trigger_delay_s: float = MAX_TRIGGER_DELAY_S  # the longest wait for `rows_min`
    waits_for_topics: bool = False  # waits for named topics that do not exist yet
    poll_interval_s: float = POLL_INTERVAL_MS / 1_000
    discovery_interval_s: float = DISCOVERY_INTERVAL_MS / 1_000
    access: Access = ANONYMOUS
    takes_filters: bool = False  # True: a batch read that takes filters
    pushed: Pushed | None = None  # the filters that Spark gave; None: no filters
    read_id: str = ""  # differs between DataFrames, and between starts of a streaming query

    @property
    def decodes(self) -> bool:
        """True when the query decodes payloads, so that a payload can fail to decode."""
        return self.value_format is not ValueFormat.BYTES or self.key_format is not None

    @property
    def service_url(self) -> str:
        """The brokers as one URL."""
        scheme = scheme_of(self.brokers[0])
        return scheme + ",".join(map(host_and_port, self.brokers))

    @property
    def asked(self) -> str:
        """The topics that the user asked for, as a text for errors."""
        if self.pattern is not None:
            return f"{self.pattern.namespace}/{self.pattern.pattern.pattern}"
        return ", ".join(map(str, self.topics))


def parse_options(given: Mapping[str, str], *, streaming: bool | None = False) -> ReadOptions:
    """Parse the options of a read. Spark passes their names in lower case.

    `streaming` is None while the kind of the read is unknown; options of both kinds are then
    allowed. Raises InvalidOption.
    """
    values = {name.lower(): value.strip() for name, value in given.items()}
    _check_names(values, streaming=streaming)
    brokers = brokers_of(_required(values, "service.url"))
    is_encrypted = scheme_of(brokers[0]).is_tls
    topics, pattern = _which_topics(values)
    start = _bounds(values, "starting", Edge.LATEST if streaming else Edge.EARLIEST)
    end = _bounds(values, "ending", Edge.LATEST)
    value_format = _choice(values, "valueFormat", ValueFormat.BYTES)
    return ReadOptions(
        brokers,
        topics,
        pattern,
        start,
        end,
        fail_on_data_loss=_flag(values, "failOnDataLoss", default=True),
        target_bytes_per_task=_number(values, "targetBytesPerTask", TARGET_BYTES_PER_TASK),
        tasks_max=_number(values, "maxPartitions", TASKS_MAX),
        read_timeout_s=_number(values, "readTimeoutMs", READ_TIMEOUT_MS) / 1_000,
        value_format=value_format,
        value_schema=_schema_text(values, "value", value_format),
        **_key_options(values),
        mode=(mode := _choice(values, "mode", Mode.FAILFAST)),
        dead_letter_topic=_dead_letter_topic(values, mode, topics, pattern),
        # Bookies have no TLS, so a query over TLS does not read from them by default.
        reads_from_bookies=_flag(values, "readFromBookies", default=not is_encrypted),
        access=parse_access(values),
        subscription=_subscription(values.get("subscription", "")),
        rows_max=_limit(values, "maxRowsPerTrigger"),
        bytes_max=_limit(values, "maxBytesPerTrigger"),
        **_least_options(values),
        waits_for_topics=_flag(values, "waitingForNonExistedTopic", default=False),
        poll_interval_s=_number(values, "pollIntervalMs", POLL_INTERVAL_MS) / 1_000,
        discovery_interval_s=_number(values, "discoveryIntervalMs", DISCOVERY_INTERVAL_MS) / 1_000,
        takes_filters=_flag(values, "filterPushdown", default=False),
    )


def _check_names(values: Mapping[str, str], *, streaming: bool | None) -> None:
    options = (*COMMON, *_OWN[streaming])
    known = {name.lower() for name in options}
    other = {name.lower() for name in (*ONLY_BATCH, *ONLY_STREAM)} - known
    for name in values:
        if name in other:
            kind = "batch reads (spark.read)" if streaming else "streams (spark.readStream)"
            raise InvalidOption(name, f"is an option of {kind} only")
        if name not in known:
            raise InvalidOption(name, f"is unknown; known options: {', '.join(options)}")


def _which_topics(
    values: Mapping[str, str],
) -> tuple[tuple[TopicName, ...], TopicPattern | None]:
    names = [name for name in ("topic", "topics", "topicsPattern") if name.lower() in values]
    if len(names) > 1:
        raise InvalidOption(names[1], f"excludes {names[0]}: give one of them")
    if not names:
        raise InvalidOption("topic", "is required (or topics, or topicsPattern)")
    text = _required(values, names[0])
    if names == ["topicsPattern"]:
        return (), _pattern(text)
    if names == ["topic"]:
        return (_topic(text, "topic"),), None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > TOPICS_MAX:
        raise InvalidOption("topics", f"names {len(parts)} topics, more than {TOPICS_MAX}")
    return tuple(dict.fromkeys(_topic(part, "topics") for part in parts)), None


def _pattern(text: str) -> TopicPattern:
    if len(text) > PATTERN_CHARACTERS_MAX:
        raise InvalidOption("topicsPattern", f"has more than {PATTERN_CHARACTERS_MAX} characters")
    domain, separator, rest = text.rpartition("://")
    if separator and domain != Domain.PERSISTENT:
        raise InvalidOption("topicsPattern", f"the domain {domain!r} is not 'persistent'")
    namespace, slash, pattern = rest.rpartition("/")
    try:
        of = NamespaceName.parse(namespace) if slash else DEFAULT_NAMESPACE
        return TopicPattern(of, re.compile(pattern))
    except InvalidNamespaceName as error:
        raise InvalidOption("topicsPattern", str(error)) from None
    except re.error as error:
        reason = f"{pattern!r} is not a regular expression: {error}"
        raise InvalidOption("topicsPattern", reason) from None


def _bounds(values: Mapping[str, str], which: str, default: Edge) -> Bounds:
    """Parse startingOffsets and startingTime, or endingOffsets and endingTime."""
    offsets, time = f"{which}Offsets", f"{which}Time"
    if time.lower() in values:
        if offsets.lower() in values:
            raise InvalidOption(time, f"excludes {offsets}: give one of them")
        ms = _number(values, time, 0)
        return Bounds(Time(ms), {}, f"time:{ms}")
    text = values.get(offsets.lower(), default.value)
    edge = _edge(text)
    if edge is not None:
        opposite = Edge.EARLIEST if which == "ending" else None
        if edge is opposite:
            raise InvalidOption(offsets, f"{text!r} would read nothing")
        return Bounds(edge, {}, edge.value)
    try:
        by_topic = json.loads(text)
    except (ValueError, RecursionError):
        by_topic = None
    if not isinstance(by_topic, dict):
        reason = f"{text[:40]!r} is not 'earliest', 'latest' or a JSON object"
        raise InvalidOption(offsets, reason)
    topics = {}
    for name, bound in by_topic.items():
        topic = _topic(name, offsets)
        if not isinstance(bound, dict):
            topics[str(topic)] = _bound(bound, offsets, name)
            continue
        for partition, of_partition in bound.items():
            if not _PARTITION.fullmatch(partition) or topic.partition is not None:
                raise InvalidOption(offsets, f"{name}: {partition[:40]!r} is not a partition")
            part = topic.with_partition(int(partition))
            topics[str(part)] = _bound(of_partition, offsets, f"{name}, {partition}")
    rest = Edge.LATEST if which == "ending" else Edge.EARLIEST
    return Bounds(rest, topics, json.dumps(by_topic, sort_keys=True))


def _bound(value: Any, option: str, name: str) -> Bound:
    if isinstance(value, str):
        edge = _edge(value)
        if edge is not None:
            return edge
        match = _ID.fullmatch(value)
        if match is not None:
            return MessagePlace(int(match[1]), int(match[2]), int(match[3] or 0))
    reason = (
        f"{name}: {str(value)[:40]!r} is not 'earliest', 'latest' or 'ledger:entry[:batch index]'"
    )
    raise InvalidOption(option, reason)


def _edge(text: str) -> Edge | None:
    return next((edge for edge in Edge if edge.value == text.lower()), None)


def _required(values: Mapping[str, str], name: str) -> str:
    value = values.get(name.lower(), "")
    if not value:
        raise InvalidOption(name, "is required")
    return value


def _topic(text: str, option: str) -> TopicName:
    try:
        topic = TopicName.parse(text)
    except InvalidTopicName as error:
        raise InvalidOption(option, str(error)) from None
    if topic.domain is not Domain.PERSISTENT:
        raise InvalidOption(option, f"{topic} is not persistent: no broker stores its messages")
    return topic


def _subscription(text: str) -> str:
    if len(text) > SUBSCRIPTION_CHARACTERS_MAX or "/" in text:
        reason = f"has a slash or more than {SUBSCRIPTION_CHARACTERS_MAX} characters"
        raise InvalidOption("subscription", reason)
    return text


def _choice(values: Mapping[str, str], name: str, default: Choice) -> Choice:
    text = values.get(name.lower(), default.value).lower()
    choices = {choice.value: choice for choice in type(default)}
    if text not in choices:
        raise InvalidOption(name, f"{text[:40]!r} is not one of {', '.join(choices)}")
    return choices[text]


def _dead_letter_topic(
    values: Mapping[str, str],
    mode: Mode,
    topics: tuple[TopicName, ...],
    pattern: TopicPattern | None,
) -> TopicName | None:
    option = "deadLetterTopic"
    if mode is not Mode.DLQ:
        if option.lower() in values:
            raise InvalidOption(option, "needs mode dlq")
        return None
    name = _topic(_required(values, option), option)
    is_matched = pattern is not None and (
        name.namespace_name == pattern.namespace and pattern.matches(name)
    )
    if is_matched or name.base in [topic.base for topic in topics]:
        raise InvalidOption(
            option, f"{name} is a topic of the query, which would read its own dead letters"
        )
    return name


def _key_options(values: Mapping[str, str]) -> dict[str, Any]:
    if "keyformat" not in values:
        for name in ("keySchema", "keyValueEncoding"):
            if name.lower() in values:
                raise InvalidOption(name, "needs keyFormat")
        return {}
    key_format = _choice(values, "keyFormat", ValueFormat.BYTES)
    for option in ("keyFormat", "valueFormat"):
        if values.get(option.lower(), "").lower() == ValueFormat.AUTO.value:
            raise InvalidOption(option, "auto cannot be used with keyFormat: name both formats")
    return {
        "key_format": key_format,
        "key_schema": _schema_text(values, "key", key_format),
        "key_value_encoding": _choice(values, "keyValueEncoding", KeyValueEncoding.INLINE),
    }


def _least_options(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the minimum number of rows of a batch, and the longest time that the batch waits for
    them."""
    least = _limit(values, "minRowsPerTrigger")
    if least is None:
        if "maxtriggerdelay" in values:
            raise InvalidOption("maxTriggerDelay", "needs minRowsPerTrigger")
        return {}
    most = _limit(values, "maxRowsPerTrigger")
    if most is not None and least > most:
        raise InvalidOption("minRowsPerTrigger", f"{least} is more than maxRowsPerTrigger, {most}")
    delay_s = _duration_s(values, "maxTriggerDelay", MAX_TRIGGER_DELAY_S)
    return {"rows_min": least, "trigger_delay_s": delay_s}


def _schema_text(values: Mapping[str, str], part: str, found: ValueFormat) -> str:
    """Return the schema of the key or of the value. Some formats need a schema, and the others
    refuse it."""
    option = f"{part}Schema"
    text = values.get(option.lower(), "")
    needs = found in (ValueFormat.JSON, ValueFormat.AVRO, ValueFormat.PROTOBUF)
    if needs and not text:
        raise InvalidOption(option, f"is required by {part}Format {found.value}")
    if text and not needs:
        reason = f"is not used by {part}Format {found.value}: give json, avro or protobuf"
        raise InvalidOption(option, reason)
    if len(text) > SCHEMA_CHARACTERS_MAX:
        raise InvalidOption(option, f"has more than {SCHEMA_CHARACTERS_MAX} characters")
    return text


def _flag(values: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = values.get(name.lower(), str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidOption(name, f"{text!r} is not true or false")
    return text == "true"


def _duration_s(values: Mapping[str, str], name: str, default_s: float) -> float:
    text = values.get(name.lower())
    if text is None:
        return default_s
    match = _DURATION.fullmatch(text.lower())
    duration_s = int(match[1]) * _UNITS_MS[match[2]] / 1_000 if match else 0.0
    if not 0 < duration_s <= DURATION_S_MAX:
        raise InvalidOption(
            name, f"{text[:40]!r} is not a duration of 1ms to 366d with a unit: ms, s, m, h or d"
        )
    return duration_s


def _limit(values: Mapping[str, str], name: str) -> int | None:
    return _number(values, name, 0) if name.lower() in values else None


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name.lower(), str(default))
    if not _PLAIN.fullmatch(text) or not 0 < int(text) <= NUMBER_MAX:
        raise InvalidOption(name, f"{text[:40]!r} is not a whole number above 0")
    return int(text)
