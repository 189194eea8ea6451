"""`magnetar local-cluster`."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 (Typer needs it at run time)
from typing import TYPE_CHECKING, Annotated

import typer

from magnetar.local_cluster import LocalCluster, run_local_cluster
from magnetar.runtime.log import configure_logging
from magnetar.runtime.process import run_process

if TYPE_CHECKING:
    import asyncio


def add_to(app: typer.Typer) -> None:
    app.command("local-cluster")(local_cluster)


def local_cluster(
    directory: Annotated[Path, typer.Option("--dir", help="directory of all data and logs")],
    zookeepers: Annotated[int, typer.Option(min=1, max=9)] = 3,
    bookies: Annotated[int, typer.Option(min=1, max=20)] = 3,
    brokers: Annotated[int, typer.Option(min=1, max=20)] = 2,
    autorecoveries: Annotated[int, typer.Option(min=0, max=20)] = 1,
    restart: Annotated[
        bool, typer.Option("--restart", help="start a process again when it ends")
    ] = False,
) -> None:
    """Run a cluster on this machine: real ZooKeepers (Java), bookies, brokers, and what restores
    lost copies, each a process.

    Prints one line of JSON when all of it serves, which is also in DIR/cluster.json; `. DIR/env.sh`
    tells a shell where it is. The logs of the processes are under DIR. SIGTERM or Ctrl-C stops
    everything.
    """
    configure_logging()
    cluster = LocalCluster(
        directory,
        zookeepers=zookeepers,
        bookies=bookies,
        brokers=brokers,
        autorecoveries=autorecoveries,
    )

    def on_ready() -> None:
        sys.stdout.write(json.dumps(cluster.describe()) + "\n")
        sys.stdout.flush()

    async def run(stop: asyncio.Event) -> None:
        await run_local_cluster(cluster, stop, restart=restart, on_ready=on_ready)

    raise typer.Exit(run_process(run))
