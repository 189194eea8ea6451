"""Another process changes the topic's record between a read and a write of its owner.

Within the owner's epoch the owner repeats its write on top of the foreign change. Another epoch,
another incarnation or a deleted record fences the topic. Both rules hold for every kind of write.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.topic_log import SMALL, TOPIC, TopicLog, drawn_incarnation, opened, opened_cursors
from support import wait_until

from magnetar.broker.cursor.journal import Waiting
from magnetar.broker.errors import BrokerError, LogError, LogFenced
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.log.topic_deletion import deleted
from magnetar.metadata.codec import decode_topic, encode_topic
from magnetar.metadata.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.broker.cursor.cursors import Cursors
    from magnetar.metadata.model import TopicRecord

    Change = Callable[[TopicRecord], TopicRecord]


class RacingStore(MemoryStore):
    """A store. Another process changes the topic's record just before the owner's next write."""

    foreign: Change | None = None

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        if path == topic_path(TOPIC) and self.foreign is not None:
            change, self.foreign = self.foreign, None
            found = await self.get(path)
            assert found is not None
            changed = encode_topic(change(decode_topic(found.value)))
            await super().put(path, changed, expected=found.version)
        return await super().put(path, value, expected=expected)


@dataclass
class Owner:
    topic: TopicLog
    cursors: Cursors
    record: TopicRecord | None = None


async def roll(owner: Owner) -> None:
    owner.topic.log._retire()
    owner.topic.append("x")
    await wait_until(
        lambda: len(owner.topic.log.owned_record.record.ledgers) == 3 or owner.topic.error
    )


async def drop_head(owner: Owner) -> None:
    owner.topic.log.drop_through(owner.topic.appended[0][1])
    owned = owner.topic.log.owned_record
    await wait_until(lambda: len(owned.record.ledgers) == 1 or owned.lost)


async def forget_deleted(owner: Owner) -> None:
    await owner.topic.log.owned_record.forget([])
    await owner.topic.log.owned_record.change(
        lambda record: replace(record, deleting=(*record.deleting, 4711))  # type: ignore[arg-type]
    )
    owned = owner.topic.log.owned_record
    await wait_until(lambda: owned.record.deleting == () or owned.lost)


async def set_property(owner: Owner) -> None:
    await owner.topic.log.set_property("k", "v")


async def subscribe(owner: Owner) -> None:
    await owner.cursors.ensure("new", EARLIEST)


async def unsubscribe(owner: Owner) -> None:
    await owner.cursors.delete("s")


async def begin_cursor_ledger(owner: Owner) -> None:
    cursor = owner.cursors.get("s")
    assert cursor is not None
    receipt = Waiting()
    cursor.acknowledge([owner.topic.appended[0][1]], receipt)
    await receipt.wait()


async def verify(owner: Owner) -> None:
    await owner.topic.log.owned_record.change(
        lambda record: replace(record, properties={**record.properties, "seen": "1"})
    )


WRITES = (
    roll,
    drop_head,
    forget_deleted,
    set_property,
    subscribe,
    unsubscribe,
    begin_cursor_ledger,
    verify,
)
FENCES: dict[str, Change] = {
    "epoch": lambda record: replace(record, epoch=record.epoch + 1),
    "incarnation": lambda record: replace(record, incarnation=drawn_incarnation()),
    "deleted": deleted,
}


async def write_beside(write: Callable[[Owner], Awaitable[None]], foreign: Change) -> Owner:
    world = ClusterState()
    store = RacingStore(world.tree)
    async with opened(
        world, config=replace(SMALL, check_interval_s=60.0), store=store, close=False
    ) as topic:
        await topic.append_and_wait("a")
        topic.log._retire()
        await topic.append_and_wait("b")
        async with opened_cursors(topic.log, close=False) as cursors:
            await cursors.ensure("s", EARLIEST)
            owner = Owner(topic, cursors)
            store.foreign = foreign
            with suppress(BrokerError):
                async with asyncio.timeout(60):
                    await write(owner)
            assert store.foreign is None, "nothing was written"
            found = await world.store().get(topic_path(TOPIC))
            assert found is not None
            owner.record = decode_topic(found.value)
            return owner


@pytest.mark.parametrize("write", WRITES)
async def test_a_write_within_the_epoch_is_made_again_on_top(
    write: Callable[[Owner], Awaitable[None]],
) -> None:
    owner = await write_beside(
        write, lambda record: replace(record, properties={**record.properties, "foreign": "1"})
    )
    owned = owner.topic.log.owned_record
    assert owned.lost is None
    assert owner.record is not None
    assert owner.record.properties["foreign"] == "1"
    assert owner.record == owned.record


@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("write", WRITES)
async def test_another_owner_or_topic_fences_at_every_write(
    write: Callable[[Owner], Awaitable[None]], fence: str
) -> None:
    owner = await write_beside(write, FENCES[fence])
    owned = owner.topic.log.owned_record
    assert isinstance(owned.lost, LogFenced)
    with pytest.raises(LogError):
        await owner.topic.log.set_property("k", "v")
