"""The names of producers and the sequence ids of messages. They stay the same in a repeated task.

The name of a task's producer holds the query (or the batch job) and the task's partition. It also
holds everything else that decides which rows are in an entry. These are the number of the topic's
partitions, and the options `batching`, `pendingBytes` and `rowOrder` if they do not have their
defaults. If one of these changes before a batch is repeated, the new entries differ from the stored
entries. The producer then has another name, so the broker stores the rows again. With the same
name, the broker would drop rows that it never had.

The messages of a task have the sequence ids

    batch << 31 | number of the message in its task

Thus sequence ids rise from batch to batch and from message to message. The broker drops messages
that it has stored under the same name and sequence id. Exactly-once depends on this: a repeated
task gets the same rows in the same order, and cuts them into the same entries (batches.py).

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
    division: tuple[str, ...] = ()  # see WriteOptions.division
    # The name under which the topics' owners record the stored batches (notes.py). Empty: they
    # record none.
    sink: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.batch < BATCHES_MAX

    def producer_name(self, topic_partitions: int = 0) -> str:
        """The producer's name, the same for all batches and attempts of this partition.

        `topic_partitions` 0: the topic has no partitions.
        """
        among = (f"of-{topic_partitions}",) if topic_partitions else ()
        return "/".join(("spark", self.writer, str(self.partition), *self.division, *among))

    @property
    def first_sequence_id(self) -> int:
        return self.batch << MESSAGE_BITS
