"""Topics are loaded, unloaded and deleted. Clients notice as little as possible."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import process_time
from typing import TYPE_CHECKING, Any

import pytest
from fakes.cluster_state import ClusterState
from fakes.place import Place, place
from support import settle, wait_until

from magnetar.broker.broker import CLOSES_PER_TURN, RELEASE_TIMEOUT_S, Broker
from magnetar.broker.errors import (
    BrokerError,
    BundleUnavailable,
    IsPartitioned,
    TooManyRequests,
    TopicInUse,
    TopicNotFound,
)
from magnetar.broker.life import LifeConfig
from magnetar.broker.loads import TopicLoads
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.log.position import LATEST
from magnetar.broker.topic.contract import CloseReason
from magnetar.broker.topic.topic import PersistentTopic, TopicState
from magnetar.metadata import codec, paths
from magnetar.metadata.model import TopicTombstone
from magnetar.metadata.policies import (
    InactiveMode,
    InactiveTopicDeletion,
    Policies,
    Retention,
    TopicPolicies,
)
from magnetar.metadata.store import ABSENT
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import Domain, TopicName

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from fakes.wire import WireClient


TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)
OWN = paths.topic_policies("public", "default", "persistent", "t")
SCHEMA = paths.schema("public", "default", "t")


async def set_policies(here: Place, policies: Policies) -> None:
    value = codec.encode_topic_policies(TopicPolicies(policies))
    await here.store.put(OWN, value, expected=ABSENT)


async def subscribe_answer(client: WireClient, **fields: object) -> object:
    body = pb.CommandSubscribe(
        topic=TOPIC, subscription="s", subType=pb.CommandSubscribe.Exclusive, consumer_id=1
    )
    for name, value in fields.items():
        setattr(body, name, value)
    return await client.ask(body)


# ---- deleting ------------------------------------------------------------------------------------


async def test_a_topic_with_clients_is_deleted_only_by_force() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        with pytest.raises(TopicInUse, match="1 connected producers"):
            await here.broker.delete_topic(NAME, force=False)
        await here.broker.delete_topic(NAME, force=True)
        await client.expect(pb.CommandCloseProducer)
        assert here.broker.topics == []
        assert await here.store.get(topic_path(NAME)) is None
        assert here.ledgers.ledgers == {}


async def test_a_forced_deletion_is_not_refused_with_one_without_force() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        async with asyncio.TaskGroup() as group:
            refused = group.create_task(_refusal(here.broker.delete_topic(NAME, force=False)))
            await asyncio.sleep(0)
            group.create_task(here.broker.delete_topic(NAME, force=True))
        assert refused.result() is TopicInUse
        assert not await here.broker.exists(NAME)


async def test_a_creation_that_meets_a_lookup_of_the_absent_topic_creates_it() -> None:
    async with place() as here:
        read = "get", topic_path(NAME)
        async with asyncio.TaskGroup() as group:
            creating = group.create_task(here.broker.create_topic(NAME))
            await asyncio.sleep(0)  # the creation reads whether the topic exists
            here.store.gates[read] = asyncio.Event()
            looking = group.create_task(_refusal(here.broker.topic(NAME, create=False)))
            await settle()
            assert here.store.held == [read]
            assert not creating.done()
            here.store.gates.pop(read).set()
        assert looking.result() is TopicNotFound
        assert await here.broker.exists(NAME)


async def test_a_creation_waits_for_the_deletion_of_the_former_topic() -> None:
    async with place() as here:
        await here.broker.locate(NAME, authoritative=True)
        await here.broker.create_topic(NAME)
        tombstone = "put", paths.deleted_topic(str(NAME))
        here.store.gates[tombstone] = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(here.broker.delete_topic(NAME, force=False))
            await wait_until(lambda: here.store.held == [tombstone])
            here.store.gates.pop(tombstone).set()
            here.store.gates[tombstone] = asyncio.Event()
            await wait_until(lambda: len(here.store.held) == 2)  # the record is still there
            creating = group.create_task(here.broker.create_topic(NAME))
            await settle()
            assert not creating.done()
            here.store.gates.pop(tombstone).set()
        assert await here.broker.exists(NAME)


async def test_a_topic_has_its_partitions_while_a_request_looks_for_its_statistics() -> None:
    async with place() as here:
        await here.broker.create_partitioned_topic(NAME, 3, {})
        await here.broker.locate(NAME, authoritative=True)
        read = "get", topic_path(NAME)
        here.store.gates[read] = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(_refusal(here.broker.topic(NAME, create=False)))
            await wait_until(lambda: here.store.held == [read])
            assert await here.broker.partitions_of(NAME, create=True) == 3
            here.store.gates.pop(read).set()
        assert looking.result() is IsPartitioned


async def test_an_absent_non_persistent_topic_is_not_listed_while_a_request_looks_for_it() -> None:
    name = TopicName.parse("non-persistent://public/default/t")
    async with place() as here:
        await here.broker.locate(name, authoritative=True)
        path = paths.partitioned_topic(name.tenant, name.namespace, name.domain, name.topic)
        read = "get", path
        here.store.gates[read] = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(_refusal(here.broker.topic(name, create=False)))
            await wait_until(lambda: here.store.held == [read])
            assert await here.broker.topics_of(name.namespace_name, tuple(Domain)) == []
            here.store.gates.pop(read).set()
        assert looking.result() is TopicNotFound


async def test_a_topic_that_does_not_exist_is_not_deleted() -> None:
    async with place() as here:
        with pytest.raises(TopicNotFound):
            await here.broker.delete_topic(NAME, force=True)


async def test_a_deleted_topic_takes_policies_and_subscriptions_along() -> None:
    async with place() as here:
        await set_policies(here, Policies(message_ttl_s=5))
        topic = await here.broker.topic(NAME)
        await topic.ensure_subscription("s", topic.log.confirmed)
        await here.broker.delete_topic(NAME, force=False)
        assert await here.store.get(OWN) is None
        await settle()
        topic = await here.broker.topic(NAME)
        assert dict(topic.subscriptions) == {}
        assert topic.policies.effective.message_ttl_s == 0


async def test_a_new_topic_gets_no_ledger_id_below_those_of_a_deleted_topic() -> None:
    async with place() as here:
        tombstone = TopicTombstone("1" * 32, epoch=3, deleted_ms=0, ledger_min=1_501)
        path = paths.deleted_topic(str(NAME))
        await here.store.put(path, codec.encode_tombstone(tombstone), expected=ABSENT)
        topic = await here.broker.topic(NAME)
        assert isinstance(topic, PersistentTopic)
        assert topic.log.owned_record.record.ledger_min == 1_501


@pytest.mark.parametrize("kind", ["producer", "consumer"])
async def test_a_schema_that_is_being_added_is_deleted_with_the_topic(kind: str) -> None:
    async with place() as here:
        await here.broker.topic(NAME)
        client = await here.client()
        added = "put", SCHEMA
        here.store.gates[added] = asyncio.Event()
        schema = pb.Schema(name="R", schema_data=b'{"type": "string"}', type=pb.Schema.Avro)
        ask = client.produce if kind == "producer" else client.subscribe
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(ask(TOPIC, schema=schema))
            await wait_until(lambda: here.store.held == [added])
            deleting = tasks.create_task(here.broker.delete_topic(NAME, force=True))
            await settle()
            assert not deleting.done()
            here.store.gates[added].set()
        assert answer.result().error == pb.ServiceNotReady
        assert await here.store.get(SCHEMA) is None
        assert not await here.broker.exists(NAME)


async def test_clients_that_reconnect_do_not_create_a_deleted_topic_again() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        await client.subscribe(TOPIC)
        await here.broker.delete_topic(NAME, force=True)
        await client.expect(pb.CommandCloseProducer)
        await client.expect(pb.CommandCloseConsumer)
        refused = await client.produce(TOPIC)
        assert refused.error == pb.TopicNotFound
        refused = await client.subscribe(TOPIC)
        assert refused.error == pb.TopicNotFound
        assert not await here.broker.exists(NAME)


async def test_clients_that_reconnect_anew_do_not_create_a_deleted_topic() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC, producer_name="p")
        await subscribe_answer(client, consumer_name="c")
        await here.broker.delete_topic(NAME, force=True)
        again = await here.client()
        refused = await again.produce(TOPIC, producer_name="p")
        assert refused.error == pb.TopicNotFound
        refused = await again.produce(TOPIC, producer_id=2, producer_name="q", epoch=1)
        assert refused.error == pb.TopicNotFound
        refused = await subscribe_answer(again, consumer_name="c")
        assert refused.error == pb.TopicNotFound  # type: ignore[attr-defined]
        assert not await here.broker.exists(NAME)


async def test_a_thousand_refused_requests_check_the_deleted_topic_once_each() -> None:
    async with place() as here:
        await here.broker.topic(NAME)
        await here.broker.delete_topic(NAME, force=True)
        began_s = process_time()
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(_refusal(here.broker.topic(NAME, reconnects=True)))
                for _ in range(1_000)
            ]
            created = group.create_task(here.broker.topic(NAME))
        assert process_time() - began_s < 2.0  # 0.1 s; 5 s when each one began an opening
        assert {task.result() for task in asked} == {TopicNotFound}
        assert created.result().name == NAME


async def _refusal(asked: Coroutine[object, object, object]) -> type[Exception] | None:
    try:
        await asked
    except BrokerError as error:
        return type(error)
    return None


async def test_a_new_client_creates_a_deleted_topic_again() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        epoch = here.topic.log.owned_record.epoch
        await here.broker.delete_topic(NAME, force=True)
        await client.expect(pb.CommandCloseProducer)
        other = await here.client()
        assert isinstance(await other.produce(TOPIC), pb.CommandProducerSuccess)
        assert here.topic.log.owned_record.epoch > epoch
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)


async def test_a_request_during_the_deletion_waits_for_its_end() -> None:
    async with place() as here:
        await here.broker.topic(NAME)
        async with asyncio.TaskGroup() as group:
            group.create_task(here.broker.delete_topic(NAME, force=True))
            await asyncio.sleep(0)
            client = await here.client()
            assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)


# ---- unloading -----------------------------------------------------------------------------------

QUICK = LifeConfig(idle_unload_s=10.0, inactive_check_s=1.0)


async def test_an_idle_topic_is_unloaded_and_the_next_request_loads_it() -> None:
    async with place(life=QUICK) as here:
        client = await here.client()
        await client.produce(TOPIC)
        await asyncio.sleep(25)
        assert len(here.broker.topics) == 1, "the topic has a producer"
        await client.ask(pb.CommandCloseProducer(producer_id=1))
        await asyncio.sleep(25)
        assert here.broker.topics == []
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)


async def test_a_request_that_meets_the_unloading_loads_the_topic_again() -> None:
    async with place(life=QUICK) as here:
        await here.broker.topic(NAME)
        first = here.topic
        client = await here.client()
        await wait_until(lambda: first.state is not TopicState.OPEN, what="the unloading")
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)
        assert here.topic is not first


async def test_a_visit_of_a_closed_topic_does_not_unload_the_one_that_replaces_it() -> None:
    async with place() as here:
        closed = await here.broker.topic(NAME)
        await asyncio.sleep(60)
        await here.broker.unload_topic(NAME)
        read = "get", topic_path(NAME)
        here.store.gates[read] = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(here.broker.topic(NAME))
            await wait_until(lambda: here.store.held == [read])
            group.create_task(here.broker._unload_idle(10.0, closed))
            await settle()
            here.store.gates.pop(read).set()
        await settle()
        assert here.broker.topics == [opening.result()]


@pytest.mark.parametrize("turns", [1, 2, 4, 8])
async def test_an_unload_that_is_cancelled_leaves_no_closed_topic_behind(turns: int) -> None:
    """An administrator's request is cancelled at its time limit."""
    async with place() as here, asyncio.TaskGroup() as group:
        await here.broker.topic(NAME)
        unload = group.create_task(here.broker.unload_topic(NAME))
        for _ in range(turns):
            await asyncio.sleep(0)
        unload.cancel()
        await settle()
        client = await here.client()
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)
        assert here.topic.state is TopicState.OPEN


async def test_a_cancelled_second_unload_leaves_the_topic_to_the_first() -> None:
    async with place() as here, asyncio.TaskGroup() as group:
        topic = await here.broker.topic(NAME)
        first, second = (group.create_task(here.broker.unload_topic(NAME)) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        assert here.broker.topics == [topic], "the first unload still closes the topic"
        await first
        assert here.broker.topics == []


async def test_a_cancelled_unload_leaves_the_topic_to_its_deletion() -> None:
    async with place() as here, asyncio.TaskGroup() as group:
        topic = await here.broker.topic(NAME)
        with topic.held():  # delays the deletion
            deletion = group.create_task(here.broker.delete_topic(NAME, force=True))
            await settle()
            unload = group.create_task(here.broker.unload_topic(NAME))
            await settle()
            unload.cancel()
            await settle()
            assert here.broker.topics == [topic], "a request would open the topic again"
        await deletion
        assert here.broker.topics == []


@pytest.mark.parametrize("fails", [False, True])
async def test_the_closes_of_many_topics_begin_in_slices(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """10,000 closes in one turn of the loop take 300 ms."""
    number, begun, in_turn = 5 * CLOSES_PER_TURN, 0, [0]
    original = Broker._close

    async def close(broker: Broker, *arguments: Any, **options: Any) -> None:
        nonlocal begun
        begun += 1
        await original(broker, *arguments, **options)

    async with place() as here:
        broker = here.broker
        for place_ in range(number):
            await broker.topic(TopicName.parse(f"{TOPIC}{place_}"))
        monkeypatch.setattr(Broker, "_close", close)
        async with asyncio.TaskGroup() as unloads:
            if fails:
                for topic in broker.topics:
                    topic._on_bug(RuntimeError("a bug"))
            else:
                for bundle in broker._owners.held:
                    unloads.create_task(broker.unload_bundle(bundle))
            while broker.served:
                before = begun
                await asyncio.sleep(0)
                in_turn.append(begun - before)
        assert begun == number
        assert max(in_turn) == CLOSES_PER_TURN


async def test_a_topic_with_a_backlog_stays_loaded() -> None:
    async with place(life=QUICK) as here:
        client = await here.client()
        await client.produce(TOPIC)
        await client.subscribe(TOPIC)
        await client.publish("a")
        await client.expect(pb.CommandSendReceipt)
        await client.ask(pb.CommandCloseProducer(producer_id=1))
        await client.ask(pb.CommandCloseConsumer(consumer_id=1))
        await asyncio.sleep(60)
        assert len(here.broker.topics) == 1


# ---- inactive topics -----------------------------------------------------------------------------


async def test_a_topic_that_is_used_while_its_deletion_begins_stays() -> None:
    """A client publishes and leaves while the broker reads the registrations of the others."""
    async with place(life=QUICK) as here:
        await set_policies(here, inactive(InactiveMode.SUBSCRIPTIONS_CAUGHT_UP))
        topic = await here.broker.topic(NAME)
        await topic.ensure_subscription("s", LATEST)
        read, path = asyncio.Event(), paths.broker_available(here.broker.me.broker)
        here.store.gates["get", path] = read
        await wait_until(lambda: ("get", path) in here.store.held, deadline_s=60)
        client = await here.client()
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)
        await client.publish()
        await client.expect(pb.CommandSendReceipt)
        await client.send(pb.CommandCloseProducer(producer_id=1, request_id=9))
        await client.expect(pb.CommandSuccess)
        read.set()
        await asyncio.sleep(2.0)
        topic = await here.broker.stored_topic(NAME, create=False)
        assert topic.subscriptions["s"].cursor.backlog_entries == 1


def inactive(mode: InactiveMode) -> Policies:
    return Policies(inactive_topic_deletion=InactiveTopicDeletion(True, mode, 30))


async def test_an_inactive_topic_without_subscriptions_is_deleted() -> None:
    async with place(life=QUICK) as here:
        await set_policies(here, inactive(InactiveMode.NO_SUBSCRIPTIONS))
        client = await here.client()
        await client.produce(TOPIC)
        await asyncio.sleep(45)
        assert await here.broker.exists(NAME), "the topic has a producer"
        await client.ask(pb.CommandCloseProducer(producer_id=1))
        await asyncio.sleep(25)
        assert await here.broker.exists(NAME)
        await asyncio.sleep(10)
        assert not await here.broker.exists(NAME)


async def test_short_visits_keep_a_topic_active() -> None:
    async with place(life=replace(QUICK, inactive_check_s=20.0)) as here:
        await set_policies(here, inactive(InactiveMode.NO_SUBSCRIPTIONS))
        client = await here.client()
        for _ in range(20):
            await client.produce(TOPIC)
            await client.ask(pb.CommandCloseProducer(producer_id=1))
            await asyncio.sleep(10)
        assert await here.broker.exists(NAME)


@pytest.mark.parametrize("mode", InactiveMode)
async def test_a_subscription_keeps_a_topic_by_its_mode(mode: InactiveMode) -> None:
    async with place(life=QUICK) as here:
        await set_policies(here, inactive(mode))
        topic = await here.broker.topic(NAME)
        await topic.ensure_subscription("s", topic.log.confirmed)
        await asyncio.sleep(100)
        assert await here.broker.exists(NAME) == (mode is InactiveMode.NO_SUBSCRIPTIONS)


async def test_a_backlog_keeps_a_topic() -> None:
    async with place(life=QUICK) as here:
        await set_policies(here, inactive(InactiveMode.SUBSCRIPTIONS_CAUGHT_UP))
        client = await here.client()
        await client.produce(TOPIC)
        await client.subscribe(TOPIC)
        await client.publish("a")
        await client.expect(pb.CommandSendReceipt)
        await client.ask(pb.CommandCloseProducer(producer_id=1))
        await client.ask(pb.CommandCloseConsumer(consumer_id=1))
        await asyncio.sleep(100)
        assert await here.broker.exists(NAME)


@pytest.mark.parametrize(("time_s", "kept"), [(0, False), (60, False), (1_000, True), (-1, True)])
async def test_retention_delays_the_deletion(time_s: int, kept: bool) -> None:
    async with place(life=QUICK) as here:
        policies = inactive(InactiveMode.NO_SUBSCRIPTIONS)
        await set_policies(here, replace(policies, retention=Retention(time_s, -1)))
        client = await here.client()
        await client.produce(TOPIC)
        await client.publish("a")
        await client.expect(pb.CommandSendReceipt)
        await client.ask(pb.CommandCloseProducer(producer_id=1))
        await asyncio.sleep(200)
        assert await here.broker.exists(NAME) == kept


async def test_stale_policies_delete_no_topic() -> None:
    async with place(life=QUICK) as here:
        await set_policies(here, inactive(InactiveMode.NO_SUBSCRIPTIONS))
        await here.broker.topic(NAME)
        here.store.gates["get", OWN] = asyncio.Event()
        value = codec.encode_topic_policies(TopicPolicies(Policies(message_ttl_s=1)))
        await here.store.put(OWN, value, expected=0)  # the read of this value does not end
        await asyncio.sleep(100)
        assert len(here.broker.topics) == 1
        here.store.gates.pop(("get", OWN)).set()


# ---- loading -------------------------------------------------------------------------------------


async def test_loads_beyond_the_limit_wait_in_fifo_order() -> None:
    loads = TopicLoads(loads_max=2, timeout_s=60.0)
    begun: list[int] = []

    async def load(number: int) -> None:
        async with loads.slot("t"):
            begun.append(number)
            assert loads.running <= 2
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        for number in range(7):
            group.create_task(load(number))
        await asyncio.sleep(0.5)
        assert begun == [0, 1]
        assert loads.waiting == 5
    assert begun == list(range(7))
    assert (loads.running, loads.waiting) == (0, 0)


async def test_a_load_above_the_limit_of_the_queue_is_refused() -> None:
    loads = TopicLoads(loads_max=1, timeout_s=60.0, waiting_max=1)

    async def load() -> None:
        async with loads.slot("t"):
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        group.create_task(load())
        group.create_task(load())
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests):
            await load()
    assert loads.running == 0


async def test_a_load_that_was_cancelled_while_it_waited_passes_its_turn_on() -> None:
    loads = TopicLoads(loads_max=1, timeout_s=60.0)
    begun: list[int] = []

    async def load(number: int) -> None:
        async with loads.slot("t"):
            begun.append(number)
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(load(number)) for number in range(4)]
        await asyncio.sleep(0.5)
        tasks[1].cancel()
        await asyncio.sleep(0.5)
        tasks[2].cancel()  # the task may have got its turn in this moment, or not
    assert begun[0] == 0
    assert begun[-1] == 3
    assert (loads.running, loads.waiting) == (0, 0)


async def test_loads_that_are_cancelled_together_end_as_cancelled() -> None:
    loads = TopicLoads(loads_max=1, timeout_s=60.0)

    async def load() -> None:
        async with loads.slot("t"):
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(load()) for _ in range(4)]
        await asyncio.sleep(0.5)
        for task in tasks[:3]:  # the first one runs, the others wait
            task.cancel()
    assert [task.cancelled() for task in tasks] == [True, True, True, False]
    assert (loads.running, loads.waiting) == (0, 0)


async def test_a_load_that_takes_too_long_ends_and_the_next_one_succeeds() -> None:
    async with place(life=LifeConfig(load_timeout_s=5.0)) as here:
        client = await here.client()
        put = ("put", topic_path(NAME))
        here.store.gates[put] = asyncio.Event()
        refused = await client.produce(TOPIC)
        assert refused.error == pb.ServiceNotReady
        here.store.gates.pop(put).set()
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)


async def test_a_stop_does_not_wait_for_the_loads_in_the_queue() -> None:
    names = [TopicName.parse(f"t{number}") for number in range(100)]
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        async with place(life=LifeConfig(loads_max=1)) as here:
            await here.broker.locate(NAME, authoritative=True)
            for name in names:
                here.store.gates["get", topic_path(name)] = asyncio.Event()
                await here.broker.locate(name, authoritative=True)
            asked = [group.create_task(_refusal(here.broker.topic(name))) for name in names]
            await settle()
            stopped_s = loop.time()
        assert loop.time() - stopped_s <= RELEASE_TIMEOUT_S
    assert asked[-1].result() is BundleUnavailable


async def test_a_topic_whose_opening_other_code_cancelled_can_be_opened_again() -> None:
    async with place() as here:
        await here.broker.locate(NAME, authoritative=True)
        here.store.strays.add(("get", topic_path(NAME)))
        assert await _refusal(here.broker.topic(NAME)) is BundleUnavailable
        topic = await here.broker.topic(NAME)
        assert topic.name == NAME


async def test_an_opening_that_is_cancelled_before_its_first_step_is_settled() -> None:
    async with place() as here, asyncio.TaskGroup() as group:
        await here.broker.locate(NAME, authoritative=True)
        asking = group.create_task(_refusal(here.broker.topic(NAME)))
        for _ in range(10):
            if NAME not in here.broker._topics:
                await asyncio.sleep(0)
        opening = here.broker._topics[NAME].opening
        assert opening is not None
        opening.cancel()
        assert await asking is BundleUnavailable
        topic = await here.broker.topic(NAME)
        assert topic.name == NAME


async def test_a_topic_that_failed_and_was_opened_again_is_not_closed() -> None:
    async with place() as here:
        await here.broker.locate(NAME, authoritative=True)
        failed = await here.broker.topic(NAME)
        assert isinstance(failed, PersistentTopic)
        await here.broker._close(NAME, CloseReason.UNLOADED)
        again = await here.broker.topic(NAME)
        await here.broker._close_all([NAME], CloseReason.TOPIC_FAILED, only={NAME: failed})
        assert not again.closed
        assert here.broker.topics == [again]


async def test_idle_topics_cost_no_task() -> None:
    async with place(ClusterState()) as here:
        await here.broker.topic(NAME)
        await settle()
        before = len(asyncio.all_tasks())
        for number in range(50):
            topic = await here.broker.topic(TopicName.parse(f"t{number}"))
            await topic.ensure_subscription("s", topic.log.confirmed)
        await settle()
        assert len(asyncio.all_tasks()) == before


# ---- unknown namespaces --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["producer", "consumer", "lookup"])
async def test_a_topic_of_an_unknown_namespace_is_refused_by_name(command: str) -> None:
    async with place() as here:
        client = await here.client()
        topic = "persistent://acme/orders/t"
        if command == "producer":
            answer = await client.produce(topic)
        elif command == "consumer":
            answer = await client.subscribe(topic)
        else:
            answer = await client.ask(pb.CommandLookupTopic(topic=topic))
        assert answer.error == pb.TopicNotFound
        assert "acme/orders" in answer.message
        assert await here.store.children(paths.TENANTS) == ["public"]
