"""Deduplication over fake ledgers: dropped duplicates, waiting duplicates, and sequence ids after a
takeover."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.numbered import chunks, numbered
from fakes.policies import SettablePolicies
from fakes.topic_log import TOPIC, drawn_incarnation
from fakes.topics import opened_topic
from support import settle, wait_until

from magnetar.broker.cursor.sequences import DEDUPLICATION, SEQUENCE_ID_MAX
from magnetar.broker.errors import LogUnavailable, NotAllowed, StraddlingBatch, TopicFull
from magnetar.broker.log.owned_record import METADATA_TIMEOUT_S, OwnedRecord
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.broker.log.record_limits import SUBSCRIPTIONS_BYTES_MAX
from magnetar.broker.topic.deduplication import DeduplicationConfig
from magnetar.broker.topic.duplicates import CHUNKED_IDLE_MAX
from magnetar.metadata.errors import OutcomeUnknown, Unavailable
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.policies import Retention

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.sessions import FakeProducerSession
    from fakes.topics import TopicRig

    from magnetar.broker.topic.producer import ProducerHandle
    from magnetar.metadata.store import Versioned
    from magnetar.protos.sends import SendRun

NOWHERE = Position(-1, -1)
RARE = DeduplicationConfig(entries_interval=1_000_000, interval_s=1e9)
OFTEN = DeduplicationConfig(entries_interval=3)


def on() -> SettablePolicies:
    return SettablePolicies(deduplication=True)


class DeafStore(MemoryStore):
    """Loses the replies of the next puts. While it is not reachable, it sends no request."""

    replies_lost = 0
    is_reachable = True

    async def get(self, path: str) -> Versioned | None:
        self._require_reachable()
        return await super().get(path)

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        if self.replies_lost:
            self.replies_lost -= 1
            await super().put(path, value, expected=expected)
            raise OutcomeUnknown(path, "the reply was lost")
        self._require_reachable()
        return await super().put(path, value, expected=expected)

    async def sync(self, path: str) -> None:
        self._require_reachable()
        await super().sync(path)

    def _require_reachable(self) -> None:
        if not self.is_reachable:
            raise Unavailable("a fault")


@dataclass
class Sender:
    handle: ProducerHandle
    session: FakeProducerSession

    def send(self, run: SendRun) -> None:
        self.handle.publish(run, asyncio.get_running_loop().time())

    async def numbers(self, *numbers: int | tuple[int, ...]) -> list[str]:
        """Send, and wait for the answers."""
        return await self.answers(numbered(self.handle.name, *numbers))

    async def answers(self, run: SendRun) -> list[str]:
        before = len(self.session.answers)
        self.send(run)
        await wait_until(lambda: len(self.session.answers) == before + len(run), what="answers")
        return [_shown(answer) for _, answer in self.session.answers[before:]]


def _shown(answer: object) -> str:
    if isinstance(answer, Exception):
        return type(answer).__name__
    return "duplicate" if answer == NOWHERE else "stored"


async def sender(it: TopicRig, name: str = "p") -> Sender:
    return Sender(*await it.produce(name))


async def stored(it: TopicRig) -> list[str]:
    """The messages that a new reader gets."""
    await settle()
    _, session = await it.subscribe(f"reader {id(object())}", durable=False, start=EARLIEST)
    await wait_until(lambda: len(session.texts) == it.topic.log.chain.messages)
    return session.texts


async def test_a_repeated_message_is_receipted_and_stored_once() -> None:
    async with opened_topic(ClusterState(), policies=on()) as it:
        one = await sender(it)
        assert await one.numbers(0, 1, 2) == ["stored"] * 3
        assert await one.numbers(1, 2, 3) == ["duplicate", "duplicate", "stored"]
        assert await one.numbers(3, 3, 4, 4) == ["duplicate", "duplicate", "stored", "duplicate"]
        assert await stored(it) == ["0", "1", "2", "3", "4"]
        other = await sender(it, "other")
        assert await other.numbers(0) == ["stored"]


async def test_without_the_policy_nothing_is_dropped() -> None:
    async with opened_topic(ClusterState()) as it:
        one = await sender(it)
        assert await one.numbers(0, 0) == ["stored"] * 2
        assert it.topic.deduplication.last_sequence_id("p") == -1


async def test_a_duplicate_in_flight_waits_for_the_outcome_of_the_first_send() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=on()) as it:
        one = await sender(it)
        await one.numbers(0)
        world.ledgers.hold()
        one.send(numbered("p", 1, 2))
        one.handle.close_nowait()  # the connection of the producer broke
        again = await sender(it)
        assert again.handle.last_sequence_id == 0
        again.send(numbered("p", 1, 2, 3))
        await settle()
        assert again.session.answers == []
        world.ledgers.release()
        await wait_until(lambda: len(again.session.answers) == 3)
        assert [_shown(it) for _, it in again.session.answers] == [
            "duplicate",
            "duplicate",
            "stored",
        ]
        assert await stored(it) == ["0", "1", "2", "3"]


async def test_a_batch_counts_by_its_last_number_and_a_straddling_one_is_refused() -> None:
    async with opened_topic(ClusterState(), policies=on()) as it:
        one = await sender(it)
        assert await one.numbers((0, 1, 2), (3, 4)) == ["stored"] * 2
        assert it.topic.deduplication.last_sequence_id("p") == 4
        assert await one.numbers((0, 1, 2), (1, 2)) == ["duplicate"] * 2
        assert await one.numbers((4, 5), (5, 6)) == [StraddlingBatch.__name__, "stored"]


async def test_chunks_with_one_sequence_id_are_not_duplicates_of_each_other() -> None:
    async with opened_topic(ClusterState(), policies=on()) as it:
        one = await sender(it)
        assert await one.answers(chunks("p", 5, 3, which=(0, 1))) == ["stored"] * 2
        assert it.topic.deduplication.last_sequence_id("p") == -1, "the message is incomplete"
        assert await one.answers(chunks("p", 5, 3)) == ["duplicate", "duplicate", "stored"]
        assert it.topic.deduplication.last_sequence_id("p") == 5
        assert await one.answers(chunks("p", 5, 3)) == ["duplicate"] * 3
        assert await one.answers(chunks("p", 6, 2)) == ["stored"] * 2
        assert await one.numbers(6, 7) == ["duplicate", "stored"]


async def test_an_unfinished_chunked_message_holds_no_entries() -> None:
    async with opened_topic(ClusterState(), policies=on()) as it:
        one = await sender(it)
        assert await one.answers(chunks("p", 5, 3, which=(0, 1))) == ["stored"] * 2
        await one.handle.close()
        stage = it.topic.deduplication.stage
        progress = stage._progress["p"]
        assert progress.chunked is not None
        assert progress.chunked.publish is None
        assert not progress.passed
        again = await sender(it)
        assert await again.answers(chunks("p", 5, 3)) == ["duplicate", "duplicate", "stored"]


async def test_the_unfinished_chunked_messages_of_many_producers_are_bounded() -> None:
    async with opened_topic(ClusterState(), policies=on()) as it:
        stage = it.topic.deduplication.stage
        for number in range(CHUNKED_IDLE_MAX + 10):
            one = await sender(it, f"p{number}")
            one.send(chunks(f"p{number}", 5, 3, which=(0,)))
            one.handle.close_nowait()
        await wait_until(lambda: it.topic.log.pending_appends == 0)
        await it.topic.deduplication.visit(())
        assert len(stage._progress) == CHUNKED_IDLE_MAX
        last = await sender(it, f"p{CHUNKED_IDLE_MAX + 9}")
        run = chunks(last.handle.name, 5, 3)
        assert await last.answers(run) == ["duplicate", "stored", "stored"]


async def test_a_sequence_id_that_no_answer_can_carry_is_refused() -> None:
    async with opened_topic(ClusterState(), policies=on()) as it:
        one = await sender(it)
        assert await one.numbers(SEQUENCE_ID_MAX + 1) == [NotAllowed.__name__]
        assert await one.numbers(SEQUENCE_ID_MAX) == ["stored"]


async def test_an_entry_in_the_name_of_another_producer_is_refused() -> None:
    async with opened_topic(ClusterState(), policies=on()) as it:
        liar = await sender(it, "liar")
        victim = await sender(it, "victim")
        assert await liar.answers(numbered("victim", 100)) == [NotAllowed.__name__]
        assert await liar.answers(numbered("victim", (1, 100))) == [NotAllowed.__name__]
        assert await victim.numbers(0) == ["stored"]


@pytest.mark.parametrize("config", [RARE, OFTEN], ids=["no snapshot", "snapshots"])
@pytest.mark.parametrize("close", [True, False], ids=["closed", "died"])
async def test_the_next_owner_drops_duplicates_of_stored_messages(
    config: DeduplicationConfig, close: bool
) -> None:
    world = ClusterState()
    async with opened_topic(world, policies=on(), deduplication=config, close=close) as it:
        one, two = await sender(it, "one"), await sender(it, "two")
        for number in range(0, 20, 2):
            await one.numbers(number, number + 1)
        await two.numbers((0, 1, 2), (3, 4))
        await two.answers(chunks("two", 9, 2))
        await settle()
    async with opened_topic(world, policies=on(), deduplication=config) as it:
        one, two = await sender(it, "one"), await sender(it, "two")
        assert (one.handle.last_sequence_id, two.handle.last_sequence_id) == (19, 9)
        assert await one.numbers(0, 18, 19, 20) == ["duplicate"] * 3 + ["stored"]
        assert await two.answers(chunks("two", 9, 2)) == ["duplicate"] * 2
        assert DEDUPLICATION not in it.topic.subscriptions


async def test_the_next_owner_knows_the_sequence_ids_of_truncated_messages() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=on(), deduplication=RARE, close=False) as it:
        one = await sender(it)
        await one.numbers(*range(7))
        await it.topic.truncate()
        assert it.topic.log.chain.records == ()
    async with opened_topic(world, policies=on(), deduplication=RARE) as it:
        one = await sender(it)
        assert one.handle.last_sequence_id == 6
        assert await one.numbers(6, 7) == ["duplicate", "stored"]


@contextlib.asynccontextmanager
async def half_on(world: ClusterState, store: DeafStore) -> AsyncIterator[TopicRig]:
    """A topic whose record has got the sequence ids, but the broker does not know it. Messages are
    trimmed at once. The broker dies at the end."""
    policies = SettablePolicies(retention=Retention(0, 0))
    async with opened_topic(world, policies=policies, store=store, close=False) as it:
        store.replies_lost = 1
        store.is_reachable = False
        policies.set(deduplication=True)
        await asyncio.sleep(METADATA_TIMEOUT_S + 1)
        store.is_reachable = True
        assert it.topic.deduplication.enabled
        assert not it.topic.deduplication.is_settled
        yield it


async def test_a_truncation_completes_a_switch_on_that_has_failed() -> None:
    world = ClusterState()
    async with half_on(world, DeafStore(world.tree)) as it:
        one = await sender(it)
        await one.numbers(*range(3))
        await it.topic.truncate()
        assert it.topic.log.chain.records == ()
        assert it.topic.deduplication.is_settled
    async with opened_topic(world, policies=on()) as it:
        one = await sender(it)
        assert await one.numbers(2, 3) == ["duplicate", "stored"]


async def test_a_trim_keeps_the_entries_whose_sequence_ids_are_not_stored_yet() -> None:
    world = ClusterState()
    async with half_on(world, DeafStore(world.tree)) as it:
        one, two = await sender(it, "one"), await sender(it, "two")
        await one.numbers(*range(5))  # a full ledger
        await two.numbers(0)
        it.topic.trim()
        await asyncio.sleep(10)
        assert it.topic.log.chain.messages == 6
    async with opened_topic(world, policies=on()) as it:
        one = await sender(it, "one")
        assert await one.numbers(4, 5) == ["duplicate", "stored"]


async def test_a_switch_off_after_a_switch_on_without_a_reply_lets_the_log_trim() -> None:
    world = ClusterState()
    store = DeafStore(world.tree)
    async with half_on(world, store) as it:
        one = await sender(it)
        await one.numbers(*range(5))  # a full ledger
        store.is_reachable = False
        it.policies.set(deduplication=False)
        await asyncio.sleep(METADATA_TIMEOUT_S + 1)
        store.is_reachable = True
        assert not it.topic.deduplication.enabled
        it.topic.trim()
        await wait_until(lambda: it.topic.log.chain.messages == 0)


async def test_a_topic_without_space_for_sequence_ids_still_trims() -> None:
    policies = SettablePolicies(retention=Retention(0, 0))
    async with opened_topic(ClusterState(), policies=policies) as it:
        large = {"k": "v" * (SUBSCRIPTIONS_BYTES_MAX - 65)}
        await it.topic.ensure_subscription("s", LATEST, large)
        with pytest.raises(TopicFull):
            await it.topic.ensure_subscription("t", LATEST)
        it.policies.set(deduplication=True)
        await settle()
        assert it.topic.deduplication.enabled
        assert not it.topic.deduplication.is_settled
        one = await sender(it)
        await one.numbers(*range(5))  # a full ledger
        await it.topic.subscriptions["s"].skip_all()
        it.topic.trim()
        await wait_until(lambda: it.topic.log.chain.messages == 0)


async def test_a_truncation_without_bookies_ends_and_drops_nothing() -> None:
    world = ClusterState()
    keep = SettablePolicies(deduplication=True, retention=Retention(-1, -1))
    async with opened_topic(world, policies=keep, deduplication=RARE) as it:
        await it.topic.ensure_subscription("s", EARLIEST)
        one = await sender(it)
        await one.numbers(*range(5))  # a full ledger
        world.ledgers.bookies = False
        with pytest.raises(LogUnavailable, match="storing sequence ids"):
            await it.topic.truncate()
        assert it.topic.log.chain.messages == 5
        assert it.topic.subscriptions["s"].cursor.backlog_entries == 5
        world.ledgers.bookies = True
        await it.topic.truncate()
        assert it.topic.log.chain.messages == 0


async def test_replayed_entries_count_towards_the_next_snapshot() -> None:
    """Otherwise the entries that a recovery reads would grow with each owner that dies early."""
    world, config = ClusterState(), DeduplicationConfig(entries_interval=5, interval_s=1e9)
    async with opened_topic(world, policies=on(), deduplication=config, close=False) as it:
        one = await sender(it)
        await one.numbers(0, 1, 2, 3)
    async with opened_topic(world, policies=on(), deduplication=config) as it:
        one = await sender(it)
        await one.numbers(4)
        sequences = it.topic.cursors.sequences
        assert sequences is not None
        await wait_until(lambda: sequences.durable_mark == it.topic.log.confirmed)


async def test_the_policy_is_followed_while_the_topic_is_open() -> None:
    world, policies = ClusterState(), SettablePolicies()
    async with opened_topic(world, policies=policies) as it:
        one = await sender(it)
        await one.numbers(0, 1)
        policies.set(deduplication=True)
        await wait_until(lambda: it.topic.deduplication.is_settled)
        assert await one.numbers(2, 2) == ["stored", "duplicate"]
        policies.is_fresh = False
        policies.set(deduplication=False)
        await settle()
        assert it.topic.deduplication.enabled, "a stale policy forgets nothing"
        policies.is_fresh = True
        await it.topic.deduplication.visit(())
        assert not it.topic.deduplication.enabled
        assert DEDUPLICATION not in it.topic.log.owned_record.record.subscriptions
        assert await one.numbers(2) == ["stored"]


async def test_a_switch_on_after_a_switch_off_without_a_reply_stores_the_sequence_ids() -> None:
    """The record may lack the sequence ids: then the next owner would not know them."""
    world, policies = ClusterState(), on()
    store = DeafStore(world.tree)
    async with opened_topic(world, policies=policies, store=store, close=False) as it:
        one = await sender(it)
        await one.numbers(7)
        store.replies_lost = 1
        store.is_reachable = False
        policies.set(deduplication=False)
        await wait_until(lambda: not it.topic.deduplication.enabled)
        await asyncio.sleep(METADATA_TIMEOUT_S + 1)
        store.is_reachable = True
        assert await one.numbers(3) == ["stored"]
        policies.set(deduplication=True)
        await wait_until(lambda: it.topic.deduplication.is_settled)
        assert await one.numbers(4, 4) == ["stored", "duplicate"]
        record = it.topic.log.owned_record
        await record.verify()
        assert DEDUPLICATION in record.record.subscriptions
    async with opened_topic(world, policies=on()) as it:
        one = await sender(it)
        assert await one.numbers(4, 5) == ["duplicate", "stored"]


async def test_a_failed_switch_is_logged_with_the_topic(caplog: pytest.LogCaptureFixture) -> None:
    world, policies = ClusterState(), SettablePolicies()
    async with opened_topic(world, policies=policies, close=False) as it:
        await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
        policies.set(deduplication=True)
        await wait_until(lambda: "deduplication was not switched" in caplog.text)
        [line] = [each for each in caplog.messages if "was not switched" in each]
        assert f"topic={it.topic.name} error=LogFenced" in line


async def test_a_producer_that_is_inactive_for_long_is_forgotten() -> None:
    world = ClusterState()
    config = DeduplicationConfig(inactivity_s=60.0)
    async with opened_topic(world, policies=on(), deduplication=config) as it:
        one, two = await sender(it, "one"), await sender(it, "two")
        await one.numbers(7)
        await two.numbers(8)
        world.clock.advance_ms(61_000)
        await it.topic.deduplication.visit({"two"})
        assert it.topic.deduplication.last_sequence_id("one") == -1
        assert it.topic.deduplication.last_sequence_id("two") == 8


async def test_a_held_duplicate_of_a_forgotten_producer_is_a_duplicate() -> None:
    """The broker forgets the producer in the step in which its first entry becomes durable."""
    world = ClusterState()
    config = DeduplicationConfig(producers_max=2)
    async with opened_topic(world, policies=on(), deduplication=config) as it:
        one, *others = [await sender(it, name) for name in ("one", "two", "three", "four")]
        world.ledgers.hold()
        one.send(numbered("one", 5, 5))
        for other in others:
            other.send(numbered(other.handle.name, 1))
        await settle()
        world.ledgers.release()
        await wait_until(lambda: len(one.session.answers) == 2)
        assert [_shown(answer) for _, answer in one.session.answers] == ["stored", "duplicate"]
        assert it.topic.deduplication.last_sequence_id("one") == 5
        assert await stored(it) == ["5", "1", "1", "1"]


async def test_a_limit_of_one_producer_keeps_the_newest_one() -> None:
    world = ClusterState()
    config = DeduplicationConfig(producers_max=1)
    async with opened_topic(world, policies=on(), deduplication=config) as it:
        one, two = await sender(it, "one"), await sender(it, "two")
        await one.numbers(7)
        await two.numbers(8)
        await it.topic.deduplication.visit({"one", "two"})
        assert it.topic.deduplication.last_sequence_id("one") == -1
        assert it.topic.deduplication.last_sequence_id("two") == 8


async def test_users_cannot_take_the_reserved_name() -> None:
    async with opened_topic(ClusterState()) as it:
        with pytest.raises(NotAllowed, match=DEDUPLICATION):
            await it.subscribe(DEDUPLICATION)
        with pytest.raises(NotAllowed, match=DEDUPLICATION):
            await it.topic.ensure_subscription(DEDUPLICATION, EARLIEST)
