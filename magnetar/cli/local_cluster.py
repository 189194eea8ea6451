"""`magnetar local-cluster`."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 (Typer needs it at run time)
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from magnetar.cli.output import program
from magnetar.local_cluster import DESCRIPTION, ENVIRONMENT, LocalCluster, run_local_cluster
from magnetar.runtime.log import configure_logging
from magnetar.runtime.process import run_process

if TYPE_CHECKING:
    import asyncio


def add_to(app: typer.Typer) -> None:
    app.command("local-cluster")(local_cluster)


def local_cluster(
    directory: Annotated[Path, typer.Option("--dir", help="directory of all data and logs")],
    zookeepers: Annotated[int, typer.Option(min=1, max=9, help="ZooKeeper servers")] = 3,
    bookies: Annotated[int, typer.Option(min=1, max=20, help="bookies")] = 3,
    brokers: Annotated[int, typer.Option(min=1, max=20, help="brokers")] = 2,
    autorecoveries: Annotated[
        int, typer.Option(min=0, max=20, help="processes that restore lost copies")
    ] = 1,
    restart: Annotated[
        bool, typer.Option("--restart", help="start a process again when it ends")
    ] = False,
    watchdog: Annotated[
        bool,
        typer.Option(
            "--watchdog",
            help="kill a server that does not answer /health for 2 s, and start it again; at most"
            " 3 times in 10 minutes",
        ),
    ] = False,
    broker_setting: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="a setting of all brokers; repeatable"),
    ] = None,
) -> None:
    """Run a cluster on this machine: ZooKeepers (Java), bookies, brokers and autorecovery
    processes.

    When all processes serve, the command prints a table on a terminal, or one line of JSON
    elsewhere. The same JSON is in DIR/cluster.json. `. DIR/env.sh` sets the variables that other
    commands read. DIR also holds data and logs; a later start with the same DIR keeps data and
    ports. SIGTERM or Ctrl-C stops all processes.
    """
    configure_logging()
    cluster = LocalCluster(
        directory,
        zookeepers=zookeepers,
        bookies=bookies,
        brokers=brokers,
        autorecoveries=autorecoveries,
        broker_settings=dict(map(_parse_setting, broker_setting or [])),
    )

    def on_ready() -> None:
        if sys.stdout.isatty():
            print_table(cluster, directory, Console(highlight=False, markup=False))
        else:
            sys.stdout.write(json.dumps(cluster.describe()) + "\n")
            sys.stdout.flush()

    async def run(stop: asyncio.Event) -> None:
        await run_local_cluster(
            cluster, stop, restart=restart or watchdog, on_ready=on_ready, watchdog=watchdog
        )

    raise typer.Exit(run_process(run))


def _parse_setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--broker-setting")
    return name, value


def print_table(cluster: LocalCluster, directory: Path, console: Console) -> None:
    """Print the processes, the addresses, and commands to try next. `directory` is printed as the
    user wrote it."""
    table = Table("process", "pid", "ports", box=None, pad_edge=False, header_style="bold")
    for process in cluster.processes:
        ports = ", ".join(f"{kind} {port}" for kind, port in process.ports.items())
        table.add_row(process.id, str(process.pid), ports)
    console.print(table)
    console.print()
    for name, url in (
        ("clients", cluster.service_url),
        ("Pulsar clients", cluster.pulsar_url),
        ("admin calls", cluster.admin_url),
        ("metadata", cluster.metadata_url),
    ):
        console.print(f"{name:<15} {url}", soft_wrap=True)
    # These lines are not wrapped, so that the user can copy them.
    console.print(f"\nThe same as JSON: {directory / DESCRIPTION}", soft_wrap=True)
    console.print(f"Logs: {directory}/<process>/*.log", soft_wrap=True)
    console.print("In another shell:")
    for command in (
        f". {directory / ENVIRONMENT}",
        f"{program()} produce greetings -m hello",
        f"{program()} consume greetings -s me -p earliest",
        f"{program()} bookies list",
    ):
        console.print(f"    {command}", style="bold", soft_wrap=True)
    console.print("Ctrl-C stops all processes.")
