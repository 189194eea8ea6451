"""Clusters to choose from: the values are checked as Apache's client checks them."""

from __future__ import annotations

from typing import Any

import pulsar
import pytest

from magnetar.client.service_info import AutoClusterFailover, ServiceInfo

A, B = ServiceInfo("grpc://a:6660"), ServiceInfo("grpc://b:6660")


@pytest.mark.parametrize("url", ["pulsar://a:6650", "pulsar+ssl://a:6651"])
def test_a_service_info_tells_what_apaches_tells(url: str) -> None:
    theirs, ours = pulsar.ServiceInfo(url), ServiceInfo(url)
    assert (ours.service_url, ours.use_tls) == (theirs.service_url, theirs.use_tls)
    assert ServiceInfo.wrap(ours) is ours


@pytest.mark.parametrize(
    "given",
    [
        {"secondary": []},
        {"secondary": ["grpc://b"]},
        {"secondary": (B,)},
        {"primary": "grpc://a"},
        {"check_interval_ms": 0},
        {"failover_threshold": 0},
        {"switch_back_threshold": -1},
        {"check_interval_ms": 1.5},
        {"check_interval_ms": True},
    ],
)
def test_an_invalid_failover_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        AutoClusterFailover(**{"primary": A, "secondary": [B], **given})


def test_a_failover_keeps_its_own_list() -> None:
    given = [B]
    failover = AutoClusterFailover(A, given)
    given.clear()
    assert failover.secondary == [B]
