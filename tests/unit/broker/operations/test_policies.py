"""Policies over the admin API: every row of the table at both levels, in Pulsar's form."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fakes.admin import admin_of
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.place import place
from fakes.wire import wire_to
from support import settle, wait_until

from magnetar.broker.errors import TopicNotFound
from magnetar.broker.operations import policies as operations
from magnetar.broker.operations.policies import set_policy
from magnetar.broker.operations.policy_table import QUOTAS, ROWS, PolicyRow
from magnetar.broker.operations.topics import create_topic
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import OutcomeUnknown
from magnetar.metadata.policies import (
    BROKER_DEFAULTS,
    EffectivePolicies,
    Policies,
    TopicPolicies,
)
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    import httpx

pytestmark = pytest.mark.real_loop

NAMESPACE = "namespaces/public/default"
TOPIC = "persistent/public/default/t"

BODIES: dict[str, Any] = {
    "retention": {"retentionTimeInMinutes": 60, "retentionSizeInMB": -1},
    "message_ttl_s": 300,
    "persistence": {
        "bookkeeperEnsemble": 3,
        "bookkeeperWriteQuorum": 2,
        "bookkeeperAckQuorum": 2,
        "managedLedgerMaxMarkDeleteRate": 0.5,
    },
    "deduplication": True,
    "delayed_delivery": {"active": False, "tickTime": 500, "maxDeliveryDelayInMillis": 0},
    "auto_topic_creation": {
        "allowAutoTopicCreation": True,
        "topicType": "partitioned",
        "defaultNumPartitions": 4,
    },
    "auto_subscription_creation": {"allowAutoSubscriptionCreation": False},
    "producers_max": 1,
    "consumers_max": 2,
    "consumers_per_subscription_max": 3,
    "subscriptions_max": 4,
    "unacked_per_consumer_max": 5,
    "unacked_per_subscription_max": 0,
    "publish_rate": {"publishThrottlingRateInMsg": 100, "publishThrottlingRateInByte": -1},
    "dispatch_rate": {
        "dispatchThrottlingRateInMsg": -1,
        "dispatchThrottlingRateInByte": 4096,
        "relativeToPublishRate": False,
        "ratePeriodInSecond": 2,
    },
    "subscription_dispatch_rate": {
        "dispatchThrottlingRateInMsg": 7,
        "dispatchThrottlingRateInByte": 8,
        "relativeToPublishRate": False,
        "ratePeriodInSecond": 1,
    },
    "subscribe_rate": {"subscribeThrottlingRatePerConsumer": 3, "ratePeriodInSecond": 30},
    "subscription_types": ["Exclusive", "Key_Shared"],
    "inactive_topic_deletion": {
        "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
        "maxInactiveDurationSeconds": 90,
        "deleteWhileInactive": True,
    },
    "subscription_expiration_time_minutes": 60,
    "max_message_bytes": 4096,
    "schema_compatibility": "BACKWARD_TRANSITIVE",
    "schema_auto_update": False,
    "schema_validation": True,
}


def test_every_policy_has_a_row() -> None:
    fields = set(EffectivePolicies.__dataclass_fields__)
    quotas = {quota.field for quota in QUOTAS.values()}
    assert {row.field for row in ROWS} | quotas == fields
    assert set(BODIES) == fields - quotas


def paths_of(row: PolicyRow) -> list[tuple[str, str]]:
    """The path where the row is set, and the query parameter that carries the value."""
    namespace = [(f"{NAMESPACE}/{row.namespace_path}", "")] if row.namespace_path else []
    topic = [(f"{TOPIC}/{row.topic_path}", row.topic_parameter)] if row.topic_path else []
    return namespace + topic


async def set_to(admin: httpx.AsyncClient, path: str, parameter: str, body: Any) -> httpx.Response:
    if parameter:
        return await admin.post(path, params={parameter: body})
    return await admin.post(path, json=body)


async def test_every_policy_is_set_read_and_removed() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        await admin.put(TOPIC)
        for row in ROWS:
            for path, parameter in paths_of(row):
                await check_life(admin, row, path, parameter)


async def check_life(admin: httpx.AsyncClient, row: PolicyRow, path: str, parameter: str) -> None:
    assert (await admin.get(path)).status_code == 204, "the policy is not set"
    applied = await admin.get(path, params={"applied": True})
    default = row.shown(getattr(BROKER_DEFAULTS, row.field))
    as_json = default.model_dump(by_alias=True) if hasattr(default, "model_dump") else default
    assert applied.json() == as_json
    answer = await set_to(admin, path, parameter, BODIES[row.field])
    assert answer.status_code == 204, answer.text
    for params in ({}, {"applied": "true"}):
        assert (await admin.get(path, params=params)).json() == BODIES[row.field]
    if row.namespace_key:
        await check_shown(admin, row, path)
    assert (await admin.delete(path)).status_code == 204
    assert (await admin.get(path)).status_code == 204, "the policy is not set"


async def check_shown(admin: httpx.AsyncClient, row: PolicyRow, path: str) -> None:
    shown = (await admin.get(NAMESPACE)).json()[row.namespace_key]
    expected: Any = BODIES[row.field] if path.startswith(NAMESPACE) else None
    if row.by_cluster:
        expected = {"magnetar": expected} if expected else {}
    assert shown == expected


async def test_a_topic_overrides_its_namespace_and_follows_it_again() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker, "/admin/v2") as admin,
    ):
        await client.produce("t")
        await admin.post(f"{NAMESPACE}/maxProducersPerTopic", json=5)
        assert (await admin.get(f"{TOPIC}/maxProducers?applied=true")).json() == 5
        await admin.post(f"{TOPIC}/maxProducers", json=2)
        assert (await admin.get(f"{TOPIC}/maxProducers?applied=true")).json() == 2
        await admin.delete(f"{TOPIC}/maxProducers")
        assert (await admin.get(f"{TOPIC}/maxProducers?applied=true")).json() == 5
        assert (await admin.get(f"{TOPIC}/maxProducers")).status_code == 204


async def test_the_serving_broker_sees_a_policy_that_another_one_set() -> None:
    cluster = ClusterState()
    async with (
        running_broker(cluster, 0) as first,
        running_broker(cluster, 1) as second,
        wire_to(first, "pulsar") as client,
        admin_of(second, "/admin/v2") as admin,
    ):
        answer = await client.produce("t")
        owner = first if hasattr(answer, "producer_name") else second
        if owner is second:
            async with admin_of(second, "/admin/v2") as there:
                await there.put(TOPIC)
        assert (await admin.post(f"{TOPIC}/messageTTL?messageTTL=17")).status_code == 204
        name = TopicName.parse("t")
        await owner.broker.topic(name, create=False)
        assert owner.broker.policies.policies_of(name).message_ttl_s == 17


async def test_both_backlog_quotas_are_kept_apart() -> None:
    size = {"limitSize": 1 << 30, "policy": "consumer_backlog_eviction"}
    age = {"limitTime": 600, "policy": "producer_exception"}
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        await admin.put(TOPIC)
        for level in (NAMESPACE, TOPIC):
            assert (await admin.get(f"{level}/backlogQuotaMap")).json() == {}
            quota = f"{level}/backlogQuota"
            assert (await admin.post(quota, json=size)).status_code == 204
            by_age = {"backlogQuotaType": "message_age"}
            assert (await admin.post(quota, params=by_age, json=age)).status_code == 204
            refused = await admin.post(quota, json=age)
            assert refused.status_code == 400
            assert "limitSize, in bytes" in refused.json()["reason"]
            found = (await admin.get(f"{level}/backlogQuotaMap")).json()
            assert found["destination_storage"]["limitSize"] == 1 << 30
            assert found["destination_storage"]["policy"] == "consumer_backlog_eviction"
            assert found["message_age"]["limitTime"] == 600
            assert (await admin.delete(quota, params=by_age)).status_code == 204
            assert set((await admin.get(f"{level}/backlogQuotaMap")).json()) == {
                "destination_storage"
            }
        applied = await admin.get(f"{TOPIC}/backlogQuotaMap?applied=true")
        assert applied.json()["message_age"]["limitTime"] == -1


WRONG = [
    ("retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 5}, "retentionSizeInMB 5"),
    ("retention", {"retentionTimeInMinutes": -2, "retentionSizeInMB": 5}, "greater than or equal"),
    ("retention", {"retentionTimeInMinutes": 5}, "retentionSizeInMB"),
    ("retention", {"retentionTimeInMinutes": 5, "retentionSizeInMB": 5, "x": 1}, "x"),
    ("messageTTL", -1, "greater than or equal to 0"),
    ("messageTTL", 1 << 40, "less than or equal to 2147483647"),
    (
        "persistence",
        {"bookkeeperEnsemble": 2, "bookkeeperWriteQuorum": 3, "bookkeeperAckQuorum": 2},
        "bookkeeperWriteQuorum 3",
    ),
    (
        "persistence",
        {"bookkeeperEnsemble": 9, "bookkeeperWriteQuorum": 3, "bookkeeperAckQuorum": 2},
        "bookkeeperEnsemble 9: expected less than or equal to 5",
    ),
    ("subscriptionTypesEnabled", [], "at least 1"),
    ("subscriptionTypesEnabled", ["Other"], "'Exclusive'"),
    ("dispatchRate", {"relativeToPublishRate": True}, "relativeToPublishRate"),
    ("autoTopicCreation", {"allowAutoTopicCreation": True, "topicType": "partitioned"}, "at least"),
    *(
        (
            "autoTopicCreation",
            {
                "allowAutoTopicCreation": allowed,
                "topicType": "partitioned",
                "defaultNumPartitions": 0,
            },
            "defaultNumPartitions must be at least 1",
        )
        for allowed in (True, False)
    ),
]


async def test_topic_creation_can_be_switched_off_without_a_number_of_partitions() -> None:
    off = {"allowAutoTopicCreation": False, "topicType": "partitioned"}
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        found = await admin.post(f"{NAMESPACE}/autoTopicCreation", json=off)
        assert found.status_code == 204, found.text


async def test_a_wrong_value_is_refused_by_name() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        for path, body, text in WRONG:
            refused = await admin.post(f"{NAMESPACE}/{path}", json=body)
            assert refused.status_code == 400
            assert text in refused.json()["reason"]
            assert refused.json()["error"] == "InvalidArgument"
            assert (await admin.get(f"{NAMESPACE}/{path}")).status_code == 204


async def test_a_boolean_is_no_number() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        await admin.put(TOPIC)
        position = {"ledgerId": 1, "entryId": 0, "batchIndex": 0}
        tried = [
            ("PUT", "namespaces/public/n", {"bundles": {"numBundles": True}}),
            ("PUT", "namespaces/public/n", {"message_ttl_in_seconds": True}),
            ("PUT", "persistent/public/default/p/partitions", True),
            ("PUT", "persistent/public/default/p/partitions", {"partitions": True}),
            ("POST", "persistent/public/default/p/partitions", True),
            *(
                (method, f"{TOPIC}/subscription/s{rest}", {**position, number: True})
                for method, rest in (
                    ("PUT", ""),
                    ("POST", "/resetcursor"),
                    ("POST", "/expireMessages"),
                )
                for number in position
            ),
            *(("POST", path, body) for row in ROWS for path, body in with_booleans(row)),
        ]
        assert len(tried) > 40
        for method, path, body in tried:
            refused = await admin.request(method, path, json=body)
            assert (refused.status_code, path, body) == (400, path, body)
            assert "expected a number, not a boolean" in refused.json()["reason"]
            assert refused.json()["error"] == "InvalidArgument"


def with_booleans(row: PolicyRow) -> Iterator[tuple[str, Any]]:
    """The paths of a policy, and its bodies with a boolean in the place of a number."""
    body = BODIES[row.field]
    members = body if isinstance(body, dict) else {}
    for path in (path for path, parameter in paths_of(row) if not parameter):
        if type(body) is int:
            yield path, True
        for key, value in members.items():
            if type(value) in (int, float):
                yield path, {**members, key: True}


async def test_partitions_share_the_policies_of_their_topic() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        assert (await admin.put(f"{TOPIC}/partitions", json=2)).status_code == 204
        assert (await admin.post(f"{TOPIC}/maxProducers", json=3)).status_code == 204
        for path in (TOPIC, f"{TOPIC}-partition-1"):
            assert (await admin.get(f"{path}/maxProducers")).json() == 3


async def test_policies_of_a_missing_topic_or_namespace_are_not_found() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        for path, error in (
            ("namespaces/public/other/retention", "NamespaceNotFound"),
            ("persistent/public/default/nothing/retention", "TopicNotFound"),
            ("persistent/public/other/t/retention", "NamespaceNotFound"),
        ):
            for answer in (
                await admin.get(path),
                await admin.post(path, json=BODIES["retention"]),
                await admin.delete(path),
            ):
                assert answer.status_code == 404
                assert answer.json()["error"] == error


async def test_writers_of_different_policies_do_not_undo_each_other() -> None:
    """The version counts each change. A write of equal policies does not count."""
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        await admin.put(TOPIC)
        for row in ROWS:
            for path, parameter in paths_of(row):
                await set_to(admin, path, parameter, BODIES[row.field])
                await set_to(admin, path, parameter, BODIES[row.field])
        from magnetar.broker.operations.policies import get_policies

        name = TopicName.parse("t")
        for target in (name, name.namespace_name):
            found = await get_policies(broker.broker, target)
            for row in ROWS:
                level = row.topic_path if target is name else row.namespace_path
                assert (getattr(found, row.field) is not None) == bool(level), row.field
            assert found.version == sum(
                getattr(found, field) is not None
                for field in Policies.__dataclass_fields__
                if field not in ("version", "unknown")
            )


@pytest.mark.parametrize("equal", [False, True])
async def test_policies_stored_too_late_do_not_replace_those_of_the_next_topic(
    equal: bool,
) -> None:
    """The topic is deleted while its policies are stored, and then created again. The policies of
    the next topic stay, also if they are equal to the late ones."""
    name = TopicName.parse("t")
    path = paths.topic_policies(name.tenant, name.namespace, name.domain, name.topic)
    next_ones = codec.encode_topic_policies(TopicPolicies(policies=Policies(message_ttl_s=9)))
    cluster = ClusterState()
    async with place(cluster) as here, asyncio.TaskGroup() as group:
        broker, store = here.broker, here.store
        await create_topic(broker, name)
        written, read = asyncio.Event(), asyncio.Event()
        store.gates["put", path] = written
        setting = group.create_task(_refused(set_policy(broker, name, "message_ttl_s", 5)))
        await wait_until(lambda: ("put", path) in store.held)
        await broker.delete_topic(name, force=False)
        store.gates["get", path] = read
        written.set()
        await wait_until(lambda: ("get", path) in store.held)
        await settle(50)
        other = cluster.store()
        found = await other.get(path)
        assert found is not None
        next_ones = found.value if equal else next_ones
        await other.put(path, next_ones, expected=found.version)  # policies of a newer topic
        read.set()
        await setting
        found = await other.get(path)
        assert found is not None
        assert found.value == next_ones


async def test_a_request_for_a_deleted_topic_removes_only_policies_that_it_wrote() -> None:
    """The request finds equal policies and writes nothing. The topic is deleted, and a newer topic
    gets the same policies, before the request looks at the topic again."""
    name = TopicName.parse("t")
    path = paths.topic_policies(name.tenant, name.namespace, name.domain, name.topic)
    cluster = ClusterState()
    async with place(cluster) as here, asyncio.TaskGroup() as group:
        broker, store, other = here.broker, here.store, cluster.store()
        await create_topic(broker, name)
        await set_policy(broker, name, "message_ttl_s", 5)
        equal = await other.get(path)
        assert equal is not None
        compared = asyncio.Event()
        store.gates["get", path] = compared
        setting = group.create_task(_refused(set_policy(broker, name, "message_ttl_s", 5)))
        await wait_until(lambda: ("get", path) in store.held)
        del store.gates["get", path]
        topic = paths.topic(name.tenant, name.namespace, name.domain, name.topic)
        record = await other.get(topic)
        assert record is not None
        await other.delete(topic, expected=record.version)
        compared.set()
        await setting
        assert await other.get(path) is not None


async def test_the_error_says_that_late_policies_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    name = TopicName.parse("t")
    path = paths.topic_policies(name.tenant, name.namespace, name.domain, name.topic)
    async with place(ClusterState()) as here, asyncio.TaskGroup() as group:
        broker, store = here.broker, here.store
        await create_topic(broker, name)
        store.gates["put", path] = written = asyncio.Event()

        async def set_late() -> None:
            with pytest.raises(OutcomeUnknown, match="its new policies may not be removed"):
                await set_policy(broker, name, "message_ttl_s", 5)

        group.create_task(set_late())
        await wait_until(lambda: ("put", path) in store.held)
        await broker.delete_topic(name, force=False)
        store.gates["get", path] = asyncio.Event()  # from now on, the store does not answer
        monkeypatch.setattr(operations, "WRITE_TIMEOUT_S", 0.1)
        written.set()


async def _refused(setting: Awaitable[None]) -> None:
    with pytest.raises(TopicNotFound):
        await setting
