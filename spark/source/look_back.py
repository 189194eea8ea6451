"""Reads the entries before a range, for messages whose first chunks are there (chunks.py)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from magnetar.spark.errors import DataLost, EntriesDeleted, TopicNotFound
from magnetar.spark.planner import Span
from magnetar.spark.source.partition_reader import TopicReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.spark.source.options import ReadOptions

BLOCK_ENTRIES: Final = 16
"""Entries of one read. They are held in memory: a chunk has up to 5 MiB."""

log = logging.getLogger(__name__)


class LookBack:
    """The earlier entries of one topic."""

    def __init__(self, options: ReadOptions, topic: str, *, owner: str | None) -> None:
        self._options = options
        self._topic = topic
        self._owner = owner

    def before(self, ledger: int, entry: int) -> Iterator[tuple[int, int, memoryview]]:
        """Yield the stored entries before this one, the newest first, back to the beginning of the
        topic. Stop early if entries are deleted meanwhile. Raises ReadRefused, OutOfOrder,
        ReadStalled."""
        reader = TopicReader(self._options, self._topic, owner=self._owner)
        try:
            ledgers = [span for span in reader.plan() if span.ledger <= ledger]
            for span in reversed(ledgers):
                end = span.last + 1 if span.ledger < ledger else min(entry, span.last + 1)
                while end > span.first:
                    first = max(span.first, end - BLOCK_ENTRIES)
                    block = list(reader.read((Span(span.ledger, first, end - 1, 0, self._topic),)))
                    for stored in reversed(block):
                        yield stored.ledger, stored.entry, stored.data
                    end = first
        except (EntriesDeleted, TopicNotFound):
            return

    def on_lost(self, ledger: int, entry: int, what: str) -> None:
        """Raise DataLost, or log the loss if `failOnDataLoss` is false."""
        what = f"entry {ledger}:{entry} is the last chunk of a message: {what}"
        if self._options.fail_on_data_loss:
            raise DataLost(self._topic, what)
        log.warning("data lost, failOnDataLoss is false: %s: %s", self._topic, what)
