"""A standalone server whose every callback of the loop is measured: `python -m siege.server DIR`.

The process prints one line of JSON with its addresses when it serves, and one with the measurements
when it has stopped. The loop is asyncio's own: uvloop's callbacks cannot be measured one by one.
The CPU time is that of the loop's thread.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import sys
import threading
import time
from asyncio import events
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siege.stuck import describe_on_signal

from magnetar.runtime.garbage import settle_gc
from magnetar.runtime.log import configure_logging
from magnetar.standalone import StandaloneConfig, run_standalone

if TYPE_CHECKING:
    from types import FrameType

    from magnetar.metadata.model import BrokerRegistration

SLOWEST = 5  # callbacks in the report
SAMPLE_S = 0.02
STACK_FRAMES = 8


class Measured:
    """The callbacks since `reset`."""

    def __init__(self) -> None:
        self.count = 0
        self.slowest: list[tuple[float, str]] = []
        self.began: float | None = None  # the running callback; None: none runs
        self.stack = ""  # the place inside a callback that takes long
        self.collecting_s = 0.0  # the time of garbage collections during the callback
        self.collection_s = 0.0  # the time of the longest collection
        self._collection_began = 0.0

    def on_collection(self, phase: str, _: object) -> None:
        if phase == "start":
            self._collection_began = time.thread_time()
        elif self.began is not None:  # not in another thread
            took_s = time.thread_time() - self._collection_began
            self.collecting_s += took_s
            self.collection_s = max(self.collection_s, took_s)

    def reset(self) -> None:
        self.collection_s = 0.0
        self.count = 0
        self.slowest = []

    def add(self, cpu_s: float, handle: Any) -> None:
        self.count += 1
        if len(self.slowest) < SLOWEST or cpu_s > self.slowest[-1][0]:
            name = f"{name_of(handle)} {self.stack}"
            self.slowest = sorted([*self.slowest, (cpu_s, name)], reverse=True)[:SLOWEST]

    def sample(self, thread: int) -> None:
        """Record the stack of slow callbacks, until the process ends. Runs in a thread."""
        while True:
            time.sleep(SAMPLE_S)
            began = self.began
            if began is not None and time.perf_counter() - began > SAMPLE_S:
                self.stack = stack_of(sys._current_frames()[thread])


def name_of(handle: Any) -> str:
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        name = coroutine.__qualname__
        while (inner := getattr(coroutine, "cr_await", None)) is not None:
            if not hasattr(inner, "cr_await"):
                break
            coroutine = inner
        return f"task {name} in {coroutine.__qualname__}"
    return getattr(callback, "__qualname__", repr(callback))[:120]


def stack_of(frame: FrameType | None) -> str:
    """The innermost functions, the innermost one first."""
    names: list[str] = []
    while frame is not None and len(names) < STACK_FRAMES:
        names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return "in " + " < ".join(names)


def measure(measured: Measured) -> None:
    """Measure all callbacks of all loops of this process from now on."""
    run: Any = events.Handle._run

    def _run(self: Any) -> None:
        measured.began, measured.stack, measured.collecting_s = time.perf_counter(), "", 0.0
        began = time.thread_time()
        run(self)
        cpu_s = time.thread_time() - began - measured.collecting_s
        measured.began = None
        measured.add(cpu_s, self)

    events.Handle._run = _run  # type: ignore[method-assign]
    gc.callbacks.append(measured.on_collection)
    main_thread = threading.get_ident()
    threading.Thread(target=measured.sample, args=(main_thread,), daemon=True).start()


def peak_kb() -> int:
    """The largest resident size of this process. On Linux `getrusage` begins with the largest size
    of the process that forked it."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1])


async def serve(directory: Path, measured: Measured) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    describe_on_signal()
    stray: list[str] = []
    loop.set_exception_handler(
        lambda _, context: stray.append(f"{context['message']}: {context.get('exception')!r}")
    )

    def on_ready(registration: BrokerRegistration) -> None:
        settle_gc()  # a server in production does the same
        measured.reset()
        urls = {
            "pulsar": registration.pulsar_url,
            "grpc": registration.grpc_url,
            "http": registration.http_url,
        }
        print(json.dumps(urls), flush=True)

    config = StandaloneConfig(
        data_dir=directory, grpc_port=0, pulsar_port=0, http_port=0, cache_bytes=16 << 20
    )
    try:
        await run_standalone(config, stop, on_ready)
    finally:
        result = {
            "callbacks": measured.count,
            "slowest": measured.slowest,
            "peak_mb": peak_kb() // 1024,
            "stray": stray,
            "collection_s": measured.collection_s,
        }
        print(json.dumps(result), flush=True)


def main() -> None:
    configure_logging(level="WARNING")
    measured = Measured()
    measure(measured)
    asyncio.run(serve(Path(sys.argv[1]), measured))


if __name__ == "__main__":
    main()
