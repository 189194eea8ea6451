"""The reasons why a subscription delivers nothing now, for operators.

The dispatcher derives the reasons from its state, on request. The dispatching code does not record
them. A subscription that delivers nothing must have at least one reason; the tests check this after
every event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Why(StrEnum):
    """The kinds of reasons."""

    NO_CONSUMERS = "no_consumers"
    NO_PERMITS = "no_permits"
    NOT_WRITABLE = "not_writable"
    UNACKED_BY_CONSUMER = "unacked_by_consumer"
    UNACKED_BY_SUBSCRIPTION = "unacked_by_subscription"
    NOTHING_TO_READ = "nothing_to_read"
    CHUNKS = "chunks"
    DRAINING = "draining"
    STANDBY = "standby"
    UNBLOCKING = "unblocking"
    UNASSIGNED = "unassigned"
    LOOK_AHEAD = "look_ahead"
    WITHHELD = "withheld"
    DELAYED = "delayed"
    LEAVING = "leaving"
    RETURNING = "returning"
    READING = "reading"
    DISPATCH_RATE = "dispatch_rate"
    READ_FAILED = "read_failed"
    NOT_DURABLE = "not_durable"
    PUBLISH_BUDGET = "publish_budget"
    METADATA_AWAY = "metadata_away"
    QUARANTINED = "quarantined"
    SEEKING = "seeking"
    DELETING = "deleting"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason. `detail` is a sentence with the numbers; `facts` has the numbers for programs."""

    why: Why
    detail: str
    consumer: str = ""  # "": the reason is not about one consumer
    facts: Mapping[str, object] = field(default_factory=dict)
    next_s: float | None = None  # seconds until a timer ends the wait; None: an event ends it

    def __str__(self) -> str:
        return f"{self.why}: {self.detail}"
