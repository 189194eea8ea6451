"""Settings of a role as flags: types, values that are passed on, and refusals by name."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
import typer
from pydantic import Field, model_validator

from magnetar.cli.role import LogLevel, add_role
from magnetar.runtime.config import RoleConfig
from magnetar.runtime.errors import PortInUse

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    Outcome = tuple[int, list["OvenConfig"], str]
    Invoke = Callable[..., Outcome]


class OvenConfig(RoleConfig):
    role = "oven"

    data_dir: Path
    grpc_port: int = Field(default=3181, ge=0, le=65535, description="where it listens")
    heat: float = 0.5
    light: bool = False
    name: str = ""
    levels: frozenset[LogLevel] = frozenset(LogLevel)
    write_quorum: int = 3
    ack_quorum: int = 2

    @model_validator(mode="after")
    def quorums(self) -> Self:
        if self.ack_quorum > self.write_quorum:
            raise ValueError(
                f"ack_quorum {self.ack_quorum} exceeds write_quorum {self.write_quorum}"
            )
        return self


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands of a test act as if this process were their own."""
    for name in list(os.environ):
        if name.startswith("MAGNETAR_"):
            monkeypatch.delenv(name)
    yield
    faulthandler.enable(file=sys.__stderr__)


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str]) -> Invoke:
    """Run a command. Returns the exit code, the settings of the started server, and the output."""

    def invoke(*arguments: str, error: Exception | None = None) -> Outcome:
        served: list[OvenConfig] = []

        async def serve(config: OvenConfig, stop: asyncio.Event) -> None:
            served.append(config)
            if error is not None:
                raise error

        app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
        add_role(app, OvenConfig, serve, text="Bake.")
        with pytest.raises(SystemExit) as end:
            app(list(arguments))
        assert isinstance(end.value.code, int)
        return end.value.code, served, "".join(capfd.readouterr())

    return invoke


def error_of(said: str) -> str:
    [line] = [json.loads(line) for line in said.splitlines() if "stopped by" in line]
    return str(line["error"])


def test_every_key_is_a_flag_of_its_type(invoke: Invoke) -> None:
    flags = ["--data-dir", "/d", "--grpc-port", "1", "--heat", "2.5", "--light", "--name", "n"]
    code, [config], _ = invoke(*flags)
    assert code == 0
    assert config == OvenConfig(data_dir=Path("/d"), grpc_port=1, heat=2.5, light=True, name="n")


def test_flags_override_the_environment_which_overrides_the_file(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "oven.toml"
    file.write_text('data_dir = "/file"\ngrpc_port = 1\nheat = 1.5\n')
    monkeypatch.setenv("MAGNETAR_OVEN_GRPC_PORT", "2")
    monkeypatch.setenv("MAGNETAR_OVEN_NAME", "environment")
    code, [config], _ = invoke("--config", str(file), "--name", "flag", "--no-light")
    assert code == 0
    assert config == OvenConfig(data_dir=Path("/file"), grpc_port=2, heat=1.5, name="flag")


@pytest.mark.parametrize(
    ("text", "flags", "reason"),
    [
        ("", [], "data_dir is required: give --data-dir, MAGNETAR_OVEN_DATA_DIR or data_dir"),
        ('data_dir = "d"\ngrpc_prot = 1', [], "unknown key 'grpc_prot'"),
        ('data_dir = "d"\ngrpc_port = 70000', [], "grpc_port in "),
        ('data_dir = "d"', ["--ack-quorum", "4"], "--ack-quorum 4 exceeds write_quorum 3"),
        ('data_dir = "d', [], "is not valid TOML"),
    ],
)
def test_settings_that_cannot_be_used_name_the_key(
    invoke: Invoke, tmp_path: Path, text: str, flags: list[str], reason: str
) -> None:
    file = tmp_path / "oven.toml"
    file.write_text(text)
    code, served, said = invoke("--config", str(file), *flags)
    assert (code, served) == (2, [])
    assert reason in error_of(said)


def test_a_missing_config_file_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    code, _, said = invoke("--config", str(tmp_path / "nope.toml"))
    assert code == 2
    assert "No such file" in error_of(said)


def test_an_unknown_environment_variable_is_refused_with_a_suggestion(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGNETAR_OVEN_GRPC_PROT", "1")
    code, _, said = invoke("--data-dir", "/d")
    assert code == 2
    assert "MAGNETAR_OVEN_GRPC_PROT: did you mean MAGNETAR_OVEN_GRPC_PORT" in error_of(said)


def test_a_flag_that_is_no_number_is_refused(invoke: Invoke) -> None:
    code, _, said = invoke("--data-dir", "/d", "--grpc-port", "many")
    assert code == 2
    assert "--grpc-port" in said
    assert "should be a valid integer" in said


@pytest.mark.parametrize("nested", [False, True])
def test_a_port_in_use_names_its_flag(invoke: Invoke, nested: bool) -> None:
    error: Exception = PortInUse("127.0.0.1", 3181)
    if nested:
        error = ExceptionGroup("", [ExceptionGroup("", [error])])
    code, _, said = invoke("--data-dir", "/d", error=error)
    assert code == 1
    assert error_of(said) == (
        "port 3181 on 127.0.0.1 is in use by another process: choose another with --grpc-port,"
        " MAGNETAR_OVEN_GRPC_PORT or grpc_port in a file"
    )


def test_help_names_flag_variable_and_default(invoke: Invoke) -> None:
    code, _, said = invoke("--help")
    said = " ".join(said.split())
    assert code == 0
    assert "--grpc-port" in said
    assert "where it listens (MAGNETAR_OVEN_GRPC_PORT; default: 3181)" in said
    assert "(MAGNETAR_OVEN_DATA_DIR; required)" in said
    assert "(MAGNETAR_OVEN_LEVELS; default: debug,error,info,warning)" in said
