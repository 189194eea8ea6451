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
async def admin_of(
    broker: RunningBroker, below: str = "/admin/v2/persistent"
) -> AsyncIterator[httpx.AsyncClient]:
    """Paths of requests are `below` this one. An exception that no handler takes is raised here."""
    transport = httpx.ASGITransport(app=admin_app(broker.broker))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://here{below}") as client:
        yield client
