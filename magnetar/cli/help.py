"""The text of `--help`: in Click's layout, and in colours on a terminal.

Click's layout cuts off no word. Typer's own panels cut off long flags and environment variables,
which do not fit their columns.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH_MAX: Final = 120  # columns; longer lines are hard to read

COMMANDS: Final = "Commands"  # title of the section for the commands without a panel

SENTENCE_MAX: Final = 200  # characters; by default Click cuts a sentence at the end of the line

_HEADING = re.compile(r"\S.*:")
_BRACES = re.compile(r"\{(\w+)\}")
_EXPECTED = re.compile(r"^Input should be ")
_TERM = re.compile(r"  (\S+(?: \S+)*)")


class Command(TyperCommand):
    """A command with help in colours, and with Click's names of arguments and types."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):
                parameter.metavar = parameter.name.upper()
            elif isinstance(parameter, TyperOption):
                parameter.metavar = parameter.metavar or _type_name(parameter)

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Remove the braces that Typer puts around a required argument."""
        return [_BRACES.sub(r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        with _values_named():
            return super().parse_args(ctx, args)

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return coloured(super().get_help(ctx))


class Group(TyperGroup):
    """A command with subcommands. Its help lists the whole first sentence of each subcommand. The
    subcommands of each `rich_help_panel` have a section of their own."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        sections: dict[str, list[tuple[str, str]]] = {COMMANDS: []}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            rows = sections.setdefault(getattr(command, "rich_help_panel", None) or COMMANDS, [])
            rows.append((name, command.get_short_help_str(limit=SENTENCE_MAX)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        with _values_named():
            return super().parse_args(ctx, args)

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return coloured(super().get_help(ctx))


def _type_name(option: TyperOption) -> str | None:
    """Return `<str>` for a repeatable option of text, `<int>` for a range of numbers. None: Typer's
    own name is right."""
    kind = option.type_descriptor
    if kind.is_list:
        [element] = get_args(kind.annotation)
        return f"<{element.__name__.lower()}>"
    return f"<{kind.ranged_type_name}>" if kind.is_ranged else None


@contextmanager
def _values_named() -> Iterator[None]:
    """Replace the message of a BadParameter that leaves the block (`_explained`)."""
    try:
        yield
    except typer.BadParameter as error:
        error.message = _explained(error)
        raise


def _explained(error: typer.BadParameter) -> str:
    """Return Pydantic's message without its standard phrases, and with the given value if the value
    has the wrong form. Another message stays as it is."""
    from pydantic import ValidationError  # a local import: it takes a while

    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return error.message
    message = cause.errors()[0]["msg"].removeprefix("Value error, ")
    given = cause.errors()[0]["input"]
    expected = message.partition(", unable to parse")[0]
    return _EXPECTED.sub(f"{str(given)!r} is not ", expected)


class App(typer.Typer):
    """A Typer whose commands have help in colours."""

    def __init__(self, **settings: Any) -> None:
        context = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH_MAX}
        settings = {"context_settings": context, **settings}
        super().__init__(cls=Group, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Command, **settings})


def coloured(text: str) -> str:
    """Return the text of a help page with colours, or unchanged if NO_COLOR is set. Click removes
    the colours if the output is not a terminal."""
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
