"""The quorums of a topic's new ledgers, by its persistence policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.bookie.ledger.quorum import ENSEMBLE_SIZE_MAX, Quorum
from magnetar.broker.errors import PoliciesUnavailable

if TYPE_CHECKING:
    from magnetar.broker.policies.source import PolicySource


def quorum_of(policies: PolicySource) -> Quorum | None:
    """The quorum of the policy, limited to ENSEMBLE_SIZE_MAX. None: the policies are unknown, and
    the quorums of the broker's configuration apply."""
    try:
        wanted = policies.effective.persistence
    except PoliciesUnavailable:
        return None
    sizes = (wanted.ensemble_size, wanted.write_quorum, wanted.ack_quorum)
    return Quorum(*(min(size, ENSEMBLE_SIZE_MAX) for size in sizes))
