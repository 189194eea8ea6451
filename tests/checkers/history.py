"""The history of a run: the actions of clients and nemesis, and what they observed. Checkers read
nothing else.

Times are on the one monotonic clock of the harness (nanoseconds). The outcome of an operation is
`ok`, `fail` (definitely not applied) or `info` (unknown: it may have been applied). A history is
kept as JSON lines.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path


class Outcome(StrEnum):
    OK = "ok"
    FAIL = "fail"
    INFO = "info"


class Place(NamedTuple):
    """The place where a message is stored. Places have the order of the topic."""

    ledger: int
    entry: int
    batch_index: int = -1


@dataclass(slots=True)
class Send:
    """Message `number` of the only producer. The outcome is INFO until an answer arrives."""

    number: int
    invoked_ns: int
    outcome: Outcome = Outcome.INFO
    answered_ns: int = 0
    place: Place | None = None  # its place in the receipt; only with OK
    error: str = ""


@dataclass(slots=True)
class Delivery:
    """A message that a consumer's session got, and acknowledged at once."""

    number: int
    place: Place
    session: int
    received_ns: int


@dataclass(slots=True)
class Session:
    """One consumer from subscribe to close. The close confirms all of its acknowledgements."""

    session: int
    opened_ns: int
    closed: Outcome = Outcome.INFO  # OK: all its acknowledgements are durable
    closed_ns: int = 0
    error: str = ""


@dataclass(slots=True)
class Read:
    """One message of a read of the whole topic from its beginning, in the order of reading."""

    number: int
    place: Place


@dataclass(slots=True)
class Fault:
    """A fault of the nemesis, and the effect that it observed."""

    what: str  # "kill-owner", "kill-bookie", "restart", ...
    target: str
    at_ns: int
    bitten: bool
    effect: str = ""
    # The time from a kill or stop of the owner until a message is acknowledged in a newer ledger.
    outage_s: float | None = None


@dataclass(slots=True)
class History:
    """All records of a run."""

    sends: list[Send] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    # The messages of each read from the beginning to the end.
    reads: list[list[Read]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)  # name, when it began

    def acknowledged(self) -> int:
        return sum(send.outcome is Outcome.OK for send in self.sends)

    def save(self, path: Path) -> None:
        with path.open("w") as file:
            for kind, records in self._kinds().items():
                for record in records:
                    file.write(json.dumps({"kind": kind, **asdict(record)}) + "\n")
            for number, read in enumerate(self.reads):
                for record in read:
                    file.write(json.dumps({"kind": "read", "read": number, **asdict(record)}))
                    file.write("\n")

    def _kinds(self) -> dict[str, list[Any]]:
        return {
            "send": self.sends,
            "delivery": self.deliveries,
            "session": self.sessions,
            "fault": self.faults,
        }
