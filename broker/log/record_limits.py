"""The size limits of the parts of a topic's record.

The metadata store takes records of at most 1,000 KiB. Each part of the record that grows has a
limit of its own below that. Therefore a large number of subscriptions does not stop producers, and
a large number of ledgers does not stop new subscriptions. Changes that must not fail always fit: a
new epoch, the close of a ledger, the state of a cursor. When a part is at its limit, consumers can
read the topic; a request that would make this part larger raises TopicFull.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import TopicFull
from magnetar.metadata.codec import encode_topic
from magnetar.metadata.model import SubscriptionRecord, TopicRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.protos.names import TopicName

LEDGERS_MAX: Final = 10_000
"""The maximum number of ledgers of a topic. Each takes at most 58 bytes (five numbers of ten bytes,
their tags, a header): 566 KiB in all. With `ledger_size_factor`, a topic that rolls each ledger by
entries at the minimum age reaches the limit after two years. A topic that rolls each ledger by size
reaches it at 200 TiB."""

DELETING_MAX: Final = 5_000
"""The maximum number of ledgers that wait for their deletion, at most 10 bytes each. While this
many wait, the log drops no further ledgers."""

SUBSCRIPTIONS_BYTES_MAX: Final = 300 << 10
"""The maximum size of the names and properties of the subscriptions, and of their states at their
creation or last reset: 3,000 subscriptions of 100 bytes. With LEDGERS_MAX, DELETING_MAX and
`CursorConfig.inline_bytes_max`, a record has at most 980 KiB. The notes of Spark's sinks, which are
properties of the record, take at most 10 KiB more (`broker/session/batch_notes.py`)."""

PROPERTIES_BYTES_MAX: Final = 8 << 10
"""The maximum size of the properties that administrators give to a topic, with PROPERTY_BYTES for
each of them. A record of the maximum size has space for them."""

PROPERTY_BYTES: Final = 16
"""The maximum size of a property in the record without its name and value: five bytes that mark it
as an administrator's property (`broker/operations/properties.py`), tags and lengths."""

LEDGERS_PER_STEP: Final = 500
"""Each time a topic's record gets this many more ledgers, the topic's next ledgers may be
larger."""


def ledger_size_factor(ledgers: int) -> int:
    """The factor for the size limits and minimum ages of the next ledger of a topic with this many
    ledgers."""
    return 1 + ledgers // LEDGERS_PER_STEP


def require_ledger_capacity(name: TopicName, ledgers: int) -> None:
    """Raise TopicFull if the record may not list one more ledger."""
    if ledgers >= LEDGERS_MAX:
        raise TopicFull(str(name), f"it has {ledgers} ledgers, which is the limit")


def require_properties_fit(
    name: TopicName, properties: Mapping[str, str], *, before: Mapping[str, str]
) -> None:
    """Raise TopicFull if these properties of an administrator are too large for the record. Accept
    them if they are not larger than the properties `before`: an earlier version had no limit for
    partitioned topics, and their administrators must be able to remove properties."""
    size = _properties_size(properties)
    if size > PROPERTIES_BYTES_MAX and size > _properties_size(before):
        why = f"its properties would have {size} bytes; the limit is {PROPERTIES_BYTES_MAX}"
        raise TopicFull(str(name), why)


def _properties_size(properties: Mapping[str, str]) -> int:
    return sum(len(f"{key}{value}".encode()) + PROPERTY_BYTES for key, value in properties.items())


def with_subscription(
    name: TopicName, record: TopicRecord, subscription: str, begin: SubscriptionRecord
) -> TopicRecord:
    """The record with one more subscription, or with a changed one. Raises TopicFull if the
    subscriptions would be too large, and larger than they are: the states that a topic writes when
    it closes may already exceed the limit."""
    subscriptions = {**record.subscriptions, subscription: begin}
    if _size_at_most(subscriptions) <= SUBSCRIPTIONS_BYTES_MAX:
        return replace(record, subscriptions=subscriptions)
    size = _encoded_size(subscriptions)
    if size > SUBSCRIPTIONS_BYTES_MAX and size > _encoded_size(record.subscriptions):
        why = f"its subscriptions would have {size} bytes; the limit is {SUBSCRIPTIONS_BYTES_MAX}"
        raise TopicFull(str(name), why)
    return replace(record, subscriptions=subscriptions)


def _encoded_size(subscriptions: Mapping[str, SubscriptionRecord]) -> int:
    return len(encode_topic(TopicRecord(epoch=0, subscriptions=subscriptions)))


def _size_at_most(subscriptions: Mapping[str, SubscriptionRecord]) -> int:
    """An upper bound for the encoded size of the subscriptions, in bytes. For 1,000 subscriptions
    this takes a tenth of the time of encoding them. A character has up to four bytes, and each
    field a tag and a length."""
    size = 0
    for name, record in subscriptions.items():
        size += 4 * len(name) + len(record.inline) + len(record.unknown) + 32
        for key, value in record.properties.items():
            size += 4 * (len(key) + len(value)) + 24
    return size
