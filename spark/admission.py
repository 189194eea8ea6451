"""Divides the rows and bytes that one batch may read among topics.

Rules.

1. The shares are proportional to the backlogs, and their sum is at most the limit, except for
   rule 2.
2. A topic with a backlog has a share of at least one row, so no topic starves at a small limit.
3. A share is never more than the backlog.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def share(backlogs: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Return how much of each backlog to read. None: there is no limit."""
    total = sum(backlogs.values())
    if limit is None or total <= limit:
        return dict(backlogs)
    shares = {
        topic: max(1, backlog * limit // total) if backlog else 0
        for topic, backlog in backlogs.items()
    }
    rest = limit - sum(shares.values())  # less than one for each topic
    for topic, backlog in backlogs.items():
        if rest <= 0:
            break
        if shares[topic] < backlog:
            shares[topic] += 1
            rest -= 1
    return shares


def rows_of_bytes(rows: int, size: int, size_share: int) -> int:
    """Return how many of `rows` rows with `size` bytes in total have about `size_share` bytes."""
    if size <= 0 or size_share >= size:
        return rows
    return max(1, rows * size_share // size) if rows else 0
