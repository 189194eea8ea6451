"""Prints tables, JSON and numbers for the commands."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROGRAM: Final = "magnetar"
WIDE: Final = 100_000  # columns of an output that is not a terminal: enough to fold no cell


def program() -> str:
    """Return the command that starts this program: its name, or its path if the PATH lacks it."""
    typed = sys.argv[0]
    return typed if shutil.which(PROGRAM) is None and Path(typed).name == PROGRAM else PROGRAM


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print one line for each row. On a terminal, fold the cells to the terminal's width."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in head:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # not parsed: a name may contain square brackets
    terminal = sys.stdout.isatty()
    Console(width=None if terminal else WIDE, highlight=False).print(table)


def plain_console() -> Console:
    """Return a console for tables of keys and names: square brackets and ":name:" stay as they
    are."""
    return Console(markup=False, emoji=False)


def print_json(found: object) -> None:
    """Print indented JSON, for people and programs."""
    typer.echo(json.dumps(found, indent=2))


def time_of(ms: int) -> str:
    """Format milliseconds since 1970 as a time in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def size_of(size: float) -> str:
    """Format a number of bytes in the largest unit that leaves at least 1."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < (999.5 if unit == "B" else 999.95):  # a larger one would be printed as 1000
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
