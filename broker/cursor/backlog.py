"""The backlog of a subscription, in entries and in messages.

The number of entries follows from the positions. The number of messages is computed from message
indexes: of the end of the log, of the mark, and of the ends of each acknowledged range and of each
partly acknowledged batch after the mark. In a ledger without batches the index follows from the
position. In a ledger with batches only the entry itself has its index, so the entry must be read.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from magnetar.broker.cursor.acks import AckState
    from magnetar.broker.log.chain import Chain
    from magnetar.broker.log.log import Log
    from magnetar.metadata.model import TopicLedger

LOOKUPS_MAX: Final = 100
"""The maximum number of reads for one exact backlog. 100 reads of one entry take about 100 ms."""


@dataclass(frozen=True, slots=True)
class Backlog:
    entries: int  # always exact
    messages: int
    exact: bool  # False: `messages` is estimated from each ledger's messages per entry


def estimate(chain: Chain, state: AckState) -> Backlog:
    """The backlog without a read. Exact if the ledgers of the mark and of the acknowledgements
    after the mark have no batches."""
    mark_index, exact = chain.index_near(state.mark_delete)
    entries = chain.entries(after=state.mark_delete, through=chain.confirmed)
    messages = chain.next_index - 1 - mark_index
    for ledger, count in state.acked_beyond_mark():
        entries -= count
        messages -= round(count * chain.messages_per_entry(ledger))
        exact = exact and chain.is_plain(ledger)
    for position, remaining in state.partial.items():
        average = round(chain.messages_per_entry(position.ledger))
        messages -= max(average - remaining.bit_count(), 0)
        exact = False
    return Backlog(entries, messages, exact)


def size(chain: Chain, state: AckState, *, stored_bytes: int) -> int:
    """An estimate of the bytes of the unacknowledged entries, from the average size of each
    ledger's entries. `stored_bytes`: the bytes of the whole log."""
    mark = state.mark_delete
    if mark >= chain.confirmed:
        return 0
    acked = dict(state.acked_beyond_mark())
    records = chain.records
    open_bytes = stored_bytes - sum(record.length for record in records)
    found = 0
    for record in records[bisect_left(records, mark.ledger, key=_ledger_of) :]:
        entries = chain.counts[record.ledger]
        if entries:
            first = mark.entry + 1 if record.ledger == mark.ledger else 0
            unacked = max(entries - first - acked.get(record.ledger, 0), 0)
            length = record.length if record.closed_ms else open_bytes
            found += length * unacked // entries
    return found


def _ledger_of(record: TopicLedger) -> int:
    return record.ledger


async def count(topic_log: Log, state: AckState) -> Backlog:
    """The exact backlog, or an estimate if the exact one takes more than LOOKUPS_MAX reads. Raises
    ReadFailed."""
    chain = topic_log.chain
    rough = estimate(chain, state)
    if rough.exact:
        return rough
    # Copy the state before the first await: it changes while this function waits.
    end_index = chain.next_index - 1
    mark = state.mark_delete
    messages_plain = sum(n for ledger, n in state.acked_beyond_mark() if chain.is_plain(ledger))
    of_batches = (part for part in state.ranges() if not chain.is_plain(part.ledger))
    ranges = list(islice(of_batches, LOOKUPS_MAX))
    partial = list(state.partial.items())[:LOOKUPS_MAX]
    if 1 + 2 * len(ranges) + 2 * len(partial) > LOOKUPS_MAX:
        return rough
    messages = end_index - await topic_log.index_at(mark) - messages_plain
    for part in ranges:
        last = await topic_log.index_at(Position(part.ledger, part.last))
        messages -= last - await topic_log.index_at(Position(part.ledger, part.first - 1))
    for position, remaining in partial:
        before = chain.previous_position(position)
        size = await topic_log.index_at(position) - await topic_log.index_at(before)
        messages -= size - (remaining & ((1 << size) - 1)).bit_count()
    return Backlog(rough.entries, messages, exact=True)


# ---- in bytes ------------------------------------------------------------------------------------


def bytes_after(topic_log: Log, position: Position) -> int:
    """The bytes of all entries after this position, by the average entry size of each ledger."""
    total = 0
    for ledger, entries, size in topic_log.ledger_sizes():
        if ledger < position.ledger or not entries:
            continue
        acked = position.entry + 1 if position.ledger == ledger else 0
        after = entries - min(max(acked, 0), entries)
        total += size * after // entries
    return total


def position_with(topic_log: Log, size: int) -> Position:
    """The first position with at most `size` bytes after it, by the estimate of `bytes_after`."""
    left = size
    found = topic_log.chain.confirmed
    for ledger, entries, ledger_bytes in reversed(topic_log.ledger_sizes()):
        if ledger_bytes > left:
            return Position(ledger, entries - 1 - entries * left // ledger_bytes)
        left -= ledger_bytes
        found = Position(ledger, -1)
    return found
