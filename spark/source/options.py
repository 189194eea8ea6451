"""The options of `spark.read.format("magnetar")`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.client.errors import InvalidUrl
from magnetar.client.session.service_url import Scheme, parse_service_url, scheme_of
from magnetar.protos.errors import InvalidTopicName
from magnetar.protos.names import Domain, TopicName
from magnetar.spark.errors import InvalidOption
from magnetar.spark.planner import TARGET_BYTES_PER_TASK, TASKS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

OPTIONS: Final = ("service.url", "topic", "targetBytesPerTask", "maxPartitions", "readTimeoutMs")

# Another broker serves a dead broker's topics within 3 s, at worst after a session timeout of 10 s.
# Within a minute, a whole cluster can restart during a job.
READ_TIMEOUT_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The parsed options of one read."""

    brokers: tuple[str, ...]  # grpc:// URLs, one broker each
    topic: TopicName
    target_bytes_per_task: int
    tasks_max: int
    read_timeout_s: float  # how long a read may go on without progress


def parse_options(given: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read. Spark passes their names in lower case. Raises InvalidOption."""
    values = {name.lower(): value for name, value in given.items()}
    known = {name.lower() for name in OPTIONS}
    for name in values:
        if name not in known:
            raise InvalidOption(name, f"is unknown; known options: {', '.join(OPTIONS)}")
    return ReadOptions(
        _brokers(_required(values, "service.url")),
        _topic(_required(values, "topic")),
        _number(values, "targetBytesPerTask", TARGET_BYTES_PER_TASK),
        _number(values, "maxPartitions", TASKS_MAX),
        _number(values, "readTimeoutMs", READ_TIMEOUT_MS) / 1_000,
    )


def _required(values: Mapping[str, str], name: str) -> str:
    value = values.get(name.lower(), "").strip()
    if not value:
        raise InvalidOption(name, "is required")
    return value


def _brokers(text: str) -> tuple[str, ...]:
    try:
        brokers, scheme = parse_service_url(text), scheme_of(text)
    except InvalidUrl as error:
        raise InvalidOption("service.url", str(error)) from None
    if scheme is not Scheme.GRPC:
        raise InvalidOption(
            "service.url", f"expected grpc://host:port, which ranges need: {text!r}"
        )
    return brokers


def _topic(text: str) -> TopicName:
    try:
        topic = TopicName.parse(text)
    except InvalidTopicName as error:
        raise InvalidOption("topic", str(error)) from None
    if topic.domain is not Domain.PERSISTENT:
        raise InvalidOption("topic", f"{topic} is not persistent: no broker stores its messages")
    return topic


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name.lower(), str(default)).strip()
    if not text.isdecimal() or int(text) == 0:
        raise InvalidOption(name, f"{text!r} is not a whole number above 0")
    return int(text)
