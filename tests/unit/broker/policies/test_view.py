"""A namespace's view answers only from records that were read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.errors import PoliciesUnavailable
from magnetar.broker.policies.view import UNSET, NamespaceView, topic_key
from magnetar.metadata.model import NamespaceBundles
from magnetar.metadata.policies import (
    BROKER_DEFAULTS,
    NamespaceRecord,
    Policies,
    TenantRecord,
    effective,
)
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from magnetar.broker.policies.part import Part

NAMES = [TopicName.parse(name) for name in ("t", "t-partition-0", "t-partition-1", "u")]
T, T0, T1, U = NAMES


def read(part: Part[Any]) -> None:
    part.on_changed()
    part.begin_read()


def known(
    record: NamespaceRecord | None = None, listed: frozenset[str] = frozenset()
) -> NamespaceView:
    view = NamespaceView(T.namespace_name, BROKER_DEFAULTS)
    for part in view.parts:
        part.begin_read()
    view.on_tenant(TenantRecord())
    view.on_record(record or NamespaceRecord())
    view.on_listed(listed)
    return view


def test_the_view_does_not_answer_before_its_records_are_read() -> None:
    view = NamespaceView(T.namespace_name, BROKER_DEFAULTS)
    with pytest.raises(PoliciesUnavailable):
        view.bundle_of(T)
    view.record.begin_read()
    view.on_record(NamespaceRecord())
    view.bundle_of(T)
    with pytest.raises(PoliciesUnavailable):
        view.policies_of(T)  # the topic may have its own policies


def test_a_topic_that_sets_policies_is_unknown_until_they_were_read() -> None:
    view = known(listed=frozenset({topic_key(T)}))
    with pytest.raises(PoliciesUnavailable):
        view.policies_of(T)
    own = view.follow(T)
    assert own is not None
    with pytest.raises(PoliciesUnavailable):
        view.policies_of(T)
    own.begin_read()
    view.on_own(T, Policies(message_ttl_s=7))
    assert view.policies_of(T).message_ttl_s == 7
    assert view.policies_of(U) == BROKER_DEFAULTS


def test_partitions_share_the_policies_of_their_topic() -> None:
    view = known(listed=frozenset({topic_key(T)}))
    own = view.follow(T0)
    assert own is not None
    assert view.follow(T1) is own
    own.begin_read()
    view.on_own(T0, Policies(message_ttl_s=7))
    assert view.policies_of(T0) == view.policies_of(T1)
    assert view.policies_of(T1).message_ttl_s == 7
    assert view.unfollow(T0) is None
    assert view.policies_of(T1).message_ttl_s == 7
    assert view.unfollow(T1) is own


def test_bundles_are_those_of_the_record() -> None:
    view = known(NamespaceRecord(NamespaceBundles.divided(1)))
    assert view.bundle_of(T).range == "0x00000000_0xffffffff"
    read(view.record)
    view.on_record(NamespaceRecord(NamespaceBundles.divided(64)))
    assert view.bundle_of(T).range == NamespaceBundles.divided(64).bundle_of(T.bundle_hash)


def test_a_change_of_only_the_bundles_notifies_no_topic() -> None:
    view, called = known(), []
    view.follow(T)
    view.subscribe(T, lambda: called.append(T))
    read(view.record)
    assert view.on_record(NamespaceRecord(NamespaceBundles.divided(8))).notify == ()
    read(view.record)
    [one] = view.on_record(NamespaceRecord(policies=Policies(message_ttl_s=1))).notify
    one.notify()
    assert called == [T]


def test_a_topic_that_is_followed_and_sets_its_first_policies_is_loaded() -> None:
    view = known()
    assert view.follow(T0) is None
    view.follow(U)
    read(view.listed)
    effects = view.on_listed(frozenset({topic_key(T)}))
    assert effects.load == (T,)
    assert view.policies_of(T0) == BROKER_DEFAULTS, "what is known stands until then"
    assert not view.is_fresh(T0)
    assert view.is_fresh(U)


def test_a_subscription_that_ended_is_not_notified() -> None:
    view, called = known(), []
    view.follow(T0)
    view.follow(T1)
    ended = view.subscribe(T0, lambda: called.append("ended"))
    view.subscribe(T0, lambda: called.append("unfollowed"))
    view.subscribe(T1, lambda: called.append("kept"))
    read(view.record)
    effects = view.on_record(NamespaceRecord(policies=Policies(message_ttl_s=1)))
    ended.end()
    ended.end()
    view.unfollow(T0)
    for one in effects.notify:
        one.notify()
    assert called == ["kept"]


def test_the_end_of_a_partition_visits_no_other_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    view, number, visits = known(), 300, 0
    partitions = [T.with_partition(index) for index in range(number)]
    for topic in partitions:
        view.follow(topic)
        view.subscribe(topic, lambda: None)
    original = TopicName.__eq__

    def equal(one: TopicName, other: object) -> bool:
        nonlocal visits
        visits += 1
        return original(one, other)

    monkeypatch.setattr(TopicName, "__eq__", equal)
    for topic in partitions:
        view.unfollow(topic)
    assert not view.is_followed
    assert visits <= 5 * number


levels = st.builds(
    Policies,
    message_ttl_s=st.none() | st.integers(0, 2),
    deduplication=st.none() | st.booleans(),
    producers_max=st.none() | st.integers(0, 2),
)


@given(st.data())
def test_answers_equal_those_of_a_view_that_computes_everything_again(data: st.DataObject) -> None:
    """Compare with a plain dictionary. The view must announce each change of an answer."""
    record, stored = Policies(), dict[TopicName, Policies]()
    view, followed, changed = known(), set[TopicName](), set[TopicName]()

    def answers() -> dict[TopicName, object]:
        return {
            topic: effective(BROKER_DEFAULTS, record, stored.get(topic.base, UNSET))
            for topic in followed
        }

    def read_own(topic: TopicName) -> None:
        own = view.own_part(topic)
        read(own)
        notify(view.on_own(topic, stored.get(topic.base, UNSET)).notify)

    def notify(subscriptions: Any) -> None:
        for one in subscriptions:
            one.notify()

    for _ in range(data.draw(st.integers(1, 12))):
        before = answers()
        changed.clear()
        topic = data.draw(st.sampled_from(NAMES))
        match data.draw(st.sampled_from(["follow", "record", "own", "delete"])):
            case "follow" if topic in followed:
                followed.discard(topic)
                view.unfollow(topic)
            case "follow":
                own = view.follow(topic)
                followed.add(topic)
                view.subscribe(topic, lambda topic=topic: changed.add(topic))
                if own is not None and not own.is_fresh:
                    read_own(topic)
            case "record":
                record = replace(data.draw(levels), version=record.version + 1)
                read(view.record)
                notify(view.on_record(NamespaceRecord(policies=record)).notify)
            case kind:
                if kind == "own":
                    stored[topic.base] = data.draw(levels)
                else:
                    stored.pop(topic.base, None)
                read(view.listed)
                effects = view.on_listed(frozenset(map(topic_key, stored)))
                for base in {*effects.load, topic.base}:
                    served = [one for one in followed if one.base == base]
                    if served and (base in effects.load or _has_own(view, served[0])):
                        read_own(served[0])
        view.check()
        for one in followed:
            assert view.policies_of(one) == answers()[one]
            if one in before and before[one] != answers()[one]:
                assert one in changed


def _has_own(view: NamespaceView, topic: TopicName) -> bool:
    return view._followed[topic_key(topic)].own is not None
