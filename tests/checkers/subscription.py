"""Checks that a subscription that began with the topic delivered everything, and kept its answered
acknowledgements.

    undelivered             acknowledged by the topic, and never delivered to the subscription
    unknown-delivery        delivered, and never sent
    answered-ack-lost       delivered in a session that was opened after the acknowledgement of that
                            very copy was answered

A delivery in a session that was opened before the answer is no anomaly: the message may have waited
in the consumer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkers.history import History, Outcome
from checkers.verdict import Anomaly, anomalies

if TYPE_CHECKING:
    from checkers.history import Delivery, Place


def check_subscription(history: History) -> list[Anomaly]:
    """Return all anomalies of the deliveries. The history must end with a drained subscription."""
    sent = {send.number for send in history.sends}
    delivered = {delivery.number for delivery in history.deliveries}
    return anomalies(
        {
            "undelivered": [
                send.number
                for send in history.sends
                if send.outcome is Outcome.OK and send.number not in delivered
            ],
            "unknown-delivery": sorted(delivered - sent),
            "answered-ack-lost": [
                f"{again.number} at {again.place} in session {again.session}"
                for again in _redelivered(history)
            ],
        }
    )


def redeliveries(history: History) -> int:
    """Return the number of deliveries of a copy beyond its first one. They are allowed until its
    acknowledgement is answered."""
    return len(history.deliveries) - len({delivery.place for delivery in history.deliveries})


def _redelivered(history: History) -> list[Delivery]:
    opened = {session.session: session.opened_ns for session in history.sessions}
    closed = {
        session.session: session.closed_ns
        for session in history.sessions
        if session.closed is Outcome.OK
    }
    answered: dict[Place, int] = {}  # place -> when the first acknowledgement of it was durable
    for delivery in history.deliveries:
        if delivery.session in closed:
            at_ns = closed[delivery.session]
            answered[delivery.place] = min(at_ns, answered.get(delivery.place, at_ns))
    return [
        delivery
        for delivery in history.deliveries
        if delivery.place in answered and opened[delivery.session] > answered[delivery.place]
    ]
