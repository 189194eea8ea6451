"""Clusters, brokers, lookups and unloading over the admin API."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from fakes.admin import admin_of
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.wire import wire_to

from magnetar.broker.config import BrokerConfig
from magnetar.metadata import paths
from magnetar.protos.names import TopicName

pytestmark = pytest.mark.real_loop

TOPIC = "admin/v2/persistent/public/default/t"
NAMESPACE = "admin/v2/namespaces/public/default"
LOOKUP = "lookup/v2/topic/persistent/public/default/t"


async def test_the_cluster_and_its_brokers_are_listed() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        assert (await admin.get("clusters")).json() == ["magnetar"]
        data = (await admin.get("clusters/magnetar")).json()
        assert data["brokerServiceUrl"] == broker.pulsar_url
        assert (await admin.get("clusters/other")).json()["error"] == "ClusterNotFound"
        assert (await admin.get("brokers/other")).status_code == 404
        for path in ("brokers", "brokers/magnetar"):
            assert (await admin.get(path)).json() == [], "the fake has no admin port"


async def test_the_leader_the_readiness_and_the_version_of_a_broker_are_shown() -> None:
    cluster = ClusterState()
    async with (
        running_broker(cluster, 0),
        running_broker(cluster, 1) as broker,
        admin_of(broker, "/admin/v2/brokers") as admin,
    ):
        first = (await broker.broker.live_brokers())[0]
        leader = (await admin.get("leaderBroker")).json()
        assert leader["serviceUrl"] == first.http_url
        assert leader.keys() == {"brokerId", "serviceUrl"}
        ready = await admin.get("ready")
        assert (ready.status_code, ready.text) == (200, "ok")
        assert (await admin.get("version")).text == version("magnetar")


async def test_a_broker_that_is_not_registered_is_not_ready() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        path = paths.broker_available(broker.registration.broker)
        found = await broker.store.get(path)
        assert found is not None
        await broker.store.delete(path, expected=found.version)
        for part in ("ready", "leaderBroker"):
            refused = await admin.get(f"brokers/{part}")
            assert refused.status_code == 503
            assert refused.json()["error"] == "NotReady"


async def test_a_lookup_names_the_broker_and_the_bundle() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "") as admin:
        found = (await admin.get(LOOKUP)).json()
        assert found["brokerUrl"] == found["nativeUrl"] == broker.pulsar_url
        assert found["grpcUrl"] == broker.grpc_url
        bundle = (await admin.get(f"{LOOKUP}/bundle")).json()
        assert bundle in (await admin.get(f"{NAMESPACE}/bundles")).text.replace('","', "_")


async def test_an_unloaded_topic_is_opened_again_by_the_next_request() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker, "") as admin,
    ):
        assert (await admin.put(f"{TOPIC}/unload")).status_code == 404
        await client.produce("t")
        [before] = broker.broker.topics
        assert (await admin.put(f"{TOPIC}/unload")).status_code == 204
        assert broker.broker.topics == []
        assert (await admin.get(f"{TOPIC}/stats")).status_code == 200
        [after] = broker.broker.topics
        assert after is not before


async def test_a_bundle_and_a_namespace_are_unloaded() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "") as admin:
        await admin.put(TOPIC)
        bundle = (await admin.get(f"{LOOKUP}/bundle")).json()
        for path in (f"{NAMESPACE}/{bundle}/unload", f"{NAMESPACE}/unload"):
            assert len(broker.broker.topics) == 1
            assert (await admin.put(path)).status_code == 204
            assert broker.broker.topics == []
            assert (await admin.get(f"{TOPIC}/stats")).status_code == 200
        wrong = await admin.put(f"{NAMESPACE}/0x0_0x1/unload")
        assert wrong.json()["error"] == "BundleNotFound"


async def test_an_unloaded_bundle_moves_to_another_broker() -> None:
    cluster = ClusterState()
    async with (
        running_broker(cluster, 0) as first,
        running_broker(cluster, 1) as second,
        admin_of(first, "") as one,
        admin_of(second, "") as other,
    ):
        name = TopicName.parse("t")
        located = await first.broker.locate(name, authoritative=True)
        assert located.broker == first.registration
        bundle = (await one.get(f"{LOOKUP}/bundle")).json()
        assert (await other.put(f"{NAMESPACE}/{bundle}/unload")).status_code == 307
        assert (await one.put(f"{NAMESPACE}/{bundle}/unload")).status_code == 204
        found = (await one.get(LOOKUP)).json()
        assert found["brokerUrl"] == second.pulsar_url


def test_settings_are_shown_by_pulsars_names() -> None:
    shown = BrokerConfig(id="b", metadata_url="zk://here").shown
    assert shown["allowAutoTopicCreation"] == "true"
    assert shown["subscriptionTypesEnabled"] == "Exclusive,Failover,Key_Shared,Shared"
    assert shown["backlogQuotaDefaultRetentionPolicy"] == "producer_request_hold"
