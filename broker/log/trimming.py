"""The choice of the ledgers at the head of a topic's log that are trimmed: pure arithmetic.

A ledger is trimmed when every durable subscription has acknowledged all of it, and retention does
not keep it. Retention keeps an acknowledged ledger until `time_s` after its close, or until the log
without the ledger would still have `size_bytes`: the limit that is reached first decides. -1 means
no limit. With 0 for either, a ledger is trimmed as soon as it is acknowledged. Only a prefix of the
ledgers is trimmed, never the open ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.log.position import Position
from magnetar.metadata.policies import UNLIMITED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from magnetar.metadata.model import TopicLedger
    from magnetar.metadata.policies import Retention


def trim_through(
    ledgers: Iterable[TopicLedger],
    *,
    slowest: Position | None,
    total_bytes: int,
    retention: Retention,
    now_ms: int,
) -> Position | None:
    """The last position that is trimmed; None: no ledger is trimmed.

    `slowest`: the lowest of the durable mark-delete positions of the durable cursors; None: there
    is no durable cursor, so all closed ledgers count as acknowledged. A cursor at the end of a
    ledger does not keep that ledger. `total_bytes`: the size of the whole log.
    """
    through: Position | None = None
    bytes_left = total_bytes
    for ledger in ledgers:
        last = Position(ledger.ledger, ledger.entries - 1)
        if ledger.closed_ms == 0 or (slowest is not None and slowest < last):
            break
        bytes_left -= ledger.length
        if not (_is_expired(ledger, retention, now_ms) or _is_surplus(bytes_left, retention)):
            break
        through = last
    return through


def _is_expired(ledger: TopicLedger, retention: Retention, now_ms: int) -> bool:
    if retention.time_s == UNLIMITED:
        return False
    return now_ms - ledger.closed_ms >= retention.time_s * 1_000


def _is_surplus(bytes_left: int, retention: Retention) -> bool:
    """Return whether the log without the ledger still has the size that retention keeps."""
    return retention.size_bytes != UNLIMITED and bytes_left >= retention.size_bytes
