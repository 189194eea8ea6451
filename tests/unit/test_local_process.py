"""A server as a local process, with small Python programs as servers."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from magnetar.local_process import LocalProcess, ProcessFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOREVER = "import pathlib, signal; pathlib.Path('ready').touch(); signal.pause()"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {FOREVER}"


class Starter:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.started: list[LocalProcess] = []

    def __call__(self, program: str, **settings: Any) -> LocalProcess:
        process = LocalProcess(
            "server",
            "server-1",
            self._directory,
            [sys.executable, "-c", program],
            {},
            (self._directory / "ready").exists,
            **settings,
        )
        self.started.append(process)
        return process


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for process in starter.started:
        process.kill()


@pytest.mark.parametrize("tied", [False, True])
def test_process_is_started_stopped_and_started_again(server: Starter, tied: bool) -> None:
    process = server(FOREVER, tied=tied)
    assert (process.running, process.pid, process.status) == (False, None, None)
    with process:
        first = process.pid
        assert first is not None
    assert (process.running, process.pid, process.status) == (False, None, -signal.SIGTERM)
    process.stop()  # does nothing
    assert process.start() > 0
    assert process.pid not in (None, first)
    process.kill()
    assert process.status == -signal.SIGKILL


def test_process_that_ends_before_it_is_ready_fails_with_its_log(server: Starter) -> None:
    process = server("print('first'); raise SystemExit('no disk')")
    with pytest.raises(ProcessFailed, match=r"server-1 ended with status 1.*no disk") as failed:
        process.start()
    assert failed.value.log_tail.splitlines() == ["first", "no disk"]


def test_a_slow_process_fails_the_wait_and_keeps_running(server: Starter) -> None:
    process = server("import signal; signal.pause()", ready_s=0.2)
    with pytest.raises(ProcessFailed, match=r"was not ready after 0\.2 s"):
        process.start()
    assert process.running


def test_process_that_ignores_sigterm_is_killed_after_its_time(server: Starter) -> None:
    process = server(DEAF, stop_s=0.2)
    process.start()
    process.stop()
    assert process.status == -signal.SIGKILL


def test_paused_process_can_be_stopped(server: Starter) -> None:
    process = server(FOREVER)
    process.start()
    process.pause()
    process.stop()
    assert process.status == -signal.SIGTERM


def test_settings_of_roles_are_not_inherited(
    server: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGNETAR_BOOKIE_ID", "other")
    monkeypatch.setenv("MAGNETAR_STANDALONE_HOST", "0.0.0.0")
    monkeypatch.setenv("MAGNETAR_SERVICE_URL", "grpc://localhost:1")
    program = (
        "import os; print(sorted(name for name in os.environ if 'MAGNETAR' in name), flush=True)"
    )
    process = server(f"{program}; {FOREVER}", variables={"MAGNETAR_BROKER_ID": "b1"})
    with process:
        pass
    assert "['MAGNETAR_BROKER_ID', 'MAGNETAR_SERVICE_URL']" in process.log.read_text()
