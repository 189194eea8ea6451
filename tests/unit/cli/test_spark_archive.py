"""The tables of `magnetar spark`: their rows, and the rows that they leave out."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from magnetar.cli import spark as spark_jobs
from magnetar.cli import spark_pipelines
from magnetar.cli.spark import ROWS_SHOWN_MAX, show
from magnetar.spark.pipelines.archive import Compared
from magnetar.spark.pipelines.incremental import Archived
from magnetar.spark.pipelines.stats import Counted, Statistics


@pytest.mark.parametrize(
    ("unequal", "more", "total"),
    [(0, "yes", "yes"), (1, "yes", "NO"), (ROWS_SHOWN_MAX, "yes", "NO"), (401, "NO", "NO")],
)
def test_the_row_of_the_partitions_left_out_says_whether_they_are_equal(
    unequal: int, more: str, total: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = [
        Compared(f"key={number:03}", in_topic=2, in_archive=2, equal=number >= unequal)
        for number in range(ROWS_SHOWN_MAX + 10)
    ]
    show(compared, Path("archive"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    [left_out] = [row for row in rows if "more" in row]
    [summed] = [row for row in rows if "partitions" in row]
    assert len([row for row in rows if "key=" in " ".join(row)]) == ROWS_SHOWN_MAX
    assert [left_out[1], left_out[-2]] == ["10", more]
    assert summed[-2] == total


KEYS = ("[a]", "[/b]", ":x:")


def test_keys_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show([Compared(f"key={key}", 1, 1, equal=True) for key in KEYS], Path("a[/b]"))
    archived = capsys.readouterr().out
    counted = [Counted("t", key, 1, 1, None, None) for key in KEYS]
    spark_pipelines.show(Statistics(counted[:1], counted, {"t": 3}, {}))
    counts = capsys.readouterr().out
    for key in KEYS:
        assert f"key={key}" in archived
        assert f" {key} " in counts


def test_the_report_says_what_is_archived_of_an_earlier_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = Archived(3, [Compared("__topic=t", 3, 3, equal=True)], {"t": 1_200})
    monkeypatch.setattr(spark_jobs, "require_spark", lambda: None)
    monkeypatch.setattr(spark_jobs, "_archive_new", lambda *_: done)
    given = ["archive", "--incremental", "--topic", "t", "--path", "a"]
    result = CliRunner().invoke(spark_jobs.jobs, given)
    assert result.exit_code == 0
    assert "t: the archive also holds 1,200 messages of an earlier topic" in result.output
