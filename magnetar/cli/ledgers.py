"""`magnetar ledgers`: list and delete orphaned ledgers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from magnetar.cli.admin import DEFAULT_ADMIN_URL, AdminUrl, Json, command
from magnetar.cli.help import App
from magnetar.cli.output import print_json, print_table, time_of


def add_to(app: typer.Typer) -> None:
    ledgers = App(help="List and delete orphaned ledgers.", no_args_is_help=True)
    ledgers.callback()(lambda: None)
    ledgers.command("orphans")(orphans)
    app.add_typer(ledgers, name="ledgers")


def orphans(
    delete: Annotated[bool, typer.Option("--delete", help="delete the listed ledgers")] = False,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """List orphaned ledgers: a broker failed after it created them, so no topic lists them.

    One broker of the cluster deletes them periodically, even without this command. A ledger that is
    younger than the broker's orphaned_ledger_grace_period_in_minutes is never listed or deleted.
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
    typer.echo(f"examined {examined} ledgers, {verb} {len(found)} orphaned ledgers")
