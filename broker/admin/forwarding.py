"""Requests that a broker makes of other brokers for an administrator."""

import asyncio
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from magnetar.broker.operations.errors import NotForwarded

if TYPE_CHECKING:
    from magnetar.metadata.model import BrokerRegistration

FORWARD_TIMEOUT_S: Final = 30.0
"""For one request. The administrator's own has 60 s for all of them."""

_DONE: Final = (
    HTTPStatus.NO_CONTENT,
    HTTPStatus.NOT_FOUND,  # it was deleted meanwhile
    HTTPStatus.TEMPORARY_REDIRECT,  # it has moved meanwhile
)


async def forward(owner: "BrokerRegistration", method: str, path: str) -> None:
    """Make one request of `owner`. Raises NotForwarded."""
    await asyncio.to_thread(_send, owner.http_url, method, path)


def _send(url: str, method: str, path: str) -> None:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=FORWARD_TIMEOUT_S)
    try:
        connection.request(method, path)
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        raise NotForwarded(url, method, path, f"failed: {error}") from error
    finally:
        connection.close()
    if status not in _DONE:
        raise NotForwarded(url, method, path, f"was answered with status {status}")
