"""The driver's view of a topic, and its consequences for one batch.

A broker answers with the ledgers of a topic, the index of the first stored message, and the index
of the next message. The methods here find which messages a query lost, how many messages it can
read, and which entries are between two positions.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from magnetar.spark.offsets import Place
from magnetar.spark.planner import Span

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Ledger:
    """One non-empty ledger. Its entries are 0..last; `bytes` is their approximate size."""

    id: int
    last: int
    first_index: int
    bytes: int
    sealed: bool = False  # a sealed ledger takes no more entries

    def bytes_of(self, entries: int) -> int:
        return self.bytes * entries // (self.last + 1)


@dataclass(frozen=True, slots=True)
class TopicState:
    """A broker's answer about one topic, and the owner's URL.

    `ledgers` may lack ledgers that the query has read.
    """

    owner: str
    ledgers: tuple[Ledger, ...]
    first_index: int  # the index of the first stored message; of the next message if none is stored
    next_index: int

    @property
    def earliest(self) -> Place:
        """The place of the first stored message. `ledgers` must include all ledgers."""
        if self.ledgers:
            return Place(self.ledgers[0].id, 0, self.first_index)
        return Place(0, 0, self.next_index)

    @property
    def latest(self) -> Place:
        """The place of the next message. `ledgers` must include the last ledger."""
        if self.ledgers:
            last = self.ledgers[-1]
            return Place(last.id, last.last + 1, self.next_index)
        return Place(0, 0, self.next_index)

    def end_from(self, start: Place) -> Place:
        """The place of the next message. Its byte count is that of `start` plus the size of the
        entries between the two places."""
        if self.next_index <= start.index:
            return start
        end = self.latest
        if not self.ledgers:
            end = replace(start, index=self.next_index)
        return replace(end, bytes=start.bytes + self.bytes_between(start, end))

    def from_ledger(self, ledger: int) -> TopicState:
        """The state without the ledgers before this one."""
        if not self.ledgers or self.ledgers[0].id >= ledger:
            return self
        return replace(self, ledgers=tuple(it for it in self.ledgers if it.id >= ledger))

    def updated(self, news: TopicState, *, from_ledger: int, first_ledger: int) -> TopicState:
        """The state after `news`. The ledgers of `news` replace the ledgers from `from_ledger` on.
        The ledgers before `first_ledger` were deleted."""
        kept = (it for it in self.ledgers if first_ledger <= it.id < from_ledger)
        return replace(news, ledgers=(*kept, *news.ledgers))

    def bytes_between(self, start: Place, end: Place) -> int:
        """The approximate size of the entries in [start, end)."""
        return sum(
            ledger.bytes_of(last - first + 1) for ledger, first, last in self._parts(start, end)
        )

    def spans(self, topic: str, start: Place, end: Place) -> list[Span]:
        """The entries in [start, end) that are stored.

        The sizes are shares of the difference between the byte counts of `start` and `end`. So the
        same positions give the same spans, even if messages were published since.
        """
        if end.index <= start.index:
            return []
        parts = list(self._parts(start, end))
        entries = sum(last - first + 1 for _, first, last in parts)
        size = max(end.bytes - start.bytes, 0)
        return [
            Span(ledger.id, first, last, size * (last - first + 1) // entries, topic)
            for ledger, first, last in parts
        ]

    def lost(self, start: Place) -> Loss | None:
        """The messages that a query at `start` can never read. None: there are none.

        A topic that was deleted and created again has ledgers with higher ids. If the broker has
        the ledger of `start` or an older one, but fewer messages than `start` says, nothing is
        lost. The answer is outdated, because another broker has taken the topic over.
        """
        is_behind = self.ledgers and self.ledgers[0].id <= start.ledger
        if (self.next_index < start.index and not is_behind) or (
            self.first_index < start.index
            and self.ledgers
            and self.ledgers[0].id > start.ledger
            and self.ledgers[0].first_index == self.first_index
        ):
            return self._created_again(start)
        if self.first_index > start.index:
            first = self.earliest if self.ledgers else replace(start, index=self.first_index)
            return Loss(
                f"messages {start.index} to {self.first_index - 1} were deleted before the query"
                f" read them (ledger {start.ledger}, from entry {start.entry})",
                replace(first, bytes=start.bytes),
            )
        return None

    def lost_between(self, start: Place, end: Place) -> Loss | None:
        """The messages of the batch [start, end) that can never be read. None: there are none. The
        batch must not be empty."""
        loss = self.lost(start)
        if loss is None and self.ledgers and self.ledgers[0].id > end.ledger:
            return self._created_again(start)
        return loss

    def is_behind(self, start: Place, end: Place) -> bool:
        """Return whether the broker's answer lacks existing messages of the batch [start, end)."""
        return self.next_index < end.index and self.lost_between(start, end) is None

    def _created_again(self, start: Place) -> Loss:
        return Loss(
            "the topic was deleted and created again: the query's next message was"
            f" {start.index}, the new topic has the messages"
            f" {self.first_index} to {self.next_index - 1}",
            replace(self.earliest, bytes=start.bytes),
        )

    def _parts(self, start: Place, end: Place) -> Iterator[tuple[Ledger, int, int]]:
        """The ledgers of [start, end), each with first and last entry."""
        for ledger in self.ledgers:
            first = start.entry if ledger.id == start.ledger else 0
            last = ledger.last if ledger.id != end.ledger else min(end.entry - 1, ledger.last)
            if start.ledger <= ledger.id <= end.ledger and first <= last:
                yield ledger, first, last


@dataclass(frozen=True, slots=True)
class Loss:
    """Messages that a query can never read."""

    what: str
    next: Place  # the first stored message; the next message if none is stored
