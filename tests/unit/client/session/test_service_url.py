from __future__ import annotations

import pytest

from magnetar.client.errors import InvalidUrl
from magnetar.client.session.service_url import (
    Scheme,
    host_and_port,
    parse_service_url,
    scheme_of,
)


@pytest.mark.parametrize(
    ("text", "brokers"),
    [
        ("grpc://localhost:6660", ["localhost:6660"]),
        ("grpc://localhost", ["localhost:6660"]),
        ("grpc://a:1,b,c:3", ["a:1", "b:6660", "c:3"]),
        ("grpc://a:1, b:2/", ["a:1", "b:2"]),
        ("grpc://[::1]:7000", ["[::1]:7000"]),
        ("grpc://127.0.0.1", ["127.0.0.1:6660"]),
        ("pulsar://a,b:1", ["a:6650", "b:1"]),
        ("pulsar+ssl://a", ["a:6651"]),
        ("grpcs://a", ["a:6661"]),
    ],
)
def test_a_service_url_names_each_broker_with_its_port(text: str, brokers: list[str]) -> None:
    assert [host_and_port(url) for url in parse_service_url(text)] == brokers


@pytest.mark.parametrize(
    "text",
    ["", "localhost:6660", "http://a:1", "grpc://", "grpc://a:0", "grpc://a:99999", "grpc://a:b",
     "grpc://a,,b", "grpc://a/b", "grpc:///"],
)  # fmt: skip
def test_invalid_service_url_is_refused(text: str) -> None:
    with pytest.raises(InvalidUrl):
        parse_service_url(text)


def test_lookup_over_http_is_refused_by_name() -> None:
    with pytest.raises(InvalidUrl, match="lookups over HTTP"):
        parse_service_url("http://localhost:8080")


def test_every_scheme_is_recognised() -> None:
    assert [scheme_of(f"{scheme}a") for scheme in Scheme] == list(Scheme)
    assert [scheme.with_tls.is_tls for scheme in Scheme] == [True] * 4
    assert [scheme.with_tls.is_grpc for scheme in Scheme] == [scheme.is_grpc for scheme in Scheme]
