"""The asyncio client with blocking methods, so that one test can run with both clients."""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import magnetar.asyncio
from magnetar.client.environment import Environment
from magnetar.client.options import ClientOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL_S = 120.0


class Blocking:
    """An object of the asyncio client. Its methods run on the loop; the caller waits for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, one: Any) -> None:
        self._loop = loop
        self._one = one

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._one, name):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, *args, **kwargs)

        return method

    def __enter__(self) -> Self:
        self._call("__aenter__")
        return self

    def __exit__(self, *error: object) -> None:
        self._call("__aexit__", *error)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        async def run() -> Any:
            result = getattr(self._one, name)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        result = asyncio.run_coroutine_threadsafe(run(), self._loop).result(CALL_S)
        return Blocking(self._loop, result) if isinstance(result, _KINDS) else result


_KINDS = (
    magnetar.asyncio.Producer,
    magnetar.asyncio.Consumer,
    magnetar.asyncio.Reader,
    magnetar.asyncio.TableView,
)


@contextmanager
def blocking_client(
    service_url: str, *, environment: Environment | None = None, **options: Any
) -> Iterator[Any]:
    """An asyncio client whose loop runs in a thread. It is shut down at the end."""
    world = environment or Environment()
    loop = (world.new_loop or asyncio.new_event_loop)()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def made() -> magnetar.asyncio.Client:
        return magnetar.asyncio.Client.in_environment(ClientOptions(service_url, **options), world)

    async def ended(client: magnetar.asyncio.Client) -> None:
        client.shutdown()
        await client.parts.scope.close()

    try:
        client = asyncio.run_coroutine_threadsafe(made(), loop).result(CALL_S)
        try:
            yield Blocking(loop, client)
        finally:
            asyncio.run_coroutine_threadsafe(ended(client), loop).result(CALL_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
