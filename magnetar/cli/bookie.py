"""`magnetar bookie`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.bookie.config import BookieConfig
from magnetar.bookie.main import run_bookie
from magnetar.cli.role import add_role

if TYPE_CHECKING:
    import typer


def add_to(app: typer.Typer) -> None:
    add_role(
        app,
        BookieConfig,
        run_bookie,
        text="Run a bookie of a cluster: it keeps the entries of ledgers, in RocksDB.",
    )
