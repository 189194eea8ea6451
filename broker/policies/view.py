"""A broker's view of one namespace: its tenant, its record, and its topics' policies. Pure.

Three parts are read for each namespace: the tenant's record, the namespace's record, and the names
of the topics that set policies of their own. These names save a read for most topics: a topic that
is not among the names sets no policies. If a topic is among the names and is followed (this broker
serves it), the topic's own record is a part, too.

1. No answer is made from an unknown part: the view raises PoliciesUnavailable instead.
2. All partitions of a topic share the policies of the topic (`TopicName.base`).
3. Listeners are called when the policies in the namespace's record, or in the record of their own
   topic, have changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from magnetar.broker.errors import PoliciesUnavailable
from magnetar.broker.ownership.bundle import Bundle, bundle_in
from magnetar.broker.policies.part import Part
from magnetar.metadata import paths
from magnetar.metadata.policies import NamespaceRecord, Policies, TenantRecord, effective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from magnetar.metadata.policies import EffectivePolicies
    from magnetar.protos.names import NamespaceName, TopicName

UNSET = Policies()


@dataclass(slots=True, eq=False)
class PolicyListener:
    topic: TopicName
    callback: Callable[[], None] | None  # None: this listener has ended
    view: NamespaceView

    def end(self) -> None:
        if self.callback is not None:
            self.callback = None
            self.view.forget(self)

    def notify(self) -> None:
        if self.callback is not None:
            self.callback()


@dataclass(slots=True, eq=False)
class _Followed:
    """A followed topic, or all followed partitions of a partitioned topic."""

    base: TopicName
    count: int = 0  # the followed topic (1), or the number of followed partitions
    own: Part[Policies] | None = None  # None: the topic sets no policies
    resolved: EffectivePolicies | None = None  # None: to be computed; used only with `own`
    # The listeners of each topic. A topic may have thousands of followed partitions.
    listeners: dict[TopicName, tuple[PolicyListener, ...]] = field(default_factory=dict)

    def all_listeners(self) -> Iterator[PolicyListener]:
        return chain.from_iterable(self.listeners.values())


@dataclass(frozen=True, slots=True)
class Effects:
    """The actions of the shell after a read."""

    load: tuple[TopicName, ...] = ()  # followed topics whose own policies must be read now
    notify: tuple[PolicyListener, ...] = ()


class NamespaceView:
    def __init__(self, name: NamespaceName, defaults: EffectivePolicies) -> None:
        self.name = name
        self.tenant: Part[TenantRecord] = Part()
        self.record: Part[NamespaceRecord] = Part()
        self.listed: Part[frozenset[str]] = Part()  # keys of the topics that set policies
        self._defaults = defaults
        # The policies of all topics that set none; None: to be computed.
        self._shared: EffectivePolicies | None = None
        self._followed: dict[str, _Followed] = {}  # keyed by `topic_key`

    @property
    def parts(self) -> tuple[Part[TenantRecord], Part[NamespaceRecord], Part[frozenset[str]]]:
        """The parts that are read for every namespace."""
        return self.tenant, self.record, self.listed

    @property
    def is_known(self) -> bool:
        return all(part.is_known for part in self.parts)

    @property
    def is_followed(self) -> bool:
        """True when a topic of the namespace is followed."""
        return bool(self._followed)

    # ---- answers ----

    def bundle_of(self, topic: TopicName) -> Bundle:
        return bundle_in(topic, self._known_record(topic).bundles)

    def policies_of(self, topic: TopicName) -> EffectivePolicies:
        record = self._known_record(topic)
        key = topic_key(topic)
        followed = self._followed.get(key)
        if followed is not None and followed.own is not None:
            if followed.resolved is None:
                if followed.own.value is None:
                    raise PoliciesUnavailable(str(topic), "its own policies were not read yet")
                followed.resolved = effective(self._defaults, record.policies, followed.own.value)
            return followed.resolved
        if self.listed.value is None:
            raise PoliciesUnavailable(str(topic), "it is unknown which topics set policies")
        if followed is None and key in self.listed.value:
            raise PoliciesUnavailable(str(topic), "its own policies are not followed")
        return self.policies_shared()

    def policies_shared(self) -> EffectivePolicies:
        """The policies of all topics that set no policies of their own."""
        if self.record.value is None:
            raise PoliciesUnavailable(str(self.name), "its record was not read yet")
        if self._shared is None:
            self._shared = effective(self._defaults, self.record.value.policies, UNSET)
        return self._shared

    def is_fresh(self, topic: TopicName) -> bool:
        """Return whether all parts that `policies_of` uses are fresh: no change was reported since
        they were read."""
        followed = self._followed.get(topic_key(topic))
        own = None if followed is None else followed.own
        return all(part.is_fresh for part in self.parts) and (own is None or own.is_fresh)

    def _known_record(self, topic: TopicName) -> NamespaceRecord:
        if self.record.value is None:
            raise PoliciesUnavailable(str(topic), "its namespace was not read yet")
        return self.record.value

    # ---- topics ----

    def follow(self, topic: TopicName) -> Part[Policies] | None:
        """Follow a topic; `listed` must be known. Returns the part with the topic's own policies;
        None: the topic sets none."""
        assert self.listed.value is not None
        key = topic_key(topic)
        followed = self._followed.setdefault(key, _Followed(topic.base))
        followed.count += 1
        if followed.own is None and key in self.listed.value:
            followed.own = Part()
        return followed.own

    def unfollow(self, topic: TopicName) -> Part[Policies] | None:
        """Stop following a topic, and end its listeners. Returns the part that is no longer needed;
        None: every part is still needed."""
        key = topic_key(topic)
        followed = self._followed[key]
        followed.count -= 1
        for listener in followed.listeners.get(topic, ()):
            listener.end()
        if followed.count:
            return None
        del self._followed[key]
        return followed.own

    def subscribe(self, topic: TopicName, callback: Callable[[], None]) -> PolicyListener:
        """Add a listener for the policies of a followed topic."""
        listener = PolicyListener(topic, callback, self)
        listeners = self._followed[topic_key(topic)].listeners
        listeners[topic] = (*listeners.get(topic, ()), listener)
        return listener

    def forget(self, listener: PolicyListener) -> None:
        """Remove a listener that has ended."""
        topic = listener.topic
        listeners = self._followed[topic_key(topic)].listeners
        left = tuple(one for one in listeners.pop(topic) if one is not listener)
        if left:
            listeners[topic] = left

    def own_part(self, topic: TopicName) -> Part[Policies]:
        """The part with the own policies of a followed topic."""
        own = self._followed[topic_key(topic)].own
        assert own is not None
        return own

    # ---- reads ----

    def on_tenant(self, tenant: TenantRecord) -> Effects:
        self.tenant.on_read(tenant)
        return Effects()

    def on_record(self, record: NamespaceRecord) -> Effects:
        before = self.record.on_read(record)
        if before is None or before.policies == record.policies:
            return Effects()
        self._shared = None
        for followed in self._followed.values():
            followed.resolved = None
        return Effects(
            notify=tuple(one for each in self._followed.values() for one in each.all_listeners())
        )

    def on_listed(self, keys: frozenset[str]) -> Effects:
        """The names of the topics that set policies were read. A topic that left the list keeps its
        part: the next read of the part finds no record, so the topic sets no policies."""
        before = self.listed.on_read(keys)
        load = []
        for key in keys - (before or frozenset()):
            followed = self._followed.get(key)
            if followed is not None and followed.own is None:
                # Until now the topic set no policies. So its part is stale, not unknown.
                followed.own = Part(UNSET)
                load.append(followed.base)
        return Effects(load=tuple(sorted(load)))

    def on_own(self, topic: TopicName, policies: Policies) -> Effects:
        """The own policies of a followed topic were read; UNSET: there is no record."""
        followed = self._followed[topic_key(topic)]
        assert followed.own is not None
        before = followed.own.on_read(policies)
        if before is None or before == policies:
            return Effects()
        followed.resolved = None
        return Effects(notify=tuple(followed.all_listeners()))

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        for part in self.parts:
            part.check()
        for key, followed in self._followed.items():
            assert followed.count > 0, f"{key} is kept without a topic"
            assert followed.resolved is None or followed.own is not None, key


def topic_key(topic: TopicName) -> str:
    """A key that is the same for all partitions of a topic, and unique in its namespace."""
    base = topic.base
    return paths.topic_policies_key(base.domain, base.topic)
