"""A topic's record has a size limit. A change that exceeds the limit is refused with the reason,
and other work continues."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.ledgers import FakeLedgers
from fakes.topic_log import SMALL, TOPIC, opened, opened_cursors
from fakes.topics import opened_topic, publish
from support import wait_until

from magnetar.broker.cursor.journal import CursorConfig
from magnetar.broker.errors import TopicFull
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.log.record_limits import (
    LEDGERS_MAX,
    LEDGERS_PER_STEP,
    PROPERTIES_BYTES_MAX,
    SUBSCRIPTIONS_BYTES_MAX,
    ledger_size_factor,
    require_properties_fit,
)
from magnetar.broker.operations.properties import PREFIX
from magnetar.broker.refusal import code_of
from magnetar.broker.topic.contract import AccessMode, CloseReason
from magnetar.metadata.codec import decode_topic, encode_topic
from magnetar.metadata.errors import InvalidLedgerMetadata
from magnetar.metadata.model import LedgerId, SubscriptionRecord, TopicLedger, TopicRecord
from magnetar.metadata.store import VALUE_BYTES_MAX
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable


async def change(world: ClusterState, change: Callable[[TopicRecord], TopicRecord]) -> None:
    """Fill the record, as many properties or years of use would."""
    store = world.store()
    found = await store.get(topic_path(TOPIC))
    assert found is not None
    record = encode_topic(change(decode_topic(found.value)))
    await store.put(topic_path(TOPIC), record, expected=found.version)


def stuffed(record: TopicRecord) -> TopicRecord:
    """A record of the maximal size."""
    note = "x" * (VALUE_BYTES_MAX - 1_000)
    spare = VALUE_BYTES_MAX - len(encode_topic(replace(record, properties={"note": note})))
    return replace(record, properties={"note": note + "x" * spare})


async def with_many_ledgers(world: ClusterState, count: int) -> None:
    """A topic with many ledgers that holds "a" in the last one."""
    world.ledgers.next_id(count)
    async with opened(world) as topic:
        await topic.append_and_wait("a")
        [last] = topic.log.chain.records
    before = [TopicLedger(LedgerId(number + 1), 0, 1, 1, 1) for number in range(count - 1)]
    await change(world, lambda record: replace(record, ledgers=(*before, last)))


async def test_a_record_above_its_limit_ends_the_log_with_an_error_that_names_the_record() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
    await change(world, stuffed)
    async with opened(world) as topic:
        topic.append("b")
        await wait_until(lambda: topic.error is not None, what="an end")
        assert isinstance(topic.error, TopicFull)
        assert str(VALUE_BYTES_MAX) in str(topic.error)
        assert topic.failed == ["b"]
        assert await topic.contents() == ["a"]


async def test_a_topic_with_the_maximum_of_ledgers_can_be_read_and_refuses_appends() -> None:
    last_takes = SMALL.ledger_entries_max * ledger_size_factor(LEDGERS_MAX)

    world = ClusterState()
    await with_many_ledgers(world, LEDGERS_MAX - 1)
    async with opened_topic(world) as it:
        handle, session = await it.produce("p")
        _, consumer = await it.subscribe()
        for number in range(last_takes + 1):
            publish(handle, entry_of(str(number)), first=number)
        await wait_until(lambda: session.reason is not None, what="an end")
        assert session.receipted == list(range(last_takes))
        assert consumer.reason is CloseReason.TOPIC_FAILED
        [error] = it.failures
        assert isinstance(error, TopicFull)
    async with opened_topic(world) as it:
        for mode in (AccessMode.SHARED, AccessMode.EXCLUSIVE):
            with pytest.raises(TopicFull, match=f"has {LEDGERS_MAX} ledgers") as refused:
                await it.produce("p", mode=mode)
        assert code_of(refused.value) == pb.NotAllowedError
        last = it.topic.log.confirmed
        _, consumer = await it.subscribe("late", start=last, durable=False)
        await wait_until(lambda: consumer.texts == [str(last_takes - 1)], what="the last")
        assert it.failures == []


async def test_ledgers_grow_with_their_number() -> None:
    assert ledger_size_factor(0) == ledger_size_factor(LEDGERS_PER_STEP - 1) == 1
    assert ledger_size_factor(LEDGERS_PER_STEP) == 2

    world = ClusterState()
    await with_many_ledgers(world, LEDGERS_PER_STEP - 1)
    names = [str(number) for number in range(SMALL.ledger_entries_max * 5)]
    async with opened(world) as topic:
        await topic.append_and_wait(*names)
        counts = [part.entries for part in topic.log.chain.records[LEDGERS_PER_STEP - 1 :]]
        assert counts == [10, 10, 0]  # the record has no entry count of the open ledger
        confirmed = topic.log.confirmed
    assert confirmed.entry == 4


@pytest.mark.parametrize("value", ["", "x", "x" * 200])
def test_the_properties_of_administrators_take_no_more_than_their_limit(value: str) -> None:
    """Also many properties, each of which takes more bytes than its name and value."""
    fitting: dict[str, str] = {}
    refused: TopicFull | None = None
    while refused is None:
        properties = {**fitting, chr(len(fitting)): value}
        try:
            require_properties_fit(TOPIC, properties, before=fitting)
        except TopicFull as error:
            refused = error
        else:
            fitting = properties
    assert f"the limit is {PROPERTIES_BYTES_MAX}" in str(refused)
    stored = {f"{PREFIX}{name}": value for name, value in fitting.items()}
    empty = len(encode_topic(TopicRecord(0)))
    assert len(encode_topic(TopicRecord(0, properties=stored))) - empty <= PROPERTIES_BYTES_MAX


async def test_a_subscription_above_the_limit_can_get_smaller_properties() -> None:
    """The state that a cursor writes into the record when the topic closes may exceed the limit."""
    world = ClusterState()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        await topic.append_and_wait(*map(str, range(100)))
        await cursors.ensure("first", EARLIEST, {"note": "x" * (SUBSCRIPTIONS_BYTES_MAX - 200)})
        second = await cursors.ensure("second", EARLIEST, {"note": "xx"})
        second.acknowledge([position for _, position in topic.appended][1::2])
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        with pytest.raises(TopicFull, match="subscriptions"):
            await cursors.set_properties("second", {"note": "xxx"})
        for properties in ({"note": "yy"}, {}):
            await cursors.set_properties("second", properties)
            second = cursors.get("second")
            assert second is not None
            assert second.properties == properties


async def test_subscriptions_have_a_size_limit_of_their_own() -> None:
    world = ClusterState()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        size = SUBSCRIPTIONS_BYTES_MAX // 2
        await cursors.ensure("first", EARLIEST, {"note": "x" * size})
        with pytest.raises(TopicFull, match="subscriptions"):
            await cursors.ensure("second", EARLIEST, {"note": "x" * size})
        assert cursors.names == ("first",)
        await topic.append_and_wait("a")
        await cursors.ensure("first", EARLIEST)
        await cursors.delete("first")
        await cursors.ensure("second", EARLIEST, {"note": "x" * size})


def test_with_all_parts_at_their_limits_necessary_changes_still_fit() -> None:
    largest = LedgerId((1 << 63) - 1)
    ledgers = tuple(
        TopicLedger(LedgerId(largest - number), largest, largest, largest, largest)
        for number in reversed(range(LEDGERS_MAX))
    )
    record = TopicRecord(
        epoch=largest,
        ledgers=ledgers,
        cursor_ledgers=(LedgerId(1),),
        subscriptions={"s": SubscriptionRecord({}, b"x" * SUBSCRIPTIONS_BYTES_MAX)},
        deleting=tuple(LedgerId(number) for number in range(2, 1000)),
        properties={"topic-epoch": str(largest)},
    )
    assert len(encode_topic(record)) + CursorConfig().inline_bytes_max < VALUE_BYTES_MAX


class WithBadMetadata(FakeLedgers):
    """Ledgers of which one has metadata that cannot be parsed."""

    bad: LedgerId

    async def delete(self, ledger: LedgerId) -> None:
        if ledger == self.bad:
            raise InvalidLedgerMetadata("a test broke it")
        await super().delete(ledger)


async def test_a_ledger_that_cannot_be_deleted_does_not_keep_others_in_the_record() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
    waiting = tuple(LedgerId(number) for number in range(100, 105))
    await change(world, lambda record: replace(record, deleting=waiting))
    ledgers = WithBadMetadata(world.ledgers)
    ledgers.bad = waiting[1]
    async with opened(world, ledgers=ledgers) as topic:
        await wait_until(lambda: topic.log.owned_record.record.deleting == (ledgers.bad,))
