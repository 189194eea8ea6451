"""Reads stored entries by range, without a subscription, for Spark's executors.

A plan divides the topic at its ledgers. Ledger boundaries never move, so the same plan always reads
the same entries. A read registers nothing at the topic, and does not protect the entries from
trimming. The read stops when its client stops.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import RangeDeleted, RangeNotConfirmed
from magnetar.broker.log.position import Position
from magnetar.protos.entry import broker_metadata_prefix
from magnetar.runtime.frames import size_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.broker.broker import Broker
    from magnetar.broker.log.chain import Chain
    from magnetar.broker.log.log import Log
    from magnetar.protos.names import TopicName
    from magnetar.runtime.frames import Buffer

RECORD: Final = struct.Struct(">qqI")  # ledger, entry, bytes of the stored entry that follows
READ_ENTRIES_MAX: Final = 5_000
READ_BYTES_MAX: Final = 2 << 20  # bytes of a frame; Spark is fastest with batches of 1 to 4 MiB


@dataclass(frozen=True, slots=True)
class LedgerRange:
    """One ledger's part of a plan: the entries first..last, both ends included."""

    ledger: int
    first: int
    last: int
    first_index: int  # the index of the ledger's first message
    bytes: int  # the stored bytes; for the open ledger, the bytes that were sent to it
    sealed: bool  # True: the ledger takes no more entries


async def plan(broker: Broker, name: TopicName) -> list[LedgerRange]:
    """Return the ranges that can be read now, oldest first. Raises NotOwner, TopicNotFound, and the
    errors of opening the topic."""
    return of_log((await broker.stored_topic(name, create=False)).log)


def of_log(log: Log, from_ledger: int = 0) -> list[LedgerRange]:
    """Return the ranges of a log that can be read now, oldest first, from `from_ledger` on."""
    return of_chain(log.chain, from_ledger, open_bytes=log.open_bytes)


def of_chain(chain: Chain, from_ledger: int = 0, *, open_bytes: int = 0) -> list[LedgerRange]:
    """Like `of_log`, for the ledgers of a chain. `open_bytes`: the size of its open ledger."""
    ranges = []
    for record in chain.records_from(from_ledger):
        count = chain.counts[record.ledger]
        if count:
            size = record.length or open_bytes  # the record of the open ledger says 0
            sealed = record.closed_ms > 0
            ranges.append(
                LedgerRange(record.ledger, 0, count - 1, record.first_index, size, sealed)
            )
    return ranges


async def read(
    broker: Broker, name: TopicName, *, ledger: int, first: int, last: int
) -> AsyncIterator[list[Buffer]]:
    """Yield frames of records for the entries first..last of one ledger, in order.

    Raises NotOwner, TopicNotFound, RangeDeleted, RangeNotConfirmed, ReadFailed.
    """
    log: Log = (await broker.stored_topic(name, create=False)).log
    _require_kept(log, name, ledger)
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
        # After a trim of the ledger, `log.read` returns entries of a later ledger, or none.
        _require_kept(log, name, ledger)
        frame: list[Buffer] = []
        for entry in entries:
            prefix = broker_metadata_prefix(
                broker_timestamp_ms=entry.broker_timestamp_ms, index=entry.index
            )
            size = size_of((prefix, entry.data))
            frame += (RECORD.pack(*entry.position, size), prefix, entry.data)
            assert following == entry.position, f"read {entry.position} instead of {following}"
            following = Position(ledger, following.entry + 1)
        assert frame, f"confirmed entry {following} was not read"
        yield frame


def _require_kept(log: Log, name: TopicName, ledger: int) -> None:
    """Raise RangeDeleted if the topic had this ledger and dropped it. A ledger after the newest one
    that this broker knows does not count as dropped: a later owner may have created it."""
    if ledger not in log.chain.counts and 0 <= ledger <= log.chain.newest:
        raise RangeDeleted(str(name), ledger)
