"""Counts the refused requests of one connection, to slow a flood and to log each kind once.

A client that repeats a refused request at once (Apache's Java client does so with schemas) would
keep the broker busy and fill its log. The broker answers the first FREE refusals of a command at
once. Each later answer waits twice as long as the one before, up to DELAY_S_MAX. A success of the
same command ends the delays.

Refusals for a temporary condition, such as a moving bundle, are not delayed: clients back off by
themselves, and a reconnect of many producers must not take longer.

This is a machine: the connection waits and writes the log.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from magnetar.protos import pulsar_pb2 as pb

FREE: Final = 10
"""The number of consecutive refusals of one command without a delay: a program that opens several
consumers with wrong parameters gets all errors at once."""

DELAY_S_FIRST: Final = 0.01
DELAY_S_MAX: Final = 1.0
"""The longest delay: well below the operation timeout of Apache's clients (30 s), which also covers
retries."""

PASSING: Final = frozenset(
    {pb.ServiceNotReady, pb.MetadataError, pb.PersistenceError, pb.UnknownError}
)
"""Codes of temporary conditions."""


class Refusals:
    def __init__(self) -> None:
        # Both are bounded: by the commands of the protocol, and by its error codes.
        self._in_row: dict[int, int] = {}  # keyed by command
        self._counts: Counter[tuple[int, int]] = Counter()  # keyed by command and code

    def on_refused(self, command: int, code: int) -> tuple[float, bool]:
        """Count a refused request of this type. Returns the delay of its answer in seconds, and
        True if the refusal is the first of its kind and should be logged."""
        kind = command, code
        self._counts[kind] += 1
        is_first = self._counts[kind] == 1
        if code in PASSING:
            return 0.0, is_first
        in_row = self._in_row[command] = self._in_row.get(command, 0) + 1
        if in_row <= FREE:
            return 0.0, is_first
        doublings = min(in_row - FREE - 1, 30)
        return min(DELAY_S_FIRST * 2**doublings, DELAY_S_MAX), is_first

    def on_success(self, command: int) -> None:
        self._in_row.pop(command, None)

    def repeated(self) -> list[tuple[int, int, int]]:
        """Return command, code and count of each kind of refusal that occurred more than once, for
        the log at the end of the connection."""
        return [(*kind, count) for kind, count in self._counts.items() if count > 1]
