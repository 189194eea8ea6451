"""The process frame in real processes: what ends a process, its exit code and its message."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = """
import asyncio, sys
from magnetar.runtime.errors import ConfigError, PortInUse
from magnetar.runtime.log import configure_logging
from magnetar.runtime.process import run_process

configure_logging()

def up():
    print("up", flush=True)

async def main(stop):
{body}

{before}
sys.exit(run_process(main))
"""


def start(body: str, *options: str, before: str = "") -> subprocess.Popen[str]:
    text = "\n".join("    " + line for line in body.strip().splitlines())
    return subprocess.Popen(
        [sys.executable, *options, "-c", PROGRAM.format(body=text, before=before)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]]]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, [json.loads(line) for line in errors.splitlines()]


def wait_up(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"


def events(lines: Sequence[dict[str, Any]]) -> list[str]:
    return [line["event"] for line in lines]


def test_a_server_may_open_as_many_files_as_its_hard_limit_allows() -> None:
    process = start(
        "limits = resource.getrlimit(resource.RLIMIT_NOFILE)\nassert limits == (500, 500), limits",
        before="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 500))",
    )
    assert finish(process) == (0, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_for_a_clean_stop(number: signal.Signals) -> None:
    process = start("up()\nawait stop.wait()")
    wait_up(process)
    process.send_signal(number)
    code, lines = finish(process)
    assert code == 0
    assert events(lines) == ["stopping"]
    assert lines[0]["signal"] == number.name


def test_a_second_signal_exits_at_once() -> None:
    process = start("up()\nawait stop.wait()\nup()\nawait asyncio.sleep(3600)")
    wait_up(process)
    process.send_signal(signal.SIGTERM)
    wait_up(process)
    process.send_signal(signal.SIGINT)
    code, lines = finish(process)
    assert code == 128 + signal.SIGINT
    assert events(lines)[-1] == "second signal: exiting at once"


def test_an_operating_error_is_one_line_and_exit_code_1() -> None:
    body = """
async def child():
    raise PortInUse("127.0.0.1", 6650)
async with asyncio.TaskGroup() as group:
    group.create_task(child())
    group.create_task(child())
"""
    code, lines = finish(start(body))
    assert code == 1
    assert events(lines) == ["stopped by an error"]
    assert lines[0]["error"] == "port 6650 on 127.0.0.1 is in use by another process"
    assert "exception" not in lines[0]


def test_a_config_error_is_exit_code_2() -> None:
    code, lines = finish(start("raise ConfigError(['unknown key x'])"))
    assert (code, lines[0]["error"]) == (2, "unknown key x")


@pytest.mark.parametrize(
    "body",
    [
        "assert stop.is_set(), 'two owners'",
        "raise ExceptionGroup('', [PortInUse('h', 1), TypeError('two owners')])",
    ],
)
def test_a_bug_is_a_traceback_and_exit_code_70(body: str) -> None:
    code, lines = finish(start(body))
    assert code == 70
    assert events(lines) == ["stopped by a bug"]
    assert "two owners" in lines[0]["exception"]
    assert "Traceback" in lines[0]["exception"]


def test_a_bug_in_a_task_without_a_waiter_ends_the_process_at_once_without_clean_up() -> None:
    body = """
def callback():
    raise AssertionError("confirmed went backwards")
try:
    asyncio.get_running_loop().call_soon(callback)
    await asyncio.sleep(3600)
finally:
    print("cleaned up", flush=True)
"""
    process = start(body)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 70
    assert out == ""
    assert "confirmed went backwards" in errors


def test_a_stray_error_that_is_no_bug_is_logged_and_the_process_continues() -> None:
    body = """
def callback():
    raise OSError("weather")
asyncio.get_running_loop().call_soon(callback)
await asyncio.sleep(0.05)
"""
    code, lines = finish(start(body))
    assert code == 0
    assert events(lines) == ["stray error"]


def test_python_without_assertions_is_refused() -> None:
    process = start("up()", "-O")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert "python -O" in errors
