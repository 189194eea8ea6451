"""The owner of each bundle, as far as this broker knows, and the rules that spread bundles evenly
over brokers. Pure, except `read_owners`.

A free bundle goes to the live broker that owns the fewest bundles. Bundles move from brokers that
own too many to brokers that own too few (balancer.py). A census may be a minute old. The only harm
is that bundles stay unevenly spread until the next round.

The rule for moves needs no leader. Every broker computes the same moves from the same counts, and
carries out the moves of its own bundles. No bundle moves between brokers whose counts differ by
one, so no move makes another move necessary.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from magnetar.broker.ownership.bundle import Bundle, preference
from magnetar.metadata import codec, paths
from magnetar.metadata.model import BrokerId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from magnetar.metadata.model import BrokerRegistration
    from magnetar.metadata.store import MetadataStore

Owner: TypeAlias = tuple[BrokerId, str]
"""A broker's id and incarnation."""


class Census:
    """The owner of each bundle. `replace` sets the owners of all bundles; between two such calls,
    `note` sets the owner of one bundle."""

    def __init__(self) -> None:
        self._owners: dict[Bundle, Owner] = {}
        self._counts: Counter[Owner] = Counter()
        self._in_namespace: Counter[tuple[Owner, str, str]] = Counter()

    def replace(self, owners: Mapping[Bundle, Owner]) -> None:
        """Set the owners of all bundles. A bundle that is not in `owners` is free."""
        self._owners.clear()
        self._counts.clear()
        self._in_namespace.clear()
        for bundle, owner in owners.items():
            self.note(bundle, owner)

    def note(self, bundle: Bundle, owner: Owner | None) -> None:
        """Set the owner of a bundle, or its next owner. None: the bundle is free."""
        self._add(bundle, self._owners.pop(bundle, None), -1)
        self._add(bundle, owner, 1)
        if owner is not None:
            self._owners[bundle] = owner

    def count(self, owner: Owner) -> int:
        """The number of bundles that the broker owns."""
        return self._counts[owner]

    def count_in(self, bundle: Bundle, owner: Owner) -> int:
        """The number of bundles of this bundle's namespace that the broker owns."""
        return self._in_namespace[owner, bundle.tenant, bundle.namespace]

    def order(
        self, bundle: Bundle, brokers: Mapping[BrokerId, BrokerRegistration]
    ) -> list[BrokerId]:
        """The brokers in the order in which they should get a free bundle. The broker with the
        fewest bundles comes first. Among equals, the one with the fewest bundles of the same
        namespace comes first, then the one with the highest preference."""

        def rank(broker: BrokerId) -> tuple[int, int, int, BrokerId]:
            owner = owner_of(brokers[broker])
            count, in_namespace = self.count(owner), self.count_in(bundle, owner)
            return count, in_namespace, -preference(bundle, broker), broker

        return sorted(brokers, key=rank)

    def choose(self, movable: Iterable[Bundle], source: Owner, target: Owner) -> Bundle | None:
        """The bundle that should move from `source` to `target`. It belongs to the namespace in
        which `source` exceeds `target` by the most bundles. None: `movable` is empty."""

        def rank(bundle: Bundle) -> tuple[int, int, str]:
            more = self.count_in(bundle, source) - self.count_in(bundle, target)
            return more, preference(bundle, target[0]), str(bundle)

        return max(movable, key=rank, default=None)

    def _add(self, bundle: Bundle, owner: Owner | None, number: int) -> None:
        if owner is None:
            return
        of_namespace = (owner, bundle.tenant, bundle.namespace)
        self._counts[owner] += number
        self._in_namespace[of_namespace] += number
        if not self._counts[owner]:
            del self._counts[owner]
        if not self._in_namespace[of_namespace]:
            del self._in_namespace[of_namespace]


def owner_of(broker: BrokerRegistration) -> Owner:
    return broker.broker, broker.incarnation


def targets_of(source: Owner, counts: Mapping[Owner, int]) -> list[Owner]:
    """The brokers that should get a bundle from `source`, one place in the list for each bundle.

    `counts` has the number of bundles of every live broker, also of those without any. After the
    moves of all brokers, each broker has an equal share. A remainder goes to the brokers that had
    the most bundles, one to each.
    """
    share, extra = divmod(sum(counts.values()), len(counts))
    ranked = sorted(counts, key=lambda owner: (-counts[owner], owner))
    sources: list[Owner] = []
    targets: list[Owner] = []
    for place, owner in enumerate(ranked):
        too_many = counts[owner] - share - (place < extra)
        sources += [owner] * too_many
        targets += [owner] * -too_many
    targets.reverse()  # the broker with the fewest first
    assert len(sources) == len(targets), counts
    return [target for it, target in zip(sources, targets, strict=True) if it == source]


async def read_owners(store: MetadataStore) -> dict[Bundle, Owner]:
    """Read all ownership records, one after the other. Raises MetadataError."""
    found: dict[Bundle, Owner] = {}
    for tenant in await store.children(paths.OWNERSHIP):
        for namespace in await store.children(f"{paths.OWNERSHIP}/{tenant}"):
            folder = f"{paths.OWNERSHIP}/{tenant}/{namespace}"
            for part in await store.children(folder):
                stored = await store.get(f"{folder}/{part}")
                if stored is not None:
                    record = codec.decode_ownership(stored.value)
                    bundle = Bundle(*map(paths.unquoted, (tenant, namespace, part)))
                    found[bundle] = record.owner, record.incarnation
    return found
