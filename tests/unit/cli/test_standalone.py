"""`magnetar standalone` on a terminal: what it prints when the server is ready."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support import free_port

from magnetar.cli.standalone import print_next
from magnetar.metadata.model import BrokerId, BrokerRegistration
from magnetar.standalone import BOOKIE, LEDGER, StandaloneConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_commands_name_an_address_only_if_it_is_not_the_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_next(server_on(6660, 8080))
    said = capsys.readouterr().out
    assert "magnetar produce greetings -m hello\n" in said
    assert "magnetar topics stats greetings\n" in said
    print_next(server_on(7660, 7080))
    said = capsys.readouterr().out
    assert "magnetar produce greetings -m hello -u grpc://127.0.0.1:7660\n" in said
    assert "magnetar topics stats greetings --admin-url http://127.0.0.1:7080\n" in said


def failing_in(path: str) -> Callable[[], None]:
    """Return a function in this file whose call is a bug."""
    names: dict[str, Any] = {}
    exec(compile("def call() -> None:\n    assert False", f"/app{path}bookie.py", "exec"), names)
    found: Callable[[], None] = names["call"]
    return found


@pytest.mark.parametrize(("path", "survives"), [(BOOKIE, False), (LEDGER, True), ("/", True)])
def test_the_process_ends_only_after_a_bug_of_the_bookie(
    path: str, survives: bool, tmp_path: Path
) -> None:
    config = StandaloneConfig(data_dir=tmp_path)
    call = failing_in(path)
    with pytest.raises(AssertionError) as direct:
        call()
    caused = AssertionError("another")
    caused.__cause__ = direct.value
    group = ExceptionGroup("tasks", [OSError(), ExceptionGroup("more", [direct.value])])
    for error in (direct.value, caused, group):
        assert config.survives(error) is survives


def test_commands_have_the_path_of_a_program_that_is_not_on_the_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [".venv/bin/magnetar", "standalone"])
    print_next(server_on(6660, 8080))
    assert "    .venv/bin/magnetar produce greetings -m hello\n" in capsys.readouterr().out
    (tmp_path / "magnetar").touch(mode=0o755)
    print_next(server_on(6660, 8080))
    assert "    magnetar produce greetings -m hello\n" in capsys.readouterr().out


def server_on(grpc: int, http: int) -> BrokerRegistration:
    return BrokerRegistration(
        broker=BrokerId("standalone"),
        incarnation="0" * 32,
        grpc_url=f"grpc://127.0.0.1:{grpc}",
        pulsar_url="pulsar://127.0.0.1:6650",
        http_url=f"http://127.0.0.1:{http}",
    )


def test_on_a_terminal_it_prints_what_to_try_next_when_it_is_ready(tmp_path: Path) -> None:
    ports = [f"--{name}-port={free_port()}" for name in ("grpc", "pulsar", "http")]
    command = [sys.executable, "-m", "magnetar.cli.main", "standalone", "--data-dir", str(tmp_path)]
    terminal, its_end = pty.openpty()
    with subprocess.Popen(
        [*command, *ports], stdin=its_end, stdout=its_end, stderr=subprocess.DEVNULL
    ) as server:
        os.close(its_end)
        said = b""
        try:
            while b"Ctrl-C stops the server." not in said:
                said += os.read(terminal, 4096)  # raises OSError when the server has ended
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=30) == 0
        finally:
            server.kill()
            os.close(terminal)
    assert b"magnetar consume greetings -s me -p earliest -u grpc://127.0.0.1:" in said
