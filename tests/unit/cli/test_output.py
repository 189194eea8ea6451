"""The tables of commands whose output is not a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.cli.output import print_table

if TYPE_CHECKING:
    import pytest


def test_a_row_of_any_width_is_one_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["n" * 1_000, "[m]"]
    print_table(["name", "entries"], [[name, "7"] for name in names])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["name", "entries"], *([it, "7"] for it in names)]
