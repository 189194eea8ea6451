"""The options of `magnetar spark` for the connection to brokers: URL, credentials, certificates.

`connects` adds these options to a command. The command receives them as options of Spark's source
and sink. A secret is accepted from an environment variable or a file, not as an argument: other
users of the machine can see the arguments of a process.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from magnetar.cli.client import DEFAULT_SERVICE_URL
from magnetar.spark import access
from magnetar.spark.errors import InvalidOption
from magnetar.spark.service_url import brokers_of

if TYPE_CHECKING:
    from collections.abc import Callable

Connection = dict[str, str]
"""The options `service.url` and `pulsar.client.*`."""

PARAMETER: Final = "connection"  # the parameter of a command that the options replace


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `connection` of a command by the options."""
    signature = inspect.signature(command, eval_str=True)
    others = [it for name, it in signature.parameters.items() if name != PARAMETER]
    given = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (_, kind, default) in _OPTIONS.items()
    ]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @functools.wraps(command)
    def connected(context: typer.Context, **values: Any) -> None:
        own = {name: values.pop(name) for name in _OPTIONS}
        command(**values, connection=_connection(context, own))

    every = [*(it.replace(kind=it.KEYWORD_ONLY) for it in others), *given, context]
    connected.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    connected.__annotations__ = {it.name: it.annotation for it in every}
    return connected


# Mechanics


def _option(name: str, text: str) -> Any:
    """An option of the command line, and the environment variable of the same name."""
    variable = f"MAGNETAR_{name.removeprefix('--').replace('-', '_').upper()}"
    return Annotated[str, typer.Option(name, envvar=variable, help=text)]


# name of the parameter -> option of the connector, option of the command line, default
_OPTIONS: Final[dict[str, tuple[str, Any, str]]] = {
    "service_url": (
        "service.url",
        _option("--service-url", "URL of the brokers: grpc://host:port[,host2:port], or grpcs://"),
        DEFAULT_SERVICE_URL,
    ),
    "auth_plugin": (
        access.PLUGIN,
        _option("--auth-plugin", "kind of credentials: token, basic, tls or oauth2"),
        "",
    ),
    "auth_params": (
        access.PARAMS,
        _option(
            "--auth-params",
            "the credentials; for token: file:///path or env:NAME. Give a secret itself only in the"
            " variable",
        ),
        "",
    ),
    "tls_trust_certs": (
        access.TRUST,
        _option("--tls-trust-certs", "with grpcs://: PEM file of the authorities to trust"),
        "",
    ),
    "tls_certificate": (
        access.CERTIFICATE,
        _option("--tls-certificate", "with grpcs://: PEM file of the client's certificate"),
        "",
    ),
    "tls_key": (
        access.KEY,
        _option("--tls-key", "with grpcs://: PEM file of the client's private key"),
        "",
    ),
}
_FLAGS: Final = {option: f"--{name.replace('_', '-')}" for name, (option, _, _) in _OPTIONS.items()}


def _connection(context: typer.Context, given: dict[str, str]) -> Connection:
    connection = {_OPTIONS[name][0]: value for name, value in given.items() if value}
    source = context.get_parameter_source("auth_params")
    is_argument = source is not None and source.name == "COMMANDLINE"
    if is_argument and access.may_hold_secret(given["auth_params"]):
        raise typer.BadParameter(
            "other users of this machine can see a secret in an argument: write file:///path or"
            " env:NAME, or set MAGNETAR_AUTH_PARAMS",
            param_hint=_FLAGS[access.PARAMS],
        )
    try:
        brokers_of(connection.get("service.url", ""))
        access.parse_access({option.lower(): value for option, value in connection.items()})
    except InvalidOption as error:
        reason = error.reason
        for option, flag in _FLAGS.items():
            reason = reason.replace(option, flag)
        raise typer.BadParameter(reason, param_hint=_FLAGS[error.option]) from None
    return connection
