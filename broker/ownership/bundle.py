"""The bundle of a topic, and the broker that a bundle prefers. Pure.

A bundle is a range of its namespace's hash space. The namespace's record lists the ranges
(metadata.model.NamespaceBundles). A bundle moves between brokers as a whole, so that ownership
costs one record for many topics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mmh3

from magnetar.metadata.model import HASH_SPACE

if TYPE_CHECKING:
    from magnetar.metadata.model import BrokerId, NamespaceBundles
    from magnetar.protos.names import TopicName


@dataclass(frozen=True, slots=True)
class Bundle:
    """One range of a namespace's topics; `range` is Pulsar's name of it,
    "0x00000000_0x40000000"."""

    tenant: str
    namespace: str
    range: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace}/{self.range}"


def bundle_in(topic: TopicName, bundles: NamespaceBundles) -> Bundle:
    """The bundle of a topic in a namespace that is divided into `bundles`."""
    return Bundle(topic.tenant, topic.namespace, bundles.bundle_of(topic.bundle_hash))


def hashes_of(bundle: Bundle) -> range:
    """The hashes of the bundle's topics (`TopicName.bundle_hash`)."""
    first, _, end = bundle.range.partition("_")
    is_last = int(end, 16) == HASH_SPACE - 1  # the name of the last bundle includes its end
    return range(int(first, 16), HASH_SPACE if is_last else int(end, 16))


def preference(bundle: Bundle, broker: BrokerId) -> int:
    """The preference of a bundle for a broker, which decides between brokers with equally many
    bundles. The broker with the highest number gets the bundle.

    Rendezvous hashing: every broker computes the same number without asking the others. So brokers
    that choose at the same time choose the same broker, and the bundles spread over all brokers.
    """
    return mmh3.hash(f"{bundle}\0{broker}", signed=False)
