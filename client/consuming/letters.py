"""Names and properties of retry topics and dead-letter topics, as Apache's Java client has them.

A *letter* is a copy of a message on a retry topic or on a dead-letter topic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from magnetar.client.errors import CryptoError, InvalidMessage
from magnetar.protos.message import OutgoingMessage
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Mapping

    from magnetar.client.message import Message, MessageId

RETRY_SUFFIX: Final = "-RETRY"
DEAD_LETTER_SUFFIX: Final = "-DLQ"

REAL_TOPIC: Final = "REAL_TOPIC"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
RECONSUME_TIMES: Final = "RECONSUMETIMES"
DELAY_TIME: Final = "DELAY_TIME"

_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def default_topic(topic: str, subscription: str, suffix: str) -> str:
    """Return `<topic>-<subscription><suffix>`; `<topic>` has no partition number."""
    return f"{TopicName.parse(topic).base}-{subscription}{suffix}"


def legacy_topic(topic: str, subscription: str, suffix: str) -> str:
    """Return `<subscription><suffix>` in the topic's namespace: the name before Pulsar 2.8."""
    name = TopicName.parse(topic)
    return f"{name.domain}://{name.namespace_name}/{subscription}{suffix}"


def dead_letter_producer_name(
    topic: str, subscription: str, consumer_name: str, random: random.Random
) -> str:
    text = "".join(random.choices(_ALPHABET, k=5))
    return f"{topic}-{subscription}-{consumer_name}-{text}{DEAD_LETTER_SUFFIX}"


def generated_consumer_name(random: random.Random) -> str:
    """Return five random letters and digits: the name of a consumer whose user gave none."""
    return "".join(random.choices(_ALPHABET, k=5))


def id_text(message_id: MessageId) -> str:
    """Return the id in the form of Apache's Java client: `ledger:entry:partition[:batch]`."""
    text = f"{message_id.ledger_id()}:{message_id.entry_id()}:{message_id.partition()}"
    index = message_id.batch_index()
    return text if index < 0 else f"{text}:{index}"


def is_letter_topic(
    topic: TopicName,
    subscription: str,
    named: Collection[TopicName],
    matches: Callable[[TopicName], bool],
) -> bool:
    """Return whether a topic may hold letters of this subscription, judged by its name. `named`:
    the letter topics that the subscription's policy names. `matches`: whether the consumer's
    pattern matches a topic.

    A consumer of a pattern leaves such topics out. Otherwise it would move its dead letters again
    and again. A name can have two meanings: `t-a-b-DLQ` is for the topic `t-a` and the subscription
    `b`, or for the topic `t` and the subscription `a-b`. For the subscription `b`, the function
    assumes the first meaning if the pattern matches `t-a`. If the pattern does not match `t-a`, the
    consumer gets no messages of `t-a`, so it writes no letters to `t-a-b-DLQ`.
    """
    name = topic.base
    if name in named:
        return True
    for suffix in (DEAD_LETTER_SUFFIX, RETRY_SUFFIX):
        end = f"{subscription}{suffix}"
        if name.topic == end:
            return True
        original = name.topic.removesuffix(f"-{end}")
        if original != name.topic and matches(replace(name, topic=original)):
            return True
    return False


def letter_properties(
    message: Message,
    custom: Mapping[str, str] | None = None,
    *,
    real_topic: str | None = None,  # None: the message's own topic or partition
) -> dict[str, str]:
    """Return the properties of a retry or dead letter.

    The properties are the message's own, the `custom` ones, and the topic and id of the message's
    first publication.
    """
    properties = message.properties()
    if custom:
        properties.update(custom)
    properties.setdefault(REAL_TOPIC, real_topic or message.topic_name())
    properties.setdefault(ORIGIN_MESSAGE_ID, id_text(message.message_id()))
    return properties


def reconsume_times(message: Message) -> int:
    """Return how often the message passed through the retry topic.

    A property that is not a number of at most 9 digits counts as 0.
    """
    text = message.properties().get(RECONSUME_TIMES, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def letter(
    message: Message, properties: Mapping[str, str], *, deliver_at_ms: int | None = None
) -> OutgoingMessage:
    """Return a copy of the message, with its keys and event time, and with these properties.

    Raises InvalidMessage for a property that is not a string, and CryptoError for a message whose
    payload is still encrypted.
    """
    received = message.received
    encryption = message.encryption_context()
    if encryption is not None and encryption.is_decryption_failed():
        raise CryptoError(
            f"{message.message_id()} is not copied: its payload is still encrypted, and the copy "
            "would lose its data key",
            topic=message.topic_name(),
        )
    for text in (*properties, *properties.values()):
        if not isinstance(text, str):
            raise InvalidMessage(f"every key and value of properties must be str, not {text!r}")
    return OutgoingMessage(
        received.payload,
        -1,
        properties,
        received.partition_key,
        received.partition_key_b64,
        received.ordering_key,
        received.event_time_ms,
        deliver_at_ms,
        received.null_value,
    )
