"""Restores the state of cursors from their records. Pure.

The state of a subscription is its inline snapshot plus the records of its number in the cursor
ledger. A number belongs to one subscription, and a reset gives the subscription a new number. So
records from before a reset, or of a deleted subscription with the same name, do not change the
subscription. Records whose number no subscription has are replayed, but their state is not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from magnetar.broker.cursor import format as records
from magnetar.broker.cursor.acks import AckState
from magnetar.broker.cursor.sequences import SequenceState
from magnetar.broker.errors import InvalidCursorRecord
from magnetar.broker.log.bitmap import Bitmap
from magnetar.broker.log.position import EARLIEST, Position

if TYPE_CHECKING:
    from magnetar.broker.log.chain import Chain


class CursorReplay:
    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._states: dict[int, AckState] = {}
        # Keyed by subscription, then by ledger and entry.
        self._redeliveries: dict[int, dict[int, dict[int, int]]] = {}
        self._sequences: dict[int, SequenceState] = {}

    @property
    def newest_number(self) -> int:
        """The highest number in the records. 0: no records. New numbers are greater."""
        return max((*self._states, *self._sequences), default=0)

    def on_entry(self, entry: bytes | memoryview) -> None:
        """Replay an entry of the cursor ledger, or an inline snapshot. Raises
        InvalidCursorRecord."""
        for record in records.read_records(entry):
            self._on_record(record)

    def state(self, number: int) -> AckState:
        """The state of a subscription whose inline snapshot was replayed."""
        return self._states[number]

    def redeliveries(self, number: int) -> dict[int, dict[int, int]]:
        """The redelivery counts of the subscription's unacknowledged entries, by ledger and
        entry."""
        state = self._states[number]
        found: dict[int, dict[int, int]] = {}
        for ledger, counts in self._redeliveries.get(number, {}).items():
            left = state.open_entries(ledger, counts)
            if left:
                found[ledger] = left
        return found

    def sequences(self, number: int) -> SequenceState:
        """Like `state`, for the producers' sequence ids."""
        return self._sequences[number]

    def _on_record(self, record: records.Record) -> None:
        if isinstance(record, records.Producers):
            known = self._sequences.setdefault(record.subscription, SequenceState())
            known.merge(record.producers, record.through)
            return
        state = self._states.get(record.subscription)
        if state is None:
            state = self._states[record.subscription] = AckState(self._chain, EARLIEST)
        match record:
            case records.Marked():
                # Entry -1: the log had no entry before this mark, so nothing is acknowledged. The
                # mark must not be applied: its ledger may have been deleted while it was empty,
                # and the log may have continued in a ledger with a smaller id.
                if record.mark.entry >= 0:
                    state.on_ack_cumulative(record.mark)
            case records.Entries():
                for entry in record.entries:
                    state.on_ack(Position(record.ledger, entry))
            case records.Ranges():
                self._on_ranges(state, record)
            case records.Bits():
                state.on_acked_bits(record.ledger, record.first, record.bits)
            case records.Batch():
                state.on_ack_batch_index(record.position, record.remaining)
            case records.Redelivered():
                self._on_redelivered(record)
            case _:
                assert_never(record)

    def _on_redelivered(self, record: records.Redelivered) -> None:
        counts = self._redeliveries.setdefault(record.subscription, {}).setdefault(
            record.ledger, {}
        )
        if counts.keys().isdisjoint(record.counts):
            counts.update(record.counts)  # the usual case, ten times as fast as the loop
            return
        for entry, count in record.counts.items():
            counts[entry] = max(count, counts.get(entry, 0))

    def _on_ranges(self, state: AckState, record: records.Ranges) -> None:
        end = self._chain.counts.get(record.ledger, 0)
        bitmap = Bitmap()
        for first, last in record.ranges:
            if first < end:
                bitmap.add_range(first, min(last, end - 1))
        state.on_acked_bits(record.ledger, *bitmap.slice_after(-1))


def number_of(inline: bytes) -> int:
    """The subscription's number in an inline snapshot. Raises InvalidCursorRecord."""
    for record in records.read_records(inline):
        return record.subscription
    raise InvalidCursorRecord("an empty snapshot")
