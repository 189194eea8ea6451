"""`magnetar autorecovery`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.bookie.repair.main import run_autorecovery
from magnetar.bookie.repair.settings import AutorecoveryConfig
from magnetar.cli.role import add_role

if TYPE_CHECKING:
    import typer


def add_to(app: typer.Typer) -> None:
    add_role(
        app,
        AutorecoveryConfig,
        run_autorecovery,
        text="Restore lost copies of a cluster's entries. Any number of processes share the work.",
    )
