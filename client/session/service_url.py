"""Parses service URLs: `grpc://host:6660[,host2:6660]`."""

from __future__ import annotations

import re
from typing import Final

from magnetar.client.errors import InvalidUrl

DEFAULT_PORT: Final = 6660
SCHEME: Final = "grpc://"

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/,\s]+)(?::([0-9]{1,5}))?")


def parse_service_url(text: str) -> tuple[str, ...]:
    """Return the URL of each broker in a service URL. Raises InvalidUrl."""
    if text.startswith(("pulsar://", "pulsar+ssl://")):
        raise InvalidUrl(
            f"{text!r} is a URL for Apache Pulsar's clients; Magnetar's client speaks gRPC: use"
            f" {SCHEME}host:{DEFAULT_PORT}"
        )
    if not text.startswith(SCHEME):
        raise InvalidUrl(f"{text!r}: expected {SCHEME}host:port[,host2:port]")
    addresses = text.removeprefix(SCHEME).rstrip("/").split(",")
    return tuple(_broker_url(address, text) for address in addresses)


def host_and_port(broker: str) -> str:
    """Return `host:port` of a broker's URL, the address for gRPC."""
    return broker.removeprefix(SCHEME)


def _broker_url(address: str, text: str) -> str:
    match = _ADDRESS.fullmatch(address.strip())
    port = int(match[2] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise InvalidUrl(f"{text!r}: {address!r} is not host:port")
    return f"{SCHEME}{match[1]}:{port}"
