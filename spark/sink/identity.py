"""Names of producers and sequence ids, such that a repeated task repeats them.

The producer of a task is named after the query (or the batch job) and the task's partition. Its
messages have the sequence ids

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
    """Who writes: a task of one batch of a query, or of a batch job (then `batch` is 0)."""

    writer: str  # id of the query or of the job
    batch: int
    partition: int

    def __post_init__(self) -> None:
        assert 0 <= self.batch < BATCHES_MAX

    @property
    def producer_name(self) -> str:
        """The same for all batches and attempts of this partition."""
        return f"spark/{self.writer}/{self.partition}"

    @property
    def first_sequence_id(self) -> int:
        return self.batch << MESSAGE_BITS
