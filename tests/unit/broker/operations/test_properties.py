"""Properties of topics and subscriptions over the admin API, in the form of Pulsar."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from fakes.admin import admin_of
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.wire import wire_to

from magnetar.broker.log.record_limits import PROPERTIES_BYTES_MAX, PROPERTY_BYTES
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    import httpx

pytestmark = pytest.mark.real_loop

T = "public/default/t"
OF_TOPIC = f"{T}/properties"
OF_SUBSCRIPTION = f"{T}/subscription/s/properties"
PARTITIONS = "application/vnd.partitioned-topic-metadata+json"


async def get(admin: httpx.AsyncClient, path: str) -> Any:
    found = await admin.get(path)
    assert found.status_code == 200, found.text
    return found.json()


async def put(admin: httpx.AsyncClient, path: str, body: Any = None) -> None:
    answer = await admin.put(path, json=body)
    assert answer.status_code == 204, answer.text


async def test_properties_of_a_topic_are_set_merged_and_removed() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await put(admin, T, {"owner": "ann", "tier": ""})
        assert await get(admin, OF_TOPIC) == {"owner": "ann", "tier": ""}
        await put(admin, OF_TOPIC, {"owner": "bob", "é": "x/y"})
        await broker.broker.unload_topic(TopicName.parse("t"))
        assert await get(admin, OF_TOPIC) == {"owner": "bob", "tier": "", "é": "x/y"}
        for _ in range(2):  # the second time, the topic does not have the property
            removed = await admin.delete(OF_TOPIC, params={"key": "é"})
            assert removed.status_code == 204
        assert await get(admin, OF_TOPIC) == {"owner": "bob", "tier": ""}
        await put(admin, OF_TOPIC)
        assert await get(admin, OF_TOPIC) == {"owner": "bob", "tier": ""}


async def test_a_topic_without_a_body_has_no_properties() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        assert (await admin.put(T)).status_code == 204
        assert await get(admin, OF_TOPIC) == {}
        exists = await admin.put(T, json={"a": "b"})
        assert exists.status_code == 409
        assert await get(admin, OF_TOPIC) == {}


async def test_properties_of_the_broker_itself_are_hidden_and_stay() -> None:
    """The broker keeps the epoch of exclusive producers among the properties of the record."""
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        mode = pb.ProducerAccessMode.Exclusive
        await client.produce("t", producer_access_mode=mode)
        [topic] = broker.broker.topics
        own = dict(topic.log.properties)
        assert own
        [key] = own
        await put(admin, OF_TOPIC, {key: "x"})
        assert await get(admin, OF_TOPIC) == {key: "x"}
        await admin.delete(OF_TOPIC, params={"key": key})
        assert await get(admin, OF_TOPIC) == {}
        assert topic.log.properties == own


async def test_a_new_topic_does_not_have_the_properties_of_a_deleted_one() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await put(admin, T, {"a": "b"})
        await admin.delete(T)
        assert (await admin.get(OF_TOPIC)).status_code == 404
        await put(admin, T)
        assert await get(admin, OF_TOPIC) == {}


async def test_a_partitioned_topic_has_its_own_properties() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        body = json.dumps({"partitions": 2, "properties": {"a": "1", "b": "2"}})
        created = await admin.put(
            f"{T}/partitions", content=body, headers={"content-type": PARTITIONS}
        )
        assert created.status_code == 204, created.text
        assert await get(admin, OF_TOPIC) == {"a": "1", "b": "2"}
        await put(admin, OF_TOPIC, {"b": "3", "c": "4"})
        assert (await admin.delete(OF_TOPIC, params={"key": "a"})).status_code == 204
        assert await get(admin, OF_TOPIC) == {"b": "3", "c": "4"}
        metadata = await get(admin, f"{T}/partitions")
        assert metadata["properties"] == {"b": "3", "c": "4"}
        assert metadata["partitions"] == 2
        assert await get(admin, f"{T}-partition-0/properties") == {}


@pytest.mark.parametrize("partitioned", [False, True])
async def test_too_large_properties_of_a_topic_are_refused(partitioned: bool) -> None:
    large = {"a": "x" * (PROPERTIES_BYTES_MAX - PROPERTY_BYTES - 1)}
    too_large = {"a": large["a"] + "x"}
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        if partitioned:
            body = {"partitions": 2, "properties": too_large}
            refused = await admin.put(f"{T}/partitions", json=body)
        else:
            refused = await admin.put(T, json=too_large)
        assert refused.status_code == 507
        assert (await admin.get(OF_TOPIC)).status_code == 404, "no topic was created"
        await put(admin, f"{T}/partitions" if partitioned else T, 2 if partitioned else None)
        await put(admin, OF_TOPIC, large)
        refused = await admin.put(OF_TOPIC, json={"b": "y"})
        assert refused.status_code == 507
        assert refused.json()["error"] == "TopicFull"
        assert f"the limit is {PROPERTIES_BYTES_MAX}" in refused.json()["reason"]
        assert await get(admin, OF_TOPIC) == large


async def test_properties_above_the_limit_can_become_smaller() -> None:
    """An earlier version had no limit for the properties of partitioned topics."""
    large = dict.fromkeys("abc", "x" * PROPERTIES_BYTES_MAX)
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await broker.broker.create_partitioned_topic(TopicName.parse("t"), 2, large)
        assert (await admin.put(OF_TOPIC, json={"d": ""})).status_code == 507
        await put(admin, OF_TOPIC, {"a": ""})
        assert (await admin.delete(OF_TOPIC, params={"key": "b"})).status_code == 204
        assert await get(admin, OF_TOPIC) == {"a": "", "c": large["c"]}


async def test_properties_of_a_subscription_are_replaced_and_durable() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        start = {"ledgerId": -1, "entryId": -1, "properties": {"a": "1"}}
        await put(admin, f"{T}/subscription/s", start)
        assert await get(admin, OF_SUBSCRIPTION) == {"a": "1"}
        await put(admin, OF_SUBSCRIPTION, {"b": "2", "c": "3"})
        stats = await get(admin, f"{T}/stats")
        assert stats["subscriptions"]["s"]["subscriptionProperties"] == {"b": "2", "c": "3"}
        await broker.broker.unload_topic(TopicName.parse("t"))
        assert await get(admin, OF_SUBSCRIPTION) == {"b": "2", "c": "3"}
        await put(admin, OF_SUBSCRIPTION)
        assert await get(admin, OF_SUBSCRIPTION) == {}


async def test_a_subscription_keeps_its_acknowledgements_when_its_properties_change() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await put(admin, f"{T}/subscription/s")
        await client.produce("t")
        for number in range(2):
            await client.publish(sequence_id=number)
            await client.expect(pb.CommandSendReceipt)
        assert (await admin.post(f"{T}/subscription/s/skip/1")).status_code == 204
        await put(admin, OF_SUBSCRIPTION, {"a": "1"})
        await broker.broker.unload_topic(TopicName.parse("t"))
        stats = await get(admin, f"{T}/stats")
        assert stats["subscriptions"]["s"]["msgBacklog"] == 1


async def test_a_subscription_of_all_partitions_has_one_set_of_properties() -> None:
    """Also with names that mean something in statistics."""
    wanted = {"averageMsgSize": "x", "oldestBacklogMessageSubscriptionName": "y", "c": ""}
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await put(admin, f"{T}/partitions", 3)
        missing = await admin.put(OF_SUBSCRIPTION, json=wanted)
        assert missing.status_code == 404
        await put(admin, f"{T}/subscription/s")
        await put(admin, OF_SUBSCRIPTION, wanted)
        assert await get(admin, OF_SUBSCRIPTION) == wanted
        for number in range(3):
            path = f"{T}-partition-{number}/subscription/s/properties"
            assert await get(admin, path) == wanted


async def test_too_large_properties_of_a_subscription_are_refused() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        for number in range(6):
            await put(admin, f"{T}/subscription/{number}")
        answers = [
            await admin.put(f"{T}/subscription/{number}/properties", json={"a": "x" * 60_000})
            for number in range(6)
        ]
        assert [it.status_code for it in answers] == [204] * 5 + [507]
        assert await get(admin, f"{T}/subscription/5/properties") == {}


async def test_the_subscription_of_a_reader_has_no_stored_properties() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await client.subscribe("t", "s", durable=False)
        assert await get(admin, OF_SUBSCRIPTION) == {}
        refused = await admin.put(OF_SUBSCRIPTION, json={"a": "b"})
        assert refused.status_code == 405
        assert refused.json()["error"] == "NotAllowed"


@pytest.mark.parametrize("path", [OF_TOPIC, OF_SUBSCRIPTION])
async def test_properties_of_what_does_not_exist_are_not_found(path: str) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        for _ in range(2):
            for answer in (await admin.get(path), await admin.put(path, json={"a": "b"})):
                assert answer.status_code == 404
            if path == OF_TOPIC:
                assert (await admin.delete(path, params={"key": "a"})).status_code == 404
                return
            await admin.put(T)  # then only the subscription is missing


@pytest.mark.parametrize("body", [[], "a", {"a": 1}, {"a": None}, {"a": "\ud800"}])
async def test_wrong_properties_are_refused(body: Any) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        headers = {"content-type": "application/json"}
        refused = await admin.put(T, content=json.dumps(body), headers=headers)
        assert refused.status_code == 400
        await put(admin, f"{T}/subscription/s")
        for path in (OF_TOPIC, OF_SUBSCRIPTION):
            refused = await admin.put(path, content=json.dumps(body), headers=headers)
            assert refused.status_code == 400, refused.text
        assert (await admin.delete(OF_TOPIC)).status_code == 400, "no key"
