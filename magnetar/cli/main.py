"""The `magnetar` command. Each subcommand has its own module. Only the module of the subcommand
that runs is imported, so `magnetar produce` does not wait for the libraries of a server."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from magnetar.cli.help import App
from magnetar.cli.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Sequence

# name -> (the module whose `add_to(app)` adds the command, its text in `magnetar --help`)
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "standalone": (
        "magnetar.cli.standalone",
        "Run a whole server in one process, for development and tests.",
    ),
    "bookie": ("magnetar.cli.bookie", "Run a bookie of a cluster: it stores entries."),
    "broker": ("magnetar.cli.broker", "Run a broker of a cluster: it serves topics."),
    "autorecovery": (
        "magnetar.cli.autorecovery",
        "Restore lost copies of a cluster's entries.",
    ),
    "local-cluster": (
        "magnetar.cli.local_cluster",
        "Run a cluster on this machine, each server in its own process.",
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
        "Show and manage bookies and their ledgers: list, drain, decommission, repair.",
    ),
    "ledgers": ("magnetar.cli.ledgers", "List and delete orphaned ledgers, which no topic lists."),
    "spark": ("magnetar.cli.spark", "Run jobs on Spark (needs Java)."),
}


def main() -> None:
    """The console script."""
    try:
        make_app(sys.argv[1:])(prog_name="magnetar")
    except KeyboardInterrupt:  # during the import of a command's libraries, which can take seconds
        sys.exit(INTERRUPTED)


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the app. Its help lists all commands, but only the command that `arguments` names can
    run."""
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
    raise AssertionError("this command was not named by the first argument")


if __name__ == "__main__":
    main()
