"""The tables of commands whose output is not a terminal."""

from __future__ import annotations

import pytest

from magnetar.cli.output import print_table, size_of


def test_a_row_of_any_width_is_one_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["n" * 1_000, "[m]"]
    print_table(["name", "entries"], [[name, "7"] for name in names])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["name", "entries"], *([it, "7"] for it in names)]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999.4, "999 B"),
        (999.7, "1.0 kB"),
        (1_000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (2e15, "2000.0 TB"),
    ],
)
def test_a_size_has_the_largest_unit_that_leaves_at_least_one(size: float, text: str) -> None:
    assert size_of(size) == text
