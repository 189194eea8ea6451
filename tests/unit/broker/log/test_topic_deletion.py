"""A deleted topic, its tombstone, and stale owners that do not know about the deletion."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.ledgers import BrokerDied, FakeLedgers, SharedLedgers, Steps
from fakes.topic_log import TOPIC, SteppingStore, TopicLog, drawn_incarnation, opened
from fakes.virtual_loop import run_virtual as run
from support import settle, wait_until

from magnetar.bookie.ledger.errors import LedgerRefused
from magnetar.broker.catalog.partitioned import PartitionedTopics
from magnetar.broker.errors import LogError, LogFenced, LogUnavailable, TopicDeleted, TopicNotFound
from magnetar.broker.log.owned_record import OwnedRecord, topic_path
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.log.record_limits import DELETING_MAX, LEDGERS_MAX
from magnetar.broker.log.topic_deletion import (
    LEDGERS_PER_PASS,
    RETURN_S_MAX,
    STALLED_S,
    TOMBSTONE_S_MAX,
    TopicDeletions,
    client_key,
    deleted,
)
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_tombstone, decode_topic, encode_topic
from magnetar.metadata.errors import NotEmpty, Unavailable
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import (
    DroppedHead,
    EntryId,
    LedgerId,
    TopicLedger,
    TopicRecord,
    TopicTombstone,
)
from magnetar.metadata.store import ABSENT, MetadataStore, Versioned
from magnetar.protos.names import Domain

if TYPE_CHECKING:
    from magnetar.protos.names import TopicName

TOMBSTONE = paths.deleted_topic(str(TOPIC))


def deletions_of(world: ClusterState, store: MetadataStore | None = None) -> TopicDeletions:
    return TopicDeletions(store or world.store(), FakeLedgers(world.ledgers), world.clock)


async def delete(
    world: ClusterState, *, clients: frozenset[str] = frozenset(), name: TopicName = TOPIC
) -> None:
    """Delete the topic by another broker, which first takes the topic over."""
    owned = await OwnedRecord.take(name, world.store(), incarnation=drawn_incarnation())
    await deletions_of(world).delete(owned, brokers={"b1": "1" * 32}, clients=clients)


def advance(world: ClusterState, seconds: float) -> None:
    world.clock.advance_ms(int(seconds * 1_000))


async def record_of(world: ClusterState, name: TopicName = TOPIC) -> TopicRecord | None:
    found = await world.store().get(topic_path(name))
    return None if found is None else decode_topic(found.value)


# ---- stale owners --------------------------------------------------------------------------------


async def drop_head(stale: TopicLog) -> None:
    stale.log.drop_through(stale.log.confirmed)


async def publish(stale: TopicLog) -> None:
    with suppress(LogError):
        stale.append(*"123456")


async def change_property(stale: TopicLog) -> None:
    with suppress(LogError):
        await stale.log.set_property("k", "v")


ACTS = (drop_head, publish, change_property)


@pytest.mark.parametrize("acts", list(itertools.permutations(ACTS, 2)))
@pytest.mark.parametrize("when", list(itertools.combinations_with_replacement(range(3), 2)))
def test_a_stale_owner_deletes_no_ledger_of_the_new_topic(acts: tuple, when: tuple) -> None:
    """The stale owner acts before the deletion, between the deletion and the new creation, or after
    both. The new topic begins at the same epoch. The stale owner may write without a read, so only
    the version of the record can refuse the write. The tombstone keeps the version of the new
    record above the version of the deleted record."""

    async def main() -> None:
        world = ClusterState()
        async with AsyncExitStack() as stack:
            stale = await stack.enter_async_context(opened(world, close=False))
            await stale.append_and_wait(*"abcdefghijkl")
            new = None
            for time in range(3):
                if time == 1:
                    await delete(world)
                elif time == 2:
                    found = await world.store().get(TOMBSTONE)
                    assert found is not None
                    await world.store().delete(TOMBSTONE, expected=found.version)
                    version = decode_tombstone(found.value).version
                    new = await stack.enter_async_context(opened(world, version_min=version))
                    await new.append_and_wait(*"ABCDEFGHIJKL")
                for act, moment in zip(acts, when, strict=True):
                    if moment == time:
                        await act(stale)
                await settle()
            assert new is not None
            await wait_until(
                lambda: stale.log.has_ended or stale.log.owned_record.lost is None, what="an end"
            )
            kept = {part.ledger for part in new.log.chain.records}
            assert kept <= world.ledgers.ledgers.keys()
            assert await new.contents() == list("ABCDEFGHIJKL")
            with pytest.raises(LogFenced):
                await stale.log.owned_record.verify()
            record = await record_of(world)
            assert record is not None
            assert record.incarnation == new.log.owned_record.incarnation
            assert {part.ledger for part in record.ledgers} == kept

    run(main())


async def test_a_stale_owner_with_the_same_epoch_is_fenced() -> None:
    world = ClusterState()
    stale = await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
    await world.store().delete(topic_path(TOPIC), expected=0)
    fresh = await OwnedRecord.take(
        TOPIC, world.store(), incarnation=drawn_incarnation(), version_min=0
    )
    assert fresh.epoch == stale.epoch
    with pytest.raises(LogFenced, match="created again"):
        await stale.change(lambda record: replace(record, deleting=(4711,)))
    record = await record_of(world)
    assert record is not None
    assert record.deleting == ()


async def test_a_record_of_an_earlier_version_gets_an_incarnation_at_the_takeover() -> None:
    world = ClusterState()
    old = TopicRecord(3, properties={"a": "b"})
    await world.store().put(topic_path(TOPIC), encode_topic(old), expected=ABSENT)
    drawn = drawn_incarnation()
    owned = await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn, create=False)
    assert owned.incarnation == drawn
    again = await OwnedRecord.take(
        TOPIC, world.store(), incarnation=drawn_incarnation(), create=False
    )
    assert again.incarnation == drawn
    assert again.record.properties == {"a": "b"}


async def test_an_absent_topic_is_only_created_on_demand() -> None:
    world = ClusterState()
    with pytest.raises(TopicNotFound):
        await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation(), create=False)
    owned = await OwnedRecord.take(
        TOPIC, world.store(), incarnation=drawn_incarnation(), epoch_min=7
    )
    assert owned.epoch == 8


# ---- deleting ------------------------------------------------------------------------------------


async def test_a_deleted_topic_leaves_only_a_tombstone() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*"abcdefghijkl")
    client = client_key("consumer", "s", "c")
    await delete(world, clients=frozenset({client}))
    assert await record_of(world) is None
    assert world.ledgers.ledgers == {}
    deletions = deletions_of(world)
    tombstone = await deletions.tombstone(TOPIC)
    assert tombstone is not None
    assert deletions.refuses(tombstone, client, reconnects=False)
    assert deletions.refuses(tombstone, "other", reconnects=True)
    assert not deletions.refuses(tombstone, "other", reconnects=False)
    advance(world, RETURN_S_MAX + 1)
    assert not deletions.refuses(tombstone, client, reconnects=True)


async def test_a_topic_that_is_being_deleted_is_not_taken_over() -> None:
    world = ClusterState()
    record = TopicRecord(3, deleted=True, incarnation=drawn_incarnation())
    await world.store().put(topic_path(TOPIC), encode_topic(record), expected=ABSENT)
    with pytest.raises(TopicDeleted):
        await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
    await deletions_of(world).finish(TOPIC)
    assert await record_of(world) is None


class TimedLedgers(FakeLedgers):
    """Ledgers that measure the time of this thread between two deletions."""

    def __init__(self, world: ClusterState) -> None:
        super().__init__(world.ledgers)
        self.before_s = time.thread_time()

    async def delete(self, ledger: LedgerId) -> None:
        now_s = time.thread_time()
        assert now_s - self.before_s < 0.3, f"before ledger {ledger}"
        await super().delete(ledger)
        self.before_s = time.thread_time()


@pytest.mark.usefixtures("no_collection")
async def test_no_step_of_the_deletion_of_the_largest_topic_blocks_the_loop() -> None:
    """A step takes 4 ms. The quadratic form took 3 s."""
    world = ClusterState()
    ledgers = tuple(LedgerId(number) for number in range(LEDGERS_MAX + DELETING_MAX))
    record = TopicRecord(3, deleted=True, incarnation=drawn_incarnation(), deleting=ledgers)
    await world.store().put(topic_path(TOPIC), encode_topic(record), expected=ABSENT)
    await TopicDeletions(world.store(), TimedLedgers(world), world.clock).finish(TOPIC)
    assert await record_of(world) is None


NEWEST = LedgerId(1_500)


@pytest.mark.parametrize(
    "old",
    [
        TopicRecord(3, ledgers=(TopicLedger(LedgerId(7), 0, 1, 1, 1), TopicLedger(NEWEST, 1))),
        TopicRecord(3, dropped=DroppedHead(NEWEST, EntryId(4), 5)),
        TopicRecord(3, deleting=(NEWEST, LedgerId(7))),
        TopicRecord(3, ledger_min=NEWEST + 1),
    ],
    ids=["in use", "dropped", "being deleted", "of an earlier topic"],
)
async def test_the_ledgers_of_a_new_topic_have_larger_ids(old: TopicRecord) -> None:
    """The broker of the new topic has a block of smaller ids. Another broker takes the new topic
    over before its first message."""
    world = ClusterState()
    record = replace(old, incarnation=drawn_incarnation())
    await world.store().put(topic_path(TOPIC), encode_topic(record), expected=ABSENT)
    await delete(world)
    tombstone = await deletions_of(world).tombstone(TOPIC)
    assert tombstone is not None
    await OwnedRecord.take(
        TOPIC, world.store(), incarnation=drawn_incarnation(), ledger_min=tombstone.ledger_min
    )
    async with opened(world) as topic:
        await topic.append_and_wait("a")
        assert topic.log.chain.newest == NEWEST + 1


async def test_a_deletion_that_died_half_way_keeps_the_largest_id() -> None:
    """The list of ledgers does not have the newest ledger any more when the broker dies."""
    world = ClusterState()
    ledgers = (NEWEST, *map(LedgerId, range(LEDGERS_PER_PASS)))
    record = TopicRecord(3, incarnation=drawn_incarnation(), deleting=ledgers)
    await world.store().put(topic_path(TOPIC), encode_topic(record), expected=ABSENT)
    owned = await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
    dying = FakeLedgers(world.ledgers, Steps(LEDGERS_PER_PASS))
    with pytest.raises(BrokerDied):
        await TopicDeletions(world.store(), dying, world.clock).delete(
            owned, brokers={}, clients=frozenset()
        )
    left = await record_of(world)
    assert left is not None
    assert NEWEST not in left.deleting
    await deletions_of(world).finish(TOPIC)
    tombstone = await deletions_of(world).tombstone(TOPIC)
    assert tombstone is not None
    assert tombstone.ledger_min == NEWEST + 1


class PausedLedgers(FakeLedgers):
    """Ledgers that stop before their first deletion."""

    def __init__(self, world: ClusterState) -> None:
        super().__init__(world.ledgers)
        self.paused = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def delete(self, ledger: LedgerId) -> None:
        self.paused.set()
        await self.goes_on.wait()
        await super().delete(ledger)


POLICIES = paths.topic_policies(TOPIC.tenant, TOPIC.namespace, TOPIC.domain, TOPIC.topic)
SCHEMA = paths.schema(TOPIC.tenant, TOPIC.namespace, TOPIC.topic)


@pytest.mark.parametrize("deleting", [False, True])
async def test_the_schema_stays_while_the_non_persistent_topic_uses_it(deleting: bool) -> None:
    world = ClusterState()
    await world.store().put(SCHEMA, b"schema", expected=ABSENT)
    await world.store().put(POLICIES, b"policies", expected=ABSENT)
    other = replace(TOPIC, domain=Domain.NON_PERSISTENT)
    partitioned = PartitionedTopics(world.store(), world.clock)
    await partitioned.create(other, 1)
    if deleting:
        await partitioned.begin_deletion(other)
    await delete(world)
    assert (await world.store().get(SCHEMA) is None) == deleting
    assert await world.store().get(POLICIES) is None


@pytest.mark.parametrize("path", [POLICIES, SCHEMA])
async def test_a_late_broker_deletes_nothing_of_the_next_topic(path: str) -> None:
    """Two brokers finish one deletion. The topic is created again before the second broker is
    done."""
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
    await world.store().put(path, b"former", expected=ABSENT)
    owned = await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
    await owned.change(deleted)
    ledgers = PausedLedgers(world)
    async with asyncio.TaskGroup() as group:
        late = TopicDeletions(world.store(), ledgers, world.clock)
        finishing = group.create_task(late.finish(TOPIC))
        await ledgers.paused.wait()
        await deletions_of(world).finish(TOPIC)
        assert await world.store().get(path) is None
        await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
        await world.store().put(path, b"of the next topic", expected=ABSENT)
        ledgers.goes_on.set()
        await finishing
    found = await world.store().get(path)
    assert found is not None
    assert found.value == b"of the next topic"


async def test_a_topic_whose_ledger_is_gone_is_deleted_unopened() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
        await deletions_of(world).delete_unopened(
            TOPIC, incarnation=drawn_incarnation(), brokers={}
        )
        with pytest.raises(LogFenced):
            await topic.log.owned_record.verify()
    assert await record_of(world) is None


@pytest.mark.parametrize("after", [False, True])
def test_a_deletion_that_dies_at_any_call_is_finished_by_the_sweeper(after: bool) -> None:
    deaths = 0
    for number in range(100):

        async def main(number: int = number) -> bool:
            world, steps = ClusterState(), Steps(number, after=after)
            async with opened(world) as topic:
                await topic.append_and_wait(*"abcdefghijkl")
            store = SteppingStore(world.tree, steps)
            ledgers = FakeLedgers(world.ledgers, steps)
            owned = await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
            dying = await _taken_by(owned, store)
            died = False
            try:
                await TopicDeletions(store, ledgers, world.clock).delete(
                    dying, brokers={}, clients=frozenset()
                )
            except BrokerDied:
                died = True
            was_deleted = (record := await record_of(world)) is None or record.deleted
            advance(world, STALLED_S + 1)
            await deletions_of(world).sweep({})
            if was_deleted:
                assert await record_of(world) is None
                assert world.ledgers.ledgers == {}
            else:
                async with opened(world) as topic:
                    assert await topic.contents(EARLIEST) == list("abcdefghijkl")
            advance(world, RETURN_S_MAX + 1)
            await deletions_of(world).sweep({})
            assert await world.store().get(TOMBSTONE) is None
            return died

        if not run(main()):
            break
        deaths += 1
    assert deaths > 5


async def _taken_by(owned: OwnedRecord, store: MetadataStore) -> OwnedRecord:
    """Take the same ownership over another session."""
    taken = await owned._store.get(topic_path(TOPIC))
    assert taken is not None
    return OwnedRecord(TOPIC, store, taken, decode_topic(taken.value))


async def test_a_tombstone_stays_while_a_broker_runs_that_ran_at_the_deletion() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
    await delete(world)  # the brokers: b1, run 1
    advance(world, RETURN_S_MAX + 1)
    sweeper = deletions_of(world)
    await sweeper.sweep({"b1": "1" * 32})
    assert await world.store().get(TOMBSTONE) is not None
    await sweeper.sweep({"b1": "2" * 32})  # b1 was restarted
    assert await world.store().get(TOMBSTONE) is None


class RefusingLedgers(FakeLedgers):
    """Ledgers whose deletion fails."""

    def __init__(self, shared: SharedLedgers, error: Exception) -> None:
        super().__init__(shared)
        self.error = error

    async def delete(self, ledger: LedgerId) -> None:
        raise self.error


async def two_deleted_topics(world: ClusterState) -> tuple[str, str]:
    """Leave a deletion that stopped after its mark, and an old tombstone. Return their paths."""
    stopped, old = TOPIC, replace(TOPIC, topic="z")
    await OwnedRecord.take(old, world.store(), incarnation=drawn_incarnation())
    await delete(world, name=old)
    async with opened(world) as topic:
        await topic.append_and_wait("a")
    refusing = RefusingLedgers(world.ledgers, NotEmpty("/x"))
    with pytest.raises(NotEmpty):
        await TopicDeletions(world.store(), refusing, world.clock).delete_unopened(
            stopped, incarnation=drawn_incarnation(), brokers={}
        )
    advance(world, TOMBSTONE_S_MAX + 1)
    return paths.deleted_topic(str(stopped)), paths.deleted_topic(str(old))


@pytest.mark.parametrize("error", [NotEmpty("/x"), LedgerRefused(1, "a fault")])
async def test_an_error_of_one_topic_does_not_stop_the_sweep(error: Exception) -> None:
    world = ClusterState()
    stopped, old = await two_deleted_topics(world)
    for foreign in (paths.deleted_topic("a//b"), f"{paths.DELETED_TOPICS}/%FF"):
        await world.store().put(foreign, b"", expected=ABSENT)
    ledgers = RefusingLedgers(world.ledgers, error)
    await TopicDeletions(world.store(), ledgers, world.clock).sweep({})
    assert await world.store().get(stopped) is not None
    assert await world.store().get(old) is None


async def test_a_store_that_does_not_answer_ends_the_sweep() -> None:
    world = ClusterState()
    _, old = await two_deleted_topics(world)
    ledgers = RefusingLedgers(world.ledgers, Unavailable("a fault"))
    with pytest.raises(Unavailable):
        await TopicDeletions(world.store(), ledgers, world.clock).sweep({})
    assert await world.store().get(old) is not None


async def test_a_tombstone_is_removed_after_a_day() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
    await delete(world)
    advance(world, TOMBSTONE_S_MAX + 1)
    await deletions_of(world).sweep({"b1": "1" * 32})
    assert await world.store().get(TOMBSTONE) is None


class PausedStore(MemoryStore):
    """Stops once between the read and the write of the record of the topic or of a partition."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.paused = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.armed = False

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        if self.armed and path.startswith(topic_path(TOPIC)):
            self.armed = False
            self.paused.set()
            await self.goes_on.wait()
        return await super().put(path, value, expected=expected)


async def test_a_tombstone_has_the_epoch_of_an_owner_that_came_during_the_deletion() -> None:
    world = ClusterState()
    await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
    paused = PausedStore(world.tree)
    paused.armed = True
    async with asyncio.TaskGroup() as group:
        group.create_task(
            deletions_of(world, paused).delete_unopened(
                TOPIC, incarnation=drawn_incarnation(), brokers={}
            )
        )
        await paused.paused.wait()
        for _ in range(2):
            owner = await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
        paused.goes_on.set()
    tombstone = await deletions_of(world).tombstone(TOPIC)
    assert tombstone is not None
    assert tombstone.epoch > owner.epoch


@pytest.mark.parametrize("changes", range(8))
async def test_a_write_that_began_before_the_deletion_does_not_reach_the_new_topic(
    changes: int,
) -> None:
    """The new record was changed so often that its version may equal the version that was read."""
    world = ClusterState()
    paused = PausedStore(world.tree)
    stale = await OwnedRecord.take(TOPIC, paused, incarnation=drawn_incarnation())
    for number in range(3):
        await stale.change(lambda record, n=str(number): replace(record, properties={n: n}))
    paused.armed = True
    async with asyncio.TaskGroup() as group:
        late = group.create_task(_fenced(stale))
        await paused.paused.wait()
        await delete(world)
        tombstone = await deletions_of(world).tombstone(TOPIC)
        assert tombstone is not None
        new = await OwnedRecord.take(
            TOPIC,
            world.store(),
            incarnation=drawn_incarnation(),
            epoch_min=tombstone.epoch,
            version_min=tombstone.version,
        )
        for number in range(changes):
            await new.change(lambda record, n=str(number): replace(record, properties={n: n}))
        before = await record_of(world)
        paused.goes_on.set()
        await late
    assert await record_of(world) == before
    await new.verify()


@pytest.mark.parametrize("changes", range(8))
async def test_a_write_that_began_before_the_deletion_does_not_reach_the_new_partition(
    changes: int,
) -> None:
    """The creation of the partitioned topic writes the partition's record, before a broker takes
    the partition."""
    world = ClusterState()
    partitioned = PartitionedTopics(world.store(), world.clock)
    await partitioned.create(TOPIC, 1)
    name = TOPIC.with_partition(0)
    paused = PausedStore(world.tree)
    stale = await OwnedRecord.take(name, paused, incarnation=drawn_incarnation(), create=False)
    for number in range(2):
        await stale.change(lambda record, n=str(number): replace(record, properties={n: n}))
    await stale.change(lambda record: replace(record, cursor_ledgers=(7,)))
    paused.armed = True
    async with asyncio.TaskGroup() as group:
        late = group.create_task(_fenced(stale))
        await paused.paused.wait()
        await partitioned.begin_deletion(TOPIC)
        await delete(world, name=name)
        await partitioned.end_deletion(TOPIC)
        await partitioned.create(TOPIC, 1)
        drawn = drawn_incarnation()
        new = await OwnedRecord.take(name, world.store(), incarnation=drawn, create=False)
        assert new.epoch > stale.epoch
        assert new.record.ledger_min == 8
        for number in range(changes):
            await new.change(lambda record, n=str(number): replace(record, properties={n: n}))
        before = await record_of(world, name)
        paused.goes_on.set()
        await late
    assert await record_of(world, name) == before
    await new.verify()


async def test_the_first_take_of_a_partition_needs_its_tombstone() -> None:
    """Without the tombstone the take fails, and the partition is still not taken."""

    class NoTombstone(MemoryStore):
        async def get(self, path: str) -> Versioned | None:
            if path.startswith(paths.DELETED_TOPICS):
                raise Unavailable(path)
            return await super().get(path)

    world = ClusterState()
    await PartitionedTopics(world.store(), world.clock).create(TOPIC, 1)
    name = TOPIC.with_partition(0)
    drawn = drawn_incarnation()
    with pytest.raises(LogUnavailable):
        await OwnedRecord.take(name, NoTombstone(world.tree), incarnation=drawn, create=False)
    assert await record_of(world, name) == TopicRecord(0)
    owned = await OwnedRecord.take(name, world.store(), incarnation=drawn, create=False)
    assert (owned.epoch, owned.incarnation) == (1, drawn)


@pytest.mark.parametrize("created_again", [False, True])
async def test_a_take_that_stood_still_neither_replaces_a_later_record_nor_revives_the_topic(
    created_again: bool,
) -> None:
    """The topic was deleted, and perhaps created again, while a broker raised the version of its
    record. The write would drop the later topic's ledgers from its record."""

    class SecondPut(PausedStore):
        puts = 0

        async def put(self, path: str, value: bytes, *, expected: int) -> int:
            self.puts += 1
            self.armed = self.puts == 2
            return await super().put(path, value, expected=expected)

    async def take(store: MemoryStore, of: TopicTombstone) -> OwnedRecord:
        drawn = drawn_incarnation()
        limits = {"epoch_min": of.epoch, "version_min": of.version}
        return await OwnedRecord.take(TOPIC, store, incarnation=drawn, **limits)

    async def stand_still(store: MemoryStore, of: TopicTombstone) -> None:
        with pytest.raises(LogFenced):
            await take(store, of)

    world = ClusterState()
    owner = await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
    for number in range(5):
        await owner.change(lambda record, n=str(number): replace(record, properties={n: n}))
    await delete(world)
    first = await deletions_of(world).tombstone(TOPIC)
    assert first is not None
    slow = SecondPut(world.tree)
    async with asyncio.TaskGroup() as group:
        group.create_task(stand_still(slow, first))
        await slow.paused.wait()
        await delete(world)
        second = await deletions_of(world).tombstone(TOPIC)
        assert second is not None
        later = await take(world.store(), second) if created_again else None
        if later is not None:
            await later.change(lambda record: replace(record, properties={"live": "yes"}))
        slow.goes_on.set()
    if later is None:
        assert await world.store().get(topic_path(TOPIC)) is None
    else:
        await later.verify()
        assert (await record_of(world)).properties == {"live": "yes"}


async def _fenced(stale: OwnedRecord) -> None:
    with pytest.raises(LogFenced):
        await stale.change(lambda record: replace(record, deleting=(4711,)))
