"""Functions of the program that do not return block neither the client nor the program's end."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import pytest
from fakes.client_world import world_of
from fakes.session_broker import FakeBrokers
from support import wait_until

from magnetar.client.authentication import AuthenticationToken
from magnetar.client.blocking import CALLS_MAX, Repeated, in_thread
from magnetar.client.errors import ErrorGettingAuthenticationData
from magnetar.client.options import ClientOptions
from magnetar.client.sync import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_loop


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """The event that a blocked function waits for."""
    event = threading.Event()
    yield event
    event.set()


def test_client_closes_although_its_token_never_comes(held: threading.Event) -> None:
    asked = threading.Event()

    def token() -> str:
        asked.set()
        held.wait()
        return "late"

    options = ClientOptions(
        "grpc://a:6660", authentication=AuthenticationToken(token), operation_timeout_seconds=30
    )
    client = Client.in_environment(options, world_of(FakeBrokers("grpc://a:6660")))
    creating = threading.Thread(target=lambda: _ignoring(lambda: client.create_producer("t")))
    creating.start()
    assert asked.wait(10)
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    creating.join(10)
    assert not creating.is_alive()


async def test_calls_that_do_not_return_are_bounded(held: threading.Event) -> None:
    begun: list[int] = []

    def function() -> str:
        begun.append(threading.get_ident())
        held.wait()
        return "done"

    repeated = Repeated(function)
    loop = asyncio.get_running_loop()
    callers = [loop.create_task(repeated.call()) for _ in range(CALLS_MAX + 5)]
    await wait_until(lambda: len(begun) >= CALLS_MAX)
    assert len(begun) == CALLS_MAX
    callers.pop().cancel()  # the others that share its call continue
    held.set()
    assert [await caller for caller in callers] == ["done"] * (CALLS_MAX + 4)
    assert len(begun) == CALLS_MAX  # a call of another thread would have begun by now
    assert await repeated.call() == "done"
    assert len(begun) == CALLS_MAX + 1


async def test_errors_and_exits_of_the_function_reach_its_caller() -> None:
    with pytest.raises(ValueError, match="12"):
        await in_thread(int, "12 ", base=2)

    def leave() -> str:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        await in_thread(leave)
    with pytest.raises(ErrorGettingAuthenticationData, match="SystemExit"):
        await AuthenticationToken(leave).auth.data()


def _ignoring(function: object) -> None:
    try:
        function()  # type: ignore[operator]
    except Exception:
        return


@pytest.mark.parametrize("error", [StopIteration, CancelledError, SystemExit])
async def test_an_error_that_would_end_or_stall_the_caller_is_reported(
    error: type[BaseException],
) -> None:
    def function() -> str:
        raise error

    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match=f"the function raised {error.__name__}"):
            await Repeated(function).call()
