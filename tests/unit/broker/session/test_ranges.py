from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from fakes.entries import entry_of

from magnetar.broker.errors import RangeDeleted, RangeNotConfirmed
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.entry import StoredEntry
from magnetar.broker.session.ranges import read
from magnetar.metadata.model import LedgerId, TopicLedger
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker
    from magnetar.broker.log.position import Position

NAME = TopicName.parse("t")


class TrimmedLog:
    """Ledgers 3 and 5 of two entries each. Ledger 3 is dropped before its second read."""

    def __init__(self) -> None:
        self.chain = Chain(
            [TopicLedger(LedgerId(id_), index, 2, 10, 1) for id_, index in ((3, 0), (5, 2))],
            next_index=4,
        )
        self.reads = 0

    async def read(self, first: Position, **_: int) -> list[StoredEntry]:
        self.reads += 1
        if self.reads == 2:
            self.chain.drop_head(1)
        at = self.chain.ceiling(first)
        return [StoredEntry(at, 0, 0, entry_of("x"))]


def broker_of(log: TrimmedLog) -> Broker:
    async def stored_topic(name: TopicName, *, create: bool) -> object:
        return SimpleNamespace(log=log)

    return cast("Broker", SimpleNamespace(stored_topic=stored_topic))


async def test_a_ledger_that_is_trimmed_during_a_read_is_named_as_deleted() -> None:
    broker = broker_of(TrimmedLog())
    frames = read(broker, NAME, ledger=3, first=0, last=1)
    assert await anext(frames)
    with pytest.raises(RangeDeleted, match="ledger 3 was deleted"):
        await anext(frames)
    with pytest.raises(RangeDeleted):
        await anext(read(broker, NAME, ledger=3, first=0, last=1))


@pytest.mark.parametrize(("ledger", "last"), [(5, 2), (6, 0), (-1, 0)])
async def test_entries_that_this_broker_does_not_know_may_be_a_later_owners(
    ledger: int, last: int
) -> None:
    with pytest.raises(RangeNotConfirmed):
        await anext(read(broker_of(TrimmedLog()), NAME, ledger=ledger, first=0, last=last))
