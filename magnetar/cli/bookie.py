"""`magnetar bookie` and `magnetar bookie inspect`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path  # noqa: TC003 (Typer needs it at run time)
from typing import TYPE_CHECKING, Annotated

import typer

from magnetar.bookie.config import BookieConfig
from magnetar.bookie.errors import StartRefused
from magnetar.bookie.main import run_bookie
from magnetar.bookie.storage.inspection import RECORD_REMEDY, inspect_directory
from magnetar.cli.role import add_role_group

if TYPE_CHECKING:
    from magnetar.bookie.storage.inspection import DirectoryFacts, StoreFacts


def add_to(app: typer.Typer) -> None:
    group = add_role_group(
        app,
        BookieConfig,
        run_bookie,
        text="Run a bookie of a cluster: it stores the entries of ledgers in RocksDB.",
    )
    group.command("inspect")(inspect)


def inspect(
    directory: Annotated[Path, typer.Argument(help="data_dir of a stopped bookie")],
    verify: Annotated[bool, typer.Option("--verify", help="check every entry's checksum")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Inspect the data directory of a stopped bookie; writes nothing to it.

    The exit status is 0 without damage, and 1 with damage or after an error.
    """
    try:
        facts = inspect_directory(directory, verify=verify)
    except StartRefused as refused:
        typer.echo(f"Error: {refused}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(facts) | {"whole": facts.whole}))
    else:
        _print(facts)
    raise typer.Exit(0 if facts.whole else 1)


def _print(facts: DirectoryFacts) -> None:
    identity = facts.identity
    if identity is not None:
        typer.echo(
            f"bookie {identity.bookie} of cluster {identity.cluster}\n"
            f"incarnation {identity.incarnation}, {identity.state}, boot epoch "
            f"{identity.boot_epoch}, former {identity.former or 'none'}"
        )
    for damage in facts.damage:
        typer.echo(f"DAMAGED: {damage}")
    _print_store(facts.store)
    if any(ledger.fenced is None for ledger in facts.store.ledgers):
        typer.echo(RECORD_REMEDY)
    for former in facts.formers:
        typer.echo(f"\nformer incarnation {former.incarnation}")
        _print_store(former)
    typer.echo("\nwhole" if facts.whole else "\nDAMAGED")


def _print_store(store: StoreFacts) -> None:
    for damage in store.damage:
        typer.echo(f"DAMAGED: {damage}")
    watermark = store.watermark
    if watermark is not None:
        end = "closed cleanly" if watermark.closed else "not closed cleanly"
        typer.echo(
            f"watermark: boot epoch {watermark.boot_epoch}, "
            f"{watermark.sequence} operations on disk, {end}"
        )
    if not store.opened:
        return
    entries = sum(ledger.entries for ledger in store.ledgers)
    size = sum(ledger.bytes for ledger in store.ledgers)
    typer.echo(
        f"store: {store.sequence} operations, {len(store.ledgers)} ledgers, {entries} entries, "
        f"{size} bytes, {store.tombstones} tombstones"
    )
    if store.ledgers:
        typer.echo(
            f"{'ledger':>12} {'fenced':>7} {'entries':>9} {'first':>9} {'last':>9} {'runs':>6} "
            f"{'bytes':>13} damaged"
        )
    for ledger in store.ledgers:
        fenced = {True: "yes", False: "no", None: "?"}[ledger.fenced]
        named = ", ".join(map(str, ledger.damaged_entries))
        more = " ..." if ledger.damaged > len(ledger.damaged_entries) else ""
        typer.echo(
            f"{ledger.ledger:>12} {fenced:>7} {ledger.entries:>9} {ledger.first:>9} "
            f"{ledger.last:>9} {ledger.runs:>6} {ledger.bytes:>13} {ledger.damaged}"
            f"{f': {named}{more}' if named else ''}"
        )
