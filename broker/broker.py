"""A broker: the topics it serves, and how they come and go with the ownership of their bundles.

A topic is opened when the first producer or consumer asks for it and this broker holds its bundle.
It is closed when the bundle goes: handed over on a clean stop, or taken by another broker that
thought this one dead. In the second case the topic has been fenced already, so that closing it
saves nothing and loses nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import NotOwner, TopicNotFound
from magnetar.broker.ownership.brokers import BrokerDirectory
from magnetar.broker.ownership.bundle import bundle_of
from magnetar.broker.ownership.owners import Owners
from magnetar.broker.session.refusal import OPERATING_ERRORS
from magnetar.broker.topic.contract import CloseReason
from magnetar.broker.topic.topic import PersistentTopic
from magnetar.metadata import paths
from magnetar.protos.names import Domain, TopicName
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    import random

    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.cache import EntryCache
    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.broker.log.log import LogConfig
    from magnetar.broker.ownership.bundle import Bundle
    from magnetar.broker.ownership.owners import Located
    from magnetar.broker.topic.protocol import Topic
    from magnetar.broker.topic.topic import ProducerNames
    from magnetar.metadata.model import BrokerRegistration
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.names import NamespaceName
    from magnetar.runtime.clock import Clock

RELEASE_TIMEOUT_S: Final = (
    30.0  # for all bundles on a clean stop; what is left is taken over instead
)

log = get_logger(__name__)


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
    ) -> None:
        self.started = asyncio.Event()  # requests may come
        self._me = me
        self._store = store
        self._ledgers = ledgers
        self._cache = cache
        self._log_config = log_config
        self._names = names
        self._clock = clock
        self._backoff = Backoff(0.1, 5.0, random)
        self._brokers = BrokerDirectory(store)
        self._owners = Owners(store, self._brokers, me, on_lost=self._unload)
        self._topics: dict[TopicName, asyncio.Future[Topic]] = {}  # opening or open
        self._failed: set[TopicName] = set()  # to be closed
        self._failing = asyncio.Event()
        self._tasks: asyncio.TaskGroup

    @property
    def me(self) -> BrokerRegistration:
        return self._me

    @property
    def topics(self) -> list[Topic]:
        """Those that are open."""
        return [
            opened.result()
            for opened in self._topics.values()
            if opened.done() and not opened.cancelled() and opened.exception() is None
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then hand every bundle over."""
        async with asyncio.TaskGroup() as self._tasks:
            lasting = [
                self._tasks.create_task(
                    supervise("brokers", self._brokers.run, backoff=self._backoff)
                ),
                self._tasks.create_task(
                    supervise("owners", self._owners.run, backoff=self._backoff)
                ),
                self._tasks.create_task(self._close_failed()),
            ]
            self.started.set()
            await stop.wait()
            await self._release_all()
            for task in lasting:
                task.cancel()

    def next_owner_of(self, name: TopicName) -> BrokerRegistration | None:
        """Who gets the topic while it is being handed over; None: it is not, or nobody."""
        return self._owners.next_owner_of(bundle_of(name))

    async def locate(self, name: TopicName, *, authoritative: bool) -> Located:
        """See Owners.locate."""
        return await self._owners.locate(name, authoritative=authoritative)

    async def topic(self, name: TopicName, *, create: bool = True) -> Topic:
        """The open topic, opened by the first who asks.

        Raises NotOwner, TopicNotFound (only if not `create`), what PersistentTopic.open raises.
        """
        if not self._owners.holds(bundle_of(name)):
            located = await self._owners.locate(name, authoritative=False)
            if located.broker != self._me:
                raise NotOwner(str(name))
        opened = self._topics.get(name)
        if opened is None:
            if not create and not await self.exists(name):
                raise TopicNotFound(str(name))
            if not self._owners.holds(bundle_of(name)):  # another broker has it by now
                raise NotOwner(str(name))
            opened = self._topics.get(name)  # somebody else may have begun meanwhile
        if opened is None:
            opened = asyncio.get_running_loop().create_future()
            self._topics[name] = opened
            self._tasks.create_task(self._open(name, opened))
        return await asyncio.shield(opened)

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

    async def _open(self, name: TopicName, opened: asyncio.Future[Topic]) -> None:
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
            )
        except OPERATING_ERRORS as error:
            log.warning("topic did not open", topic=str(name), error=str(error))
            del self._topics[name]
            opened.set_exception(error)
            opened.exception()  # everybody who asked may have gone: that is no unhandled error
            return
        log.info("topic opened", topic=str(name))
        opened.set_result(topic)
        if not self._owners.holds(bundle_of(name)):  # lost while it was opening
            await self._close(name, CloseReason.UNLOADED)

    def _on_failed(self, topic: Topic, error: BrokerError) -> None:
        log.warning("topic failed", topic=str(topic.name), error=str(error))
        self._owners.doubt(bundle_of(topic.name))
        self._failed.add(topic.name)
        self._failing.set()

    async def _close_failed(self) -> None:
        """Close topics whose logs have failed, so that they can be opened anew."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._failing.wait()
                self._failing.clear()
                for name in self._failed:
                    group.create_task(self._close(name, CloseReason.LOG_FAILED))
                self._failed.clear()

    async def _close(self, name: TopicName, reason: CloseReason) -> None:
        opened = self._topics.get(name)
        if opened is None:
            return
        try:
            topic = await asyncio.shield(opened)
        except OPERATING_ERRORS:
            return  # it did not open: nothing to close
        await topic.close(reason)
        log.info("topic closed", topic=str(name), reason=reason.value)
        if self._topics.get(name) is opened:
            del self._topics[name]

    async def _unload(self, bundle: Bundle) -> None:
        async with asyncio.TaskGroup() as group:
            for name in [name for name in self._topics if bundle_of(name) == bundle]:
                group.create_task(self._close(name, CloseReason.UNLOADED))

    async def _release_all(self) -> None:
        """Hand everything over, all bundles at once."""
        self._owners.begin_stop()
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S), asyncio.TaskGroup() as group:
                for bundle in self._owners.held:
                    group.create_task(self._owners.release(bundle, self._unload))
        except TimeoutError:
            log.error("not every bundle was handed over", left=[str(b) for b in self._owners.held])
