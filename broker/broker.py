"""A broker: it opens and closes topics as it gains and loses the ownership of their bundles.

The broker opens a topic when the first client asks for the topic and the broker holds the topic's
bundle. First the broker waits for the policies of the topic and the bundles of its namespace. It
serves no topic whose policies are unknown.

The broker closes a topic when it loses the topic's bundle. Either this broker hands the bundle
over, or another broker takes the bundle because it considers this broker dead. In both cases the
next owner fences the topic before it serves the topic. So a close that fails loses no acknowledged
entry.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from magnetar.broker.balance import BALANCE_DEFAULTS
from magnetar.broker.catalog.catalog import NAMES_PER_TURN, Catalog
from magnetar.broker.catalog.reserved import is_system
from magnetar.broker.catalog.watching import WatchedLists
from magnetar.broker.chores import Chore, Chores
from magnetar.broker.dispatch.active import FAILOVER_DEFAULTS, FailoverRules
from magnetar.broker.errors import (
    BundleUnavailable,
    IsPartitioned,
    LogDamaged,
    NonPersistentInUse,
    NotAllowed,
    NotOwner,
    PoliciesUnavailable,
    ReservedName,
    TaskFailed,
    TopicDeleted,
    TopicExists,
    TopicFailed,
    TopicInUse,
    TopicNotFound,
    TopicQuarantined,
)
from magnetar.broker.guard import Failures, Guard, Quarantine
from magnetar.broker.idleness import may_delete, may_unload, tend_ledger
from magnetar.broker.life import LIFE_DEFAULTS
from magnetar.broker.loads import TopicLoads
from magnetar.broker.log.budget import PublishBudget
from magnetar.broker.log.closed import closed_chain
from magnetar.broker.log.latency import LatencyHistogram
from magnetar.broker.log.sweep import OrphanSweep
from magnetar.broker.log.topic_deletion import TopicDeletions
from magnetar.broker.ownership.balancer import Balancer
from magnetar.broker.ownership.brokers import BrokerDirectory
from magnetar.broker.ownership.liveness import SILENCE_S, Liveness
from magnetar.broker.ownership.owners import Owners
from magnetar.broker.ownership.standstill import Standstill
from magnetar.broker.policies.cache import PolicyCache
from magnetar.broker.policies.source import FollowedPolicies
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.broker.schemas.registry import SchemaRegistry
from magnetar.broker.topic.contract import CloseReason
from magnetar.broker.topic.environment import TopicEnvironment
from magnetar.broker.topic.live import NonPersistentTopic
from magnetar.broker.topic.live_producer import Cap
from magnetar.broker.topic.pausing_rate import PausingRate
from magnetar.broker.topic.topic import PersistentTopic
from magnetar.broker.topic_changes import TopicChanges
from magnetar.metadata import paths
from magnetar.metadata.model import BUNDLES_DEFAULT
from magnetar.metadata.policies import BROKER_DEFAULTS, Rate
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.protos.names import Domain, TopicName
from magnetar.runtime.awake import Awake
from magnetar.runtime.log import get_logger
from magnetar.runtime.on_demand import spawner
from magnetar.runtime.steps import StepMeter
from magnetar.runtime.supervise import Backoff, is_operating_error, supervise
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from magnetar.broker.balance import BalanceRules
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.key_shared_settings import KeySharedSettings
    from magnetar.broker.life import LifeConfig
    from magnetar.broker.log.cache import EntryCache
    from magnetar.broker.log.chain import Chain
    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.broker.log.log import LogConfig
    from magnetar.broker.ownership.bundle import Bundle
    from magnetar.broker.ownership.liveness import Witnesses
    from magnetar.broker.ownership.owners import Located
    from magnetar.broker.topic.deduplication import DeduplicationConfig
    from magnetar.broker.topic.producer_admission import ProducerNames
    from magnetar.broker.topic.protocol import ServedTopic, Topic
    from magnetar.metadata.model import (
        BookieRegistration,
        BrokerRegistration,
        Member,
        TopicTombstone,
    )
    from magnetar.metadata.policies import EffectivePolicies
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.names import NamespaceName
    from magnetar.runtime.clock import Clock

RELEASE_TIMEOUT_S: Final = 30.0
"""The time limit for the release of all bundles on a clean stop. When it passes, other brokers take
over the remaining bundles."""

ORPHAN_GRACE_S: Final = 24 * 3600.0
"""The minimum age of a ledger that is deleted because no topic's record lists it."""

SWEEP_PERIOD_S: Final = 60.0
"""The pause between two searches for unfinished deletions and old tombstones."""

UNLOAD_PERIOD_S_MAX: Final = 60.0

CLOSES_PER_TURN: Final = 50
"""The closes of topics that begin in one turn of the event loop, at 0.1 ms each. A bundle may have
10,000 topics, and the loss of a bookie may end the logs of as many."""

NON_PERSISTENT_PER_CONNECTION: Final = 1_000
"""Pulsar's maxConcurrentNonPersistentMessagePerConnection."""

UNLIMITED_RATE: Final = Rate(0, 0, 1)

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Asking:
    """The client for which a topic is opened."""

    client: str  # see `client_key`
    reconnects: bool


ADMINISTRATOR: Final = Asking("", reconnects=False)


@dataclass(slots=True, eq=False)
class _Served:
    """A topic that is opening, open, or closing."""

    # The bundle by which this broker owns the topic. A later division of the namespace does not
    # change it.
    bundle: Bundle
    opened: asyncio.Future[ServedTopic]
    opening: asyncio.Task[None] | None = None  # settles `opened`
    used_s: float = 0.0  # the loop's time of the last request for the topic
    # Set when an unload of the idle topic, or its deletion, has ended. None: neither has begun.
    left: asyncio.Event | None = None

    @property
    def is_opened(self) -> bool:
        """False while the topic is opening: perhaps there is no such topic."""
        opened = self.opened
        return opened.done() and not opened.cancelled() and opened.exception() is None


class Broker:
    """Serves topics while `run` runs. The caller keeps `me` registered meanwhile (main.py)."""

    def __init__(
        self,
        me: BrokerRegistration,
        *,
        store: MetadataStore,
        ledgers: LedgerStore,
        witnesses: Witnesses,
        cache: EntryCache,
        log_config: LogConfig,
        names: ProducerNames,
        clock: Clock,
        random: random.Random,
        namespace_bundles: int = BUNDLES_DEFAULT,
        default_policies: EffectivePolicies = BROKER_DEFAULTS,
        orphan_grace_s: float = ORPHAN_GRACE_S,
        chores: Sequence[Chore] = (),
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        strict_delays: bool = False,
        fixed_delay_look_ahead: int = 0,
        publish_budget: PublishBudget | None = None,
        cluster: str = "magnetar",
        life: LifeConfig = LIFE_DEFAULTS,
        partitions_max: int = 0,
        non_persistent: bool = True,
        non_persistent_per_connection: int = NON_PERSISTENT_PER_CONNECTION,
        deduplication: DeduplicationConfig | None = None,
        failover: FailoverRules = FAILOVER_DEFAULTS,
        key_shared: KeySharedSettings | None = None,
        publish_rate: Rate = UNLIMITED_RATE,
        silence_s: float = SILENCE_S,
        balance: BalanceRules = BALANCE_DEFAULTS,
        find_bookie: Callable[[Member], BookieRegistration | None] | None = None,
    ) -> None:
        """`namespace_bundles`: the number of bundles of a namespace whose record this broker
        creates. `chores`: the periodic work on the open topics, besides the work for `life`.
        `message_bytes_max`: the limit of a payload as sent. `strict_delays`,
        `fixed_delay_look_ahead`: see DelayPolicy. `cluster`: the cluster's name for administrators.
        `partitions_max`: see PartitionedTopics. `non_persistent`: True enables non-persistent
        topics. `non_persistent_per_connection`: the limit of their unanswered messages on one
        connection. `publish_rate`: the limit for all topics together. `silence_s`: see Liveness.
        `find_bookie`: see BookieRegistry.find; None: clients cannot reach the bookies."""
        self.failures = Failures()
        self.policies = PolicyCache(
            store,
            namespace_bundles=namespace_bundles,
            defaults=default_policies,
            failures=self.failures,
        )
        self.default_policies = default_policies
        self.namespace_bundles = namespace_bundles
        self.cluster = cluster
        self.orphans = OrphanSweep(store, ledgers, clock, grace_s=orphan_grace_s)
        self.catalog = Catalog(store, self.policies, clock, partitions_max=partitions_max)
        self.schemas = SchemaRegistry(store, clock)
        self.watched_lists = WatchedLists(store, self.catalog)
        self.changes = TopicChanges()
        self.turns = Turns()  # the turns of long computations
        self.find_bookie = find_bookie
        self._non_persistent = non_persistent
        loop = asyncio.get_running_loop()
        self._cap = Cap(non_persistent_per_connection, loop.call_soon)
        self.started = asyncio.Event()  # set when the broker accepts requests
        self.message_bytes_max = message_bytes_max
        self._failover = failover
        self._strict_delays = strict_delays
        self._fixed_delay_look_ahead = fixed_delay_look_ahead
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
        self.liveness = Liveness(witnesses, silence_s=silence_s)
        self._owners = Owners(
            store, self._brokers, me, liveness=self.liveness, on_lost=self._unload
        )
        self.balancer = Balancer(
            store,
            self._brokers,
            self._owners,
            me,
            liveness=self.liveness,
            unload=self._unload,
            rules=balance,
        )
        self.standstill = Standstill(self._owners.verify)
        self._deletions = TopicDeletions(store, ledgers, clock)
        self._loads = TopicLoads(loads_max=life.loads_max, timeout_s=life.load_timeout_s)
        self._topics: dict[TopicName, _Served] = {}
        self._deleting: dict[TopicName, asyncio.Task[Exception | None]] = {}
        self._failed: dict[TopicName, ServedTopic] = {}  # the topics to be closed
        self._failing = asyncio.Event()
        self._deduplication = deduplication
        self._key_shared = key_shared
        self.publish_latency = LatencyHistogram()
        self.steps = StepMeter()
        self.awake = Awake()
        self.publish_budget = publish_budget or PublishBudget()  # the budget of all topics together
        self.publish_rate = PausingRate()
        self.publish_rate.set_rate(publish_rate, loop.time())
        self.opened_topics = 0  # the number of topics opened so far, including new topics
        self.quarantine = Quarantine()
        chores = (*chores, *self._chores_of_life(life))
        self._chores = Chores(chores, lambda: self.topics, self.failures)
        self._tasks: asyncio.TaskGroup
        self._environment: TopicEnvironment  # the environment of the persistent topics

    @property
    def me(self) -> BrokerRegistration:
        return self._me

    def now_ms(self) -> int:
        """Return the wall clock's time, in milliseconds since 1970-01-01 UTC."""
        return self._clock.now_ms()

    @property
    def metadata(self) -> MetadataStore:
        """The metadata store, for operations of administrators."""
        return self._store

    @property
    def bundles(self) -> int:
        """The number of bundles that this broker owns."""
        return len(self._owners.held)

    @property
    def served(self) -> list[ServedTopic]:
        """The open topics."""
        return [served.opened.result() for served in self._topics.values() if served.is_opened]

    @property
    def topics(self) -> list[Topic]:
        """The open persistent topics."""
        return [topic for topic in self.served if isinstance(topic, PersistentTopic)]

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then hand every bundle over."""
        async with asyncio.TaskGroup() as self._tasks:
            self._environment = self._make_environment()
            lasting = [
                self._tasks.create_task(self._supervise("policies", self.policies.run)),
                self._tasks.create_task(self._supervise("brokers", self._brokers.run)),
                self._tasks.create_task(self._supervise("owners", self._owners.run)),
                self._tasks.create_task(self._supervise("balancer", self.balancer.run)),
                self._tasks.create_task(self._supervise("standstill", self.standstill.run)),
                self._tasks.create_task(self._supervise("chores", self._chores.run)),
                self._tasks.create_task(self._supervise("deleted topics", self._sweep_deleted)),
                self._tasks.create_task(self._supervise("topic lists", self.watched_lists.run)),
                self._tasks.create_task(self._close_failed()),
                self._tasks.create_task(self.awake.run()),
            ]
            self.started.set()
            await stop.wait()
            await self._release_all()
            for served in self._topics.values():
                if served.opening is not None and not served.opened.done():
                    served.opening.cancel()  # thousands of topics may wait to be loaded
            for task in lasting:
                task.cancel()

    async def _supervise(self, name: str, child: Callable[[], Awaitable[None]]) -> None:
        """Run a child task, and start it again after an error. Count the bugs in the child."""

        async def guarded() -> None:
            try:
                await child()
            except Exception as error:  # guard.py
                if not is_operating_error(error):
                    self.failures.note("task", name, error)
                    raise TaskFailed(name, error) from None
                raise

        await supervise(name, guarded, backoff=self._backoff)

    def next_owner_of(self, name: TopicName) -> BrokerRegistration | None:
        """Return the next owner of a topic that is being handed over. None: the topic is not being
        handed over, or no next owner is known."""
        served = self._topics.get(name)
        return None if served is None else self._owners.next_owner_of(served.bundle)

    async def locate(self, name: TopicName, *, authoritative: bool) -> Located:
        """See Owners.locate. Also raises PoliciesUnavailable, NamespaceNotFound, NotAllowed."""
        return await self._owners.locate(await self._bundle_of(name), authoritative=authoritative)

    async def topic(
        self, name: TopicName, *, create: bool = True, client: str = "", reconnects: bool = False
    ) -> ServedTopic:
        """Return the open topic. The first request for a topic opens it.

        `client` (see `client_key`) and `reconnects` describe the client. A client that was
        connected to a deleted topic does not create it again (TopicDeletions.refuses). Raises
        NotOwner, NotAllowed, TopicNotFound, NamespaceNotFound, PoliciesUnavailable,
        TooManyRequests, TopicQuarantined, TimeoutError, and the errors of PersistentTopic.open and
        Catalog.require_creatable.
        """
        bundle = await self._bundle_of(name)
        if not self._owners.holds(bundle):
            located = await self._owners.locate(bundle, authoritative=False)
            if located.broker != self._me:
                raise NotOwner(str(name))
        asking = Asking(client, reconnects) if create else None
        while True:
            if not self._owners.holds(bundle):  # another broker owns the bundle by now
                raise NotOwner(str(name))
            served = self._topics.get(name)
            begun = served is None
            if served is None:
                served = self._begin(name, bundle, asking)
            elif served.left is not None:
                await served.left.wait()  # then this request loads the topic again
                continue
            try:
                topic = await asyncio.shield(served.opened)
            except TopicNotFound:
                if begun or asking is None:
                    raise
                # The request that began the opening could not create the topic; this one may.
                async with self._loads.slot(str(name)):
                    await self._require_admitted(name, asking)
                continue
            served.used_s = asyncio.get_running_loop().time()
            return topic

    async def stored_topic(self, name: TopicName, *, create: bool = True) -> PersistentTopic:
        """Like `topic`, for operations that need stored messages. Also raises NotAllowed for a
        non-persistent topic."""
        if name.domain is not Domain.PERSISTENT:
            raise NotAllowed(str(name), "the messages of a non-persistent topic are not stored")
        topic = await self.topic(name, create=create)
        assert isinstance(topic, PersistentTopic), name
        return topic

    def is_open(self, name: TopicName) -> bool:
        """Return True if the topic is open or opening here. Return False while the broker unloads
        it as idle, or deletes it."""
        served = self._topics.get(name)
        return served is not None and served.left is None

    async def closed_chain(self, name: TopicName) -> Chain | None:
        """Return the ledgers of a topic that is not open here, read without opening the topic.
        None: the caller must open the topic. See log/closed.py."""
        if self.is_open(name):
            return None
        return await closed_chain(name, store=self._store, ledgers=self._ledgers)

    async def create_topic(self, name: TopicName) -> None:
        """Create the topic. Of several requests at the same time, one creates the topic.

        Raises TopicExists, NotOwner, and the errors of `topic`.
        """
        bundle = await self._bundle_of(name)
        exists = await self.exists(name)
        if not self._owners.holds(bundle):
            raise NotOwner(str(name))
        while not exists and (served := self._topics.get(name)) is not None:
            if served.left is not None:  # this broker deletes the topic, or unloads it
                await served.left.wait()
                exists = await self.exists(name)
                continue
            with suppress(TopicNotFound):  # another request, which did not create the topic
                await asyncio.shield(served.opened)
                exists = True
        if exists:
            raise TopicExists(str(name))
        if not self._owners.holds(bundle):  # another broker owns the bundle by now
            raise NotOwner(str(name))
        await asyncio.shield(self._begin(name, bundle, ADMINISTRATOR).opened)

    async def delete_topic(
        self, name: TopicName, *, force: bool, unless_used: Callable[[Topic], bool] | None = None
    ) -> None:
        """Delete the topic, its subscriptions, its ledgers and its own policies. On return the
        topic is deleted. If the deletion fails half-way, this broker or another one finishes it
        later.

        `unless_used` is called in the step in which the topic stops admitting clients. It returns
        True if the topic is in use although it has no clients. Raises TopicNotFound, TopicInUse
        (unless `force`), NotOwner, and the errors of `topic`.
        """
        while (deleting := self._deleting.get(name)) is not None:
            outcome = await asyncio.shield(deleting)
            if outcome is None:
                return
            if not isinstance(outcome, TopicInUse):
                raise outcome
            # The other request may have had neither `force` nor the same `unless_used`.
        deleting = self._tasks.create_task(self._delete(name, force, unless_used))
        self._deleting[name] = deleting
        deleting.add_done_callback(lambda _: self._deleting.pop(name, None))
        deleting.add_done_callback(_retrieve)
        outcome = await asyncio.shield(deleting)  # a cancelled caller does not stop the deletion
        if outcome is not None:
            raise outcome

    async def _delete(
        self, name: TopicName, force: bool, unless_used: Callable[[Topic], bool] | None
    ) -> Exception | None:
        try:
            try:
                topic = await self.stored_topic(name, create=False)
            except LogDamaged:
                if not force:
                    raise
                drawn = f"{self._random.getrandbits(128):032x}"
                others = await self._other_brokers()
                await self._deletions.delete_unopened(name, incarnation=drawn, brokers=others)
                return None
            await self._delete_open(topic, force, unless_used)
        except OPERATING_ERRORS as error:
            return error
        except Exception as error:  # guard.py
            self.failures.note("delete", str(name), error)
            return TopicFailed(str(name), error)
        return None

    async def _delete_open(
        self, topic: Topic, force: bool, unless_used: Callable[[Topic], bool] | None
    ) -> None:
        others = await self._other_brokers()
        if unless_used is not None and unless_used(topic):
            raise TopicInUse(str(topic.name), len(topic.producers), 0)
        clients = topic.begin_deletion(force=force)
        served = self._topics[topic.name]
        served.left = asyncio.Event()
        try:
            await topic.wait_released()
            await self._deletions.delete(topic.log.owned_record, brokers=others, clients=clients)
        finally:
            topic.end_deletion()
            self._forget(topic.name, served)

    def _forget(self, name: TopicName, served: _Served) -> None:
        """Forget a topic that was closed or deleted. Waiting requests open it again."""
        if self._topics.get(name) is served:
            del self._topics[name]
            self.policies.unfollow(name)
        if served.left is not None:
            served.left.set()
        self.changes.tell(name)

    async def _other_brokers(self) -> dict[str, str]:
        """Return the other registered brokers with their incarnations. Raises MetadataError."""
        await self._brokers.refresh()
        live = self._brokers.live.values()
        return {it.broker: it.incarnation for it in live if it.broker != self._me.broker}

    async def _sweep_deleted(self) -> None:
        """Finish deletions that have stopped half-way, and remove old tombstones. Only one
        registered broker does this work: the one whose id sorts first."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            live = {str(it.broker): it.incarnation for it in self._brokers.live.values()}
            if min(live, default=self._me.broker) == self._me.broker:
                try:
                    await self._deletions.sweep(live)
                except OPERATING_ERRORS as error:
                    log.warning("sweeping deleted topics failed", error=repr(error))

    def _begin(self, name: TopicName, bundle: Bundle, asking: Asking | None) -> _Served:
        refusal = self.quarantine.refusal(name, asyncio.get_running_loop().time())
        if refusal is not None:
            raise TopicQuarantined(str(name), *refusal)
        served = _Served(bundle, asyncio.get_running_loop().create_future())
        self._topics[name] = served
        served.opening = self._tasks.create_task(self._open(name, served, asking))
        served.opening.add_done_callback(partial(self._on_opening_ended, name, served))
        return served

    def _on_opening_ended(self, name: TopicName, served: _Served, _: object) -> None:
        """Settle an opening that was cancelled: this broker stops, or other code cancelled the
        operation."""
        if not served.opened.done():
            why = "the opening of its topic was cancelled"
            self._forget_unopened(name, served, BundleUnavailable(str(served.bundle), why))

    async def _bundle_of(self, name: TopicName) -> Bundle:
        """Wait until the namespace is known, and return the topic's bundle. Raises
        PoliciesUnavailable, NamespaceNotFound, NotAllowed."""
        if name.domain is Domain.NON_PERSISTENT and not self._non_persistent:
            why = "non-persistent topics are switched off (enable_non_persistent_topics)"
            raise NotAllowed(str(name), why)
        await self.policies.ready(name.namespace_name)
        return self.policies.bundle_of(name)

    async def exists(self, name: TopicName) -> bool:
        """See Catalog.exists."""
        return await self.catalog.exists(name)

    async def partitions_of(self, name: TopicName, *, create: bool) -> int:
        """See Catalog.partitions_of."""
        await self._bundle_of(name)
        served = self._topics.get(name)
        if served is not None and served.is_opened:
            return 0
        return await self.catalog.partitions_of(name, create=create)

    async def create_partitioned_topic(
        self, name: TopicName, partitions: int, properties: Mapping[str, str]
    ) -> None:
        """Create a partitioned topic for an administrator. Raises InvalidPartitionCount,
        ReservedName, TopicExists, PoliciesUnavailable, NamespaceNotFound, MetadataError."""
        await self._bundle_of(name)
        if is_system(name):
            raise ReservedName(str(name), "the name is reserved for the system")
        await self.catalog.partitioned.create(name, partitions, properties)

    async def topics_of(
        self, namespace: NamespaceName, domains: Collection[Domain] = (Domain.PERSISTENT,)
    ) -> list[TopicName]:
        """Return the namespace's topics. A non-persistent topic without partitions is included only
        if it is open at this broker."""
        found: list[TopicName] = []
        for it in domains:
            found += await self.catalog.names(namespace, it)
        if Domain.NON_PERSISTENT in domains:
            known = {name for name in found if name.domain is Domain.NON_PERSISTENT}
            for name, served in self._topics.items():
                if (
                    name.domain is Domain.NON_PERSISTENT
                    and name.namespace_name == namespace
                    and name not in known
                    and served.is_opened
                ):
                    found.append(name)
        return found

    async def close_non_persistent(self, name: TopicName, *, force: bool) -> None:
        """Close a non-persistent topic for an administrator. Raises TopicNotFound,
        NonPersistentInUse."""
        served = self._topics.get(name)
        if served is None:
            raise TopicNotFound(str(name))
        topic = await asyncio.shield(served.opened)
        assert isinstance(topic, NonPersistentTopic), name
        if topic.users and not force:
            raise NonPersistentInUse(str(name), topic.users)
        await self._close(name, CloseReason.UNLOADED)

    async def perhaps_open(self, names: Sequence[TopicName]) -> list[TopicName]:
        """Return those of `names` that may be open at a broker: the topics that this broker has
        opened, and the topics of bundles that other brokers own. The result is correct only with a
        fresh view of the metadata: call PartitionedTopics.find_fresh first. Raises
        PoliciesUnavailable, MetadataError."""
        found: list[TopicName] = []
        owners: dict[Bundle, BrokerRegistration | None] = {}
        for number, name in enumerate(names, 1):
            if number % NAMES_PER_TURN == 0:
                await asyncio.sleep(0)
            bundle = await self._bundle_of(name)
            if bundle not in owners:
                owners[bundle] = await self._owners.owner_of(bundle)
            owner = owners[bundle]
            if name in self._topics or owner not in (None, self._me):
                found.append(name)
        return found

    def _on_idle(self, name: TopicName) -> None:
        """Close a non-persistent topic that has had no clients for a while."""
        self._tasks.create_task(self._close(name, CloseReason.UNLOADED))

    def watch_topics(
        self, namespace: NamespaceName, on_change: Callable[[], None]
    ) -> Callable[[], None]:
        """Call back when the persistent topics of the namespace may have changed. Returns the
        function that ends the watch."""
        folder = paths.topics(namespace.tenant, namespace.namespace, Domain.PERSISTENT)
        return self._store.watch(folder, on_change)

    async def stored_partitions_of(self, name: TopicName) -> int:
        """See Catalog.partitions_of. Reads the metadata even for a topic that is open here, because
        this broker may be deleting the topic."""
        await self._bundle_of(name)
        return await self.catalog.partitions_of(name, create=False)

    def watch_partitioned(
        self, name: TopicName, on_change: Callable[[], None]
    ) -> Callable[[], None]:
        """Call back when the record of a partitioned topic changes. Returns the function that ends
        the watch."""
        path = paths.partitioned_topic(name.tenant, name.namespace, name.domain, name.topic)
        return self._store.watch(path, on_change)

    def watch_record(self, name: TopicName, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call back when the record of a topic changes. Returns the function that ends the
        watch."""
        path = paths.topic(name.tenant, name.namespace, name.domain, name.topic)
        return self._store.watch(path, on_change)

    async def _open(self, name: TopicName, served: _Served, asking: Asking | None) -> None:
        try:
            async with self._loads.slot(str(name)):
                await self.policies.follow(name)
                topic = await self._open_followed(name, served.bundle, asking)
        except OPERATING_ERRORS as error:
            log.warning("topic did not open", topic=str(name), error=str(error))
            self._forget_unopened(name, served, error)
            return
        except Exception as error:  # guard.py
            self.failures.note("open", str(name), error)
            failed = TopicFailed(str(name), error)
            self.quarantine.on_failure(name, str(failed), asyncio.get_running_loop().time())
            self._forget_unopened(name, served, failed)
            return
        log.info("topic opened", topic=str(name))
        self.opened_topics += 1
        served.opened.set_result(topic)
        self.changes.tell(name)
        if not self._owners.holds(served.bundle):  # lost while the topic was opening
            await self._close(name, CloseReason.UNLOADED)

    def _forget_unopened(self, name: TopicName, served: _Served, error: Exception) -> None:
        if self._topics.get(name) is served:
            del self._topics[name]
        served.opened.set_exception(error)
        served.opened.exception()  # marks it as retrieved: every caller may have left

    async def _open_followed(
        self, name: TopicName, bundle: Bundle, asking: Asking | None
    ) -> ServedTopic:
        """Open a topic whose policies the broker follows. If it does not open, unfollow them."""
        topic: ServedTopic | None = None
        try:
            if name.domain is Domain.NON_PERSISTENT:
                topic = await self._open_non_persistent(name, asking)
            else:
                topic = await self._open_or_create(name, bundle, asking)
        finally:
            if topic is None:
                self.policies.unfollow(name)
        return topic

    async def _open_non_persistent(self, name: TopicName, asking: Asking | None) -> ServedTopic:
        """Open a non-persistent topic. The topic has no record, so each opening creates it."""
        await self._require_creatable(name, asking)
        return NonPersistentTopic(
            name,
            policies=FollowedPolicies(self.policies, name),
            clock=self._clock,
            next_name=self._names.next,
            cap=self._cap,
            on_idle=self._on_idle,
            on_failed=self._on_failed,
            spawn=spawner(self._tasks),
            guard=partial(self._guard, name),
            message_bytes_max=self.message_bytes_max,
            failover=self._failover,
            key_shared=self._key_shared,
            turns=self.turns,
        )

    async def _require_creatable(self, name: TopicName, asking: Asking | None) -> None:
        """Raise the errors of Catalog.require_creatable. `asking` None: the request must not create
        the topic, so raise IsPartitioned or TopicNotFound."""
        if asking is not None:
            await self.catalog.require_creatable(name, by_user=asking is ADMINISTRATOR)
            return
        record = await self.catalog.partitioned.find(name)
        if record is not None and not record.deleting:
            raise IsPartitioned(str(name), record.partitions)
        raise TopicNotFound(str(name))

    async def _open_or_create(
        self, name: TopicName, bundle: Bundle, asking: Asking | None
    ) -> Topic:
        """Open the topic. If the topic does not exist, create it for the client `asking`. `asking`
        None: raise TopicNotFound or IsPartitioned instead."""
        try:
            return await self._open_topic(name, bundle, create=False)
        except TopicDeleted:
            await self._deletions.finish(name)
        except TopicNotFound:
            pass
        tombstone = await self._require_admitted(name, asking)
        return await self._open_topic(name, bundle, create=True, tombstone=tombstone)

    async def _require_admitted(
        self, name: TopicName, asking: Asking | None
    ) -> TopicTombstone | None:
        """Check that the client `asking` may create the topic. Return the tombstone of an earlier
        topic of this name. Raises TopicNotFound, and the errors of `_require_creatable`."""
        await self._require_creatable(name, asking)
        assert asking is not None
        if name.domain is Domain.NON_PERSISTENT:
            return None
        tombstone = await self._deletions.tombstone(name)
        if tombstone is not None and self._deletions.refuses(
            tombstone, asking.client, reconnects=asking.reconnects
        ):
            raise TopicNotFound(str(name))
        return tombstone

    async def _open_topic(
        self,
        name: TopicName,
        bundle: Bundle,
        *,
        create: bool,
        tombstone: TopicTombstone | None = None,
    ) -> Topic:
        return await PersistentTopic.open(
            name,
            self._environment,
            policies=FollowedPolicies(self.policies, name),
            incarnation=f"{self._random.getrandbits(128):032x}",
            create=create,
            epoch_min=0 if tombstone is None else tombstone.epoch,
            ledger_min=0 if tombstone is None else tombstone.ledger_min,
            version_min=-1 if tombstone is None else tombstone.version,
            holds=lambda: self._owners.holds(bundle),
            guard=partial(self._guard, name),
        )

    def _make_environment(self) -> TopicEnvironment:
        return TopicEnvironment(
            store=self._store,
            ledgers=self._ledgers,
            log_config=self._log_config,
            cache=self._cache,
            clock=self._clock,
            names=self._names,
            tasks=self._tasks,
            on_failed=self._on_failed,
            message_bytes_max=self.message_bytes_max,
            strict_delays=self._strict_delays,
            fixed_delay_look_ahead=self._fixed_delay_look_ahead,
            latency=self.publish_latency,
            budget=self.publish_budget,
            deduplication=self._deduplication,
            failover=self._failover,
            key_shared=self._key_shared,
            turns=self.turns,
        )

    def _guard(self, name: TopicName, on_failure: Callable[[Exception], None]) -> Guard:
        return Guard(str(name), failures=self.failures, steps=self.steps, on_failure=on_failure)

    def _on_failed(self, topic: ServedTopic, error: BrokerError) -> None:
        log.warning("topic failed", topic=str(topic.name), error=str(error))
        served = self._topics.get(topic.name)
        if isinstance(error, TopicFailed):
            now = asyncio.get_running_loop().time()
            self.quarantine.on_failure(topic.name, str(error), now)
        elif served is not None:
            self._owners.doubt(served.bundle)
        self._failed[topic.name] = topic
        self._failing.set()

    async def _close_failed(self) -> None:
        """Close the topics that have failed, so that the next request opens them again."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._failing.wait()
                self._failing.clear()
                failed, self._failed = self._failed, {}
                group.create_task(self._close_all(failed, CloseReason.TOPIC_FAILED, only=failed))

    async def _close_all(
        self,
        names: Collection[TopicName],
        reason: CloseReason,
        *,
        only: Mapping[TopicName, ServedTopic] | None = None,
    ) -> None:
        """Close the topics concurrently. A call with more than CLOSES_PER_TURN names begins at most
        CLOSES_PER_TURN closes in one turn of the event loop, and takes turns with other such calls.
        `only`: see `_close`."""
        async with asyncio.TaskGroup() as group:
            for number, name in enumerate(names):
                if number % CLOSES_PER_TURN == 0 and len(names) > CLOSES_PER_TURN:
                    await self.turns.take()
                one = None if only is None else only[name]
                group.create_task(self._close(name, reason, only=one))

    async def _close(
        self, name: TopicName, reason: CloseReason, *, only: ServedTopic | None = None
    ) -> None:
        """Close the topic of this name. `only`: close it only if it is this object. After a topic
        has failed, a request may already have opened the topic again."""
        served = self._topics.get(name)
        if served is None:
            return
        try:
            topic = await asyncio.shield(served.opened)
        except OPERATING_ERRORS:
            return  # the topic did not open: there is nothing to close
        if only is not None and topic is not only:
            return
        try:
            await topic.close(reason)
        except asyncio.CancelledError:
            if topic.closed:  # otherwise another call still closes or deletes the topic
                self._forget(name, served)
            raise
        except Exception as error:  # guard.py; the next owner recovers open ledgers
            self.failures.note("close", str(name), error)
        log.info("topic closed", topic=str(name), reason=reason.value)
        self._forget(name, served)

    def _chores_of_life(self, life: LifeConfig) -> tuple[Chore, ...]:
        chores = [
            Chore("tend open ledgers", self._log_config.check_interval_s, tend_ledger),
            Chore("delete inactive topics", life.inactive_check_s, self._delete_inactive),
        ]
        if life.idle_unload_s > 0:
            period_s = min(life.idle_unload_s / 2, UNLOAD_PERIOD_S_MAX)
            unload = partial(self._unload_idle, life.idle_unload_s)
            chores.append(Chore("unload idle topics", period_s, unload))
        return tuple(chores)

    async def _unload_idle(self, idle_s: float, topic: Topic) -> None:
        """Free the memory of a topic that has had no clients and no work for `idle_s`. The next
        request loads it again."""
        now = asyncio.get_running_loop().time()
        served = self._topics.get(topic.name)
        if served is None or served.left is not None or now - served.used_s < idle_s:
            return
        if not served.is_opened or served.opened.result() is not topic:
            return  # the topic was closed, and a request opens it again
        if may_unload(topic, idle_s, now):
            served.left = asyncio.Event()
            await self._close(topic.name, CloseReason.UNLOADED)

    async def _delete_inactive(self, topic: Topic) -> None:
        """Delete the topic if its policy for inactive topics says so."""
        if not self._is_used(topic):
            log.info("deleting an inactive topic", topic=str(topic.name))
            with suppress(TopicInUse, TopicNotFound):  # a client joined, or the topic is deleted
                await self.delete_topic(topic.name, force=False, unless_used=self._is_used)

    def _is_used(self, topic: Topic) -> bool:
        return not may_delete(topic, asyncio.get_running_loop().time(), self._clock.now_ms())

    async def live_brokers(self) -> list[BrokerRegistration]:
        """Return the registered brokers, sorted by id. Raises MetadataError."""
        await self._brokers.refresh()
        return [each for _, each in sorted(self._brokers.live.items())]

    async def unload_topic(self, name: TopicName) -> None:
        """Close the topic if it is open here. The next request opens it again."""
        await self._close(name, CloseReason.UNLOADED)

    async def owner_of(self, bundle: Bundle) -> BrokerRegistration | None:
        """Return the registered broker that owns the bundle. None: the bundle has no owner, or its
        owner is not registered. Raises MetadataError."""
        return await self._owners.owner_of(bundle)

    async def unload_bundle(self, bundle: Bundle) -> BrokerRegistration | None:
        """Unload the bundle, and hand it over to another broker if one is available. If another
        broker owns the bundle, return that broker and do nothing. Raises MetadataError."""
        if self._owners.holds(bundle):
            await self._owners.release(bundle, self._unload)
            return None
        owner = await self._owners.owner_of(bundle)
        return None if owner == self._me else owner

    async def _unload(self, bundle: Bundle) -> None:
        await self.turns.take()  # a broker may unload hundreds of bundles at once
        names = [name for name, served in self._topics.items() if served.bundle == bundle]
        await self._close_all(names, CloseReason.UNLOADED)
        await self.turns.take()
        for number, name in enumerate(self.changes.watched_in(bundle), 1):
            if number % NAMES_PER_TURN == 0:
                await asyncio.sleep(0)
            # Look the topic's bundle up again: a division of the namespace may have put the topic
            # into a new bundle, which this broker may still own.
            try:
                is_mine = self._owners.holds(self.policies.bundle_of(name))
            except PoliciesUnavailable:  # the namespace was deleted
                is_mine = False
            if not is_mine:
                self.changes.tell(name)

    async def _release_all(self) -> None:
        """Hand over all bundles concurrently."""
        self._owners.begin_stop()
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S), asyncio.TaskGroup() as group:
                for bundle in self._owners.held:
                    group.create_task(self._owners.release(bundle, self._unload))
                group.create_task(self._owners.wait_released())
        except TimeoutError:
            log.error(
                "bundles were not handed over in time", left=[str(b) for b in self._owners.held]
            )


def _retrieve(task: asyncio.Task[Exception | None]) -> None:
    """Retrieve the outcome of a task, so that asyncio logs no error if every caller has left."""
    if not task.cancelled():
        task.exception()
