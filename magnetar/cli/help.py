"""The text of `--help`: Click's layout, which cuts no word, in colours on a terminal.

Typer's own panels cut what does not fit their columns: long flags and environment variables.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH_MAX: Final = 120  # columns; longer lines are hard to read

SENTENCE_MAX: Final = 200  # characters; Click cuts at what is left of the line

_HEADING = re.compile(r"\S.*:")
_TERM = re.compile(r"  (\S+(?: \S+)*)")


class Command(TyperCommand):
    """A command with help in colours."""

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return coloured(super().get_help(ctx))


class Group(TyperGroup):
    """A command with subcommands. Their first sentences are listed whole."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        names = self.list_commands(ctx)
        texts = [self.commands[name].get_short_help_str(limit=SENTENCE_MAX) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(list(zip(names, texts, strict=True)))

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return coloured(super().get_help(ctx))


class App(typer.Typer):
    """A Typer whose commands have help in colours."""

    def __init__(self, **settings: Any) -> None:
        context = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH_MAX}
        settings = {"context_settings": context, **settings}
        super().__init__(cls=Group, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Command, **settings})


def coloured(text: str) -> str:
    """The text of a help page with colours, unless NO_COLOR is set. Click removes them again where
    the output is no terminal."""
    if "NO_COLOR" in os.environ:
        return text
    lines = []
    in_section = False
    for line in text.split("\n"):
        usage = line.startswith("Usage: ")
        if usage or _HEADING.fullmatch(line):
            in_section = not usage
            head, separator, rest = line.partition(":")
            lines.append(typer.style(head + separator, fg="yellow", bold=True) + rest)
        elif in_section and (term := _TERM.match(line)):
            lines.append(f"  {typer.style(term[1], fg='cyan', bold=True)}{line[term.end() :]}")
        else:
            lines.append(line)
    return "\n".join(lines)
