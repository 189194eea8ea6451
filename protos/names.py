"""Names of topics and namespaces: `{persistent|non-persistent}://tenant/namespace/topic`.

The rules are Pulsar's:

- Tenant and namespace are made of letters and digits of ASCII and `-=:._`.
- The topic part may hold anything but a slash, and is not blank. Pulsar knows slashes only in names
  of its first version, `persistent://tenant/cluster/namespace/topic`, which are refused here.
- Short names stand for persistent topics: `topic` is in the namespace `public/default`,
  `tenant/namespace/topic` is what it says.
- A partition is a topic of its own, named `<topic>-partition-<n>`, without leading zeros.

Three rules are ours, because a name also becomes part of paths and URLs: no part is `.` or `..`, a
full name has at most 1,024 bytes, and it can be encoded as UTF-8.
"""

import re
import zlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

from magnetar.protos.errors import InvalidNamespaceName, InvalidTopicName

# Percent-encoded, three for one, it stays below 4 KiB, the smallest limit of a path or URL.
TOPIC_NAME_BYTES_MAX: Final = 1024


class Domain(StrEnum):
    """Whether the messages of a topic are stored."""

    PERSISTENT = "persistent"
    NON_PERSISTENT = "non-persistent"


@dataclass(frozen=True, slots=True, order=True)
class NamespaceName:
    """A namespace of a tenant, printed as `tenant/namespace`. Make one with `parse`."""

    tenant: str
    namespace: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises InvalidNamespaceName."""
        parts = text.split("/")
        if len(parts) != 2:
            raise InvalidNamespaceName(text, "expected tenant/namespace")
        for what, part in zip(("tenant", "namespace"), parts, strict=True):
            if (problem := _entity_problem(what, part)) is not None:
                raise InvalidNamespaceName(text, problem)
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace}"


DEFAULT_NAMESPACE: Final = NamespaceName("public", "default")


@dataclass(frozen=True, slots=True, order=True)
class TopicName:
    """A topic, or one partition of a partitioned topic; `str` gives the name in full.

    Make one with `parse`.
    """

    domain: Domain
    tenant: str
    namespace: str
    topic: str  # the last part, with the suffix of a partition

    @classmethod
    def parse(cls, text: str) -> Self:
        """The topic that a full or short name means. Raises InvalidTopicName."""
        scheme, separator, rest = text.partition("://")
        if separator:
            if scheme not in tuple(Domain):
                raise InvalidTopicName(text, f"the domain {scheme!r} is not one of {_DOMAINS}")
        else:
            scheme, rest = Domain.PERSISTENT, text
        parts = rest.split("/")
        if len(parts) == 1 and not separator:
            parts = [DEFAULT_NAMESPACE.tenant, DEFAULT_NAMESPACE.namespace, *parts]
        if (problem := _topic_problem(parts)) is not None:
            raise InvalidTopicName(text, problem)
        name = cls(Domain(scheme), *parts)
        if (problem := _encoding_problem(str(name))) is not None:
            raise InvalidTopicName(text, problem)
        return name

    def __str__(self) -> str:
        return f"{self.domain}://{self.tenant}/{self.namespace}/{self.topic}"

    @property
    def namespace_name(self) -> NamespaceName:
        return NamespaceName(self.tenant, self.namespace)

    @property
    def partition(self) -> int | None:
        """The number of this partition; None: the name is not that of a partition."""
        match = _PARTITION.fullmatch(self.topic)
        if match is None:
            return None
        index = int(match[2])
        return index if index <= _PARTITION_MAX else None

    @property
    def base(self) -> "TopicName":
        """The partitioned topic that this partition belongs to; itself if it is not a partition."""
        if self.partition is None:
            return self
        return replace(self, topic=self.topic[: self.topic.rindex(_PARTITION_SUFFIX)])

    def with_partition(self, index: int) -> "TopicName":
        """Partition `index` of this topic, which must not be a partition itself."""
        assert self.partition is None
        assert 0 <= index <= _PARTITION_MAX
        return replace(self, topic=f"{self.topic}{_PARTITION_SUFFIX}{index}")

    @property
    def bundle_hash(self) -> int:
        """The place of the topic in its namespace's hash space, 0 to 2^32-1."""
        return zlib.crc32(str(self).encode())


_DOMAINS = ", ".join(Domain)
_ENTITY = re.compile(r"[-=:.\w]+", re.ASCII)
_PARTITION_SUFFIX = "-partition-"
_PARTITION = re.compile(r"(.+)-partition-(0|[1-9][0-9]{0,9})", re.DOTALL)
_PARTITION_MAX = 2**31 - 1  # an int32 on the wire


def _topic_problem(parts: list[str]) -> str | None:
    """Why these parts are not tenant, namespace and topic; None: they are."""
    match parts:
        case [tenant, namespace, topic]:
            problem = _entity_problem("tenant", tenant) or _entity_problem("namespace", namespace)
            return problem or _local_problem(topic)
        case [_, _, _, *_]:
            return (
                "expected tenant/namespace/topic with no further slash; names of the form"
                " tenant/cluster/namespace/topic are not supported"
            )
        case _:
            return (
                "expected {persistent|non-persistent}://tenant/namespace/topic,"
                " tenant/namespace/topic or topic"
            )


def _entity_problem(what: str, part: str) -> str | None:
    if _ENTITY.fullmatch(part) is None:
        return f"the {what} {part!r} must be made of one or more of A-Z a-z 0-9 - = : . _"
    return _dots_problem(what, part)


def _local_problem(topic: str) -> str | None:
    if not topic or topic.isspace():
        return "the topic part is blank"
    return _dots_problem("topic part", topic)


def _dots_problem(what: str, part: str) -> str | None:
    return f"the {what} cannot be {part!r}" if part in (".", "..") else None


def _encoding_problem(name: str) -> str | None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "it cannot be encoded as UTF-8"
    if size > TOPIC_NAME_BYTES_MAX:
        return f"it has {size} bytes in full, the limit is {TOPIC_NAME_BYTES_MAX}"
    return None
