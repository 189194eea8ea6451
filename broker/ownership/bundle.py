"""Which bundle a topic belongs to, and which live broker a free bundle should go to. Pure.

A bundle is a range of its namespace's hash space. The namespace's record says the ranges
(metadata.model.NamespaceBundles). A bundle moves between brokers as a whole, so that ownership
costs one record for many topics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mmh3

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def by_preference(bundle: Bundle, brokers: Iterable[BrokerId]) -> list[BrokerId]:
    """The brokers in the order in which a free bundle should go to them.

    Rendezvous hashing: every broker computes the same order without talking to the others, and when
    one leaves only its own bundles move.
    """
    return sorted(brokers, key=lambda broker: (-_weight(bundle, broker), broker))


def _weight(bundle: Bundle, broker: BrokerId) -> int:
    return mmh3.hash(f"{bundle}\0{broker}", signed=False)
