"""Shared by the client commands: the option for the service URL, and the handling of errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

import magnetar
from magnetar.cli.interrupt import INTERRUPTED, run_interruptible
from magnetar.client.errors import START_ADVICE
from magnetar.client.session.service_url import host_and_port, parse_service_url

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

PROBE_S: Final = 2.0

ServiceUrl = Annotated[
    str,
    typer.Option(
        "--service-url",
        "-u",
        envvar="MAGNETAR_SERVICE_URL",
        help="URL of the brokers: grpc://host:port[,host2:port], or pulsar://host:port",
    ),
]
DEFAULT_SERVICE_URL: Final = "grpc://localhost:6660"


def run_client(service_url: str, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end. An error of the client or of a file ends the command with one line and
    exit code 1."""
    try:
        run_interruptible(_reachable_first(service_url, work))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (magnetar.PulsarException, OSError, ExceptionGroup) as error:
        first: Exception = error
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, magnetar.Timeout) and first.broker is not None:
            fail(f"{first}. `magnetar topics stats {first.topic}` shows the topic's state")
        if isinstance(first, magnetar.ConnectError):
            fail(f"{first}. Does the port match the URL's scheme (grpc: 6660, pulsar: 6650)?")
        if isinstance(first, magnetar.PulsarException):
            fail(str(first))
        if isinstance(first, OSError):
            fail(f"{first.filename}: {first.strerror}" if first.filename else str(first))
        raise
    finally:
        work.close()  # the work may not have begun


def fail(reason: str, *, code: int = 1) -> NoReturn:
    """End the command with an error. `reason` says what happened and what to do."""
    typer.echo(f"Error: {reason}", err=True)
    raise typer.Exit(code)


async def _reachable_first(service_url: str, work: Coroutine[Any, Any, None]) -> None:
    await require_reachable(service_url)
    await work


async def require_reachable(service_url: str) -> None:
    """End the command unless a server listens at one of the brokers' addresses.

    A client retries for 30 s, because a broker may restart. With this check, the user learns of a
    mistyped address at once.
    """
    brokers = [host_and_port(url) for url in parse_service_url(service_url)]
    problems = [await _probe(broker) for broker in brokers]
    if all(problems):
        fail(
            f"cannot reach {service_url}: {problems[0]}. {START_ADVICE}; --service-url or"
            " MAGNETAR_SERVICE_URL sets another URL"
        )


async def _probe(address: str) -> str | None:
    """Return the reason why a connection to this address fails. None: a server listens."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no answer within {PROBE_S:g} s"
    except ConnectionRefusedError:
        return "connection refused"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return None
