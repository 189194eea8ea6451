"""Orphaned ledgers: the rule, and sweeps after a crash at every step of a topic's life."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.ledgers import BrokerDied, FakeLedgers, Steps
from fakes.topic_log import SMALL, TOPIC, SteppingStore, opened, opened_cursors
from fakes.virtual_loop import run_virtual
from support import settle, wait_until

from magnetar.broker.log.orphans import Verdict, custom_of, judge, origin_of
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.broker.log.sweep import PAUSE_S, OrphanSweep, Page
from magnetar.metadata.codec import decode_topic, encode_topic
from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.model import (
    BookieId,
    DroppedHead,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    Segment,
    TopicLedger,
    TopicRecord,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.topic_log import TopicLog

GRACE_S = 3600.0
NAMES = [f"m{number}" for number in range(12)]
TINY = replace(SMALL, ledger_entries_max=2)
CUSTOM = custom_of(str(TOPIC), kind="data", epoch=5)


def ledger_of(custom: dict[str, bytes], *, created_ms: int = 0) -> LedgerMetadata:
    return LedgerMetadata(
        ledger=LedgerId(7),
        state=LedgerState.OPEN,
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(EntryId(0), (Member(BookieId("b"), "0" * 32),)),),
        master_key=0,
        creator_token=0,
        created_ms=created_ms,
        custom=custom,
    )


@pytest.mark.parametrize(
    ("record", "verdict"),
    [
        (None, Verdict.ORPHAN),
        (TopicRecord(6), Verdict.ORPHAN),
        (TopicRecord(5), Verdict.MAY_BE_LISTED),
        (TopicRecord(4), Verdict.MAY_BE_LISTED),
        (TopicRecord(6, ledgers=(TopicLedger(LedgerId(7), 0),)), Verdict.LISTED),
        (TopicRecord(6, cursor_ledgers=(LedgerId(7),)), Verdict.LISTED),
        (TopicRecord(6, deleting=(LedgerId(7),)), Verdict.LISTED),
        (TopicRecord(6, dropped=DroppedHead(LedgerId(7), EntryId(0), 1)), Verdict.ORPHAN),
    ],
)
def test_a_ledger_is_judged_by_its_record_and_its_age(
    record: TopicRecord | None, verdict: Verdict
) -> None:
    metadata = ledger_of(CUSTOM)
    origin = origin_of(CUSTOM)
    assert judge(metadata, origin, record, now_ms=1_000, grace_ms=1_000) is verdict
    young = verdict if verdict is Verdict.UNKNOWN else Verdict.YOUNG
    assert judge(metadata, origin, record, now_ms=999, grace_ms=1_000) is young


@pytest.mark.parametrize(
    "custom",
    [
        {},
        {"log": b""},
        CUSTOM | {"kind": b"something else"},
        CUSTOM | {"epoch": b"x"},
        CUSTOM | {"epoch": b"-1"},
        CUSTOM | {"topic": b"\xff"},
        CUSTOM | {"topic": b"persistent://no-such-form"},
        {key: value for key, value in CUSTOM.items() if key != "epoch"},
    ],
)
def test_a_ledger_without_a_recorded_origin_is_kept(custom: dict[str, bytes]) -> None:
    origin = origin_of(custom)
    assert origin is None
    verdict = judge(ledger_of(custom), origin, None, now_ms=1 << 40, grace_ms=1)
    assert verdict is Verdict.UNKNOWN


def sweep_of(world: ClusterState) -> OrphanSweep:
    async def ids(after: int) -> AsyncIterator[LedgerId]:
        for ledger in sorted(world.ledgers.ledgers):
            if ledger > after:
                yield LedgerId(ledger)

    ledgers = FakeLedgers(world.ledgers)
    return OrphanSweep(world.store(), ledgers, world.clock, grace_s=GRACE_S, ids=ids)


async def swept(world: ClusterState, *, delete: bool = True) -> Page:
    return await sweep_of(world).page(-1, delete=delete)


async def record_of(world: ClusterState) -> TopicRecord:
    found = await world.store().get(topic_path(TOPIC))
    assert found is not None
    return decode_topic(found.value)


def listed(record: TopicRecord) -> set[int]:
    data = {int(part.ledger) for part in record.ledgers}
    return data | set(record.cursor_ledgers) | set(record.deleting)


@pytest.mark.parametrize("after", [False, True])
async def test_a_ledger_of_a_crash_at_any_call_is_swept(after: bool) -> None:
    """The script rolls ledgers, writes cursors, and drops and deletes ledgers. The sweep deletes no
    listed ledger. After the next owner closed the topic, the sweep leaves no unlisted ledger."""
    number = 0
    while await dies_at(Steps(number, after=after)):
        number += 1
    assert number >= 25, "the script died at fewer than 25 calls"


def deleting(topic: TopicLog) -> bool:
    return bool(topic.log.owned_record.record.deleting)


async def dies_at(steps: Steps) -> bool:
    world = ClusterState()
    async with opened(world, config=TINY) as topic, opened_cursors(topic.log) as cursors:
        await cursors.ensure("s", EARLIEST)
        await topic.append_and_wait(*NAMES[:5])
    store = SteppingStore(world.tree, steps)
    reported: list[tuple[object, Position]] = []
    try:
        async with (
            opened(world, config=TINY, steps=steps, store=store, close=False) as topic,
            opened_cursors(topic.log, close=False) as cursors,
        ):
            reported = topic.appended
            topic.append(*NAMES[5:])
            await wait_until(lambda: steps.dead or len(topic.appended) == 7)
            cursor = cursors.get("s")
            if cursor is not None and not steps.dead:
                cursor.acknowledge_cumulative(topic.appended[2][1], done=lambda _: None)
            await settle()
            topic.log.drop_through(topic.appended[2][1] if topic.appended[3:] else EARLIEST)
            await wait_until(
                lambda: steps.dead or (topic.log.chain.first_index == 7 and not deleting(topic))
            )
            await settle()
    except* BrokerDied:
        pass
    world.clock.advance_ms(round(GRACE_S * 1_000))
    before = listed(await record_of(world))
    living = set(world.ledgers.ledgers)
    await swept(world)
    assert living - set(world.ledgers.ledgers) <= living - before, "a live ledger was deleted"
    async with opened(world, config=TINY) as topic, opened_cursors(topic.log):
        contents = await topic.contents()
        assert contents == NAMES[topic.log.chain.first_index :][: len(contents)]
        assert topic.log.last_index + 1 >= 5 + len(reported), "what was confirmed is there"
        await wait_until(lambda: not topic.log.owned_record.record.deleting)
        await swept(world)
        assert set(world.ledgers.ledgers) == listed(topic.log.owned_record.record)
        assert await topic.contents() == contents
    return steps.dead


async def test_a_ledger_that_its_creator_may_still_list_is_kept() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
        own = topic.log.owned_record.epoch
        mine = await FakeLedgers(world.ledgers).create(
            newer_than=LedgerId(-1), custom=custom_of(str(TOPIC), kind="data", epoch=own)
        )
        former = await FakeLedgers(world.ledgers).create(
            newer_than=LedgerId(-1), custom=custom_of(str(TOPIC), kind="cursor", epoch=own - 1)
        )
        dry = await swept(world, delete=False)
        assert [orphan.ledger for orphan in dry.orphans] == [former.ledger]
        assert dry.deleted == 0
        assert former.ledger in world.ledgers.ledgers
        assert (await swept(world)).deleted == 1
        assert former.ledger not in world.ledgers.ledgers
        assert mine.ledger in world.ledgers.ledgers
        assert await topic.contents() == ["a"]
    async with opened(world):
        assert [orphan.ledger for orphan in (await swept(world)).orphans] == [mine.ledger]


async def test_the_ledgers_of_a_vanished_topic_are_deleted() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
    world.clock.advance_ms(round(GRACE_S * 1_000))
    assert (await swept(world)).orphans == []
    store = world.store()
    found = await store.get(topic_path(TOPIC))
    assert found is not None
    await store.delete(topic_path(TOPIC), expected=found.version)
    assert (await swept(world)).deleted == 3
    assert world.ledgers.ledgers == {}


async def test_a_ledger_that_the_record_lists_meanwhile_is_kept() -> None:
    """The sweep reads the topic's record a second time before it judges a ledger as orphaned."""
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
    world.clock.advance_ms(round(GRACE_S * 1_000))
    store = world.store()
    found = await store.get(topic_path(TOPIC))
    assert found is not None
    record = decode_topic(found.value)
    last = record.ledgers[-1]
    shorter = replace(record, ledgers=record.ledgers[:-1], epoch=record.epoch + 1)
    version = await store.put(topic_path(TOPIC), encode_topic(shorter), expected=found.version)
    sweep = sweep_of(world)
    pages = sweep._ids

    async def ids(after: int) -> AsyncIterator[LedgerId]:
        async for ledger in pages(after):
            if ledger == last.ledger:  # earlier ledgers were judged by the first read
                await store.put(topic_path(TOPIC), encode_topic(record), expected=version)
            yield ledger

    sweep._ids = ids
    assert (await sweep.page(-1, delete=True)).deleted == 0


class UnreadableLedgers(FakeLedgers):
    """Ledgers whose metadata cannot be decoded."""

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        raise InvalidRecord("ledger metadata", f"ledger {ledger}")


def test_a_sweep_pauses_after_an_unreadable_ledger_too() -> None:
    async def main() -> None:
        world = ClusterState()
        ledgers = UnreadableLedgers(world.ledgers)
        loop = asyncio.get_running_loop()
        began = loop.time()
        sweep = OrphanSweep(world.store(), ledgers, world.clock, grace_s=GRACE_S, ids=ids)
        page = await sweep.page(-1, delete=True)
        assert page.unreadable == page.examined == 500
        assert page.deleted == 0
        assert loop.time() - began == pytest.approx(500 * PAUSE_S)

    async def ids(_after: int) -> AsyncIterator[LedgerId]:
        for ledger in range(500):
            yield LedgerId(ledger)

    run_virtual(main())


async def test_after_all_messages_are_dropped_no_ledger_is_left() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
        await topic.log.roll()
        topic.log.drop_through(LATEST)
        await topic.log.wait_dropped(LATEST)
        await wait_until(lambda: world.ledgers.ledgers == {})
        assert topic.log.last_index == 11
