"""The command line as a whole: what is listed is there, and help needs no server."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from magnetar.cli.help import coloured
from magnetar.cli.main import COMMANDS, make_app


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(arguments), list(arguments))
    return result.exit_code, result.output


def test_help_lists_every_command() -> None:
    code, said = invoke("--help")
    assert code == 0
    for name, (_, text) in COMMANDS.items():
        assert name in said
        assert text[:40] in said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    code, said = invoke(name, "--help")
    assert code == 0
    assert f"Usage: root {name}" in said or f"Usage: magnetar {name}" in said, said


@pytest.mark.parametrize("name", ["topics", "subscriptions", "bookies", "spark"])
def test_a_command_with_subcommands_prints_its_help(name: str) -> None:
    code, said = invoke(name)
    assert code == 2
    assert f"{name} [OPTIONS] COMMAND [ARGS]..." in said
    assert "Commands:" in said


@pytest.mark.parametrize("name", ["topics", "namespaces"])
def test_help_lists_policies_after_the_other_commands(name: str) -> None:
    _, said = invoke(name, "--help")
    commands, policies = said.split("Policies:")
    assert " set-" not in commands
    assert all(
        line.startswith(("  set-", "  get-", "  remove-", "    "))
        for line in policies.splitlines()
        if line
    )
    assert "  unload" in commands


def test_the_version_is_printed() -> None:
    assert invoke("--version") == (0, f"magnetar {version('magnetar')}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_cuts_no_word(name: str) -> None:
    _, said = invoke(name, "--help")
    said = said.replace("[ARGS]...", "")
    assert "…" not in said.replace("host:port…", "")
    assert not re.search(r"\w\.\.\.", said.replace("value...", "")), said


def test_help_is_coloured_without_changing_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "Usage: magnetar x\n\n  It does: this.\n\nOptions:\n  -a, --all <str>  all of it\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    colours = coloured(plain)
    assert "\x1b[1mOptions:\x1b[0m\n" in colours
    assert "\x1b[1m-a, --all <str>\x1b[0m  all of it" in colours
    assert re.sub(r"\x1b\[\d+m", "", colours) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured(plain) == plain


def test_an_unknown_command_or_flag_is_a_usage_error() -> None:
    code, said = invoke("standalon")
    assert code == 2
    assert "Did you mean 'standalone'?" in said
    code, said = invoke("produce", "greetings", "--mesages", "x")
    assert code == 2
    assert "No such option: --mesages" in said
    assert "Traceback" not in said


def test_help_names_arguments_and_types_as_a_user_types_them() -> None:
    _, said = invoke("produce", "--help")
    assert "produce [OPTIONS] TOPIC\n" in said
    for term in ("TOPIC <str>", "--messages <str>", "--files <path>", "--num-produce <int>"):
        assert term in said
    assert "list[" not in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("produce", "Missing argument 'TOPIC'."),
        ("produce g -m x -n 0", "'0' is not greater than or equal to 1"),
        ("consume g -s x -t Foo", "'Foo' is not one of 'exclusive', 'shared'"),
        ("standalone --grpc-port abc", "'abc' is not a valid integer\n"),
        ("bookie --grpc-port abc", "'abc' is not a valid integer\n"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(arguments: str, reason: str) -> None:
    code, said = invoke(*arguments.split())
    assert code == 2
    assert reason in said
    assert "Input should be" not in said
    assert "Value error" not in said


@pytest.mark.parametrize("role", ["standalone", "bookie", "broker", "autorecovery"])
def test_every_key_of_a_server_is_described(role: str) -> None:
    config = {
        "standalone": "magnetar.standalone.StandaloneConfig",
        "bookie": "magnetar.bookie.config.BookieConfig",
        "broker": "magnetar.broker.config.BrokerConfig",
        "autorecovery": "magnetar.bookie.repair.settings.AutorecoveryConfig",
    }[role]
    module, _, name = config.rpartition(".")
    fields = getattr(importlib.import_module(module), name).model_fields
    assert [key for key, field in fields.items() if not field.description] == []


def test_one_command_does_not_import_another() -> None:
    """A client command loads no server, and a listing loads neither."""
    code = """
import sys
from magnetar.cli.main import make_app
make_app([])
assert not any(n.startswith(("grpc", "pydantic", "rocksdict")) for n in sys.modules)
make_app(["produce"])
assert not any(n.startswith(("magnetar.broker", "magnetar.bookie", "rocksdict", "kazoo"))
               for n in sys.modules)
make_app(["standalone"])
assert not any(n.startswith(("kazoo", "fastapi")) for n in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ctrl_c_during_an_import_is_no_traceback() -> None:
    code = """
import os, signal, sys
from magnetar.cli.main import main

class Slow:  # a library that takes its time
    def find_spec(self, name, path=None, target=None):
        os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Slow())
sys.argv = ["magnetar", "produce", "greetings", "-m", "x"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (130, "")
