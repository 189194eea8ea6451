"""The `magnetar` command. Each subcommand has its own module, and only the one that runs is
imported: `magnetar produce` does not wait for the libraries of a server."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from magnetar.cli.help import App
from magnetar.cli.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Sequence

# name -> (the module whose `add_to(app)` makes it, what `magnetar --help` says of it)
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "standalone": (
        "magnetar.cli.standalone",
        "Run a whole server in one process, for development and tests.",
    ),
    "bookie": ("magnetar.cli.bookie", "Run a bookie of a cluster: it keeps the entries."),
    "broker": ("magnetar.cli.broker", "Run a broker of a cluster: it serves topics."),
    "autorecovery": (
        "magnetar.cli.autorecovery",
        "Restore lost copies of a cluster's entries.",
    ),
    "local-cluster": (
        "magnetar.cli.local_cluster",
        "Run a cluster on this machine, each server a process of its own.",
    ),
    "produce": ("magnetar.cli.produce", "Send messages to a topic."),
    "consume": ("magnetar.cli.consume", "Receive messages from a topic."),
    "tenants": ("magnetar.cli.tenants", "Create, list, change and delete tenants."),
    "namespaces": (
        "magnetar.cli.namespaces",
        "Create, list and delete namespaces, and set their policies.",
    ),
    "topics": (
        "magnetar.cli.topics",
        "Create, list, look at and delete topics, and set their policies.",
    ),
    "subscriptions": (
        "magnetar.cli.subscriptions",
        "Look at the subscriptions of a topic, and move or delete them.",
    ),
    "schemas": (
        "magnetar.cli.schemas",
        "Show, add, check and delete the schemas of topics.",
    ),
    "bookies": (
        "magnetar.cli.bookies",
        "Look at bookies and what they hold: list, drain, decommission, under-replicated, ledger.",
    ),
    "ledgers": ("magnetar.cli.ledgers", "Look for ledgers that belong to no topic: orphans."),
    "spark": ("magnetar.cli.spark", "Jobs that run on Spark (they need Java)."),
}


def main() -> None:
    """The console script."""
    try:
        make_app(sys.argv[1:])(prog_name="magnetar")
    except KeyboardInterrupt:  # while a command's libraries were imported: seconds, for some
        sys.exit(INTERRUPTED)


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """All commands by name and text. Only the one that `arguments` name is complete."""
    app = App(
        name="magnetar",
        help="Magnetar: publish-subscribe and queueing on quorum-replicated storage.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(version: Version = False) -> None:
        pass  # without a callback Typer would make a lone command the whole program

    for name, (module, text) in COMMANDS.items():
        if name in arguments[:1]:
            importlib.import_module(module).add_to(app)
        else:
            app.command(name, help=text)(_listed_only)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"magnetar {version('magnetar')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
]


def _listed_only() -> None:
    raise AssertionError("the command line's first word names the command")


if __name__ == "__main__":
    main()
