"""The end of a client's tasks."""

from __future__ import annotations

import asyncio

import pytest
from support import settle

from magnetar.client.scope import Scope


@pytest.mark.parametrize("failed", [False, True])
async def test_a_cancellation_during_the_end_does_not_cut_the_end_short(failed: bool) -> None:
    ends: list[str] = []

    async def at_end() -> None:
        ends.append("began")
        await asyncio.sleep(1)
        ends.append("done")

    async def bug() -> None:
        raise AssertionError("a bug")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    scope = Scope(on_failure=lambda _: None, at_end=at_end)
    await scope.open()
    if failed:
        scope.start(bug(), "bug")
    else:
        scope.cancel()
    await settle()
    assert ends == ["began"]
    scope.cancel()
    await scope.wait_ended()
    assert ends == ["began", "began", "done"]


async def test_an_end_that_cancels_itself_is_not_repeated() -> None:
    ends = 0

    async def at_end() -> None:
        nonlocal ends
        ends += 1
        raise asyncio.CancelledError

    scope = Scope(on_failure=lambda _: None, at_end=at_end)
    await scope.open()
    await scope.close()
    assert ends == 1
