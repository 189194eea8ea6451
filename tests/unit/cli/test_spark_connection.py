"""How `magnetar spark` gets its credentials: from files and variables, for each job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from magnetar.cli.main import make_app
from magnetar.cli.spark_connection import Connection, connects

TLS = Path(__file__).parents[2] / "fakes" / "tls"
SECRET = "eyJhbGciOi"


def connection_of(*arguments: str, **variables: str) -> Connection:
    """The connection that a command gets. Raises AssertionError with what it prints."""
    found: list[Any] = []

    def job(name: str = "unnamed", *, connection: Connection) -> None:
        found.extend((name, connection))

    app = typer.Typer()
    app.command()(connects(job))
    result = CliRunner().invoke(app, list(arguments), env=variables)
    if result.exit_code:
        raise AssertionError(result.output)
    name, connection = found
    assert name == "unnamed"
    assert isinstance(connection, dict)
    return connection


def test_a_job_without_credentials_has_the_url_only() -> None:
    assert connection_of() == {"service.url": "grpc://localhost:6660"}
    assert connection_of("--service-url", "grpc://b") == {"service.url": "grpc://b"}


def test_options_and_variables_become_options_of_source_and_sink() -> None:
    url, trust = "grpcs://b:6661", str(TLS / "ca.pem")
    wanted = {
        "service.url": url,
        "pulsar.client.authPluginClassName": "token",
        "pulsar.client.authParams": "file:///run/t",
        "pulsar.client.tlsTrustCertsFilePath": trust,
        "pulsar.client.tlsCertificateFilePath": str(TLS / "client.pem"),
        "pulsar.client.tlsKeyFilePath": str(TLS / "client-key.pem"),
    }
    names = [
        "service-url",
        "auth-plugin",
        "auth-params",
        "tls-trust-certs",
        "tls-certificate",
        "tls-key",
    ]
    flags: list[str] = []
    variables: dict[str, str] = {}
    for name, value in zip(names, wanted.values(), strict=True):
        flags += [f"--{name}", value]
        variables[f"MAGNETAR_{name.replace('-', '_').upper()}"] = value
    assert connection_of(*flags) == connection_of(**variables) == wanted


OAUTH2 = '{"issuer_url":"https://a",%s}'


@pytest.mark.parametrize(
    ("plugin", "params"),
    [
        ("token", f"token:{SECRET}"),
        ("basic", f'{{"username":"u","password":"{SECRET}"}}'),
        ("basic", f' {{"password":"{SECRET}","username":"u","method":"basic"}}'),
        ("oauth2", OAUTH2 % f'"private_key":"data:application/json;base64,{SECRET}secret"'),
        ("oauth2", OAUTH2 % f'"private_key":"/k.json","client_secret":"{SECRET}"'),
        ("oauth2", OAUTH2 % f'"private_key":"{{\\"client_secret\\":\\"{SECRET}\\"}}"'),
    ],
)
def test_a_secret_is_taken_from_the_variable_but_not_from_an_argument(
    plugin: str, params: str
) -> None:
    given = connection_of("--auth-plugin", plugin, MAGNETAR_AUTH_PARAMS=params)
    assert given["pulsar.client.authParams"] == params
    with pytest.raises(AssertionError, match="MAGNETAR_AUTH_PARAMS") as caught:
        connection_of("--auth-plugin", plugin, "--auth-params", params)
    assert "--auth-params" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("params", [SECRET, f'{{"password":"{SECRET}"', f'["{SECRET}"]', "1"])
def test_a_text_that_is_not_known_to_be_a_path_is_refused_as_an_argument(params: str) -> None:
    with pytest.raises(AssertionError, match="MAGNETAR_AUTH_PARAMS") as caught:
        connection_of("--auth-plugin", "token", "--auth-params", params)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("plugin", "params"),
    [
        ("token", "env:TOKEN"),
        ("tls", "tlsCertFile:/a.pem,tlsKeyFile:/b.pem"),
        ("oauth2", OAUTH2 % '"private_key":"/k.json"'),
        ("oauth2", OAUTH2 % '"private_key":"file:///k.json","audience":"a","scope":"s"'),
        ("oauth2", OAUTH2 % '"type":"client_credentials","private_key":"k","client_id":"c"'),
    ],
)
def test_parameters_that_name_a_place_are_taken_from_an_argument(plugin: str, params: str) -> None:
    given = connection_of("--auth-plugin", plugin, "--auth-params", params)
    assert given["pulsar.client.authParams"] == params


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("--service-url", "localhost"), "--service-url"),
        (("--service-url", "pulsar://localhost"), "--service-url"),
        (("--auth-plugin", "athenz"), "--auth-plugin"),
        (("--auth-params", "file:///run/t"), "--auth-params"),
        (("--tls-trust-certs", "/no.pem"), "--tls-trust-certs"),
        (("--service-url", "grpcs://b", "--tls-trust-certs", "/no.pem"), "--tls-trust-certs"),
        (("--service-url", "grpcs://b", "--tls-key", "/no.pem"), "--tls-certificate"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_option(
    arguments: tuple[str, ...], flag: str
) -> None:
    with pytest.raises(AssertionError, match=f"Invalid value for {flag}: ") as caught:
        connection_of(*arguments)
    assert "pulsar.client" not in str(caught.value)


@pytest.mark.parametrize("name", ["archive", "replay", "compact", "stats"])
def test_each_job_has_the_options(name: str) -> None:
    shown = CliRunner().invoke(make_app(["spark", name]), ["spark", name, "--help"]).output
    for flag in ("--service-url", "--auth-plugin", "--auth-params", "--tls-trust-certs"):
        assert f"  {flag} " in shown
    assert "MAGNETAR_AUTH_PARAMS" in shown
