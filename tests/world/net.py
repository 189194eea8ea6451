"""The network between hosts: it delays messages, holds them at cuts, and loses connections.

A connection keeps the order of its messages, as TCP does. Messages of different connections can
overtake each other. A cut has one direction. Messages in this direction wait until the cut is
healed, unless an end has given up the connection meanwhile. Each end notices a dead connection
independently, at a time of its own. Calls (all traffic but the write streams) are a single message
in each direction. A request may be delivered twice, as by a retrying proxy. Then the second answer
is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from world.loop import RUNNING, Pausable, SimLoop

from magnetar.runtime.errors import StreamClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from random import Random

    from world.trace import Trace

    from magnetar.runtime.frames import Buffer

T = TypeVar("T")

FRAMES_MAX = 16  # frames under way and not yet received, for each direction of a stream


class Unreachable(Exception):
    """The call's connection was refused or lost."""


@dataclass
class Weather:
    """The present faults of the network. Probabilities are per message."""

    delay_s: float = 0.0005  # the mean delay of one way
    spike: float = 0.0  # the probability that a message takes `spike_s` on average instead
    spike_s: float = 0.2
    duplicate: float = 0.0  # the probability that a call is delivered twice
    reset: float = 0.0  # the probability that a frame breaks its connection
    notice_s: float = 2.0  # the longest time until an end gives up a connection that is cut


class Host(Pausable):
    """A process with an address: its tasks end with it."""

    def __init__(
        self,
        name: str,
        loop: SimLoop,
        on_failure: Callable[[Host, BaseException], None],
    ) -> None:
        """`on_failure` receives the tasks that failed."""
        self.name = name
        self.alive = False
        self.paused = False
        self.ends: dict[SimStream, None] = {}  # its ends of connections
        self.calls: dict[asyncio.Future[Any], Host] = {}  # calls served here, and their callers
        self._loop = loop
        self._context = copy_context()
        self._context.run(RUNNING.set, self)
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        task = self._loop.create_task(work, context=self._context)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def cancel_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def wait_end(self) -> None:
        """Wait until no task of a dead process runs any more, or it was started again."""
        while self._tasks and not self.alive:
            await asyncio.wait(list(self._tasks))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_failure(self, error)


@dataclass
class _Link:
    """One direction between two hosts."""

    cut: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Network:
    def __init__(self, loop: SimLoop, random: Random, trace: Trace) -> None:
        self.loop = loop
        self.random = random
        self.trace = trace
        self.weather = Weather()
        self._links: dict[tuple[str, str], _Link] = {}

    # -- faults ----------------------------------------------------------------------------------

    def cut(self, source: Host, target: Host) -> None:
        """Hold all messages from `source` to `target`."""
        link = self._link(source, target)
        if not link.cut:
            link.cut = True
            self.trace.note("net", "cut", source.name, target.name)
            for end in [*source.ends]:
                if end.remote is target:
                    self._give_up_later(end)
                    self._give_up_later(end.twin)

    def heal(self, source: Host, target: Host) -> None:
        link = self._link(source, target)
        if link.cut:
            self.trace.note("net", "heal", source.name, target.name)
            self._heal(link)

    def heal_all(self) -> None:
        for link in list(self._links.values()):
            if link.cut:
                self._heal(link)
        self.trace.note("net", "heal everything")

    def is_cut(self, source: Host, target: Host) -> bool:
        return self._link(source, target).cut

    def drop(self, host: Host, *, told: bool) -> None:
        """End the host's connections. With `told`, the other ends learn it at once; otherwise they
        notice later."""
        ends, host.ends = list(host.ends), {}
        for end in ends:
            end.end("the process has ended")
            if told and not self.is_cut(host, end.remote):
                self.send(host, end.remote, partial(end.twin.end, "reset by peer"))
            else:
                self._give_up_later(end.twin)
        for answer, source in list(host.calls.items()):
            if told:
                self.send(host, source, partial(_refuse, answer, host.name))

    # -- messages --------------------------------------------------------------------------------

    def send(self, source: Host, target: Host, arrive: Callable[[], None]) -> None:
        """Deliver a single message, which may overtake others."""
        self.loop.later(self._delay_s(), self._arrive, source, target, arrive)

    async def call(
        self,
        source: Host,
        target: Host,
        what: str,
        serve: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Run `serve` on the target. Raises Unreachable. Waits without end at a cut, or when the
        target was lost unnoticed: the caller has a deadline."""
        answer: asyncio.Future[T] = self.loop.create_future()

        def reply(done: asyncio.Task[T]) -> None:
            if not target.alive or done.cancelled():
                return
            error = done.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            self.send(target, source, lambda: settle(done.result() if error is None else error))

        def settle(value: Any) -> None:
            if answer.done() or not source.alive:
                return
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)

        def arrive() -> None:
            if target.alive:
                target.spawn(serve()).add_done_callback(reply)
            else:
                self.send(target, source, lambda: settle(Unreachable(f"{target.name} refuses")))

        target.calls[answer] = source
        answer.add_done_callback(lambda done: target.calls.pop(done, None))
        self.send(source, target, arrive)
        if self._chance(self.weather.duplicate):
            self.trace.fault(source.name, "call twice", target.name, what)
            self.send(source, target, arrive)
        return await answer

    def connect(self, source: Host, target: Host) -> tuple[SimStream, SimStream]:
        """Both ends of a new stream."""
        near, far = SimStream(self, source, target), SimStream(self, target, source)
        near.twin, far.twin = far, near
        source.ends[near] = target.ends[far] = None
        return near, far

    def transmit(self, end: SimStream, size: int, deliver: Callable[[], None]) -> None:
        """Send a frame or the end of a stream, in the stream's order."""
        weather = self.weather
        if size and self._chance(weather.reset):
            self.trace.fault("net", "connection lost", end.local.name, end.remote.name)
            self.loop.later(self._delay_s(), end.end, "connection lost")
            self.loop.later(self._delay_s(), end.twin.end, "connection lost")
            return
        at_s = max(end.last_arrival_s, self.loop.time() + self._delay_s())
        end.last_arrival_s = at_s + 1e-9
        delay_s = at_s - self.loop.time()
        self.loop.later(delay_s, self._arrive, end.local, end.remote, deliver)

    def _arrive(self, source: Host, target: Host, deliver: Callable[[], None]) -> None:
        link = self._link(source, target)
        if link.cut:
            self.trace.bitten["message into a cut"] += 1
            link.waiting.append(deliver)
        else:
            deliver()

    @staticmethod
    def _heal(link: _Link) -> None:
        link.cut = False
        waiting, link.waiting = link.waiting, []
        for deliver in waiting:  # at once, so that nothing overtakes them
            deliver()

    def _give_up_later(self, end: SimStream) -> None:
        def give_up() -> None:
            cut = self.is_cut(end.local, end.remote) or self.is_cut(end.remote, end.local)
            if not end.ended and (cut or end.twin.ended):
                self.trace.fault(end.local.name, "connection given up", end.remote.name)
                end.end("connection timed out")

        self.loop.later(self.random.uniform(0.01, self.weather.notice_s), give_up)

    def _link(self, source: Host, target: Host) -> _Link:
        key = (source.name, target.name)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = _Link()
        return link

    def _delay_s(self) -> float:
        weather, random = self.weather, self.random
        if weather.spike and random.random() < weather.spike:
            self.trace.bitten["slow message"] += 1
            return random.expovariate(1 / weather.spike_s)
        return random.expovariate(1 / weather.delay_s)

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability


class SimStream:
    """One end of a connection; a `FrameStream`."""

    twin: SimStream

    def __init__(self, network: Network, local: Host, remote: Host) -> None:
        self.local, self.remote = local, remote
        self.peer = remote.name
        self.ended = False
        self.last_arrival_s = 0.0
        self.tap: Callable[[bytes], None] | None = None  # called with each frame sent from here
        self._network = network
        self._frames: deque[bytes] = deque()
        self._under_way = 0  # frames that were sent from here and are not yet received
        self._why = ""
        self._changed: list[asyncio.Future[None]] = []

    async def send(self, parts: Sequence[Buffer]) -> None:
        try:
            while self._under_way >= FRAMES_MAX and not self.ended:
                await self._wait()
        except asyncio.CancelledError:
            self.abort("cancelled by the peer")
            raise
        if self.ended:
            raise StreamClosed(self._why, clean=False)
        frame = b"".join(parts)
        assert frame, "a frame is never empty"
        if self.tap is not None:
            self.tap(frame)
        self._under_way += 1
        self._network.transmit(self, len(frame), lambda: self.twin._take(frame))

    async def receive(self) -> memoryview:
        try:
            while not self._frames and not self.ended:
                await self._wait()
        except asyncio.CancelledError:
            self.abort("cancelled by the peer")
            raise
        if not self._frames:
            raise StreamClosed(self._why, clean=False)
        self.twin._under_way -= 1
        self.twin._wake()
        return memoryview(self._frames.popleft())

    async def close(self) -> None:
        self.abort("closed by the peer")

    def abort(self, reason: str) -> None:
        """Close this end. The other end learns it after the frames that are under way."""
        if not self.ended:
            self._network.transmit(self, 0, lambda: self.twin.end(reason))
            self.end("closed here")
            self._frames.clear()

    def end(self, why: str) -> None:
        if not self.ended:
            self.ended = True
            self._why = why
            self.local.ends.pop(self, None)
            self._wake()

    def _take(self, frame: bytes) -> None:
        if not self.ended:
            self._frames.append(frame)
            self._wake()

    async def _wait(self) -> None:
        changed: asyncio.Future[None] = self._network.loop.create_future()
        self._changed.append(changed)
        await changed

    def _wake(self) -> None:
        waiting, self._changed = self._changed, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


def _refuse(answer: asyncio.Future[Any], name: str) -> None:
    if not answer.done():
        answer.set_exception(Unreachable(f"{name} has ended"))


async def serve_stream(stream: SimStream, handler: Callable[[SimStream], Awaitable[None]]) -> None:
    """Run a server's handler on its end. An operating error of the handler breaks the stream; a bug
    is raised."""
    try:
        await handler(stream)
    except AssertionError:
        stream.abort("internal error")
        raise
    except Exception as error:
        stream.abort(f"{type(error).__name__}: {error}")
    finally:
        await stream.close()
