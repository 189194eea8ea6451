"""The properties that administrators give to topics and subscriptions, in the form of Pulsar.

The broker stores the properties and does not use them. The properties of a partitioned topic are in
the record of the partitioned topic, and any broker changes them. Those of any other topic are in
the topic's record, next to the broker's own properties: only the names of the administrators'
properties begin with PREFIX.

Operations on one topic raise the errors of `topics.open_topic`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import NotAllowed, SubscriptionNotFound
from magnetar.broker.log.record_limits import require_properties_fit
from magnetar.broker.operations.topics import create_topic, open_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from magnetar.broker.broker import Broker
    from magnetar.broker.topic.subscription import Subscription
    from magnetar.protos.names import TopicName

    Change = Callable[[dict[str, str]], dict[str, str]]

PREFIX: Final = "user/"


async def create_topic_with(broker: Broker, name: TopicName, properties: Mapping[str, str]) -> None:
    """Create a topic with these properties. Raises TopicExists, TopicFull.

    NOTE: the properties are written after the topic's record. If the second write fails, the topic
    exists without properties, and `set_topic_properties` adds them.
    """
    require_properties_fit(name, properties, before={})
    await create_topic(broker, name)
    if properties:
        await set_topic_properties(broker, name, properties)


async def topic_properties(broker: Broker, name: TopicName) -> dict[str, str]:
    """Return the properties of a topic. Raises TopicNotFound."""
    record = await broker.catalog.partitioned.find_fresh(name)
    if record is not None and not record.deleting:
        return dict(record.properties)
    return _of_administrators((await open_topic(broker, name)).log.properties)


async def set_topic_properties(
    broker: Broker, name: TopicName, properties: Mapping[str, str]
) -> None:
    """Add these properties to those of a topic, or replace the values of those that it has. Raises
    TopicNotFound, TopicFull."""
    await _change(broker, name, lambda found: {**found, **properties})


async def remove_topic_property(broker: Broker, name: TopicName, key: str) -> None:
    """Remove a property of a topic, if the topic has it. Raises TopicNotFound."""
    await _change(
        broker, name, lambda found: {one: value for one, value in found.items() if one != key}
    )


async def subscription_properties(
    broker: Broker, name: TopicName, subscription: str
) -> dict[str, str]:
    """Return the properties of a subscription. Raises SubscriptionNotFound."""
    topic = await open_topic(broker, name)
    return dict(_found(topic.subscriptions, subscription).cursor.properties)


async def set_subscription_properties(
    broker: Broker, name: TopicName, subscription: str, properties: Mapping[str, str]
) -> None:
    """Replace all properties of a durable subscription. Raises SubscriptionNotFound, TopicFull, and
    NotAllowed for the subscription of a reader."""
    topic = await open_topic(broker, name)
    if not _found(topic.subscriptions, subscription).cursor.durable:
        raise NotAllowed(
            f"subscription {subscription}", "the subscription of a reader is not stored"
        )
    await topic.cursors.set_properties(subscription, properties)


async def _change(broker: Broker, name: TopicName, change: Change) -> None:
    def changed(found: Mapping[str, str]) -> Mapping[str, str]:
        properties = change(dict(found))
        require_properties_fit(name, properties, before=found)
        return properties

    def changed_in_record(found: Mapping[str, str]) -> Mapping[str, str]:
        others = {key: value for key, value in found.items() if not key.startswith(PREFIX)}
        properties = changed(_of_administrators(found))
        return others | {PREFIX + key: value for key, value in properties.items()}

    record = await broker.catalog.partitioned.find_fresh(name)
    if record is not None and not record.deleting:
        await broker.catalog.partitioned.change_properties(name, changed)
        return
    topic = await open_topic(broker, name)
    await topic.log.change_properties(changed_in_record)


def _of_administrators(properties: Mapping[str, str]) -> dict[str, str]:
    return {
        key.removeprefix(PREFIX): value
        for key, value in properties.items()
        if key.startswith(PREFIX)
    }


def _found(subscriptions: Mapping[str, Subscription], name: str) -> Subscription:
    found = subscriptions.get(name)
    if found is None:
        raise SubscriptionNotFound(name)
    return found
