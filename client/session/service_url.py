"""Parses service URLs: `grpc://host:6660[,host2:6660]`, or `pulsar://host:6650[,host2:6650]`.

The scheme selects the transport. Magnetar's brokers offer `grpc://` and `pulsar://`. Apache
Pulsar's brokers offer `pulsar://` and `pulsar+ssl://`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from magnetar.client.errors import InvalidUrl


class Scheme(StrEnum):
    """A transport between client and broker."""

    GRPC = "grpc://"
    GRPC_TLS = "grpcs://"
    PULSAR = "pulsar://"
    PULSAR_TLS = "pulsar+ssl://"

    @property
    def is_tls(self) -> bool:
        return self in (Scheme.GRPC_TLS, Scheme.PULSAR_TLS)

    @property
    def is_grpc(self) -> bool:
        return self in (Scheme.GRPC, Scheme.GRPC_TLS)

    @property
    def with_tls(self) -> Scheme:
        """The same transport, encrypted."""
        return Scheme.GRPC_TLS if self.is_grpc else Scheme.PULSAR_TLS


DEFAULT_PORTS: Final = {
    Scheme.GRPC: 6660,
    Scheme.GRPC_TLS: 6661,
    Scheme.PULSAR: 6650,
    Scheme.PULSAR_TLS: 6651,
}

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/,\s]+)(?::([0-9]{1,5}))?")


def parse_service_url(text: str) -> tuple[str, ...]:
    """Return the URL of each broker in a service URL. Raises InvalidUrl."""
    scheme = scheme_of(text)
    addresses = text.removeprefix(scheme).rstrip("/").split(",")
    return tuple(_broker_url(scheme, address, text) for address in addresses)


def scheme_of(text: str) -> Scheme:
    """Return the scheme of a URL. Raises InvalidUrl."""
    for scheme in Scheme:
        if text.startswith(scheme):
            return scheme
    if text.startswith(("http://", "https://")):
        raise InvalidUrl(
            f"{text!r}: lookups over HTTP are not supported; use grpc://host:6660, or"
            " pulsar://host:6650 for Apache Pulsar"
        )
    raise InvalidUrl(
        f"{text!r}: expected grpc://host:port or pulsar://host:port; with TLS grpcs:// or"
        " pulsar+ssl://"
    )


def host_and_port(broker: str) -> str:
    """Return `host:port` of a broker's URL."""
    return broker.partition("://")[2]


def _broker_url(scheme: Scheme, address: str, text: str) -> str:
    match = _ADDRESS.fullmatch(address.strip())
    port = int(match[2] or DEFAULT_PORTS[scheme]) if match else 0
    if match is None or not 0 < port < 65536:
        raise InvalidUrl(f"{text!r}: {address!r} is not host:port")
    return f"{scheme}{match[1]}:{port}"
