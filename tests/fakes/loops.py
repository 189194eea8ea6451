"""The event loop that a test's own runner makes: asyncio's, or uvloop's as servers use it."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvloop

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPS = ("asyncio", "uvloop")


@contextmanager
def loop_of(kind: str) -> Iterator[None]:
    """While inside, new event loops are of this kind."""
    before = asyncio.get_event_loop_policy()
    if kind == "uvloop":
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
