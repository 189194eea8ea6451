"""Divides topics into Spark tasks, from the lists of ledgers that brokers returned.

Rules.

1. The tasks hold every entry of the ledgers exactly once, in the order of the list.
2. No entry is split between two tasks. A task is a list of spans and may hold several ledgers and
   topics, so that many small ledgers become few tasks. A task costs Spark 20 to 36 ms before its
   first row.
3. The same ledgers and limits give the same tasks. The load and the number of executors do not
   matter.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# 100,000 rows of 150 bytes: 0.1 s of decoding, several times the cost of a task itself.
TARGET_BYTES_PER_TASK: Final = 16 << 20
# The driver's Python process does not know how many cores the executors have. More tasks than cores
# cost little. Sixteen tasks keep a small cluster busy. Users of a large cluster set maxPartitions.
TASKS_MAX: Final = 16
# For a ledger of unknown size. The guess lies between an unbatched message (1 KiB) and a full batch
# (128 KiB). If ledgers of the plan have a known size, the mean size of their entries is used
# instead, whichever topics the ledgers belong to.
ENTRY_BYTES_GUESS: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Span:
    """A range of entries of one ledger, first and last included."""

    ledger: int
    first: int
    last: int
    bytes: int  # estimated size of the stored entries; 0: not known
    topic: str = ""  # full name; empty: the caller knows it

    @property
    def entries(self) -> int:
        return self.last - self.first + 1


def plan_tasks(
    ledgers: Sequence[Span],
    *,
    target_bytes: int = TARGET_BYTES_PER_TASK,
    tasks_max: int = TASKS_MAX,
) -> list[tuple[Span, ...]]:
    """Return the tasks for these ledgers: about `target_bytes` each, at most `tasks_max` tasks.

    The list is empty if there are no ledgers. No task is empty.
    """
    assert target_bytes > 0
    assert tasks_max > 0
    if not ledgers:
        return []
    entry_bytes = _entry_bytes(ledgers)
    weighed = [_weighed(span, entry_bytes) for span in ledgers]
    total = sum(span.bytes for span in weighed)
    count = max(1, min(-(-total // target_bytes), tasks_max))
    tasks: list[list[Span]] = [[]]
    done = 0  # bytes in the tasks so far
    for span in weighed:
        rest: Span | None = span
        while rest is not None:
            free = total * len(tasks) // count - done
            if rest.bytes <= free or len(tasks) == count:
                head, rest = rest, None
            else:
                fitting = max(free, 0) * rest.entries // rest.bytes
                if not fitting and tasks[-1]:
                    tasks.append([])
                    continue
                head, rest = _split(rest, max(fitting, 1))
            tasks[-1].append(head)
            done += head.bytes
    return [tuple(task) for task in tasks]


def _entry_bytes(ledgers: Sequence[Span]) -> int:
    """Estimate the bytes of an entry in a ledger of unknown size: the mean of known ledgers."""
    known = [span for span in ledgers if span.bytes]
    entries = sum(span.entries for span in known)
    return max(1, sum(span.bytes for span in known) // entries) if known else ENTRY_BYTES_GUESS


def _weighed(span: Span, entry_bytes: int) -> Span:
    assert span.entries > 0, span
    if span.bytes:
        return span
    return replace(span, bytes=span.entries * entry_bytes)


def _split(span: Span, entries: int) -> tuple[Span, Span | None]:
    """Split a span after `entries` entries, with bytes in proportion. None: there is no rest."""
    if entries == span.entries:
        return span, None
    size = span.bytes * entries // span.entries
    cut = span.first + entries
    return (
        replace(span, last=cut - 1, bytes=size),
        replace(span, first=cut, bytes=span.bytes - size),
    )
