"""Requests to the admin API of a broker in the test's process, without a port.

Building an app takes half a second, so the tests share apps, one test after the other, each with a
broker of its own. The apps are built at import: on a busy machine the brokers of a test would stand
still for longer than their deadlines while the test builds one.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import httpx

from magnetar.broker.admin.app import admin_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.broker import RunningBroker

    from magnetar.broker.broker import Broker
    from magnetar.runtime.http import App


class _Present:
    """Forwards every attribute to the broker of the present test."""

    broker: Broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.broker, name)


def _built() -> tuple[_Present, App]:
    present = _Present()
    return present, admin_app(cast("Broker", present))


_FREE: Final = [_built() for _ in range(2)]  # one for each of two brokers in a test


@asynccontextmanager
async def admin_of(
    broker: RunningBroker, below: str = "/admin/v2/persistent"
) -> AsyncIterator[httpx.AsyncClient]:
    """Paths of requests are `below` this one. An exception that no handler takes is raised here."""
    present, app = _FREE.pop() if _FREE else _built()
    present.broker = broker.broker
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://here{below}") as client:
        yield client
    del present.broker
    _FREE.append((present, app))
