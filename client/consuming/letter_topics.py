"""Names a subscription's retry topic and dead-letter topic, and creates their LetterProducers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from magnetar.client.asking import asking
from magnetar.client.consuming.letter_producer import LetterProducer, OpenProducer
from magnetar.client.consuming.letter_schemas import LetterSchemas
from magnetar.client.consuming.letters import (
    DEAD_LETTER_SUFFIX,
    RETRY_SUFFIX,
    dead_letter_producer_name,
    default_topic,
    is_letter_topic,
    legacy_topic,
)
from magnetar.client.errors import TopicNotFound
from magnetar.client.options import ProducerOptions
from magnetar.client.topic import topic_name
from magnetar.protos.names import Domain, NamespaceName, TopicName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.client.consuming.sources import Without
    from magnetar.client.consuming.subscription import Subscription
    from magnetar.client.encryption import CryptoKeyReader
    from magnetar.client.environment import Parts
    from magnetar.client.policies import DeadLetterPolicy


def dead_letter_producer(
    topic: str, subscription: Subscription, open_producer: OpenProducer, parts: Parts
) -> LetterProducer:
    """Return the producer for the subscription's dead letters."""
    policy = subscription.dead_letters
    assert policy is not None

    async def options() -> ProducerOptions:
        return ProducerOptions(
            await dead_letter_topic(topic, subscription.name, policy, parts),
            producer_name=dead_letter_producer_name(
                topic, subscription.name, subscription.consumer_name or "", parts.random
            ),
            batching_enabled=False,
            chunking_enabled=True,
            block_if_queue_full=True,
            initial_subscription_name=policy.initial_subscription_name or None,
            crypto_key_reader=_key_reader(subscription),
            encryption_keys=policy.encryption_keys,
        )

    name = policy.dead_letter_topic or default_topic(topic, subscription.name, DEAD_LETTER_SUFFIX)
    return LetterProducer(name, options, open_producer, LetterSchemas(parts, subscription.decoder))


def retry_producer(
    topic: str, subscription: Subscription, open_producer: OpenProducer, parts: Parts
) -> LetterProducer:
    """Return the producer for the retry topic."""
    policy = subscription.dead_letters
    assert policy is not None

    async def options() -> ProducerOptions:
        return ProducerOptions(
            topic,
            batching_enabled=False,
            chunking_enabled=True,
            block_if_queue_full=True,
            crypto_key_reader=_key_reader(subscription),
            encryption_keys=policy.encryption_keys,
        )

    return LetterProducer(topic, options, open_producer, LetterSchemas(parts, subscription.decoder))


def _key_reader(subscription: Subscription) -> CryptoKeyReader | None:
    """Return the reader of the keys that encrypt letters. None: they are not encrypted."""
    assert subscription.dead_letters is not None
    return subscription.key_reader if subscription.dead_letters.encryption_keys else None


async def dead_letter_topic(
    topic: str, subscription: str, policy: DeadLetterPolicy, parts: Parts
) -> str:
    """Return the topic of the policy, else the legacy topic if it exists, else the default."""
    given = policy.dead_letter_topic
    return given or await _default(topic, subscription, DEAD_LETTER_SUFFIX, parts)


async def letter_topics(
    topics: Sequence[TopicName] | NamespaceName,
    subscription: str,
    policy: DeadLetterPolicy,
    parts: Parts,
) -> DeadLetterPolicy:
    """Return the policy with the full names of both letter topics of a consumer with retries.

    A letter topic that the policy does not name is named after the topic that `first_of` returns.
    For a pattern, `topics` is its namespace. The letter topics are then `<subscription>-RETRY` and
    `<subscription>-DLQ` in this namespace.

    Raises InvalidTopicName, and the errors of `asking`.
    """

    async def chosen(given: str, suffix: str) -> str:
        if given:
            return str(topic_name(given))
        if isinstance(topics, NamespaceName):
            return f"{Domain.PERSISTENT}://{topics}/{subscription}{suffix}"
        return await _default(str(first_of(topics)), subscription, suffix, parts)

    return replace(
        policy,
        retry_letter_topic=await chosen(policy.retry_letter_topic, RETRY_SUFFIX),
        dead_letter_topic=await chosen(policy.dead_letter_topic, DEAD_LETTER_SUFFIX),
    )


def letter_topics_of(subscription: Subscription) -> Without:
    """Return a function that says whether a topic holds letters of the subscription.

    Raises InvalidTopicName.
    """
    policy = subscription.dead_letters
    if policy is None:
        return lambda *_: False
    given = policy.dead_letter_topic, policy.retry_letter_topic
    named = {topic_name(name) for name in given if name}
    return lambda topic, matches: is_letter_topic(topic, subscription.name, named, matches)


def first_of(topics: Sequence[TopicName]) -> TopicName:
    """Return the topic after which the letter topics are named: the first persistent topic in
    alphabetical order. A non-persistent topic counts only if no topic is persistent, because
    letters must be stored."""
    return min(topics, key=lambda topic: (topic.domain is not Domain.PERSISTENT, str(topic)))


async def _default(topic: str, subscription: str, suffix: str, parts: Parts) -> str:
    legacy = legacy_topic(topic, subscription, suffix)
    try:
        await asking(lambda: parts.lookup.partitions(legacy, creates=False), parts, legacy)
    except TopicNotFound:
        return default_topic(topic, subscription, suffix)
    return legacy
