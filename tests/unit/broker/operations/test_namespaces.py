"""Tenants and namespaces over the admin API, and races between their creation and deletion."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fakes.admin import admin_of
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.namespaces import leave_topic
from fakes.place import place
from fakes.wire import wire_to
from support import wait_until

from magnetar.broker.admin.namespaces import DELETIONS_MAX
from magnetar.broker.errors import TenantNotFound
from magnetar.broker.operations import namespaces, topics
from magnetar.broker.operations.errors import NamespaceExists, NamespaceNotEmpty
from magnetar.broker.operations.namespaces import (
    create_namespace,
    create_tenant,
    delete_namespace,
    delete_tenant,
    namespace_record,
    tenant_record,
)
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import OutcomeUnknown, Unavailable
from magnetar.metadata.policies import NamespaceRecord, Policies, Retention, TenantRecord
from magnetar.metadata.store import ABSENT, SessionState
from magnetar.protos.names import NamespaceName, TopicName

if TYPE_CHECKING:
    import httpx

    from magnetar.broker.broker import Broker
    from magnetar.metadata.memory import MemoryStore
    from magnetar.metadata.store import Versioned

pytestmark = pytest.mark.real_loop


def kind_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"] if answer.content else ""


async def test_a_tenant_from_creation_to_deletion() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        assert (await admin.get("tenants")).json() == ["public"]
        assert kind_of(await admin.get("tenants/acme")) == (404, "TenantNotFound")
        body = {"adminRoles": ["b", "a"], "allowedClusters": []}
        assert kind_of(await admin.put("tenants/acme", json=body)) == (204, "")
        assert kind_of(await admin.put("tenants/acme")) == (409, "TenantExists")
        assert (await admin.get("tenants")).json() == ["acme", "public"]
        shown = {"adminRoles": ["a", "b"], "allowedClusters": ["magnetar"]}
        assert (await admin.get("tenants/acme")).json() == shown
        assert kind_of(await admin.post("tenants/acme", json={"adminRoles": ["c"]})) == (204, "")
        assert (await admin.get("tenants/acme")).json()["adminRoles"] == ["c"]
        assert kind_of(await admin.delete("tenants/acme")) == (204, "")
        assert kind_of(await admin.delete("tenants/acme")) == (404, "TenantNotFound")
        assert kind_of(await admin.post("tenants/acme", json={})) == (404, "TenantNotFound")


async def test_a_namespace_from_creation_to_deletion() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        one = "namespaces/acme/orders"
        assert kind_of(await admin.put(one)) == (404, "TenantNotFound")
        await admin.put("tenants/acme")
        assert (await admin.get("namespaces/acme")).json() == []
        # The body of Pulsar's tools: every policy, most of them not set.
        body = {
            "bundles": {"boundaries": None, "numBundles": 16},
            "replication_clusters": ["magnetar"],
            "auth_policies": {"namespace_auth": {}},
            "retention_policies": {"retentionTimeInMinutes": 5, "retentionSizeInMB": 5},
            "publishMaxMessageRate": {"magnetar": {"publishThrottlingRateInMsg": 9}},
            "topicDispatchRate": {},
            "subscription_types_enabled": [],
            "message_ttl_in_seconds": None,
            "": 5,  # a key of no policy
        }
        assert kind_of(await admin.put(one, json=body)) == (204, "")
        record = await namespace_record(broker.broker, NamespaceName("acme", "orders"))
        assert record.policies.max_message_bytes is None
        assert kind_of(await admin.put(one)) == (409, "NamespaceExists")
        assert (await admin.get("namespaces/acme")).json() == ["acme/orders"]
        bundles = (await admin.get(f"{one}/bundles")).json()
        assert bundles["numBundles"] == 16
        assert bundles["boundaries"][:2] == ["0x00000000", "0x10000000"]
        assert bundles["boundaries"][-1] == "0xffffffff"
        shown = (await admin.get(one)).json()
        assert shown["retention_policies"] == body["retention_policies"]
        assert shown["bundles"] == bundles
        assert (await admin.get(f"{one}/publishRate")).json()["publishThrottlingRateInMsg"] == 9
        assert (await admin.get(f"{one}/topics")).json() == []

        await admin.put("persistent/acme/orders/t")
        assert (await admin.get(f"{one}/topics")).json() == ["persistent://acme/orders/t"]
        refused = await admin.delete(one)
        assert kind_of(refused) == (409, "NamespaceNotEmpty")
        assert "persistent://acme/orders/t" in refused.json()["reason"]
        assert kind_of(await admin.delete("tenants/acme")) == (409, "TenantNotEmpty")
        assert kind_of(await admin.delete(one, params={"force": "true"})) == (204, "")
        assert (await admin.get("namespaces/acme")).json() == []
        assert kind_of(await admin.delete("tenants/acme")) == (204, "")


async def test_force_deletes_a_namespace_with_topics_of_all_kinds() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker, "/admin/v2") as admin,
    ):
        one = "namespaces/public/other"
        await admin.put(one)
        for domain in ("persistent", "non-persistent"):
            await admin.put(f"{domain}/public/other/t")
            await admin.put(f"{domain}/public/other/p/partitions", json=2)
        await client.produce("persistent://public/other/p-partition-1")
        assert kind_of(await admin.delete(one, params={"force": "true"})) == (204, "")
        assert kind_of(await admin.get(one)) == (404, "NamespaceNotFound")
        assert broker.broker.served == []


async def test_force_deletes_several_topics_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0
    delete_one = topics.delete_topic

    async def delete(broker: Broker, name: TopicName, *, force: bool) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await delete_one(broker, name, force=force)
        running -= 1

    monkeypatch.setattr(topics, "delete_topic", delete)
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        one = "namespaces/public/other"
        await admin.put(one)
        for number in range(2 * DELETIONS_MAX):
            await admin.put(f"persistent/public/other/t{number}")
        assert kind_of(await admin.delete(one, params={"force": "true"})) == (204, "")
        assert kind_of(await admin.get(one)) == (404, "NamespaceNotFound")
        assert broker.broker.served == []
    assert most == DELETIONS_MAX


async def test_a_namespace_that_is_created_again_has_no_old_policies() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        one = "namespaces/public/other"
        await admin.put(one)
        assert kind_of(await admin.post(f"{one}/deduplication", json=True)) == (204, "")
        assert kind_of(await admin.delete(one)) == (204, "")
        assert kind_of(await admin.get(one)) == (404, "NamespaceNotFound")
        assert kind_of(await admin.delete(one)) == (404, "NamespaceNotFound")
        await admin.put(one)
        assert (await admin.get(one)).json()["deduplicationEnabled"] is None


async def test_the_bundles_of_a_deleted_namespace_have_no_owner() -> None:
    name = NamespaceName("public", "other")
    folder = paths.ownership_folder(name.tenant, name.namespace)
    async with (
        running_broker(ClusterState()) as running,
        admin_of(running, "/admin/v2") as admin,
    ):
        before = running.broker.bundles
        await admin.put("namespaces/public/other")
        await admin.put("persistent/public/other/t")
        assert running.broker.bundles == before + 1
        assert kind_of(await admin.delete("namespaces/public/other?force=true")) == (204, "")
        assert await running.broker.metadata.children(folder) == []
        await wait_until(lambda: running.broker.bundles == before)


async def test_a_watch_of_a_topic_learns_that_its_namespace_was_deleted() -> None:
    """Another broker may own the topic when it is created again."""
    watched, told = TopicName.parse("public/other/never-created"), asyncio.Event()
    async with (
        running_broker(ClusterState()) as running,
        admin_of(running, "/admin/v2") as admin,
    ):
        before = running.broker.bundles
        await admin.put("namespaces/public/other")
        await running.broker.locate(watched, authoritative=True)
        assert running.broker.bundles == before + 1
        running.broker.changes.watch(watched, told.set)
        assert kind_of(await admin.delete("namespaces/public/other")) == (204, "")
        await wait_until(lambda: running.broker.bundles == before)
        await wait_until(told.is_set)


async def test_a_late_deletion_leaves_the_policies_of_the_next_namespace() -> None:
    name, cluster = NamespaceName("public", "other"), ClusterState()
    path = paths.topic_policies(name.tenant, name.namespace, "persistent", "t")
    async with place(cluster) as here, asyncio.TaskGroup() as group:
        await create_namespace(here.broker, name, None, Policies())
        other, read = cluster.store(), asyncio.Event()
        version = await other.put(path, b"left over", expected=ABSENT)
        here.store.gates["get", path] = read
        deleting = group.create_task(delete_namespace(here.broker, name))
        await wait_until(lambda: ("get", path) in here.store.held)
        await create_namespace(here.broker, name, None, Policies())
        await other.put(path, b"of the next namespace", expected=version)
        read.set()
        await deleting
        found = await other.get(path)
        assert found is not None
        assert found.value == b"of the next namespace"


def lose_the_reply_of_a_deletion(store: MemoryStore, of: str) -> None:
    """The next deletion of this node is applied, and its reply is lost."""
    delete = store.delete

    async def delete_once(path: str, *, expected: int) -> None:
        await delete(path, expected=expected)
        if path == of:
            store.delete = delete  # type: ignore[method-assign]
            raise OutcomeUnknown(path, "the reply was lost")

    store.delete = delete_once  # type: ignore[method-assign]


async def test_a_deletion_whose_reply_is_lost_removes_the_policies_of_its_topics() -> None:
    name = NamespaceName("public", "other")
    path = paths.topic_policies(name.tenant, name.namespace, "persistent", "t")
    async with place() as here:
        await create_namespace(here.broker, name, None, Policies())
        await here.store.put(path, b"left over", expected=ABSENT)
        lose_the_reply_of_a_deletion(here.store, paths.namespace("public", "other"))
        await delete_namespace(here.broker, name)
        assert await here.store.get(path) is None


def fail_the_deletion_of(
    store: MemoryStore,
    of: str,
    monkeypatch: pytest.MonkeyPatch,
    write_timeout_s: float = namespaces.WRITE_TIMEOUT_S,
) -> None:
    """The next deletion of this node is not sent. From the first deletion of any node on, this time
    limit applies."""
    delete = store.delete

    async def delete_later(path: str, *, expected: int) -> None:
        monkeypatch.setattr(namespaces, "WRITE_TIMEOUT_S", write_timeout_s)
        if path != of:
            return await delete(path, expected=expected)
        monkeypatch.setattr(store, "delete", delete)
        raise Unavailable("the session is suspended")

    monkeypatch.setattr(store, "delete", delete_later)


async def test_a_deletion_removes_the_policies_of_its_topics_when_the_connection_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = NamespaceName("public", "other")
    path = paths.topic_policies(name.tenant, name.namespace, "persistent", "t")
    async with place() as here:
        await create_namespace(here.broker, name, None, Policies())
        await here.store.put(path, b"left over", expected=ABSENT)
        fail_the_deletion_of(here.store, path, monkeypatch)
        await delete_namespace(here.broker, name)
        assert await here.store.get(path) is None


@pytest.mark.parametrize("parameters", [{}, {"force": "true"}])
async def test_a_repeated_deletion_removes_the_policies_that_a_failed_one_has_left(
    parameters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, path = (
        "namespaces/public/other",
        paths.topic_policies("public", "other", "persistent", "t"),
    )
    async with (
        running_broker(ClusterState()) as running,
        admin_of(running, "/admin/v2") as admin,
    ):
        store = running.broker._store
        await admin.put(one)
        await store.put(path, b"left over", expected=ABSENT)
        fail_the_deletion_of(store, path, monkeypatch, 0.0)
        with pytest.raises(OutcomeUnknown):
            await delete_namespace(running.broker, NamespaceName("public", "other"))
        assert await store.get(path) is not None
        answer = await admin.delete(one, params=parameters)
        assert kind_of(answer) == (404, "NamespaceNotFound")
        assert await store.get(path) is None


async def test_a_deletion_of_a_tenant_succeeds_when_the_connection_breaks_with_its_reply() -> None:
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        lose_the_reply_of_a_deletion(here.store, paths.tenant("acme"))
        delete = here.store.delete

        async def delete_once(path: str, *, expected: int) -> None:
            here.store.delete = delete  # type: ignore[method-assign]
            lose_the_connection_at_a_sync(here.store, path)
            await delete(path, expected=expected)

        here.store.delete = delete_once  # type: ignore[method-assign]
        await delete_tenant(here.broker, "acme")
        with pytest.raises(TenantNotFound):
            await delete_tenant(here.broker, "acme")


async def test_a_deletion_of_a_tenant_that_cannot_be_read_again_has_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        get, gets = here.store.get, 0

        async def get_once(path: str) -> Versioned | None:
            nonlocal gets
            gets += path == paths.tenant("acme")
            if gets > 1:
                raise Unavailable("the session is suspended")
            return await get(path)

        lose_the_reply_of_a_deletion(here.store, paths.tenant("acme"))
        with monkeypatch.context() as patch:
            patch.setattr(here.store, "get", get_once)
            with pytest.raises(OutcomeUnknown):
                await delete_tenant(here.broker, "acme")


async def test_a_deletion_of_a_tenant_leaves_a_tenant_that_was_created_again() -> None:
    """The first request is applied, its reply is lost, and another client creates the tenant."""
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        delete = here.store.delete

        async def delete_without_reply(path: str, *, expected: int) -> None:
            here.store.delete = delete  # type: ignore[method-assign]
            await delete(path, expected=expected)
            await create_tenant(here.broker, "acme", TenantRecord())
            raise OutcomeUnknown(path)

        here.store.delete = delete_without_reply  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknown):
            await delete_tenant(here.broker, "acme")
        assert await here.store.get(paths.tenant("acme")) is not None


@pytest.mark.parametrize("is_applied", [True, False])
async def test_a_creation_leaves_the_namespace_of_a_tenant_that_was_created_again(
    is_applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The creator deletes its namespace again. The request is applied and its reply is lost, or it
    is not sent. Then another client creates the tenant and the namespace."""
    name, cluster = NamespaceName("acme", "n"), ClusterState()
    async with place(cluster) as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        put, delete, other = here.store.put, here.store.delete, cluster.store()

        async def put_once(path: str, value: bytes, *, expected: int) -> int:
            version = await put(path, value, expected=expected)
            if path == paths.namespace("acme", "n"):
                monkeypatch.setattr(here.store, "put", put)
                # This deletion looked for namespaces before the namespace was written.
                await other.delete(paths.tenant("acme"), expected=0)
            return version

        async def delete_once(path: str, *, expected: int) -> None:
            monkeypatch.setattr(here.store, "delete", delete)
            if is_applied:
                await delete(path, expected=expected)
            await create_tenant(here.broker, "acme", TenantRecord())
            if is_applied:
                await create_namespace(here.broker, name, None, Policies())
                raise OutcomeUnknown(path)
            with pytest.raises(NamespaceExists):
                await create_namespace(here.broker, name, None, Policies())
            raise Unavailable("the session is suspended")

        monkeypatch.setattr(here.store, "put", put_once)
        monkeypatch.setattr(here.store, "delete", delete_once)
        with pytest.raises(OutcomeUnknown):
            await create_namespace(here.broker, name, None, Policies())
        assert await other.get(paths.namespace("acme", "n")) is not None


async def test_a_deletion_of_a_tenant_whose_reply_is_lost_succeeds() -> None:
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        lose_the_reply_of_a_deletion(here.store, paths.tenant("acme"))
        await delete_tenant(here.broker, "acme")
        with pytest.raises(TenantNotFound):
            await delete_tenant(here.broker, "acme")


@pytest.mark.parametrize("of", [paths.namespace("acme", "n"), paths.tenant("acme")])
async def test_a_creation_whose_reply_is_lost_leaves_no_namespace_without_its_tenant(
    of: str,
) -> None:
    """The tenant is deleted when the creator has written the namespace, or writes the tenant."""
    name, cluster = NamespaceName("acme", "n"), ClusterState()
    async with place(cluster) as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        put, other = here.store.put, cluster.store()

        async def put_without_reply(path: str, value: bytes, *, expected: int) -> int:
            if path != of:
                return await put(path, value, expected=expected)
            here.store.put = put  # type: ignore[method-assign]
            if path != paths.tenant("acme"):
                await put(path, value, expected=expected)
            # This deletion looked for namespaces before the namespace was written.
            await other.delete(paths.tenant("acme"), expected=0)
            raise OutcomeUnknown(path)

        here.store.put = put_without_reply  # type: ignore[method-assign]
        with pytest.raises(TenantNotFound):
            await create_namespace(here.broker, name, None, Policies())
        assert await other.get(paths.namespace("acme", "n")) is None


async def test_a_creation_whose_replies_are_lost_succeeds() -> None:
    name = NamespaceName("acme", "n")
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        put = here.store.put
        left = [paths.tenant("acme"), paths.namespace("acme", "n")]

        async def put_without_reply(path: str, value: bytes, *, expected: int) -> int:
            version = await put(path, value, expected=expected)
            if left and path == left[-1]:
                left.pop()
                raise OutcomeUnknown(path)
            return version

        here.store.put = put_without_reply  # type: ignore[method-assign]
        await create_namespace(here.broker, name, None, Policies())
        here.store.put = put  # type: ignore[method-assign]
        assert left == []
        with pytest.raises(NamespaceExists):
            await create_namespace(here.broker, name, None, Policies())


def lose_the_connection_at_a_sync(store: MemoryStore, of: str) -> None:
    """At the next sync of this node there is no connection. Then the client connects again."""
    sync = store.sync

    async def sync_once(path: str) -> None:
        if path == of:
            store.sync = sync  # type: ignore[method-assign]
            if store.session_state is SessionState.CONNECTED:
                store.suspend()
            asyncio.get_running_loop().call_soon(store.reconnect)
        await sync(path)

    store.sync = sync_once  # type: ignore[method-assign]


@pytest.mark.parametrize("is_reply_lost", [True, False])
async def test_a_creation_succeeds_when_the_connection_breaks(is_reply_lost: bool) -> None:
    """The connection breaks when the namespace is written, before or after the reply."""
    name = NamespaceName("acme", "n")
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        put = here.store.put

        async def put_once(path: str, value: bytes, *, expected: int) -> int:
            version = await put(path, value, expected=expected)
            if path == paths.namespace("acme", "n"):
                here.store.put = put  # type: ignore[method-assign]
                next_sync = path if is_reply_lost else paths.tenant("acme")
                lose_the_connection_at_a_sync(here.store, next_sync)
                if is_reply_lost:
                    here.store.suspend()
                    raise OutcomeUnknown(path)
            return version

        here.store.put = put_once  # type: ignore[method-assign]
        await create_namespace(here.broker, name, None, Policies())
        assert await namespace_record(here.broker, name)
        tenant = await here.store.get(paths.tenant("acme"))
        assert tenant is not None
        assert tenant.version == 1  # written again


async def test_a_creation_that_cannot_write_its_tenant_has_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = NamespaceName("acme", "n")
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        put = here.store.put

        async def put_once(path: str, value: bytes, *, expected: int) -> int:
            version = await put(path, value, expected=expected)
            monkeypatch.setattr(namespaces, "WRITE_TIMEOUT_S", 0.0)
            monkeypatch.setattr(here.store, "sync", refuse)
            return version

        async def refuse(path: str) -> None:
            raise Unavailable("the session is suspended")

        with monkeypatch.context() as patch:
            patch.setattr(here.store, "put", put_once)
            with pytest.raises(OutcomeUnknown):
                await create_namespace(here.broker, name, None, Policies())
        monkeypatch.undo()
        assert await namespace_record(here.broker, name)


async def test_a_namespace_is_restored_when_the_connection_breaks() -> None:
    name = NamespaceName("acme", "n")
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        await create_namespace(here.broker, name, None, Policies())
        delete = here.store.delete

        async def delete_once(path: str, *, expected: int) -> None:
            here.store.delete = delete  # type: ignore[method-assign]
            await delete(path, expected=expected)
            await leave_topic(here.store, "acme", "n")
            lose_the_connection_at_a_sync(here.store, path)

        here.store.delete = delete_once  # type: ignore[method-assign]
        with pytest.raises(NamespaceNotEmpty):
            await delete_namespace(here.broker, name)
        assert await namespace_record(here.broker, name)


async def test_a_restored_namespace_has_its_policies() -> None:
    """The broker of the topic that appears records the namespace, without policies."""
    name = NamespaceName("acme", "n")
    policies = Policies(retention=Retention(-1, -1))
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        await create_namespace(here.broker, name, 16, policies)
        before = await namespace_record(here.broker, name)
        delete = here.store.delete

        async def delete_once(path: str, *, expected: int) -> None:
            here.store.delete = delete  # type: ignore[method-assign]
            await delete(path, expected=expected)
            await leave_topic(here.store, "acme", "n")
            record = codec.encode_namespace(NamespaceRecord())
            await here.store.put(path, record, expected=ABSENT)

        here.store.delete = delete_once  # type: ignore[method-assign]
        with pytest.raises(NamespaceNotEmpty):
            await delete_namespace(here.broker, name)
        assert await namespace_record(here.broker, name) == before


async def test_a_namespace_created_again_keeps_its_own_policies() -> None:
    name = NamespaceName("acme", "n")
    async with place() as here:
        await create_tenant(here.broker, "acme", TenantRecord())
        await create_namespace(here.broker, name, None, Policies(retention=Retention(-1, -1)))
        delete = here.store.delete

        async def delete_once(path: str, *, expected: int) -> None:
            here.store.delete = delete  # type: ignore[method-assign]
            await delete(path, expected=expected)
            await create_namespace(here.broker, name, None, Policies())
            await leave_topic(here.store, "acme", "n")

        here.store.delete = delete_once  # type: ignore[method-assign]
        with pytest.raises(NamespaceNotEmpty):
            await delete_namespace(here.broker, name)
        assert (await namespace_record(here.broker, name)).policies.retention is None


async def test_a_restored_namespace_has_its_tenant() -> None:
    """A topic appears while the namespace is deleted, and the tenant is deleted, too."""
    name = NamespaceName("acme", "n")
    record = TenantRecord(admin_roles=frozenset({"a"}))
    async with place() as here:
        await create_tenant(here.broker, "acme", record)
        await create_namespace(here.broker, name, None, Policies())
        delete = here.store.delete

        async def delete_once(path: str, *, expected: int) -> None:
            here.store.delete = delete  # type: ignore[method-assign]
            await delete(path, expected=expected)
            await leave_topic(here.store, "acme", "n")
            await delete_tenant(here.broker, "acme")

        here.store.delete = delete_once  # type: ignore[method-assign]
        with pytest.raises(NamespaceNotEmpty):
            await delete_namespace(here.broker, name)
        assert await namespace_record(here.broker, name)
        assert await tenant_record(here.broker, "acme") == record


async def test_public_default_exists_and_is_protected() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        assert (await admin.get("namespaces/public")).json() == ["public/default"]
        assert (await admin.get("namespaces/public/default")).json()["bundles"]["numBundles"] == 4
        assert kind_of(await admin.delete("tenants/public")) == (412, "Protected")
        assert kind_of(await admin.delete("namespaces/public/default")) == (412, "Protected")


WRONG: list[tuple[str, object, int, str]] = [
    ("tenants/a%20b", None, 412, "A-Z a-z 0-9"),
    ("tenants/..%2Fx", None, 404, ""),
    (f"tenants/{'a' * 600}", None, 400, "512 bytes"),
    ("namespaces/public/a%20b", None, 412, "A-Z a-z 0-9"),
    ("namespaces/public/n", {"bundles": {"numBundles": 129}}, 400, "numBundles"),
    ("namespaces/public/n", {"bundles": {"numBundles": -1}}, 400, "numBundles"),
    ("namespaces/public/n", {"retention_policies": 5}, 400, "retention_policies"),
    ("tenants/a", {"adminRoles": ["x"] * 101}, 204, ""),
    ("tenants/a", {"adminRoles": [str(n) for n in range(101)]}, 400, "adminRoles"),
]


async def test_an_invalid_name_or_policy_is_refused_at_creation() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        admin_of(broker, "/admin/v2") as admin,
    ):
        for path, body, status, text in WRONG:
            answer = await admin.put(path, json=body)
            assert answer.status_code == status, answer.text
            assert text in answer.text


async def test_no_namespace_is_left_without_its_tenant() -> None:
    """Creation of a namespace and deletion of its tenant at the same time, by two brokers."""
    cluster = ClusterState()
    async with (
        running_broker(cluster, 0) as first,
        running_broker(cluster, 1) as second,
        admin_of(first, "/admin/v2") as one,
        admin_of(second, "/admin/v2") as other,
    ):
        for number in range(60):
            tenant = f"t{number}"
            await one.put(f"tenants/{tenant}")
            async with asyncio.TaskGroup() as group:
                created = group.create_task(one.put(f"namespaces/{tenant}/n"))
                for _ in range(number % 13):
                    await asyncio.sleep(0)
                deleted = group.create_task(other.delete(f"tenants/{tenant}"))
            exists = (await one.get(f"tenants/{tenant}")).status_code == 200
            left = await one.get(f"namespaces/{tenant}/n")
            assert exists == (left.status_code == 200)
            assert exists == (created.result().status_code == 204)
            assert exists == (deleted.result().status_code == 409)
