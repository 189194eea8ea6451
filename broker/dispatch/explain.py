"""Why nothing is being dispatched: facts for people, computed from what the machines keep.

The reasons are derived on their own, not left behind by the dispatching code: a subscription at
rest for which no reason can be found is a bug, and the tests look for one after every event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Why(StrEnum):
    """What dispatching waits for."""

    NO_CONSUMERS = "no_consumers"
    NO_PERMITS = "no_permits"
    NOT_WRITABLE = "not_writable"
    UNACKED_BY_CONSUMER = "unacked_by_consumer"
    UNACKED_BY_SUBSCRIPTION = "unacked_by_subscription"
    NOTHING_TO_READ = "nothing_to_read"
    READING = "reading"
    READ_FAILED = "read_failed"
    SEEKING = "seeking"
    DELETING = "deleting"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Reason:
    """One of them, in words."""

    why: Why
    detail: str
    consumer: str = ""  # "": not about one consumer

    def __str__(self) -> str:
        return f"{self.why}: {self.detail}"
