"""Metadata URLs: the parsed values, and the refused URLs."""

from __future__ import annotations

import pytest

from magnetar.metadata.url import InvalidMetadataUrl, MetadataUrl


@pytest.mark.parametrize(
    ("url", "hosts", "chroot"),
    [
        ("zk://a:1", "a:1", "/magnetar"),
        ("zk://a:1/", "a:1", "/magnetar"),
        ("zk://a:1,b:65535/x/y", "a:1,b:65535", "/x/y"),
        ("zk://[::1]:2181/m", "[::1]:2181", "/m"),
    ],
)
def test_valid_urls_give_hosts_and_chroot(url: str, hosts: str, chroot: str) -> None:
    assert MetadataUrl.parse(url) == MetadataUrl(hosts, chroot)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("a:1", "zk://"),
        ("zookeeper://a:1", "zk://"),
        ("zk://", "''"),
        ("zk://a", "'a'"),
        ("zk://a:1,b", "'b'"),
        ("zk://a:0", "'a:0'"),
        ("zk://a:65536", "'a:65536'"),
        ("zk://a:1//x", "//x"),
        ("zk://a:1/x/", "/x/"),
        ("zk://a:1/../x", "/../x"),
    ],
)
def test_invalid_urls_are_refused_with_the_expected_form(url: str, named: str) -> None:
    with pytest.raises(InvalidMetadataUrl) as caught:
        MetadataUrl.parse(url)
    assert named in str(caught.value)
    assert "expected zk://" in str(caught.value)
