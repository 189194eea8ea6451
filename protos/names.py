"""Names of topics and namespaces: `{persistent|non-persistent}://tenant/namespace/topic`.

Pulsar's rules:

- Tenant and namespace consist of ASCII letters, ASCII digits and `-=:._`.
- The topic part may hold any character except a slash, and is not blank. Pulsar has slashes only in
  names of its first version, `persistent://tenant/cluster/namespace/topic`. Magnetar refuses them.
- A short name means a persistent topic: `topic` is in the namespace `public/default`;
  `tenant/namespace/topic` lacks only the domain.
- A partition is a separate topic, named `<topic>-partition-<n>`, without leading zeros.

Magnetar adds three rules, because a name also becomes part of paths and URLs. No part is `.` or
`..`. A full name has at most 1,024 bytes. A name can be encoded as UTF-8.
"""

import re
import sys
import zlib
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final, Self

from magnetar.protos.errors import InvalidNamespaceName, InvalidTopicName

# Percent-encoding triples the length; the result stays below 4 KiB, the smallest limit of a path or
# URL.
TOPIC_NAME_BYTES_MAX: Final = 1024


class Domain(StrEnum):
    """The domain of a topic: its messages are stored (persistent) or not (non-persistent)."""

    PERSISTENT = "persistent"
    NON_PERSISTENT = "non-persistent"


@dataclass(frozen=True, slots=True, order=True)
class NamespaceName:
    """A namespace of a tenant, printed as `tenant/namespace`. Create it with `parse`."""

    tenant: str
    namespace: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `tenant/namespace`. Raises InvalidNamespaceName."""
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
    """A topic, or one partition of a partitioned topic. `str` returns the full name.

    Create it with `parse`.
    """

    domain: Domain
    tenant: str
    namespace: str
    topic: str  # the last part, with the suffix of a partition

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a full or short name. Raises InvalidTopicName."""
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
        tenant, namespace, topic = parts  # many topics share the first two: intern them
        name = cls(Domain(scheme), sys.intern(tenant), sys.intern(namespace), topic)
        if (problem := _encoding_problem(str(name))) is not None:
            raise InvalidTopicName(text, problem)
        return name

    def __str__(self) -> str:
        return f"{self.domain}://{self.tenant}/{self.namespace}/{self.topic}"

    @property
    def namespace_name(self) -> NamespaceName:
        """The namespace of the topic."""
        return _namespace(self.tenant, self.namespace)

    @property
    def partition(self) -> int | None:
        """The number of this partition; None: the topic is not a partition."""
        if _PARTITION_SUFFIX not in self.topic:
            return None
        match = _PARTITION.fullmatch(self.topic)
        if match is None:
            return None
        index = int(match[2])
        return index if index <= _PARTITION_MAX else None

    @property
    def base(self) -> "TopicName":
        """The partitioned topic of this partition, or the topic itself if it is not a partition."""
        if self.partition is None:
            return self
        return replace(self, topic=self.topic[: self.topic.rindex(_PARTITION_SUFFIX)])

    def with_partition(self, index: int) -> "TopicName":
        """Return partition `index` of this topic. The topic must not be a partition."""
        assert self.partition is None
        assert 0 <= index <= _PARTITION_MAX
        return replace(self, topic=f"{self.topic}{_PARTITION_SUFFIX}{index}")

    @property
    def bundle_hash(self) -> int:
        """The hash that selects the topic's bundle in its namespace, 0 to 2^32-1."""
        return zlib.crc32(str(self).encode())


_DOMAINS = ", ".join(Domain)
_ENTITY = re.compile(r"[-=:.\w]+", re.ASCII)
_PARTITION_SUFFIX = "-partition-"
_PARTITION = re.compile(r"(.+)-partition-(0|[1-9][0-9]{0,9})", re.DOTALL)
_PARTITION_MAX = 2**31 - 1  # an int32 on the wire


@lru_cache(1024)
def _namespace(tenant: str, namespace: str) -> NamespaceName:
    return NamespaceName(tenant, namespace)


def _topic_problem(parts: list[str]) -> str | None:
    """Return why these parts are not tenant, namespace and topic. None: they are valid."""
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
        return f"the {what} {part!r} must consist of one or more of A-Z a-z 0-9 - = : . _"
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
        return "the name cannot be encoded as UTF-8"
    if size > TOPIC_NAME_BYTES_MAX:
        return f"the full name has {size} bytes, the limit is {TOPIC_NAME_BYTES_MAX}"
    return None
