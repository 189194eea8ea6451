"""Bugs in the spreading of bundles over brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutants.plant import Mutant, enter
from world.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mutants.plant import Fired

    from magnetar.broker.ownership.census import Owner

    Targets = Callable[[Owner, Mapping[Owner, int]], list[Owner]]


def _moves_for_a_difference_of_one(right: Targets, fired: Fired) -> Targets:
    def targets_of(source: Owner, counts: Mapping[Owner, int]) -> list[Owner]:
        least = min(counts, key=lambda owner: (counts[owner], owner))
        if counts[source] != counts[least] + 1:
            return right(source, counts)
        fired()
        return [least]

    return targets_of


enter(
    Mutant(
        name="bundles move between brokers whose numbers differ by one",
        breaks="bundles that are spread evenly do not move",
        wrong={"magnetar.broker.ownership.balancer:targets_of": _moves_for_a_difference_of_one},
        caught_by=frozenset({"STEADY", "SPREAD"}),
        scene=SCENARIOS["balance"],
        seeds=20,
    )
)
