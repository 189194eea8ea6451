"""The watches of topics, and the topics that a lost bundle concerns."""

from __future__ import annotations

from time import process_time

import pytest
from fakes.namespaces import create_namespaces
from fakes.place import place

from magnetar.broker.ownership.bundle import Bundle, bundle_in, hashes_of
from magnetar.broker.topic_changes import TopicChanges
from magnetar.metadata.model import HASH_SPACE, NamespaceBundles
from magnetar.protos.names import TopicName

NAMES = [TopicName.parse(f"acme/orders/t{number}") for number in range(1_000)]


@pytest.mark.parametrize("count", [1, 3, 4, 128])
def test_the_watched_topics_of_a_bundle_are_those_in_its_range(count: int) -> None:
    changes, bundles = TopicChanges(), NamespaceBundles.divided(count)
    for name in (*NAMES, TopicName.parse("acme/other/t0")):
        changes.watch(name, lambda: None)
    for part in bundles.names:
        bundle = Bundle("acme", "orders", part)
        expected = [name for name in NAMES if bundle_in(name, bundles) == bundle]
        assert changes.watched_in(bundle) == expected


def test_the_last_bundle_has_the_last_hash() -> None:
    first, last = (Bundle("acme", "orders", it) for it in NamespaceBundles.divided(2).names)
    assert HASH_SPACE // 2 - 1 in hashes_of(first)
    assert HASH_SPACE // 2 not in hashes_of(first)
    assert HASH_SPACE - 1 in hashes_of(last)


def test_a_topic_is_watched_until_its_last_watch_ends() -> None:
    changes, told = TopicChanges(), []
    name, whole = NAMES[0], Bundle("acme", "orders", NamespaceBundles.divided(1).names[0])
    first = changes.watch(name, lambda: told.append(1))
    second = changes.watch(name, lambda: told.append(2))
    changes.tell(name)
    first()
    first()
    changes.tell(name)
    assert changes.watched_in(whole) == [name]
    second()
    second()
    changes.tell(name)
    assert told == [1, 2, 2]
    assert changes.watched_in(whole) == []


async def test_unloading_many_bundles_with_many_watched_topics_takes_little_time() -> None:
    async with place() as here:
        spaces = [f"acme/n{number}" for number in range(30)]
        await create_namespaces(here.store, *spaces)
        for number in range(10_000):
            name = TopicName.parse(f"{spaces[number % len(spaces)]}/t{number}")
            await here.broker.locate(name, authoritative=True)
            here.broker.changes.watch(name, lambda: None)
        assert here.broker.bundles == 4 * len(spaces)
        began_s = process_time()
        await here.broker._release_all()
        assert process_time() - began_s < 1.5  # 0.1 s; 5 s when each bundle looked at all topics
