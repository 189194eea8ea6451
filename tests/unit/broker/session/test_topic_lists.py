"""GET_TOPICS_OF_NAMESPACE, WATCH_TOPIC_LIST and PARTITIONED_METADATA over a connection."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fakes.place import place
from support import wait_until

from magnetar.broker.catalog.listing import compiled, hash_of
from magnetar.broker.catalog.partitioned import PartitionedTopics
from magnetar.broker.session.watchers import LIST_BYTES_MAX, WATCHERS_MAX, _Watcher
from magnetar.metadata import codec, paths
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import TopicRecord
from magnetar.metadata.policies import AutoTopicCreation, NamespaceRecord, Policies
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.protos.names import NamespaceName, TopicName
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.steps import STEP_CPU_S_MAX, StepMeter
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    from fakes.place import Place
    from fakes.wire import WireClient

NAMESPACE = "public/default"
EURO = "\N{EURO SIGN}"  # three bytes
Mode = pb.CommandGetTopicsOfNamespace.Mode


def full(*topics: str) -> list[str]:
    return [str(TopicName.parse(topic)) for topic in topics]


async def create(here: Place, *topics: str) -> None:
    for topic in topics:
        name = TopicName.parse(topic)
        await here.broker.locate(name, authoritative=True)
        await here.broker.create_topic(name)


async def ask(client: WireClient, **fields: Any) -> pb.CommandGetTopicsOfNamespaceResponse:
    fields = {"namespace": NAMESPACE, **fields}
    body = await client.ask(pb.CommandGetTopicsOfNamespace(request_id=0, **fields))
    assert isinstance(body, pb.CommandGetTopicsOfNamespaceResponse)
    return body


async def test_a_pattern_is_applied_and_the_answer_is_marked_as_filtered() -> None:
    async with place() as here:
        client = await here.client()
        await create(here, "a1", "a2", "b")
        everything = await ask(client)
        assert sorted(everything.topics) == full("a1", "a2", "b")
        assert not everything.filtered
        found = await ask(client, topics_pattern="persistent://public/default/a.*")
        assert sorted(found.topics) == full("a1", "a2")
        assert found.filtered
        assert found.topics_hash == hash_of(full("a1", "a2"))


async def test_a_pattern_that_backtracks_is_left_to_the_client() -> None:
    async with place() as here:
        client = await here.client()
        await create(here, "a1", "b")
        found = await ask(client, topics_pattern=r"public/default/(a+)+\1")
        assert sorted(found.topics) == full("a1", "b")
        assert not found.filtered


async def test_an_equal_hash_needs_no_list() -> None:
    async with place() as here:
        client = await here.client()
        await create(here, "a", "b")
        same = await ask(client, topics_hash=hash_of(full("b", "a")))
        assert (list(same.topics), same.changed) == ([], False)
        other = await ask(client, topics_hash="0")
        assert (len(other.topics), other.changed) == (2, True)


async def test_system_topics_are_hidden() -> None:
    async with place() as here:
        client = await here.client()
        await create(here, "a")
        path = paths.topic("public", "default", "persistent", "__change_events")
        await here.store.put(path, b"", expected=-1)
        assert list((await ask(client)).topics) == full("a")


async def watch(client: WireClient, pattern: str, watcher_id: int = 1, **fields: Any) -> Any:
    return await client.ask(
        pb.CommandWatchTopicList(
            namespace=NAMESPACE,
            topics_pattern=pattern,
            watcher_id=watcher_id,
            request_id=0,
            **fields,
        )
    )


async def test_a_watcher_is_notified_of_new_and_deleted_topics() -> None:
    async with place() as here:
        client = await here.client()
        await create(here, "a1", "b1")
        first = await watch(client, "public/default/a.*", 7)
        assert isinstance(first, pb.CommandWatchTopicListSuccess)
        assert list(first.topic) == full("a1")
        assert first.topics_hash == hash_of(full("a1"))
        await create(here, "b2", "a2")
        update: Any = await client.expect(pb.CommandWatchTopicUpdate)
        assert (update.watcher_id, list(update.new_topics)) == (7, full("a2"))
        assert update.topics_hash == hash_of(full("a1", "a2"))
        path = paths.topic("public", "default", "persistent", "a1")
        found = await here.store.get(path)
        assert found is not None
        await here.store.delete(path, expected=found.version)
        update = await client.expect(pb.CommandWatchTopicUpdate)
        assert (list(update.new_topics), list(update.deleted_topics)) == ([], full("a1"))


async def test_a_watcher_with_an_equal_hash_gets_no_first_list() -> None:
    async with place() as here:
        client = await here.client()
        await create(here, "a1")
        first = await watch(client, ".*", topics_hash=hash_of(full("a1")))
        assert list(first.topic) == []


async def test_a_watcher_ends_with_its_command_and_with_its_connection() -> None:
    async with place() as here:
        client, other = await here.client(), await here.client()
        await watch(client, ".*")
        await watch(other, ".*")
        done = await client.ask(pb.CommandWatchTopicListClose(request_id=0, watcher_id=1))
        assert isinstance(done, pb.CommandSuccess)
        await create(here, "a1")
        await other.expect(pb.CommandWatchTopicUpdate)
        assert await client.ask(pb.CommandWatchTopicListClose(request_id=0, watcher_id=1))
        await other.wire.break_off()
        await here.serving[1]
        assert here.broker.watched_lists._watched == {}


async def test_a_pattern_that_cannot_be_watched_is_refused() -> None:
    async with place() as here:
        client = await here.client()
        refused = await watch(client, "(?=a)a")
        assert isinstance(refused, pb.CommandError)
        assert refused.error == pb.NotAllowedError
        assert "only plain groups" in refused.message


async def test_a_connection_has_a_limited_number_of_watchers() -> None:
    async with place() as here:
        client = await here.client()
        for number in range(WATCHERS_MAX):
            await watch(client, ".*", number)
        assert isinstance(await watch(client, ".*", 0), pb.CommandWatchTopicListSuccess)
        refused = await watch(client, ".*", WATCHERS_MAX)
        assert isinstance(refused, pb.CommandError)
        assert "100 watchers" in refused.message


# ---- automatic creation --------------------------------------------------------------------------


async def allow(here: Place, enabled: bool, partitions: int) -> None:
    """The policy of the namespace."""
    name = TopicName.parse("x")
    await here.broker.policies.ready(name.namespace_name)
    path = paths.namespace("public", "default")
    found = await here.store.get(path)
    assert found is not None
    policies = Policies(auto_topic_creation=AutoTopicCreation(enabled, partitions))
    value = codec.encode_namespace(NamespaceRecord(policies=policies))
    await here.store.put(path, value, expected=found.version)
    while True:
        shared = here.broker.policies.policies_of_namespace(name.namespace_name)
        if shared.auto_topic_creation == policies.auto_topic_creation:
            return
        await here.store.sync(path)


async def partitions_of(client: WireClient, topic: str, create: bool = True) -> Any:
    return await client.ask(
        pb.CommandPartitionedTopicMetadata(
            topic=topic, request_id=0, metadata_auto_creation_enabled=create
        )
    )


@pytest.mark.parametrize("deleting", [False, True])
async def test_another_request_creates_the_topic_during_the_automatic_creation(
    deleting: bool,
) -> None:
    name = TopicName.parse("t")
    path = paths.partitioned_topic(name.tenant, name.namespace, name.domain, name.topic)
    write = "put", path
    async with place() as here, asyncio.TaskGroup() as group:
        await allow(here, True, 3)
        here.store.gates[write] = asyncio.Event()
        answering = group.create_task(partitions_of(await here.client(), "t"))
        await wait_until(lambda: here.store.held == [write])
        other = PartitionedTopics(MemoryStore(here.store._shared), SystemClock())
        await other.create(name, 2)
        if deleting:
            await other.begin_deletion(name)
        here.store.gates.pop(write).set()
        answer = await answering
        if deleting:
            assert (answer.response, answer.error) == (answer.Failed, pb.TopicNotFound)
        else:
            assert (answer.response, answer.partitions) == (answer.Success, 2)


async def test_a_client_may_try_again_to_create_a_topic_that_is_being_deleted() -> None:
    """The topic has no partitions. The new topic gets partitions by policy."""
    path = paths.topic("public", "default", "persistent", "t")
    record = TopicRecord(3, incarnation="1" * 32, deleted=True)
    async with place() as here:
        client = await here.client()
        await allow(here, True, 3)
        version = await here.store.put(path, codec.encode_topic(record), expected=-1)
        answer = await partitions_of(client, "t")
        assert (answer.response, answer.error) == (answer.Failed, pb.ServiceNotReady)
        await here.store.delete(path, expected=version)
        answer = await partitions_of(client, "t")
        assert (answer.response, answer.partitions) == (answer.Success, 3)


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not asked"])
@pytest.mark.parametrize("partitions", [0, 3])
@pytest.mark.parametrize("enabled", [True, False], ids=["allowed", "forbidden"])
@pytest.mark.parametrize("exists", ["", "plain", "partitioned"])
async def test_partitioned_metadata_creates_by_policy(
    exists: str, enabled: bool, partitions: int, asked: bool
) -> None:
    async with place() as here:
        client = await here.client()
        if exists == "plain":
            await create(here, "t")
        elif exists == "partitioned":
            await here.broker.create_partitioned_topic(TopicName.parse("t"), 2, {})
        await allow(here, enabled, partitions)
        answer = await partitions_of(client, "t", asked)
        if not exists and not (enabled and asked):
            assert answer.error == pb.TopicNotFound
            assert answer.response == answer.Failed
        else:
            expected = {"": partitions, "plain": 0, "partitioned": 2}[exists]
            assert (answer.response, answer.partitions) == (answer.Success, expected)
        listed = sorted((await ask(client)).topics)
        if exists == "plain":
            assert listed == full("t")
        elif exists == "partitioned" or (partitions and enabled and asked):
            assert len(listed) == (2 if exists else 3)
        else:
            assert listed == []


@pytest.mark.parametrize("enabled", [True, False], ids=["allowed", "forbidden"])
async def test_producers_and_consumers_create_by_policy(enabled: bool) -> None:
    async with place() as here:
        client = await here.client()
        await allow(here, enabled, 0)
        for topic, opened in (
            ("t", await client.produce("t")),
            ("u", await client.subscribe("u", "s", consumer_id=2)),
        ):
            created = await here.broker.exists(TopicName.parse(topic))
            assert created == enabled
            assert isinstance(opened, pb.CommandError) != enabled
            if not enabled:
                assert opened.error == pb.TopicNotFound


async def test_partitions_are_created_whatever_the_policy_says() -> None:
    async with place() as here:
        client = await here.client()
        await here.broker.create_partitioned_topic(TopicName.parse("t"), 2, {})
        await allow(here, False, 0)
        path = paths.topic("public", "default", "persistent", "t-partition-1")
        found = await here.store.get(path)
        assert found is not None
        await here.store.delete(path, expected=found.version)  # as if a crash had come before it
        opened = await client.produce("t-partition-1")
        assert isinstance(opened, pb.CommandProducerSuccess)


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        ("t", pb.NotAllowedError),
        ("t-partition-2", pb.NotAllowedError),
        ("other-partition-0", pb.NotAllowedError),
        ("__change_events", pb.NotAllowedError),
        ("orders__transaction_pending_ack", pb.NotAllowedError),
        ("persistent://pulsar/system/transaction_coordinator_assign", pb.NotAllowedError),
    ],
)
async def test_reserved_names_are_refused_by_name(topic: str, code: int) -> None:
    async with place() as here:
        client = await here.client()
        await here.broker.create_partitioned_topic(TopicName.parse("t"), 2, {})
        refused = await client.produce(topic)
        assert isinstance(refused, pb.CommandError)
        assert refused.error == code
        assert str(TopicName.parse(topic)) in refused.message
        if topic != "t":
            metadata = await partitions_of(client, topic)
            assert metadata.error == code


async def test_a_watcher_that_is_replaced_before_its_first_list_is_answered() -> None:
    """A regression test: the request, and with it the connection, waited for REQUEST_TIMEOUT_S."""
    async with place() as here:
        client = await here.client()
        for _ in range(2):
            body = pb.CommandWatchTopicList(
                request_id=7, watcher_id=1, namespace="public/default", topics_pattern=".*"
            )
            await client.send(body)
        loop = asyncio.get_running_loop()
        began = loop.time()
        answers = {type((await client.receive()).body) for _ in range(2)}
        assert answers == {pb.CommandError, pb.CommandWatchTopicListSuccess}
        assert loop.time() - began < 5


async def test_a_change_that_is_larger_than_a_frame_reaches_all_watchers_in_parts() -> None:
    """A regression test: the error ended the task of all watchers, so later watchers missed the
    change."""
    async with place() as here:
        clients = [await here.client() for _ in range(2)]
        for client in clients:
            await watch(client, ".*")
        topics = full(*[f"{'x' * 900}{number}" for number in range(6_000)])
        for topic in topics:
            name = TopicName.parse(topic)
            path = paths.topic(name.tenant, name.namespace, name.domain, name.topic)
            await here.store.put(path, b"", expected=-1)
        for client in clients:
            seen: list[str] = []
            while len(seen) < len(topics):
                update: Any = await client.expect(pb.CommandWatchTopicUpdate)
                assert len(update.SerializeToString()) < MESSAGE_BYTES_MAX
                seen += update.new_topics
                assert update.topics_hash == hash_of(seen)
            assert sorted(seen) == sorted(topics)


async def test_a_list_of_long_names_is_refused_by_its_bytes_and_not_watched() -> None:
    async with place() as here:
        client = await here.client()
        for number in range(LIST_BYTES_MAX // 900):
            path = paths.topic("public", "default", "persistent", f"{EURO * 300}{number}")
            await here.store.put(path, b"", expected=-1)
        refused = await watch(client, ".*")
        assert isinstance(refused, pb.CommandError)
        assert refused.error == pb.NotAllowedError
        assert here.broker.watched_lists._watched == {}


@pytest.mark.usefixtures("no_collection")
async def test_an_update_of_a_very_long_list_takes_no_long_step() -> None:
    meter, turns, told = StepMeter(), Turns(), []
    began = meter.begin()

    class Measured(Turns):
        async def take(self) -> None:
            nonlocal began
            meter.end("update", began)
            await turns.take()
            began = meter.begin()

    names = {text: TopicName.parse(text) for text in full(*map(str, range(LIST_BYTES_MAX // 32)))}

    async def listed(*_: object) -> dict[str, TopicName]:
        return names

    lists = SimpleNamespace(watch=listed)
    broker = SimpleNamespace(turns=Measured(), watched_lists=lists)
    context: Any = SimpleNamespace(broker=broker, over=False, put_control=told.append)
    watcher = _Watcher(context, 1, NamespaceName.parse(NAMESPACE), ".*")
    await watcher.begin(await compiled(".*", turns))
    new, gone = full("new")[0], full("7")[0]
    meter.kinds.clear()
    began = meter.begin()
    await watcher.on_change({new: TopicName.parse(new)}, {gone: TopicName.parse(gone)})
    meter.end("update", began)
    assert meter.cpu_s_max < STEP_CPU_S_MAX
    assert len(told) == 1
    assert hash_of([*(names.keys() - {gone}), new]).encode() in told[0]
