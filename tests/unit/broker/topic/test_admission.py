"""Access modes of producers: fenced producers, the FIFO order of waiting producers, and the limit
of producers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fakes.cluster_state import ClusterState
from fakes.gated_store import GatedStore
from fakes.numbered import numbered
from fakes.policies import SettablePolicies
from fakes.topic_log import TOPIC
from fakes.topics import opened_topic
from support import settle, wait_until

from magnetar.broker.errors import ProducerBusy, ProducerFenced, TopicClosing
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.topic.contract import AccessMode, CloseReason
from magnetar.broker.topic.producer import ProducerHandle, ProducerState

if TYPE_CHECKING:
    from fakes.topics import TopicRig

SHARED, EXCLUSIVE = AccessMode.SHARED, AccessMode.EXCLUSIVE
WAIT, FENCING = AccessMode.WAIT_FOR_EXCLUSIVE, AccessMode.EXCLUSIVE_WITH_FENCING


async def test_a_fencing_producer_takes_the_place_of_all_others_at_once() -> None:
    async with opened_topic(ClusterState()) as it:
        shared, shared_session = await it.produce("shared")
        _, other_session = await it.produce("other")
        new, _ = await it.produce("new", mode=FENCING)
        assert new.topic_epoch == 0
        assert shared_session.reason is other_session.reason is CloseReason.FENCED
        shared.publish(numbered("shared", 0), 0.0)
        assert shared.outstanding == 0, "a fenced producer publishes nothing"
        with pytest.raises(ProducerFenced):  # the fenced producer reconnects
            await it.produce("shared", epoch=1)
        with pytest.raises(ProducerBusy):
            await it.produce("fresh")
        newer, _ = await it.produce("newer", mode=FENCING)
        assert newer.topic_epoch == 1
        with pytest.raises(ProducerFenced):
            await it.produce("new", mode=FENCING, topic_epoch=0)
        assert list(it.topic.producers) == ["newer"], "a fenced producer fences no other one"


async def test_a_returning_producer_is_not_fenced_by_an_epoch_that_no_producer_got() -> None:
    """The epoch of a newer producer is being written when the older producer fences it."""
    world = ClusterState()
    store = GatedStore(world.tree)
    write = "put", topic_path(TOPIC)
    async with opened_topic(world, store=store) as it:
        first, _ = await it.produce("first", mode=FENCING)
        first.close_nowait()
        store.gates[write] = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fenced_while_it_connects(it))
            await wait_until(lambda: write in store.held)
            back = tasks.create_task(
                it.produce("first", mode=FENCING, topic_epoch=first.topic_epoch)
            )
            await wait_until(lambda: list(it.topic.producers) == ["first"])
            store.gates[write].set()
        again, _ = back.result()
        assert again.topic_epoch == it.topic.admission.epoch == 1
        again.close_nowait()
        await it.produce("first", mode=FENCING, topic_epoch=again.topic_epoch)


async def _fenced_while_it_connects(it: TopicRig) -> None:
    with pytest.raises(TopicClosing):
        await it.produce("newer", mode=FENCING)


async def test_waiting_producers_become_exclusive_in_fifo_order() -> None:
    async with opened_topic(ClusterState()) as it:
        leader, _ = await it.produce("leader", mode=EXCLUSIVE)
        first, first_session = await it.produce("first", mode=WAIT)
        second, second_session = await it.produce("second", mode=WAIT)
        gone, gone_session = await it.produce("gone", mode=WAIT)
        assert first.state is second.state is ProducerState.WAITING
        first.publish(numbered("first", 0), 0.0)
        assert first.outstanding == 0, "a waiting producer publishes nothing"
        gone.close_nowait()
        leader.close_nowait()
        await wait_until(lambda: first_session.is_ready)
        assert first.state is ProducerState.OPEN
        assert first.topic_epoch == 1
        assert not second_session.is_ready
        with pytest.raises(ProducerBusy):
            await it.produce("shared")
        await first.close()
        await wait_until(lambda: second_session.is_ready)
        assert second.topic_epoch == 2
        assert not gone_session.is_ready
        await second.close()
        assert (await it.produce("shared"))[0].state is ProducerState.OPEN


async def test_a_waiting_producer_of_a_free_topic_becomes_exclusive_at_once() -> None:
    async with opened_topic(ClusterState()) as it:
        handle, session = await it.produce("p", mode=WAIT)
        assert handle.state is ProducerState.OPEN
        assert handle.topic_epoch == 0
        assert not session.is_ready


async def test_a_producer_waits_for_shared_producers_and_new_shared_ones_are_refused() -> None:
    async with opened_topic(ClusterState()) as it:
        one, _ = await it.produce("one")
        two, _ = await it.produce("two")
        _, session = await it.produce("waits", mode=WAIT)
        with pytest.raises(ProducerBusy, match="waits"):
            await it.produce("three")
        one.close_nowait()
        await settle()
        assert not session.is_ready
        two.close_nowait()
        await wait_until(lambda: session.is_ready)


async def test_a_fencing_producer_ends_the_queue() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.produce("leader", mode=EXCLUSIVE)
        _, waiting = await it.produce("waits", mode=WAIT)
        await it.produce("new", mode=FENCING)
        assert isinstance(waiting.refusal, ProducerFenced)
        assert list(it.topic.producers) == ["new"]


async def test_a_former_leader_that_returns_too_late_is_fenced() -> None:
    async with opened_topic(ClusterState()) as it:
        leader, _ = await it.produce("leader", mode=WAIT)
        leader.close_nowait()
        again, _ = await it.produce("leader", mode=WAIT, topic_epoch=leader.topic_epoch)
        assert again.topic_epoch == leader.topic_epoch
        again.close_nowait()
        await it.produce("next", mode=WAIT)
        with pytest.raises(ProducerFenced):
            await it.produce("leader", mode=WAIT, topic_epoch=leader.topic_epoch)


async def test_a_dead_leader_is_evicted_for_a_producer_that_would_wait() -> None:
    async with opened_topic(ClusterState()) as it:
        _, session = await it.produce("leader", mode=EXCLUSIVE)
        session.alive = False
        handle, _ = await it.produce("next", mode=WAIT)
        assert handle.state is ProducerState.OPEN
        assert session.reason is CloseReason.REPLACED


async def test_the_end_of_the_topic_ends_the_wait() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.produce("leader", mode=EXCLUSIVE)
        _, session = await it.produce("waits", mode=WAIT)
        await it.topic.close()
        assert session.reason is CloseReason.UNLOADED
        assert not session.is_ready


class Counted(dict[str, ProducerHandle]):
    """Counts the producers that are looked at one after the other."""

    seen = 0

    def values(self) -> Any:
        for handle in super().values():
            self.seen += 1
            yield handle


async def test_a_new_producer_costs_no_look_at_all_others() -> None:
    async with opened_topic(ClusterState()) as it:
        for number in range(20):
            await it.produce(f"p{number}")
        counted = it.topic.admission.connected = Counted(it.topic.admission.connected)
        await it.produce("another")
        assert counted.seen == 1
        it.topic.admission.connected = dict(counted)


async def test_a_producer_above_max_producers_per_topic_is_refused() -> None:
    policies = SettablePolicies(producers_max=2)
    async with opened_topic(ClusterState(), policies=policies) as it:
        one, _ = await it.produce("one")
        await it.produce("two")
        with pytest.raises(ProducerBusy, match="max_producers_per_topic"):
            await it.produce("three")
        one.close_nowait()
        await it.produce("three")
        policies.set(producers_max=3)
        await it.produce("four")


async def test_a_generated_name_differs_from_the_names_of_clients() -> None:
    async with opened_topic(ClusterState()) as it:
        made, _ = await it.produce()
        prefix, number = made.name.rsplit("-", 1)
        brought, _ = await it.produce(f"{prefix}-{int(number) + 1}")
        following, _ = await it.produce()
        assert len({made.name, brought.name, following.name}) == 3


async def test_a_generated_name_differs_from_the_names_of_waiting_producers() -> None:
    async with opened_topic(ClusterState()) as it:
        made, _ = await it.produce(mode=EXCLUSIVE)
        prefix, number = made.name.rsplit("-", 1)
        waits, _ = await it.produce(f"{prefix}-{int(number) + 1}", mode=WAIT)
        following, _ = await it.produce(mode=WAIT)
        assert list(it.topic.admission.waiting.values()) == [waits, following]


async def test_a_generated_name_has_no_stored_sequence_ids() -> None:
    """With a reused name, a client would begin above the stored ids, or its messages would count as
    duplicates."""
    policies = SettablePolicies(deduplication=True)
    async with opened_topic(ClusterState(), policies=policies) as it:
        made, _ = await it.produce()
        prefix, number = made.name.rsplit("-", 1)
        brought, session = await it.produce(f"{prefix}-{int(number) + 1}")
        brought.publish(numbered(brought.name, 1_000), 0.0)
        await wait_until(lambda: len(session.answers) == 1)
        brought.close_nowait()
        following, _ = await it.produce()
        assert following.name != brought.name
        assert following.last_sequence_id == -1
