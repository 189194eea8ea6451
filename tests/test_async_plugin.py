"""The plugin of the async tests: which loop a test gets, and what the virtual loop refuses."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from fakes.virtual_loop import run_virtual
from hypothesis import given
from hypothesis import strategies as st

DAY_S = 86_400.0


@pytest.mark.virtual_loop(deadline_s=2 * DAY_S)
async def test_a_day_passes_at_once_on_the_virtual_loop() -> None:
    began_s = time.monotonic()
    await asyncio.sleep(DAY_S)
    assert asyncio.get_running_loop().time() >= DAY_S
    assert time.monotonic() - began_s < 60


@pytest.mark.real_loop
async def test_a_marked_test_gets_a_loop_with_threads() -> None:
    assert await asyncio.to_thread(threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize("seconds", [1, 2])
async def test_an_async_test_gets_its_arguments(seconds: int, tmp_path: object) -> None:
    assert seconds in (1, 2)
    assert tmp_path


@given(st.integers(0, 1000))
async def test_each_example_of_hypothesis_has_a_loop_of_its_own(seconds: int) -> None:
    assert asyncio.get_running_loop().time() < 1
    await asyncio.sleep(seconds)


@pytest.mark.xfail(raises=TimeoutError, strict=True)
async def test_a_test_without_end_fails_at_the_deadline() -> None:
    await asyncio.Event().wait()


@pytest.mark.xfail(raises=TimeoutError, strict=True)
@pytest.mark.real_loop(deadline_s=0.01)
async def test_the_marker_gives_the_deadline() -> None:
    await asyncio.Event().wait()


@pytest.mark.xfail(raises=TypeError, strict=True)
@pytest.mark.real_loop(240)
async def test_a_deadline_without_a_name_is_refused() -> None:
    pass


@pytest.mark.xfail(raises=AssertionError, strict=True)
async def test_a_failure_in_a_callback_fails_the_test() -> None:
    def fail() -> None:
        raise ValueError

    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(1)


async def connect() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        await asyncio.get_running_loop().sock_recv(ours, 1)


async def use_a_thread() -> None:
    await asyncio.to_thread(print)


async def be_called_by_a_thread() -> None:
    loop = asyncio.get_running_loop()
    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(print))
    thread.start()
    thread.join()


@pytest.mark.parametrize("work", [connect, use_a_thread, be_called_by_a_thread])
def test_the_virtual_loop_refuses_sockets_and_threads(work) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError, match="real_loop"):
        run_virtual(work())
