"""Trims a topic's log: drops ledgers that neither a durable subscription nor retention keeps.

The trimmer asks the log to trim, and the log's own task does the work. So a trim takes some
microseconds here and needs no task. The trimmer trims when a cursor has left a ledger, when a
ledger was closed, and when the policies change. A chore calls it, too, because the retention time
of a ledger may end without an event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.errors import PoliciesUnavailable
from magnetar.broker.log.log import LogState
from magnetar.broker.log.trimming import trim_through

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.cursor.cursors import Cursors
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position
    from magnetar.broker.policies.source import PolicySource
    from magnetar.runtime.clock import Clock


class Trimmer:
    """Trims the log of one topic. Call `end` when the topic closes."""

    __slots__ = ("_clock", "_cursors", "_log", "_policies", "end")

    def __init__(
        self, topic_log: Log, cursors: Cursors, policies: PolicySource, clock: Clock
    ) -> None:
        self._log = topic_log
        self._cursors = cursors
        self._policies = policies
        self._clock = clock
        topic_log.trimmable = self._trimmable
        trim = self.trim  # one bound method for all three
        topic_log.on_ledger_closed = trim
        cursors.on_ledger_left(trim)
        self.end: Callable[[], None] = policies.subscribe(trim)

    def trim(self) -> None:
        """Drop the ledgers that are not needed any more. Drops nothing while the policies are not
        up to date: the topic may have a retention that this broker does not know yet."""
        topic_log = self._log
        is_in_service = topic_log.state in (LogState.OPEN, LogState.TERMINATED)
        if is_in_service and topic_log.chain.has_closed and self._is_fresh():
            topic_log.trim()

    def _trimmable(self) -> Position | None:
        """The position up to which no ledger is needed at present. None: no ledger may be dropped.
        The log calls this when it writes the topic's record."""
        if not self._is_fresh():
            return None
        topic_log = self._log
        return trim_through(
            topic_log.chain.records,
            slowest=self._cursors.slowest_mark,
            total_bytes=topic_log.stored_bytes,
            retention=self._policies.effective.retention,
            now_ms=self._clock.now_ms(),
        )

    def _is_fresh(self) -> bool:
        try:
            return self._policies.is_fresh
        except PoliciesUnavailable:
            return False
