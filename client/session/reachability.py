"""Checks whether the brokers of a cluster accept connections."""

from __future__ import annotations

import asyncio

from magnetar.client.session.service_url import host_and_port, parse_service_url


async def is_reachable(service_url: str, timeout_s: float) -> bool:
    """Return whether one of the brokers of the URL accepts a connection.

    `timeout_s`: the time limit for each broker. Raises InvalidUrl.
    """
    for broker in parse_service_url(service_url):
        host, _, port = host_and_port(broker).rpartition(":")
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, UnicodeError):  # UnicodeError: the host name is invalid
            continue
        writer.close()
        return True
    return False
