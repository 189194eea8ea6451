"""Names of topics and namespaces: Pulsar's rules, and the three of our own."""

import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protos.errors import InvalidNamespaceName, InvalidTopicName
from magnetar.protos.names import (
    DEFAULT_NAMESPACE,
    TOPIC_NAME_BYTES_MAX,
    Domain,
    NamespaceName,
    TopicName,
)

entities = st.from_regex(r"\A[-=:.A-Za-z0-9_]{1,20}\Z").filter(lambda s: s not in (".", ".."))
locals_ = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=40)
topics = locals_.filter(lambda s: s and not s.isspace() and s not in (".", ".."))
names = st.builds(TopicName, st.sampled_from(Domain), entities, entities, topics)


def parsed(text: str) -> TopicName | InvalidTopicName:
    try:
        return TopicName.parse(text)
    except InvalidTopicName as error:
        return error


@given(names)
def test_a_full_name_reads_as_it_prints(name: TopicName) -> None:
    assert TopicName.parse(str(name)) == name
    assert name.namespace_name == NamespaceName.parse(f"{name.tenant}/{name.namespace}")
    assert name.bundle_hash == zlib.crc32(str(name).encode())


@given(st.text(max_size=60))
def test_any_text_is_a_name_or_refused_by_name(text: str) -> None:
    found = parsed(text)
    if isinstance(found, TopicName):
        assert str(found).endswith(text)
        assert TopicName.parse(str(found)) == found
    else:
        assert found.name == text
        assert found.reason
        assert found.definite


@given(names.filter(lambda name: name.partition is None), st.integers(0, 2**31 - 1))
def test_a_partition_knows_its_number_and_its_topic(name: TopicName, index: int) -> None:
    partition = name.with_partition(index)
    assert str(partition) == f"{name}-partition-{index}"
    assert partition.partition == index
    assert partition.base == name
    assert name.base == name


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("orders", "persistent://public/default/orders"),
        ("a:b", "persistent://public/default/a:b"),
        ("acme/shop/orders", "persistent://acme/shop/orders"),
        ("persistent://acme/shop/orders", "persistent://acme/shop/orders"),
        ("non-persistent://acme/shop/orders", "non-persistent://acme/shop/orders"),
        ("persistent://a-=:._1/b/größe und %2F?", "persistent://a-=:._1/b/größe und %2F?"),
    ],
)
def test_short_names_are_completed_and_full_names_are_kept(text: str, full: str) -> None:
    assert str(TopicName.parse(text)) == full


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "blank"),
        ("  ", "blank"),
        ("acme/shop", "expected"),
        ("acme/shop/", "blank"),
        ("acme//orders", "the namespace '' must consist of"),
        ("/shop/orders", "the tenant '' must consist of"),
        ("persistent://orders", "expected"),
        ("persistent://acme/orders", "expected"),
        ("persistent://acme/cluster/shop/orders", "tenant/cluster/namespace/topic are not"),
        ("acme/shop/orders/today", "no further slash"),
        ("topic://acme/shop/orders", "the domain 'topic'"),
        ("PERSISTENT://acme/shop/orders", "the domain 'PERSISTENT'"),
        ("acmé/shop/orders", "the tenant 'acmé' must consist of"),
        ("acme/sh op/orders", "the namespace 'sh op' must consist of"),
        ("acme/shop\n/orders", "must consist of"),
        ("../shop/orders", "the tenant cannot be '..'"),
        ("acme/./orders", "the namespace cannot be '.'"),
        ("acme/shop/..", "the topic part cannot be '..'"),
        ("\ud800", "UTF-8"),
    ],
)
def test_invalid_name_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidTopicName, match=re.escape(reason)) as caught:
        TopicName.parse(text)
    assert caught.value.name == text


def test_a_name_at_the_limit_is_accepted_and_a_longer_one_refused() -> None:
    room = TOPIC_NAME_BYTES_MAX - len("persistent://public/default/")
    assert TopicName.parse("x" * room).topic == "x" * room
    with pytest.raises(InvalidTopicName, match=r"the full name has 1025 bytes, the limit is 1024"):
        TopicName.parse("x" * (room + 1))
    with pytest.raises(InvalidTopicName) as caught:
        TopicName.parse("é" * 1_000_000)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(
    ("topic", "partition", "base"),
    [
        ("t-partition-0", 0, "t"),
        ("t-partition-10", 10, "t"),
        ("t-partition-1-partition-2", 2, "t-partition-1"),
        ("t-partition-2147483647", 2**31 - 1, "t"),
        ("t-partition-2147483648", None, "t-partition-2147483648"),
        ("t-partition-01", None, "t-partition-01"),
        ("t-partition-", None, "t-partition-"),
        ("t-partition-x", None, "t-partition-x"),
        ("t-partition-\u0661", None, "t-partition-\u0661"),  # a digit, but not of ASCII
        ("-partition-1", None, "-partition-1"),
    ],
)
def test_only_names_with_a_number_at_the_end_are_partitions(
    topic: str, partition: int | None, base: str
) -> None:
    name = TopicName.parse(topic)
    assert name.partition == partition
    assert name.base.topic == base


def test_a_partition_has_no_partitions() -> None:
    with pytest.raises(AssertionError):
        TopicName.parse("t-partition-1").with_partition(2)


def test_the_hash_of_a_known_name() -> None:
    # gzip ends with the CRC-32 of what it packed:
    # printf persistent://public/default/x | gzip -c | tail -c8 | head -c4 | xxd -e
    assert TopicName.parse("x").bundle_hash == 0x8B8A9502


def test_invalid_namespaces_are_refused_by_name() -> None:
    assert str(DEFAULT_NAMESPACE) == "public/default"
    for text in ("", "acme", "acme/cluster/shop", "acme/", "/shop", "a b/c", "acme/.."):
        with pytest.raises(InvalidNamespaceName) as caught:
            NamespaceName.parse(text)
        assert caught.value.name == text
