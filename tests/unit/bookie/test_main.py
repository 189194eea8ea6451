"""The bookie's process: the answer of its health check about its registration."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from magnetar.bookie.config import BookieConfig
from magnetar.bookie.main import Ready, serve_bookie
from magnetar.metadata.memory import MemoryStore, MemoryTree

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.real_loop
async def test_health_says_unregistered_while_the_session_is_suspended_or_lost(
    tmp_path: Path,
) -> None:
    store, stop = MemoryStore(MemoryTree()), asyncio.Event()
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    config = BookieConfig(
        id="b1",
        data_dir=tmp_path / "b1",
        metadata_url="zk://unused:1",
        grpc_port=0,
        http_port=0,
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_bookie(config, stop, store=store, on_ready=ready.set_result))
        url = f"http://127.0.0.1:{(await ready).http_port}/health"
        async with httpx.AsyncClient() as client:

            async def health() -> tuple[int, str]:
                answer = await client.get(url)
                return answer.status_code, answer.json()["state"]

            assert await health() == (200, "serving")
            store.suspend()
            assert await health() == (503, "unregistered")
            store.reconnect()
            assert await health() == (200, "serving")
            store.expire()
            assert await health() == (503, "unregistered")
            store.reconnect()
            while await health() != (200, "serving"):
                pass  # the bookie registers again by itself
        stop.set()
