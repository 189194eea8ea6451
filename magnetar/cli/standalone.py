"""`magnetar standalone`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import typer

from magnetar.cli.output import program
from magnetar.cli.role import add_role
from magnetar.standalone import StandaloneConfig, run_standalone

if TYPE_CHECKING:
    import asyncio

    from magnetar.metadata.model import BrokerRegistration

# The URLs of a server with the default ports. The other commands connect to it by default.
LOCAL_SERVICE_URL: Final = "grpc://127.0.0.1:6660"
LOCAL_ADMIN_URL: Final = "http://127.0.0.1:8080"


def add_to(app: typer.Typer) -> None:
    add_role(
        app,
        StandaloneConfig,
        serve,
        text="Run a whole server in one process: metadata, a bookie and a broker. All data is in"
        " one directory.",
    )


async def serve(config: StandaloneConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. When the server is ready, print commands to try next, if the
    output is a terminal."""
    await run_standalone(config, stop, print_next if sys.stdout.isatty() else None)


def print_next(server: BrokerRegistration) -> None:
    """Print the addresses of the server, and commands that use them."""
    service = "" if server.grpc_url == LOCAL_SERVICE_URL else f" -u {server.grpc_url}"
    admin = "" if server.http_url == LOCAL_ADMIN_URL else f" --admin-url {server.http_url}"
    magnetar = program()
    typer.echo(
        f"\nclients         {server.grpc_url}\n"
        f"Pulsar clients  {server.pulsar_url}\n"
        f"HTTP            {server.http_url} (health, metrics, admin API)\n"
        "In another shell:\n"
        f"    {magnetar} produce greetings -m hello{service}\n"
        f"    {magnetar} consume greetings -s me -p earliest{service}\n"
        f"    {magnetar} topics stats greetings{admin}\n"
        "Ctrl-C stops the server."
    )
