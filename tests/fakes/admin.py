"""Requests to the admin API of a broker in the test's process, without a port."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx

from magnetar.broker.admin.app import admin_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.broker import RunningBroker


@asynccontextmanager
async def admin_of(broker: RunningBroker) -> AsyncIterator[httpx.AsyncClient]:
    """Paths are below `/admin/v2/persistent`. An exception that no handler takes is raised here."""
    transport = httpx.ASGITransport(app=admin_app(broker.broker))
    url = "http://here/admin/v2/persistent"
    async with httpx.AsyncClient(transport=transport, base_url=url) as client:
        yield client
