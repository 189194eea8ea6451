"""Commands that run a server of a role. Each setting of the role is also a flag."""

from __future__ import annotations

import inspect
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import typer

from magnetar.cli.help import App
from magnetar.runtime.config import ConfigError, RoleConfig, load_config
from magnetar.runtime.errors import PortInUse
from magnetar.runtime.log import configure_logging
from magnetar.runtime.process import report_failure, run_process

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from pydantic.fields import FieldInfo

Config = TypeVar("Config", bound=RoleConfig)

# Typer parses a flag as one of these types. The settings class parses any other type from text.
_TYPES: Final = (bool, int, float, Path)


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class FlagForPort(Exception):
    """A port is in use; the text names the setting that changes it."""

    definite = True

    def __init__(self, error: PortInUse, key: str, environment: str) -> None:
        flag = key.replace("_", "-")
        super().__init__(f"{error}: choose another with --{flag}, {environment} or {key} in a file")


def add_role(
    app: typer.Typer,
    config_class: type[Config],
    serve: Callable[[Config, asyncio.Event], Awaitable[None]],
    *,
    text: str,
) -> None:
    """Add the command of a role. It reads the settings (`load_config`) and serves until SIGTERM.

    The command ends with the exit code of `run_process`. After wrong settings the exit code is
    USAGE, and the log names each wrong setting.
    """

    def run(**given: Any) -> None:
        _run(config_class, serve, given)

    _take_flags(run, config_class, [])
    app.command(config_class.role, help=text)(run)


def add_role_group(
    app: typer.Typer,
    config_class: type[Config],
    serve: Callable[[Config, asyncio.Event], Awaitable[None]],
    *,
    text: str,
) -> typer.Typer:
    """Like `add_role`, for a command that also has subcommands. Without a subcommand the command
    serves. Returns the group for the subcommands."""

    def run(context: typer.Context, **given: Any) -> None:
        if context.invoked_subcommand is None:
            _run(config_class, serve, given)

    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    _take_flags(run, config_class, [context])
    group = App()
    group.callback(invoke_without_command=True, help=text)(run)
    app.add_typer(group, name=config_class.role)
    return group


def _run(
    config_class: type[Config],
    serve: Callable[[Config, asyncio.Event], Awaitable[None]],
    given: dict[str, Any],
) -> NoReturn:
    configure_logging(level=given.pop("log_level").upper())
    try:
        config = load_config(config_class, file=given.pop("config"), flags=given)
    except ConfigError as error:
        raise typer.Exit(report_failure(error)) from None
    raise typer.Exit(
        run_process(lambda stop: _serve(serve, config, stop), survives=config.survives)
    )


def _take_flags(
    run: Callable[..., None], config_class: type[Config], before: list[inspect.Parameter]
) -> None:
    """Give `run` a signature with one parameter for each key: Typer makes flags of parameters."""
    parameters = [
        *before,
        _parameter("config", Path, "TOML file with the keys below, in snake_case", default=None),
        _parameter("log_level", LogLevel, "lowest level that is logged", default=LogLevel.INFO),
        *(_flag(config_class, key, field) for key, field in config_class.model_fields.items()),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


async def _serve(
    serve: Callable[[Config, asyncio.Event], Awaitable[None]], config: Config, stop: asyncio.Event
) -> None:
    try:
        await serve(config, stop)
    except* PortInUse as group:
        raise _explained(group, config) from None


def _explained(group: BaseExceptionGroup[PortInUse], config: RoleConfig) -> Exception:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, PortInUse)
    for key in type(config).model_fields:
        if key.endswith("_port") and getattr(config, key) == error.port:
            return FlagForPort(error, key, f"MAGNETAR_{config.role.upper()}_{key.upper()}")
    return error


def _flag(config_class: type[RoleConfig], key: str, field: FieldInfo) -> inspect.Parameter:
    kind: Any = field.annotation if field.annotation in _TYPES else str
    words = field.description or key.replace("_", " ")
    environment = f"MAGNETAR_{config_class.role.upper()}_{key.upper()}"
    standard = "required" if field.is_required() else f"default: {_text_of(field.default)}"
    return _parameter(key, kind, f"{words} ({environment}; {standard})", default=None)


def _text_of(value: object) -> str:
    """Return a default as a user writes it in a flag."""
    if isinstance(value, frozenset):
        return ",".join(sorted(map(str, value)))
    return str(value) or "empty"


def _parameter(name: str, kind: Any, text: str, *, default: object) -> inspect.Parameter:
    flag = name.replace("_", "-")
    flag = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
    option = typer.Option(flag, help=text, show_default=default is not None)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, option],
    )
