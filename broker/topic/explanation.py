"""All reasons why a subscription delivers nothing now, from a snapshot of its state. Pure.

The dispatcher explains itself (dispatch/explain.py). This module adds the causes outside of the
dispatcher: the state of the subscription, its reads, its topic and its broker. `explain` names
every reason that holds, not only the first one. The exceptions are a quarantined topic and a closed
subscription, which have one reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.explain import Reason, Why

if TYPE_CHECKING:
    from collections.abc import Mapping


class SubscriptionState(Enum):
    OPEN = "open"
    SEEKING = "seeking"
    DELETING = "deleting"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The facts from which `explain` derives the reasons. The fields from `budget_waiting` on
    are facts of the broker: operations/delivery.py sets them, not the subscription."""

    state: SubscriptionState = SubscriptionState.OPEN
    # None: no consumer has connected since the topic was opened, or since a seek.
    dispatcher: tuple[Reason, ...] | None = None
    read_failure: str = ""  # "": the last read succeeded
    retry_in_s: float = 0.0
    rate: str = ""  # the dispatch rate that a read waits for; "": none
    rate_wait_s: float = 0.0
    unconfirmed: int = 0  # entries that are published and not durable yet
    # Why these entries are not durable: the bookies that failed. "": no bookie has failed.
    log_trouble: str = ""
    budget_waiting: int = 0  # connections that wait before they may publish
    budget_used: int = 0  # bytes
    budget_max: int = 0
    metadata_session: str = ""  # the state of the metadata session; "": it is connected
    quarantine: str = ""  # the reason why the topic is refused; "": it is served
    quarantine_s: float = 0.0


_STATES: Final[Mapping[SubscriptionState, Reason]] = {
    SubscriptionState.SEEKING: Reason(Why.SEEKING, "a seek is moving the subscription"),
    SubscriptionState.DELETING: Reason(Why.DELETING, "the broker is deleting the subscription"),
    SubscriptionState.CLOSED: Reason(Why.CLOSED, "this broker no longer serves the topic"),
}


def explain(at: Snapshot) -> list[Reason]:
    """Every reason that holds. A quarantine hides the other reasons: a quarantined topic is not
    open. The close of the subscription hides them, too."""
    if at.quarantine:
        detail = (
            f"the broker refuses the topic for {at.quarantine_s:.0f} s more, because it failed"
            f" repeatedly: {at.quarantine}"
        )
        ends_in = {"endsInS": round(at.quarantine_s)}
        return [Reason(Why.QUARANTINED, detail, "", ends_in, at.quarantine_s)]
    reasons: list[Reason] = []
    facts: dict[str, object]
    if at.state in _STATES:
        reasons.append(_STATES[at.state])
    if at.state is SubscriptionState.CLOSED:
        return reasons
    if at.read_failure:
        facts = {"retryInS": round(at.retry_in_s, 3)}
        reasons.append(Reason(Why.READ_FAILED, at.read_failure, "", facts, at.retry_in_s))
    if at.rate:
        detail = f"{at.rate}, and this rate is used up"
        facts = {"waitS": round(at.rate_wait_s, 3)}
        reasons.append(Reason(Why.DISPATCH_RATE, detail, "", facts, at.rate_wait_s))
    if at.dispatcher is not None:
        reasons += at.dispatcher
    else:
        reasons.append(
            Reason(
                Why.NO_CONSUMERS,
                "no consumer has connected since the broker opened the topic, or since a seek",
            )
        )
    return reasons + _upstream(at)


def _upstream(at: Snapshot) -> list[Reason]:
    """The reasons why published messages are not durable yet, or the broker accepts no new ones."""
    reasons: list[Reason] = []
    facts: dict[str, object]
    if at.unconfirmed:
        detail = f"{at.unconfirmed} published entries are not durable yet"
        if at.log_trouble:
            detail += f": {at.log_trouble}"
        reasons.append(Reason(Why.NOT_DURABLE, detail, facts={"entries": at.unconfirmed}))
    if at.budget_waiting:
        detail = (
            f"{at.budget_waiting} connections wait before they may publish: the broker holds"
            f" {at.budget_used} of {at.budget_max} bytes for producers"
        )
        facts = {
            "connections": at.budget_waiting,
            "usedBytes": at.budget_used,
            "maxBytes": at.budget_max,
        }
        reasons.append(Reason(Why.PUBLISH_BUDGET, detail, facts=facts))
    if at.metadata_session:
        detail = (
            f"the session with the metadata store is {at.metadata_session}: the broker opens no"
            " ledger and no topic until it is connected again"
        )
        facts = {"session": at.metadata_session}
        reasons.append(Reason(Why.METADATA_AWAY, detail, facts=facts))
    return reasons
