"""The oldest unacknowledged entry of a subscription, for the age of its backlog and for expiry.

The times of the entry are read once and kept until another entry is the oldest. So a second
question costs no read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.broker.log.position import EARLIEST

if TYPE_CHECKING:
    from magnetar.broker.cursor.cursor import Cursor
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position


@dataclass(frozen=True, slots=True)
class Oldest:
    """Times of one entry, in milliseconds."""

    position: Position
    published_ms: int  # by the client's clock
    appended_ms: int  # by the broker's clock


class OldestUnacked:
    """The oldest unacknowledged entry of one subscription."""

    __slots__ = ("_cursor", "_known", "_log")

    def __init__(self, cursor: Cursor, topic_log: Log) -> None:
        self._cursor = cursor
        self._log = topic_log
        self._known: Oldest | None = None  # None: no entry was read yet

    def known(self) -> Oldest | None:
        """The oldest unacknowledged entry, without a read. None: there is none, or its times were
        not read yet."""
        known = self._known
        if known is None or known.position != self._cursor.first_unacked(EARLIEST):
            return None
        return known

    async def find(self) -> Oldest | None:
        """Like `known`, with one read if it is necessary. None: every entry is acknowledged, or the
        oldest unacknowledged entry was dropped during the read. Raises ReadFailed."""
        position = self._cursor.first_unacked(EARLIEST)
        if position > self._log.confirmed:
            return None
        known = self._known
        if known is None or known.position != position:
            entries = await self._log.read(position, entries_max=1, bytes_max=1)
            if not entries:
                return None  # it was dropped during the read
            [entry] = entries
            published_ms = entry.view.publish_time_ms
            known = self._known = Oldest(entry.position, published_ms, appended_ms(entry))
        return known

    async def last_before(self, cutoff_ms: int) -> Position | None:
        """The last entry that was appended before this time. None: the oldest unacknowledged entry
        was not, or there is none. Approximate where the clocks of two owners disagree. Raises
        ReadFailed."""
        oldest = await self.find()
        if oldest is None or oldest.appended_ms >= cutoff_ms:
            return None
        kept = await self._log.search(lambda entry: appended_ms(entry) >= cutoff_ms)
        return max(self._log.chain.previous_position(kept), oldest.position)


def appended_ms(entry: StoredEntry) -> int:
    """The time in milliseconds when the broker appended the entry. An entry without this time: the
    time when the client published it."""
    return entry.broker_timestamp_ms or entry.view.publish_time_ms
