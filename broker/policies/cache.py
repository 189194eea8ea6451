"""The broker's cache of tenants, namespaces and policies, which answers without waiting.

`ready(namespace)` loads a namespace at its first use. `follow(topic)` loads the policies of a topic
that this broker serves. After that, `bundle_of` and `policies_of` answer without waiting. Watches
keep the cache fresh: each report of a change queues a read, and a few reader tasks carry out the
reads.

While the broker has no connection to the metadata store, the cache is stale. It still returns the
values that it read last, and `is_fresh` returns False. After reconnecting, the cache reads every
record again. A record that was never read is unknown. The cache never takes an unknown record for
"no policies": the caller gets PoliciesUnavailable and retries.

The cache keeps at most NAMESPACES_MAX namespaces. At the limit, it forgets the least recently used
namespace that is not needed: no topic of it is served, and no request waits for it. If every
namespace is needed, the cache refuses another namespace with PoliciesUnavailable.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.errors import NamespaceNotFound, PoliciesUnavailable
from magnetar.broker.policies.upgrade import BUILT_IN, has_topics, record_namespaces
from magnetar.broker.policies.view import UNSET, NamespaceView
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import InvalidRecord, MetadataError
from magnetar.metadata.model import BUNDLES_DEFAULT, NamespaceBundles
from magnetar.metadata.policies import BROKER_DEFAULTS, NamespaceRecord, TenantRecord
from magnetar.metadata.store import KEEP, SessionState, update
from magnetar.protos.names import DEFAULT_NAMESPACE
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from magnetar.broker.guard import Failures
    from magnetar.broker.ownership.bundle import Bundle
    from magnetar.broker.policies.part import Part
    from magnetar.broker.policies.view import Effects
    from magnetar.metadata.policies import EffectivePolicies, Policies
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.names import NamespaceName, TopicName

NAMESPACES_MAX: Final = 4_096
"""The maximum number of namespaces in the cache. Each namespace needs about 6 KiB, with three
watches: 24 MiB in all."""

READERS: Final = 8
"""The maximum number of concurrent reads. With eight readers and 1 ms for each read, the cache
reads 10,000 records again in a second or two after a lost connection."""

RETRY_S: Final = 0.2
"""The pause in seconds before the cache repeats a read that failed on a live connection."""

CREATE_TIMEOUT_S: Final = 5.0
"""The time limit in seconds for creating the record of a tenant or namespace. The request that
needs the record has a deadline of its own."""

NOTIFY_BATCH: Final = 32
"""The maximum number of callbacks in one step of the event loop. The callback of a topic takes
30 us, and 7 us more for each subscription: 25 ms for 32 topics with 100 subscriptions each."""

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Node:
    """A cached value (`Part`), its path, and the functions that read and apply the value."""

    part: Part[Any]
    path: str
    read: Callable[[], Awaitable[Any]]  # returns None when the namespace may be forgotten
    apply: Callable[[Any], Effects]
    unwatch: Callable[[], None] = lambda: None
    # The outcome of the next read. None: no request has asked for a read.
    attempt: asyncio.Future[None] | None = None
    dropped: bool = False


@dataclass(slots=True, eq=False)
class _Entry:
    view: NamespaceView
    nodes: dict[Part[Any], _Node] = field(default_factory=dict)
    waiting: int = 0  # requests that need the namespace now
    is_gone: bool = False  # the last read found no record: the namespace was deleted

    @property
    def is_needed(self) -> bool:
        kept = self.view.name == DEFAULT_NAMESPACE
        return kept or self.waiting > 0 or self.view.is_followed


class PolicyCache:
    """`run` carries out the reads. It is supervised, and runs as long as the broker serves."""

    def __init__(
        self,
        store: MetadataStore,
        *,
        namespace_bundles: int = BUNDLES_DEFAULT,
        defaults: EffectivePolicies = BROKER_DEFAULTS,
        namespaces_max: int = NAMESPACES_MAX,
        failures: Failures | None = None,
    ) -> None:
        """`namespace_bundles`: the number of bundles of a namespace whose record this broker
        creates. `failures` counts unexpected exceptions of callbacks; None: the cache raises
        them."""
        self._store = store
        self._new_bundles = NamespaceBundles.divided(namespace_bundles)
        self._defaults = defaults
        self._namespaces_max = namespaces_max
        self._failures = failures
        self._entries: dict[NamespaceName, _Entry] = {}  # least recently used first
        self._queue: dict[_Node, _Entry] = {}  # the nodes to be read, in FIFO order
        self._wake = asyncio.Event()

    # ---- answers ----

    async def ready(self, namespace: NamespaceName) -> None:
        """Wait until the namespace is known. Known values may be stale; see `is_fresh`.

        Raises NamespaceNotFound and PoliciesUnavailable (a read failed, a record is invalid, or the
        metadata store is not connected). The caller must set a deadline for the wait.
        """
        entry = self._use(namespace)
        if entry.view.is_known:
            return
        try:
            await self._wait_read(entry, [p for p in entry.view.parts if not p.is_known])
        except NamespaceNotFound:
            if not entry.is_needed and self._entries.get(namespace) is entry:
                self._drop(entry)
            raise

    def bundle_of(self, topic: TopicName) -> Bundle:
        """Return the bundle of a topic. Raises PoliciesUnavailable if the namespace is unknown."""
        return self._known(topic).bundle_of(topic)

    def policies_of(self, topic: TopicName) -> EffectivePolicies:
        """Return the policies of a topic. The namespace must be known. The topic must be followed,
        or must set no policies of its own. Raises PoliciesUnavailable if the policies are
        unknown."""
        return self._known(topic).policies_of(topic)

    def policies_of_namespace(self, namespace: NamespaceName) -> EffectivePolicies:
        """Return the policies of topics that set no policies of their own, in a known namespace.
        Raises PoliciesUnavailable if the policies are unknown."""
        entry = self._entries.get(namespace)
        if entry is None:
            raise PoliciesUnavailable(str(namespace), "it was not read yet")
        return entry.view.policies_shared()

    def tenant_of(self, namespace: NamespaceName) -> TenantRecord:
        """Return the tenant of a known namespace. Raises PoliciesUnavailable if the tenant is
        unknown."""
        entry = self._entries.get(namespace)
        if entry is None or entry.view.tenant.value is None:
            raise PoliciesUnavailable(str(namespace), "its tenant was not read yet")
        return entry.view.tenant.value

    def is_fresh(self, topic: TopicName) -> bool:
        """Return whether `policies_of` is up to date: since the last read, the metadata store has
        reported no change, and its connection was not lost. Code that deletes data must check this
        first. Raises PoliciesUnavailable."""
        return self._known(topic).is_fresh(topic)

    def _known(self, topic: TopicName) -> NamespaceView:
        entry = self._entries.get(topic.namespace_name)
        if entry is None:
            raise PoliciesUnavailable(str(topic), "its namespace was not read yet")
        return entry.view

    # ---- topics that are served ----

    async def follow(self, topic: TopicName) -> None:
        """Read all records on which the topic's policies depend, and keep them fresh until
        `unfollow`. A topic must not be followed twice at the same time. Raises NamespaceNotFound
        and PoliciesUnavailable. After an error the topic is not followed."""
        entry = self._use(topic.namespace_name)
        entry.waiting += 1
        try:
            await self._wait_read(entry, [p for p in entry.view.parts if not p.is_fresh])
            own = entry.view.follow(topic)
        finally:
            entry.waiting -= 1
            self._drop_if_gone(entry)
        if own is None:
            return
        if own not in entry.nodes:
            self._add_own(entry, topic)
        read = False
        try:
            if not own.is_fresh:
                await self._wait_read(entry, [own])
            read = True
        finally:
            if not read:
                self.unfollow(topic)

    def unfollow(self, topic: TopicName) -> None:
        """End `follow` for a topic that is no longer served. Its callbacks are not called again."""
        entry = self._entries[topic.namespace_name]
        unneeded = entry.view.unfollow(topic)
        if unneeded is not None:
            self._drop_node(entry.nodes.pop(unneeded))
        self._drop_if_gone(entry)

    def subscribe(self, topic: TopicName, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the policies of a followed topic may have changed. `callback` runs
        on the event loop and must be short. Returns the function that ends these calls; `unfollow`
        ends them, too."""
        return self._known(topic).subscribe(topic, callback).end

    # ---- reading ----

    async def run(self) -> None:
        """Carry out the queued reads until cancelled. Supervised."""
        unwatch = self._store.watch_session(self._on_session)
        try:
            self._use(DEFAULT_NAMESPACE)  # this namespace always exists: its first read creates it
            for entry in self._entries.values():
                for node in entry.nodes.values():
                    self._queue_read(entry, node)  # reads that an earlier run did not complete
            async with asyncio.TaskGroup() as group:
                group.create_task(self._record_namespaces())
                for _ in range(READERS):
                    group.create_task(self._read_queued())
        finally:
            unwatch()
            for entry in self._entries.values():
                for node in entry.nodes.values():
                    self._fail(node, "the reads of policies were stopped")

    async def _record_namespaces(self) -> None:
        try:
            await record_namespaces(self._store, self._new_bundles)
        # Not fatal: the cache also records each namespace at its first use.
        except (MetadataError, InvalidRecord) as error:
            log.warning("recording the namespaces of topics failed", error=str(error))

    async def _read_queued(self) -> None:
        while True:
            while not self._queue or self._store.session_state is not SessionState.CONNECTED:
                self._wake.clear()
                await self._wake.wait()
            node = next(iter(self._queue))
            entry = self._queue.pop(node)
            # False: another reader is reading the node. That reader queues it again if needed.
            if node.part.wants_read:
                await self._read(entry, node)

    async def _read(self, entry: _Entry, node: _Node) -> None:
        node.part.begin_read()
        try:
            value = await node.read()
        except NamespaceNotFound as error:
            node.part.on_failed()  # read again when the node is created, or at the next request
            entry.is_gone = True
            self._fail(node, error)
            if not node.dropped and not entry.is_needed:
                self._drop(entry)
        except InvalidRecord as error:
            node.part.on_unusable(str(error))
            log.error("a record cannot be read", path=node.path, error=str(error))
            self._fail(node, str(error))
            self._queue_read(entry, node)  # the record may have been repaired meanwhile
        except MetadataError as error:
            node.part.on_failed()
            log.warning("reading policies failed", path=node.path, error=str(error))
            self._fail(node, str(error))
            await asyncio.sleep(RETRY_S)
            self._queue_read(entry, node)
        except BaseException:  # cancelled: the next `run` reads the node
            node.part.on_failed()
            raise
        else:
            if value is None and not node.dropped and not entry.is_needed:
                self._drop(entry)
            elif value is None:
                node.part.on_failed()  # a request that needs the namespace has come meanwhile
                self._queue_read(entry, node)
            elif not node.dropped:
                await self._apply(entry, node, value)

    async def _apply(self, entry: _Entry, node: _Node, value: object) -> None:
        effects = node.apply(value)
        if node.part is entry.view.record:
            entry.is_gone = False
        if node.part.wants_read:  # a change was reported meanwhile
            self._queue_read(entry, node)
        if node.attempt is not None:
            node.attempt.set_result(None)
            node.attempt = None
        for topic in effects.load:
            self._add_own(entry, topic)
        for start in range(0, len(effects.notify), NOTIFY_BATCH):
            if start:
                await asyncio.sleep(0)
            for subscription in effects.notify[start : start + NOTIFY_BATCH]:
                try:
                    subscription.notify()
                except Exception as error:  # see guard.py
                    if self._failures is None:
                        raise
                    self._failures.note("policy callback", str(subscription.topic), error)

    async def _wait_read(self, entry: _Entry, parts: Iterable[Part[Any]]) -> None:
        """Wait for one read of each part. Raises PoliciesUnavailable or NamespaceNotFound if a read
        fails."""
        entry.waiting += 1
        try:
            attempts = [self._attempt(entry, entry.nodes[part]) for part in parts]
            for attempt in attempts:
                await asyncio.shield(attempt)  # others may wait for the same read
        finally:
            entry.waiting -= 1

    def _attempt(self, entry: _Entry, node: _Node) -> asyncio.Future[None]:
        state = self._store.session_state
        if state is not SessionState.CONNECTED:
            raise PoliciesUnavailable(node.path, f"the metadata session is {state.value}")
        if node.part.is_unusable:
            raise PoliciesUnavailable(node.path, node.part.trouble)
        if node.attempt is None:
            node.attempt = asyncio.get_running_loop().create_future()
            self._queue_read(entry, node)
        return node.attempt

    def _fail(self, node: _Node, why: str | NamespaceNotFound) -> None:
        if node.attempt is not None:
            error = PoliciesUnavailable(node.path, why) if isinstance(why, str) else why
            node.attempt.set_exception(error)
            node.attempt.exception()  # avoids asyncio's warning: perhaps no request waits for it
            node.attempt = None

    def _queue_read(self, entry: _Entry, node: _Node) -> None:
        if node.part.wants_read and not node.dropped:
            self._queue[node] = entry
            self._wake.set()

    def _on_changed(self, entry: _Entry, node: _Node) -> None:
        node.part.on_changed()
        self._queue_read(entry, node)

    def _on_session(self, state: SessionState) -> None:
        """When the connection is lost, make every part stale: watches report no changes then."""
        self._wake.set()
        if state is SessionState.CONNECTED:
            return
        for entry in self._entries.values():
            for node in entry.nodes.values():
                self._on_changed(entry, node)
                self._fail(node, f"the metadata session is {state.value}")

    # ---- namespaces that are kept ----

    def _use(self, namespace: NamespaceName) -> _Entry:
        """Return the namespace's entry. The entry becomes the most recently used one."""
        entry = self._entries.pop(namespace, None)
        if entry is None:
            if len(self._entries) >= self._namespaces_max:
                self._make_room(namespace)
            entry = self._add(namespace)
        self._entries[namespace] = entry
        return entry

    def _make_room(self, namespace: NamespaceName) -> None:
        for name in list(self._entries):
            entry = self._entries[name]
            if not entry.is_needed:
                self._drop(entry)
                return
            # A needed entry becomes the most recently used one.
            self._entries[name] = self._entries.pop(name)
        why = f"this broker serves topics of {self._namespaces_max} other namespaces already"
        raise PoliciesUnavailable(str(namespace), why)

    def _add(self, namespace: NamespaceName) -> _Entry:
        entry = _Entry(NamespaceView(namespace, self._defaults))
        view, (tenant, name) = entry.view, (namespace.tenant, namespace.namespace)
        folder = paths.topic_policies_folder(tenant, name)
        for node in (
            _Node(
                view.tenant,
                paths.tenant(tenant),
                partial(self._read_tenant, entry),
                view.on_tenant,
            ),
            _Node(
                view.record,
                paths.namespace(tenant, name),
                partial(self._read_namespace, entry),
                view.on_record,
            ),
            _Node(view.listed, folder, partial(self._read_names, folder), view.on_listed),
        ):
            self._add_node(entry, node)
        return entry

    def _add_own(self, entry: _Entry, topic: TopicName) -> None:
        base = topic.base
        path = paths.topic_policies(base.tenant, base.namespace, base.domain, base.topic)
        own = entry.view.own_part(topic)
        read = partial(self._read_own, path)
        self._add_node(entry, _Node(own, path, read, partial(entry.view.on_own, topic)))

    def _add_node(self, entry: _Entry, node: _Node) -> None:
        entry.nodes[node.part] = node
        node.unwatch = self._store.watch(node.path, partial(self._on_changed, entry, node))
        self._queue_read(entry, node)

    def _drop_if_gone(self, entry: _Entry) -> None:
        """Forget a deleted namespace that is no longer needed. Otherwise it would stay known."""
        if entry.is_gone and not entry.is_needed:
            self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.view.name]
        for node in entry.nodes.values():
            self._drop_node(node)

    def _drop_node(self, node: _Node) -> None:
        node.dropped = True
        node.unwatch()
        self._queue.pop(node, None)
        self._fail(node, "it is not needed any more")

    # ---- records ----

    async def _read_tenant(self, entry: _Entry) -> TenantRecord | None:
        path = paths.tenant(entry.view.name.tenant)
        stored = await self._get_or_create(
            entry, path, codec.encode_tenant(TenantRecord()), is_tenant=True
        )
        return None if stored is None else codec.decode_tenant(stored)

    async def _read_namespace(self, entry: _Entry) -> NamespaceRecord | None:
        path = paths.namespace(entry.view.name.tenant, entry.view.name.namespace)
        new = codec.encode_namespace(NamespaceRecord(self._new_bundles))
        stored = await self._get_or_create(entry, path, new, is_tenant=False)
        return None if stored is None else codec.decode_namespace(stored)

    async def _get_or_create(
        self, entry: _Entry, path: str, new: bytes, *, is_tenant: bool
    ) -> bytes | None:
        """Return the stored record of a tenant or namespace. Create an absent record if the
        namespace is built in or has topics: an earlier version of Magnetar created topics without
        the record of their namespace. None: the record is absent, and the namespace is not needed.
        Raises NamespaceNotFound."""
        found = await self._store.get(path)
        if found is None:
            await self._store.sync(path)  # an administrator may just have created it
            found = await self._store.get(path)
        if found is not None:
            return found.value
        name = entry.view.name
        if not await self._exists_without_record(name, is_tenant=is_tenant):
            raise NamespaceNotFound(str(name))
        if not entry.is_needed:
            return None
        deadline = asyncio.get_running_loop().time() + CREATE_TIMEOUT_S
        # Several brokers may create the record. All of them use the record that is stored first.
        stored = await update(
            self._store, path, lambda value: new if value is None else KEEP, deadline=deadline
        )
        assert stored is not None
        return stored.value

    async def _exists_without_record(self, name: NamespaceName, *, is_tenant: bool) -> bool:
        if name in BUILT_IN or await has_topics(self._store, name):
            return True
        # An earlier version of Magnetar kept no records of tenants. The namespace may have a record
        # of that version.
        path = paths.namespace(name.tenant, name.namespace)
        return is_tenant and await self._store.get(path) is not None

    async def _read_names(self, folder: str) -> frozenset[str]:
        return frozenset(map(paths.unquoted, await self._store.children(folder)))

    async def _read_own(self, path: str) -> Policies:
        found = await self._store.get(path)
        return UNSET if found is None else codec.decode_topic_policies(found.value).policies
