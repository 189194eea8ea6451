"""When a watchdog kills a server, and when it does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from magnetar.local_cluster import _guard
from magnetar.runtime.ports import free_ports
from magnetar.watchdog import (
    CHECK_S,
    KILLS_MAX,
    KILLS_PERIOD_S,
    SILENCE_S,
    Watchdog,
    answers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked", flush=True)
        self.send_response(503)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


STOPPING_SERVER = """
import http.server, signal, sys, threading, time
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked", flush=True)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health)
stops = []
def stop(*_):
    stops.append(1)
    if len(stops) == 1:
        threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
server.serve_forever()
server.server_close()
end = time.monotonic() + 4.0
while time.monotonic() < end:
    time.sleep(0.1)
print("stopped after", len(stops), "signal", flush=True)
"""


def wait_asked(wrapper: subprocess.Popen[str]) -> None:
    """Wait until the wrapper has asked the server once more."""
    assert wrapper.stdout is not None
    assert wrapper.stdout.readline() == "asked\n"


def check(watchdog: Watchdog, *, since: float, until: float, answers: bool) -> Iterator[float]:
    """Check the server repeatedly. Yields the times at which the watchdog kills it."""
    for number in range(int((until - since) / CHECK_S) + 1):
        now = since + number * CHECK_S
        if watchdog.on_check(now, answers=answers):
            yield now


def test_a_server_that_falls_silent_is_killed_after_the_limit() -> None:
    watchdog = Watchdog()
    assert list(check(watchdog, since=0.0, until=10.0, answers=True)) == []
    assert list(check(watchdog, since=10.5, until=20.0, answers=False)) == [10.0 + SILENCE_S]


def test_a_server_that_has_not_answered_yet_is_not_killed() -> None:
    """The server may replay its log for minutes."""
    watchdog = Watchdog()
    assert list(check(watchdog, since=0.0, until=600.0, answers=False)) == []


def test_a_restarted_server_gets_its_time_to_start() -> None:
    watchdog = Watchdog()
    list(check(watchdog, since=0.0, until=10.0, answers=True))
    watchdog.on_ended()
    assert list(check(watchdog, since=10.5, until=60.0, answers=False)) == []


@pytest.mark.real_loop
async def test_a_server_that_was_restarted_between_two_checks_gets_its_time_to_start() -> None:
    """This happens if many servers of a local cluster are restarted at the same time."""
    asked = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()
        asked.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process: Any = SimpleNamespace(id="broker-1", ports={"http": port}, pid=1, signal=Mock())
    async with asyncio.TaskGroup() as group:
        guard = group.create_task(_guard(process))
        for _ in range(2):
            await asked.wait()
            asked.clear()
        server.close()
        process.pid = 2
        await asyncio.sleep(SILENCE_S + 4 * CHECK_S)
        guard.cancel()
    process.signal.assert_not_called()


def test_a_watchdog_that_stood_still_starts_its_count_again() -> None:
    watchdog = Watchdog()
    list(check(watchdog, since=0.0, until=10.0, answers=True))
    assert list(check(watchdog, since=30.0, until=31.5, answers=False)) == []
    assert list(check(watchdog, since=32.0, until=40.0, answers=False)) == [30.0 + SILENCE_S]


def test_a_short_limit_counts_although_a_silent_check_takes_as_long() -> None:
    """A check of a stopped server ends after CHECK_S, and the pause before it takes as long."""
    watchdog = Watchdog(CHECK_S)
    assert not watchdog.on_check(0.0, answers=True)
    assert watchdog.on_check(2.1 * CHECK_S, answers=False)


def test_kills_are_bounded() -> None:
    watchdog, kills = Watchdog(), 0
    for number in range(20):
        began = 10.0 * number
        list(check(watchdog, since=began, until=began + 5.0, answers=True))
        kills += len(list(check(watchdog, since=began + 5.5, until=began + 9.0, answers=False)))
    assert kills == KILLS_MAX
    later = KILLS_PERIOD_S + 1.0
    list(check(watchdog, since=later, until=later + 5.0, answers=True))
    assert len(list(check(watchdog, since=later + 5.5, until=later + 9.0, answers=False))) == 1


def test_the_wrapper_kills_a_stopped_server_and_ends_with_its_status() -> None:
    [port] = free_ports(1)
    server = [sys.executable, "-c", SERVER, str(port)]
    wrapper = subprocess.Popen(
        [sys.executable, "-m", "magnetar.watchdog", "--port", str(port), "--", *server],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(3):  # after the third check, the wrapper knows the first two answers
            wait_asked(wrapper)
        [child] = Path(f"/proc/{wrapper.pid}/task/{wrapper.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGSTOP)
        assert wrapper.wait(60.0) == 128 + signal.SIGKILL
        assert wrapper.stderr is not None
        assert "silent for 2 s" in wrapper.stderr.read()
    finally:
        wrapper.kill()
        wrapper.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_gets_one_signal_and_its_time_to_stop(number: signal.Signals) -> None:
    """A server that stops serves no /health any more. A second signal would end it at once."""
    [port] = free_ports(1)
    server = [sys.executable, "-c", STOPPING_SERVER, str(port)]
    wrapper = subprocess.Popen(
        [sys.executable, "-m", "magnetar.watchdog", "--port", str(port), "--", *server],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for _ in range(3):
            wait_asked(wrapper)
        os.killpg(wrapper.pid, number)  # as a terminal does at Ctrl-C
        assert wrapper.wait(60.0) == 0
        assert wrapper.stdout is not None
        assert "stopped after 1 signal" in wrapper.stdout.read()
    finally:
        wrapper.kill()
        wrapper.communicate()


def test_the_wrapper_passes_a_stop_on() -> None:
    [port] = free_ports(1)
    server = [sys.executable, "-c", SERVER, str(port)]
    wrapper = subprocess.Popen(
        [sys.executable, "-m", "magnetar.watchdog", "--port", str(port), "--", *server],
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_asked(wrapper)  # the wrapper has installed its signal handlers
    wrapper.terminate()
    assert wrapper.wait(60.0) == 128 + signal.SIGTERM
    wrapper.communicate()
    assert not answers(port)
