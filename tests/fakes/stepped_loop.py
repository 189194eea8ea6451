"""An event loop on real sockets whose clock moves by hand, for clients of real servers."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fakes.blocking import blocking_client

import magnetar
from magnetar.client.environment import Environment
from magnetar.client.options import ClientOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL_S = 60.0
NEVER_S = 1e9
TURNS = 3  # turns of the loop: timers that are due run in the first two


class SteppedLoop(asyncio.SelectorEventLoop):
    """Nothing times out on a busy machine. Closing a client takes time: `go_on` lets the clock
    run."""

    now_s = 0.0
    _real_s: float | None = None  # the start of the clock; None: the clock stands still

    def time(self) -> float:
        return self.now_s if self._real_s is None else self.now_s + super().time() - self._real_s

    def go_on(self) -> None:
        self._real_s = super().time()

    def step(self, seconds: float) -> None:
        self.now_s += seconds

    def advance(self, seconds: float) -> None:
        """From another thread: advance the time by this much, and run the timers that are due."""

        async def pass_time() -> None:
            self.step(seconds)
            for _ in range(TURNS):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(pass_time(), self).result(CALL_S)


@contextmanager
def stepped_client(face: str, service_url: str) -> Iterator[tuple[Any, SteppedLoop]]:
    """A client with one face, "synchronous" or "asyncio", and the loop that has its clock. It does
    not miss pings of the broker, for which no time passes."""
    loop = SteppedLoop()
    environment = Environment(
        keepalive_s=NEVER_S, ping_after_s=NEVER_S, ask_after_s=2 * NEVER_S, new_loop=lambda: loop
    )
    if face == "asyncio":
        with blocking_client(service_url, environment=environment) as client:
            try:
                yield client, loop
            finally:
                loop.call_soon_threadsafe(loop.go_on)
    else:
        made = magnetar.Client.in_environment(ClientOptions(service_url), environment)
        try:
            yield made, loop
        finally:
            loop.call_soon_threadsafe(loop.go_on)
            made.shutdown()
