"""Names of producers and sequence ids, such that a repeated task repeats them.

The producer of a task is named after the query (or the batch job) and the task's partition, and
after what else decides which rows an entry holds, unless it has its default: the options `batching`
and `pendingBytes`, and the number of the topic's partitions. If one of these changes before a batch
is repeated, the entries are others than those that are stored. With another name, rows are then
stored again; with the same name, the broker would drop rows that it never had.

Its messages have the sequence ids

    batch << 31 | place of the message among those of its task

Thus they rise from batch to batch and from message to message. The broker drops messages that it
has stored under the same name and sequence id. Exactly-once depends on this: a repeated task gets
the same rows in the same order, and cuts them into the same entries (batches.py).

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MESSAGE_BITS: Final = 31
MESSAGES_MAX: Final = 1 << MESSAGE_BITS
"""Messages of one task in one batch."""

BATCHES_MAX: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a writer: a task of one batch of a query, or of a batch job (`batch` is
    0)."""

    writer: str  # id of the query or of the job
    batch: int
    partition: int
    division: tuple[str, ...] = ()  # options that are not the default ones
    sink: str = ""  # name under which topics note its batches; empty: they note none

    def __post_init__(self) -> None:
        assert 0 <= self.batch < BATCHES_MAX

    def producer_name(self, topic_partitions: int = 0) -> str:
        """The same for all batches and attempts of this partition. 0: the topic has none."""
        among = (f"of-{topic_partitions}",) if topic_partitions else ()
        return "/".join(("spark", self.writer, str(self.partition), *self.division, *among))

    @property
    def first_sequence_id(self) -> int:
        return self.batch << MESSAGE_BITS
