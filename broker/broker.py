"""A broker: it opens and closes topics as it gains and loses the ownership of their bundles.

The broker opens a topic when the first producer or consumer asks for it and the broker holds its
bundle. Before that it waits for the policies of the topic and the bundles of its namespace: it
decides nothing for a topic whose policies are unknown.

The broker closes the topic when it loses the bundle: by a clean stop, which hands the bundle over,
or because another broker took the bundle and judged this one dead. In the second case the topic is
fenced already, so closing it saves nothing and loses nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.chores import Chores
from magnetar.broker.errors import NotOwner, TopicExists, TopicNotFound
from magnetar.broker.log.budget import PublishBudget
from magnetar.broker.log.latency import LatencyHistogram
from magnetar.broker.ownership.brokers import BrokerDirectory
from magnetar.broker.ownership.owners import Owners
from magnetar.broker.policies.cache import PolicyCache
from magnetar.broker.policies.source import FollowedPolicies
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.broker.topic.contract import CloseReason
from magnetar.broker.topic.topic import PersistentTopic
from magnetar.metadata import paths
from magnetar.metadata.model import BUNDLES_DEFAULT
from magnetar.metadata.policies import BROKER_DEFAULTS
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.protos.names import Domain, TopicName
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from magnetar.broker.chores import Chore
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.cache import EntryCache
    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.broker.log.log import LogConfig
    from magnetar.broker.ownership.bundle import Bundle
    from magnetar.broker.ownership.owners import Located
    from magnetar.broker.topic.protocol import Topic
    from magnetar.broker.topic.topic import ProducerNames
    from magnetar.metadata.model import BrokerRegistration
    from magnetar.metadata.policies import EffectivePolicies
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.names import NamespaceName
    from magnetar.runtime.clock import Clock

RELEASE_TIMEOUT_S: Final = 30.0
"""For all bundles on a clean stop. Other brokers take over the bundles that are left."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Served:
    """A topic that is opening or open."""

    bundle: Bundle  # by which this broker owns it; the namespace may be divided anew later
    opened: asyncio.Future[Topic]


class Broker:
    """Serves topics while `run` runs. `me` must be registered by then (main.py does it)."""

    def __init__(
        self,
        me: BrokerRegistration,
        *,
        store: MetadataStore,
        ledgers: LedgerStore,
        cache: EntryCache,
        log_config: LogConfig,
        names: ProducerNames,
        clock: Clock,
        random: random.Random,
        namespace_bundles: int = BUNDLES_DEFAULT,
        default_policies: EffectivePolicies = BROKER_DEFAULTS,
        chores: Sequence[Chore] = (),
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        publish_budget: PublishBudget | None = None,
        cluster: str = "magnetar",
    ) -> None:
        """`namespace_bundles`: of a namespace whose record this broker creates. `chores`: the
        periodic work on the open topics. `message_bytes_max`: of a payload as sent. `cluster`: its
        name for administrators."""
        self.policies = PolicyCache(
            store, namespace_bundles=namespace_bundles, defaults=default_policies
        )
        self.default_policies = default_policies
        self.namespace_bundles = namespace_bundles
        self.cluster = cluster
        self.started = asyncio.Event()  # the broker takes requests
        self.message_bytes_max = message_bytes_max
        self._me = me
        self._store = store
        self._ledgers = ledgers
        self._cache = cache
        self._log_config = log_config
        self._names = names
        self._clock = clock
        self._random = random
        self._backoff = Backoff(0.1, 5.0, random)
        self._brokers = BrokerDirectory(store)
        self._owners = Owners(store, self._brokers, me, on_lost=self._unload)
        self._topics: dict[TopicName, _Served] = {}
        self._failed: set[TopicName] = set()  # to be closed
        self._failing = asyncio.Event()
        self.publish_latency = LatencyHistogram()
        self.publish_budget = publish_budget or PublishBudget()  # of all topics together
        self._chores = Chores(chores, lambda: self.topics)
        self._tasks: asyncio.TaskGroup

    @property
    def me(self) -> BrokerRegistration:
        return self._me

    @property
    def metadata(self) -> MetadataStore:
        """For operations of administrators."""
        return self._store

    @property
    def topics(self) -> list[Topic]:
        """The open topics."""
        return [
            served.opened.result()
            for served in self._topics.values()
            if served.opened.done()
            and not served.opened.cancelled()
            and served.opened.exception() is None
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then hand every bundle over."""
        async with asyncio.TaskGroup() as self._tasks:
            lasting = [
                self._tasks.create_task(
                    supervise("policies", self.policies.run, backoff=self._backoff)
                ),
                self._tasks.create_task(
                    supervise("brokers", self._brokers.run, backoff=self._backoff)
                ),
                self._tasks.create_task(
                    supervise("owners", self._owners.run, backoff=self._backoff)
                ),
                self._tasks.create_task(
                    supervise("chores", self._chores.run, backoff=self._backoff)
                ),
                self._tasks.create_task(self._close_failed()),
            ]
            self.started.set()
            await stop.wait()
            await self._release_all()
            for task in lasting:
                task.cancel()

    def next_owner_of(self, name: TopicName) -> BrokerRegistration | None:
        """The next owner of a topic that is being handed over; None: it is not, or there is no
        next owner."""
        served = self._topics.get(name)
        return None if served is None else self._owners.next_owner_of(served.bundle)

    async def locate(self, name: TopicName, *, authoritative: bool) -> Located:
        """See Owners.locate. Raises PoliciesUnavailable, too."""
        return await self._owners.locate(await self._bundle_of(name), authoritative=authoritative)

    async def topic(self, name: TopicName, *, create: bool = True) -> Topic:
        """The open topic. The first request for it opens it.

        Raises NotOwner, TopicNotFound (only if not `create`), PoliciesUnavailable, what
        PersistentTopic.open raises.
        """
        bundle = await self._bundle_of(name)
        if not self._owners.holds(bundle):
            located = await self._owners.locate(bundle, authoritative=False)
            if located.broker != self._me:
                raise NotOwner(str(name))
        served = self._topics.get(name)
        if served is None:
            if not create and not await self.exists(name):
                raise TopicNotFound(str(name))
            if not self._owners.holds(bundle):  # another broker has it by now
                raise NotOwner(str(name))
            served = self._topics.get(name)  # another request may have begun to open it
        if served is None:
            served = self._begin(name, bundle)
        return await asyncio.shield(served.opened)

    async def create_topic(self, name: TopicName) -> None:
        """Create the topic. Of several requests at the same time, one creates it.

        Raises TopicExists, NotOwner, PoliciesUnavailable, what Topic.open raises.
        """
        bundle = await self._bundle_of(name)
        exists = await self.exists(name)
        if not self._owners.holds(bundle):
            raise NotOwner(str(name))
        served = self._topics.get(name)
        if served is not None:
            await asyncio.shield(served.opened)  # it exists once it is open
            exists = True
        if exists:
            raise TopicExists(str(name))
        await asyncio.shield(self._begin(name, bundle).opened)

    def _begin(self, name: TopicName, bundle: Bundle) -> _Served:
        served = _Served(bundle, asyncio.get_running_loop().create_future())
        self._topics[name] = served
        self._tasks.create_task(self._open(name, served))
        return served

    async def _bundle_of(self, name: TopicName) -> Bundle:
        """Waits until the namespace is known. Raises PoliciesUnavailable."""
        await self.policies.ready(name.namespace_name)
        return self.policies.bundle_of(name)

    async def exists(self, name: TopicName) -> bool:
        """Whether the topic has a record."""
        path = paths.topic(name.tenant, name.namespace, name.domain, name.topic)
        return await self._store.get(path) is not None

    async def topics_of(self, namespace: NamespaceName) -> list[str]:
        """Full names of the namespace's persistent topics."""
        folder = paths.topics(namespace.tenant, namespace.namespace, Domain.PERSISTENT)
        return [
            str(
                TopicName(
                    Domain.PERSISTENT,
                    namespace.tenant,
                    namespace.namespace,
                    paths.unquoted(child),
                )
            )
            for child in await self._store.children(folder)
        ]

    async def _open(self, name: TopicName, served: _Served) -> None:
        try:
            await self.policies.follow(name)
            topic = await self._open_followed(name)
        except OPERATING_ERRORS as error:
            log.warning("topic did not open", topic=str(name), error=str(error))
            del self._topics[name]
            served.opened.set_exception(error)
            served.opened.exception()  # all requests for it may have ended: that is no error
            return
        log.info("topic opened", topic=str(name))
        served.opened.set_result(topic)
        if not self._owners.holds(served.bundle):  # lost while the topic was opening
            await self._close(name, CloseReason.UNLOADED)

    async def _open_followed(self, name: TopicName) -> Topic:
        """The policies of an open topic are followed; those of one that did not open are not."""
        topic = None
        try:
            topic = await PersistentTopic.open(
                name,
                store=self._store,
                ledgers=self._ledgers,
                log_config=self._log_config,
                cache=self._cache,
                clock=self._clock,
                names=self._names,
                tasks=self._tasks,
                on_failed=self._on_failed,
                policies=FollowedPolicies(self.policies, name),
                message_bytes_max=self.message_bytes_max,
                latency=self.publish_latency,
                budget=self.publish_budget,
                incarnation=f"{self._random.getrandbits(128):032x}",
            )
        finally:
            if topic is None:
                self.policies.unfollow(name)
        return topic

    def _on_failed(self, topic: Topic, error: BrokerError) -> None:
        log.warning("topic failed", topic=str(topic.name), error=str(error))
        served = self._topics.get(topic.name)
        if served is not None:
            self._owners.doubt(served.bundle)
        self._failed.add(topic.name)
        self._failing.set()

    async def _close_failed(self) -> None:
        """Close topics whose logs have failed, so that the next request opens them again."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._failing.wait()
                self._failing.clear()
                for name in self._failed:
                    group.create_task(self._close(name, CloseReason.LOG_FAILED))
                self._failed.clear()

    async def _close(self, name: TopicName, reason: CloseReason) -> None:
        served = self._topics.get(name)
        if served is None:
            return
        try:
            topic = await asyncio.shield(served.opened)
        except OPERATING_ERRORS:
            return  # it did not open: there is nothing to close
        await topic.close(reason)
        log.info("topic closed", topic=str(name), reason=reason.value)
        if self._topics.get(name) is served:
            del self._topics[name]
            self.policies.unfollow(name)

    async def live_brokers(self) -> list[BrokerRegistration]:
        """The registered brokers, by id. Raises MetadataError."""
        await self._brokers.refresh()
        return [each for _, each in sorted(self._brokers.live.items())]

    async def unload_topic(self, name: TopicName) -> None:
        """Close the topic if it is open here. The next request opens it again."""
        await self._close(name, CloseReason.UNLOADED)

    async def unload_bundle(self, bundle: Bundle) -> BrokerRegistration | None:
        """Hand the bundle over to another broker if there is one. Returns its owner if that is
        another broker, which was not asked. Raises MetadataError."""
        if self._owners.holds(bundle):
            await self._owners.release(bundle, self._unload)
            return None
        owner = await self._owners.owner_of(bundle)
        return None if owner == self._me else owner

    async def _unload(self, bundle: Bundle) -> None:
        names = [name for name, served in self._topics.items() if served.bundle == bundle]
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(self._close(name, CloseReason.UNLOADED))

    async def _release_all(self) -> None:
        """Hand over all bundles at once."""
        self._owners.begin_stop()
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S), asyncio.TaskGroup() as group:
                for bundle in self._owners.held:
                    group.create_task(self._owners.release(bundle, self._unload))
        except TimeoutError:
            log.error(
                "bundles were not handed over in time", left=[str(b) for b in self._owners.held]
            )
