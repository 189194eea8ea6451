"""The parsed arguments of a request: topics, namespaces, subscriptions and positions.

Each function parses one argument. The error for a wrong value names the argument and says what was
expected.
"""

from __future__ import annotations

from typing import Final

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.broker.operations.errors import InvalidArgument
from magnetar.protos.names import DEFAULT_NAMESPACE, Domain, NamespaceName, TopicName

SUBSCRIPTION_NAME_BYTES_MAX: Final = 1024
"""The same limit as for a topic's name. A subscription's name is part of paths, of metric labels
and of the topic's record."""

INT32_MAX: Final = (1 << 31) - 1
INT64_MAX: Final = (1 << 63) - 1


def _no_boolean(found: object) -> object:
    if isinstance(found, bool):
        raise PydanticCustomError("boolean_number", "Input should be a number, not a boolean")
    return found


NO_BOOLEAN: Final = BeforeValidator(_no_boolean)
"""Refuses `true` and `false` as a number: pydantic would take them for 1 and 0."""


NAMESPACE_NAME_BYTES_MAX: Final = 512
"""The limit of `tenant/namespace`. It leaves half of a topic's full name to the topic."""


def topic_name(
    tenant: str, namespace: str, topic: str, domain: Domain = Domain.PERSISTENT
) -> TopicName:
    """Return the name of the topic that has these parts. Raises InvalidTopicName."""
    return TopicName.parse(f"{domain}://{tenant}/{namespace}/{topic}")


def namespace_name(tenant: str, namespace: str) -> NamespaceName:
    """Return the namespace. Raises InvalidNamespaceName, InvalidArgument."""
    name = NamespaceName.parse(f"{tenant}/{namespace}")
    if len(str(name)) > NAMESPACE_NAME_BYTES_MAX:
        expected = f"at most {NAMESPACE_NAME_BYTES_MAX} bytes"
        raise InvalidArgument("namespace", str(name), expected)
    return name


def tenant_name(text: str) -> str:
    """Return the tenant's name. Raises InvalidNamespaceName, InvalidArgument."""
    if "/" in text:
        raise InvalidArgument("tenant", text, "a name without a slash")
    return namespace_name(text, DEFAULT_NAMESPACE.namespace).tenant


def subscription_name(text: str) -> str:
    """Return the subscription's name. Raises InvalidArgument."""
    if not text or text.isspace():
        raise InvalidArgument("subscription name", text, "a name that is not blank")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument("subscription name", text, "text of Unicode characters") from None
    if size > SUBSCRIPTION_NAME_BYTES_MAX:
        expected = f"at most {SUBSCRIPTION_NAME_BYTES_MAX} bytes, not {size}"
        raise InvalidArgument("subscription name", text, expected)
    return text


def position(ledger: int, entry: int) -> Position:
    """Return the position of an entry, or one of Pulsar's two special message ids: (-1, -1) is the
    beginning of the topic, and (2^63-1, 2^63-1) is its end. Raises InvalidArgument."""
    found = Position(ledger, entry)
    if found in (EARLIEST, LATEST):
        return found
    if 0 <= ledger <= INT64_MAX and 0 <= entry <= INT64_MAX:
        return found
    expected = "ledgerId and entryId from 0 to 2^63-1, both -1 (earliest), or both 2^63-1 (latest)"
    raise InvalidArgument("message id", str(found), expected)
