"""How a topic is cut into Spark tasks: arithmetic over the ledgers that a broker named.

Rules.

1. The tasks hold every entry of the ledgers exactly once, in the topic's order.
2. A cut falls between two entries. Ledger boundaries are crossed freely: a task is a list of spans,
   so that a topic of many small ledgers becomes few tasks (a task costs Spark 20 to 36 ms before
   its first row).
3. The same ledgers and limits give the same tasks, whatever the load or the number of executors.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# 100,000 rows of 150 bytes: a tenth of a second of decoding, some times what the task itself costs.
TARGET_BYTES_PER_TASK: Final = 16 << 20
# A driver's Python process does not know how many cores the executors have. More tasks than cores
# cost little; sixteen keep a small cluster busy, and large ones say what they want.
TASKS_MAX: Final = 16
# An open ledger's bytes are not known. Between an unbatched message (1 KiB) and a full batch
# (128 KiB); entries of a ledger whose size is known tell more.
ENTRY_BYTES_GUESS: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Span:
    """Entries of one ledger, first and last inclusive."""

    ledger: int
    first: int
    last: int
    bytes: int  # of stored entries, an estimate; 0: not known

    @property
    def entries(self) -> int:
        return self.last - self.first + 1


def plan_tasks(
    ledgers: Sequence[Span],
    *,
    target_bytes: int = TARGET_BYTES_PER_TASK,
    tasks_max: int = TASKS_MAX,
) -> list[tuple[Span, ...]]:
    """The tasks for these ledgers: about `target_bytes` each, never more than `tasks_max` of them.

    [] when there are no ledgers. No task is empty.
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
            room = total * len(tasks) // count - done
            if rest.bytes <= room or len(tasks) == count:
                head, rest = rest, None
            else:
                fitting = max(room, 0) * rest.entries // rest.bytes
                if not fitting and tasks[-1]:
                    tasks.append([])
                    continue
                head, rest = _split(rest, max(fitting, 1))
            tasks[-1].append(head)
            done += head.bytes
    return [tuple(task) for task in tasks]


def _entry_bytes(ledgers: Sequence[Span]) -> int:
    """What an entry of an unknown ledger probably takes: the mean of the known ones."""
    known = [span for span in ledgers if span.bytes]
    entries = sum(span.entries for span in known)
    return max(1, sum(span.bytes for span in known) // entries) if known else ENTRY_BYTES_GUESS


def _weighed(span: Span, entry_bytes: int) -> Span:
    assert span.entries > 0, span
    if span.bytes:
        return span
    return Span(span.ledger, span.first, span.last, span.entries * entry_bytes)


def _split(span: Span, entries: int) -> tuple[Span, Span | None]:
    """The first `entries` of a span and the rest, the bytes spread evenly; None: no rest."""
    if entries == span.entries:
        return span, None
    size = span.bytes * entries // span.entries
    cut = span.first + entries
    return (
        Span(span.ledger, span.first, cut - 1, size),
        Span(span.ledger, cut, span.last, span.bytes - size),
    )
