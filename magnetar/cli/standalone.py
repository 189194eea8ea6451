"""`magnetar standalone`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.cli.role import add_role
from magnetar.standalone import StandaloneConfig, run_standalone

if TYPE_CHECKING:
    import typer


def add_to(app: typer.Typer) -> None:
    add_role(
        app,
        StandaloneConfig,
        run_standalone,
        text="Run a whole server in one process: metadata, one bookie, a broker. All its data is in"
        " one directory.",
    )
