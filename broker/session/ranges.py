"""Reading stored entries by range, without a subscription: what Spark's executors do.

A plan cuts the topic at its ledgers; ledger boundaries never move, so that the same plan reads the
same entries again. A read keeps no state here between its frames: it stops when its client does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import RangeNotConfirmed
from magnetar.broker.log.position import Position
from magnetar.protos.entry import broker_metadata_prefix
from magnetar.runtime.frames import size_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.broker.broker import Broker
    from magnetar.broker.log.log import Log
    from magnetar.protos.names import TopicName
    from magnetar.runtime.frames import Buffer

RECORD: Final = struct.Struct(">qqI")  # ledger, entry, bytes of the stored entry that follows
READ_ENTRIES_MAX: Final = 5_000
READ_BYTES_MAX: Final = 2 << 20  # per frame: a batch of the size that Spark likes, 1 to 4 MiB


@dataclass(frozen=True, slots=True)
class LedgerRange:
    """One ledger's part of a plan. Entry ids are inclusive."""

    ledger: int
    first: int
    last: int
    first_index: int  # of the ledger's first message
    bytes: int  # of stored entries; of the open ledger what was sent to it


async def plan(broker: Broker, name: TopicName) -> list[LedgerRange]:
    """What can be read now, oldest first. Raises NotOwner, TopicNotFound, what opening raises."""
    log: Log = (await broker.topic(name, create=False)).log
    records = log.chain.records
    sent = log.stored_bytes - sum(record.length for record in records)
    ranges = []
    for record in records:
        count = log.chain.counts[record.ledger]
        if count:
            size = record.length or sent  # the record of the open ledger says 0
            ranges.append(LedgerRange(record.ledger, 0, count - 1, record.first_index, size))
    return ranges


async def read(
    broker: Broker, name: TopicName, *, ledger: int, first: int, last: int
) -> AsyncIterator[list[Buffer]]:
    """Frames of records for the entries first..last of one ledger, in order.

    Raises NotOwner, TopicNotFound, RangeNotConfirmed, ReadFailed.
    """
    log: Log = (await broker.topic(name, create=False)).log
    confirmed = log.chain.counts.get(ledger, 0) - 1
    if first < 0 or last > confirmed:
        raise RangeNotConfirmed(str(name), ledger, last, confirmed)
    following = Position(ledger, first)
    while following <= Position(ledger, last):
        entries = await log.read(
            following,
            entries_max=min(READ_ENTRIES_MAX, last - following.entry + 1),
            bytes_max=READ_BYTES_MAX,
        )
        frame: list[Buffer] = []
        for entry in entries:
            prefix = broker_metadata_prefix(
                broker_timestamp_ms=entry.broker_timestamp_ms, index=entry.index
            )
            size = size_of((prefix, entry.data))
            frame += (RECORD.pack(*entry.position, size), prefix, entry.data)
            assert following == entry.position, f"{entry.position} came instead of {following}"
            following = Position(ledger, following.entry + 1)
        assert frame, f"nothing at {following}, though it is confirmed"
        yield frame
