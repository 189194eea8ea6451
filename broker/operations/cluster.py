"""Administration of the cluster: its brokers, lookups, and unloading."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from magnetar.broker.errors import TopicNotFound
from magnetar.broker.operations.errors import (
    BundleNotFound,
    ClusterNotFound,
    NotReady,
    ServedElsewhere,
)
from magnetar.broker.operations.namespaces import namespace_record
from magnetar.broker.operations.topics import require_owner
from magnetar.broker.ownership.bundle import Bundle, bundle_in
from magnetar.broker.topic.live import NonPersistentTopic
from magnetar.protos.names import Domain

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker
    from magnetar.metadata.model import BrokerRegistration
    from magnetar.protos.names import NamespaceName, TopicName


class LookupData(BaseModel):
    """The addresses of the broker that serves a topic."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    broker_url: str = Field(description="for Apache Pulsar's clients")
    broker_url_tls: str = ""
    http_url: str = Field(description="for administrators")
    http_url_tls: str = ""
    native_url: str = Field(description="the same address as brokerUrl")
    grpc_url: str = Field(description="for Magnetar's clients")

    @classmethod
    def of(cls, broker: BrokerRegistration) -> LookupData:
        return cls(
            broker_url=broker.pulsar_url,
            http_url=broker.http_url,
            native_url=broker.pulsar_url,
            grpc_url=broker.grpc_url,
        )


class ClusterData(BaseModel):
    """The addresses of a cluster, which are those of one of its brokers."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    service_url: str = Field(description="for administrators")
    broker_service_url: str = Field(description="for Apache Pulsar's clients")


def cluster_data(broker: Broker, cluster: str) -> ClusterData:
    """Return the addresses of this cluster. Raises ClusterNotFound for another cluster."""
    require_cluster(broker, cluster)
    return ClusterData(service_url=broker.me.http_url, broker_service_url=broker.me.pulsar_url)


async def list_brokers(broker: Broker) -> list[str]:
    """Return the live brokers with an admin port, as host:port, sorted."""
    return sorted(
        urlsplit(each.http_url).netloc for each in await broker.live_brokers() if each.http_url
    )


class BrokerInfo(BaseModel):
    """The addresses of a broker."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    broker_id: str = Field(description="host:port, for administrators")
    service_url: str = Field(description="for administrators")


async def leader(broker: Broker) -> BrokerInfo:
    """Return the live broker whose id sorts first: it finishes incomplete deletions of topics for
    the cluster. Raises NotReady."""
    live = await broker.live_brokers()
    if not live:
        raise NotReady(str(broker.me.broker))
    url = live[0].http_url
    return BrokerInfo(broker_id=urlsplit(url).netloc, service_url=url)


async def require_ready(broker: Broker) -> None:
    """Raise NotReady unless this broker is registered, so that clients can find it."""
    if broker.me.broker not in {each.broker for each in await broker.live_brokers()}:
        raise NotReady(str(broker.me.broker))


async def look_up(broker: Broker, name: TopicName) -> LookupData:
    """Return the addresses of the broker that serves the topic.

    If the topic's bundle has no owner, this broker chooses one. Raises ServedElsewhere if it
    chooses another broker. The caller must ask that broker.
    """
    located = await broker.locate(name, authoritative=False)
    if not located.serves:
        raise ServedElsewhere(str(name), located.broker)
    return LookupData.of(located.broker)


async def bundle_of(broker: Broker, name: TopicName) -> str:
    """Return the range of the topic's bundle. Raises NamespaceNotFound."""
    record = await namespace_record(broker, name.namespace_name)
    return bundle_in(name, record.bundles).range


async def unload_topic(broker: Broker, name: TopicName) -> None:
    """Close the topic. Its clients reconnect and open it again. Raises ServedElsewhere,
    TopicNotFound."""
    await require_owner(broker, name)
    if name.domain is Domain.NON_PERSISTENT:
        await broker.close_non_persistent(name, force=True)
        return
    if not await broker.exists(name):
        raise TopicNotFound(str(name))
    await broker.unload_topic(name)


async def unload_bundle(broker: Broker, name: NamespaceName, part: str) -> None:
    """Unload a bundle, and hand it over to another broker if one is available. Raises
    NamespaceNotFound, BundleNotFound, ServedElsewhere."""
    record = await namespace_record(broker, name)
    if part not in record.bundles.names:
        raise BundleNotFound(str(name), part)
    bundle = Bundle(name.tenant, name.namespace, part)
    owner = await broker.unload_bundle(bundle)
    if owner is not None:
        raise ServedElsewhere(str(bundle), owner)


async def open_non_persistent(broker: Broker, name: NamespaceName, part: str) -> list[str]:
    """Return the open non-persistent topics of a bundle, sorted. Raises NamespaceNotFound,
    BundleNotFound, ServedElsewhere."""
    record = await namespace_record(broker, name)
    if part not in record.bundles.names:
        raise BundleNotFound(str(name), part)
    bundle = Bundle(name.tenant, name.namespace, part)
    owner = await broker.owner_of(bundle)
    if owner is not None and owner != broker.me:
        raise ServedElsewhere(str(bundle), owner)
    found = [topic.name for topic in broker.served if isinstance(topic, NonPersistentTopic)]
    return sorted(str(it) for it in found if bundle_in(it, record.bundles) == bundle)


async def unload_namespace(
    broker: Broker, name: NamespaceName
) -> list[tuple[str, BrokerRegistration]]:
    """Hand over the namespace's bundles that this broker owns. Returns the bundles that other
    brokers own, with these owners. The caller must ask each owner to hand its bundle over. Raises
    NamespaceNotFound."""
    left = []
    for part in (await namespace_record(broker, name)).bundles.names:
        owner = await broker.unload_bundle(Bundle(name.tenant, name.namespace, part))
        if owner is not None:
            left.append((part, owner))
    return left


def require_cluster(broker: Broker, cluster: str) -> None:
    """Raise ClusterNotFound if `cluster` is not the cluster of this broker."""
    if cluster != broker.cluster:
        raise ClusterNotFound(cluster, broker.cluster)
