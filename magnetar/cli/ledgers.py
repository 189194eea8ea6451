"""`magnetar ledgers`: look for ledgers that belong to no topic."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from magnetar.cli.admin import DEFAULT_ADMIN_URL, AdminUrl, Json, command
from magnetar.cli.help import App
from magnetar.cli.output import print_json, print_table, time_of


def add_to(app: typer.Typer) -> None:
    ledgers = App(help="Look for ledgers that belong to no topic.", no_args_is_help=True)
    ledgers.callback()(lambda: None)
    ledgers.command("orphans")(orphans)
    app.add_typer(ledgers, name="ledgers")


def orphans(
    delete: Annotated[bool, typer.Option("--delete", help="delete them now")] = False,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """List ledgers that belong to no topic: a broker died after it created them.

    One broker of the cluster deletes them from time to time. A ledger that is younger than the
    broker's orphaned_ledger_grace_period_in_minutes is never listed.
    """
    found: list[dict[str, Any]] = []
    examined = 0
    after: int | None = -1
    while after is not None:
        path = f"/admin/v2/ledgers/orphans?after={after}"
        page = command(admin_url, "DELETE" if delete else "GET", path)
        found += page["orphans"]
        examined += page["examined"]
        after = page["nextAfter"]
    if as_json:
        print_json(found)
        return
    if found:
        print_table(
            ("ledger", "topic", "kind", "created"),
            (
                (str(each["ledgerId"]), each["topic"], each["kind"], time_of(each["createdAt"]))
                for each in found
            ),
        )
    verb = "deleted" if delete else "found"
    typer.echo(f"{verb} {len(found)} orphaned ledgers of {examined}")
