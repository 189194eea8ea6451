"""`magnetar broker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.config import BrokerConfig
from magnetar.broker.main import run_broker
from magnetar.cli.role import add_role

if TYPE_CHECKING:
    import typer


def add_to(app: typer.Typer) -> None:
    add_role(
        app,
        BrokerConfig,
        run_broker,
        text="Run a broker of a cluster: it serves topics and keeps nothing on disk.",
    )
