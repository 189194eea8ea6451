"""The options of `df.write.format("magnetar")` and `df.writeStream.format("magnetar")`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.client.enums import CompressionType
from magnetar.protos.errors import InvalidTopicName
from magnetar.protos.names import Domain, TopicName
from magnetar.spark import access
from magnetar.spark.access import ANONYMOUS, Access, parse_access
from magnetar.spark.errors import InvalidOption
from magnetar.spark.service_url import brokers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

Choice = TypeVar("Choice", bound=StrEnum)

OPTIONS: Final = (
    "service.url",
    "topic",
    "deliveryGuarantee",
    "valueFormat",
    "batching",
    "rowOrder",
    "compression",
    "pendingBytes",
    "sendTimeoutMs",
    "jobId",
    *access.OPTIONS,
)
# Spark puts these into the options of a streaming query.
OF_SPARK: Final = ("path", "checkpointlocation", "queryname")

# Another broker usually serves a dead broker's topics within 3 s. In the worst case, it first waits
# for the session timeout of 10 s.
SEND_TIMEOUT_MS: Final = 60_000
PENDING_BYTES: Final = 32 << 20
PENDING_BYTES_MIN: Final = 1 << 20
PENDING_BYTES_MAX: Final = 1 << 30
QUERY_NAME_BYTES_MAX: Final = 200  # brokers have the same limit
# A part of the producers' names.
JOB_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guarantee(StrEnum):
    """The guarantee after failures. AT_LEAST_ONCE: rows of a repeated task may be stored again.
    DEDUP: the broker's deduplication stores each row exactly once."""

    AT_LEAST_ONCE = "at-least-once"
    DEDUP = "dedup"


class ValueFormat(StrEnum):
    """The form of the payload. AUTO: bytes for a binary or text `value`, else JSON."""

    AUTO = "auto"
    BYTES = "bytes"
    JSON = "json"


class RowOrder(StrEnum):
    """The order of the rows of one task. SORTED sorts by all columns, so that a repeated task has
    the same order also after a shuffle."""

    ARRIVAL = "arrival"
    SORTED = "sorted"


class Batching(StrEnum):
    """The division of messages into entries. KEY: an entry holds messages of one key, as Key_Shared
    subscriptions need it."""

    DEFAULT = "default"
    KEY = "key"


COMPRESSIONS: Final = {
    "none": CompressionType.NONE,
    "lz4": CompressionType.LZ4,
    "zlib": CompressionType.ZLib,
    "zstd": CompressionType.ZSTD,
    "snappy": CompressionType.SNAPPY,
}


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The parsed options of one write."""

    service_url: str
    brokers: tuple[str, ...]  # grpc:// or grpcs:// URLs, one broker each
    topic: TopicName | None  # None: the column __topic names the topic of each row
    guarantee: Guarantee
    value_format: ValueFormat
    batching: Batching
    compression: CompressionType
    pending_bytes: int  # the limit for a task's rows that have no receipt yet
    send_timeout_s: float  # the maximal time that a task waits for a receipt
    job_id: str | None  # the id of a batch job with dedup; None: a new one for each job
    row_order: RowOrder = RowOrder.ARRIVAL
    query_name: str = ""  # the name of a streaming query; empty: it has none
    access: Access = ANONYMOUS

    @property
    def division(self) -> tuple[str, ...]:
        """The options that decide how the task divides rows into entries. Options with their
        default values are left out."""
        by_key = (f"by-{self.batching}",) if self.batching is not Batching.DEFAULT else ()
        pending = (f"pending-{self.pending_bytes}",) if self.pending_bytes != PENDING_BYTES else ()
        order = (f"{self.row_order}",) if self.row_order is not RowOrder.ARRIVAL else ()
        return (*by_key, *pending, *order)


def parse_options(given: Mapping[str, str], *, streaming: bool = False) -> WriteOptions:
    """Parse the options of a write. Spark passes their names in lower case. Raises InvalidOption.

    A streaming query has no `jobId`: its own id takes that place.
    """
    known = {name.lower() for name in OPTIONS} | (set(OF_SPARK) if streaming else set())
    values = {name.lower(): value.strip() for name, value in given.items()}
    for name in values:
        if name not in known:
            raise InvalidOption(name, f"is unknown; known options: {', '.join(OPTIONS)}")
    service_url = values.get("service.url", "")
    if not service_url:
        raise InvalidOption("service.url", "is required")
    guarantee = _choice(values, "deliveryGuarantee", Guarantee, Guarantee.AT_LEAST_ONCE)
    return WriteOptions(
        service_url,
        brokers_of(service_url),
        topic_of(values["topic"]) if values.get("topic") else None,
        guarantee,
        _choice(values, "valueFormat", ValueFormat, ValueFormat.AUTO),
        _choice(values, "batching", Batching, Batching.DEFAULT),
        _compression(values.get("compression", "none")),
        _number(values, "pendingBytes", PENDING_BYTES, PENDING_BYTES_MIN, PENDING_BYTES_MAX),
        _number(values, "sendTimeoutMs", SEND_TIMEOUT_MS, 1, 2**31 - 1) / 1_000,
        _job_id(values.get("jobid"), guarantee, streaming=streaming),
        _choice(values, "rowOrder", RowOrder, RowOrder.ARRIVAL),
        _query_name(values.get("queryname", "")),
        parse_access(values),
    )


def topic_of(text: str) -> TopicName:
    """Parse the name of a topic that a sink can write to. Raises InvalidOption."""
    try:
        topic = TopicName.parse(text)
    except InvalidTopicName as error:
        raise InvalidOption("topic", str(error)) from None
    if topic.domain is not Domain.PERSISTENT:
        raise InvalidOption("topic", f"{topic} is not persistent: no broker stores its messages")
    return topic


def _choice(values: Mapping[str, str], name: str, kind: type[Choice], default: Choice) -> Choice:
    text = values.get(name.lower(), default)
    try:
        return kind(text.lower())
    except ValueError:
        raise InvalidOption(name, f"{text!r} is not one of {', '.join(kind)}") from None


def _compression(text: str) -> CompressionType:
    found = COMPRESSIONS.get(text.lower())
    if found is None:
        raise InvalidOption("compression", f"{text!r} is not one of {', '.join(COMPRESSIONS)}")
    return found


def _number(values: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = values.get(name.lower(), str(default))
    if not (text.isdecimal() and text.isascii() and len(text) < 20 and least <= int(text) <= most):
        raise InvalidOption(name, f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def _query_name(text: str) -> str:
    if len(text.encode()) > QUERY_NAME_BYTES_MAX:
        raise InvalidOption("queryName", f"has more than {QUERY_NAME_BYTES_MAX} bytes")
    return text


def _job_id(text: str | None, guarantee: Guarantee, *, streaming: bool) -> str | None:
    if text is None:
        return None
    if streaming:
        raise InvalidOption("jobId", "is for batch writes; a streaming query has an id of its own")
    if guarantee is not Guarantee.DEDUP:
        raise InvalidOption("jobId", f"needs deliveryGuarantee {Guarantee.DEDUP}")
    if not JOB_ID.fullmatch(text):
        raise InvalidOption("jobId", f"{text!r} is not 1 to 64 letters, digits, '.', '_' or '-'")
    return text
