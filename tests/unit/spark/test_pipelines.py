"""The decisions of the pipelines, without Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from magnetar.demo.delays import Delays
from magnetar.demo.hours import Streamed, by_hour_of_day, draw, hours_in_file
from magnetar.spark.errors import TargetBusy, TargetForeign
from magnetar.spark.pipelines.incremental import count_earlier
from magnetar.spark.pipelines.reading import job_id
from magnetar.spark.pipelines.replay import job_of, parquet_files
from magnetar.spark.pipelines.stats import Counted, Statistics, picture
from magnetar.spark.pipelines.target import locked
from magnetar.spark.sink.options import JOB_ID

if TYPE_CHECKING:
    from pathlib import Path


def test_files_that_spark_reads_are_found_in_order(tmp_path: Path) -> None:
    read = ["__partition=0/g.parquet", "a=1/c.parquet", "b.parquet", "f.parq", "h"]
    for name in (*read, "_temporary/d.parquet", ".e.parquet", "_SUCCESS", "a=1/.c.parquet.crc"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"12")
    assert parquet_files(tmp_path) == [tmp_path / name for name in read]
    assert parquet_files(tmp_path / "b.parquet") == [tmp_path / "b.parquet"]
    assert parquet_files(tmp_path / "absent") == []


def test_the_id_of_a_replay_depends_on_names_and_contents_of_the_files(tmp_path: Path) -> None:
    def job(content: bytes, name: str = "a.parquet", folder: str = "one") -> str:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
        (found,) = parquet_files(path)
        id_ = job_of("t", path, [found])
        found.unlink()
        return id_

    assert job(b"12") == job(b"12") == job(b"12", folder="two")
    assert len({job(b"12"), job(b"21"), job(b"12", name="b.parquet")}) == 3
    (tmp_path / "a.parquet").write_bytes(b"12")
    assert job_of("t", tmp_path / "a.parquet", [tmp_path / "a.parquet"]) == job(b"12")


def test_a_job_id_depends_on_all_parts_and_is_accepted_by_the_sink() -> None:
    one = job_id("replay", "t", "a 1")
    assert one == job_id("replay", "t", "a 1") != job_id("replay", "t", "a 2")
    assert JOB_ID.fullmatch(one)


@pytest.mark.parametrize(
    ("ledgers", "earlier"),
    [
        ([], 0),
        ([(3, 0, 9, 10)], 0),
        ([(3, 0, 9, 10), (4, 10, 14, 5), (9, 20, 29, 10)], 0),  # a ledger was deleted unread
        ([(3, 0, 9, 10), (4, 10, 14, 5), (7, 0, 2, 3)], 15),
        ([(7, 0, 2, 3), (4, 10, 14, 5), (3, 0, 9, 10), (8, 3, 30, 28)], 15),
        ([(3, 0, 9, 10), (7, 9, 9, 0)], 10),  # no message of the new topic is archived
        ([(3, 0, 0, 1), (5, 0, 0, 1), (8, 0, 0, 1)], 2),  # created again twice
    ],
)
def test_messages_of_earlier_topics_are_those_before_the_indexes_begin_again(
    ledgers: list[tuple[int, int, int, int]], earlier: int
) -> None:
    assert count_earlier(ledgers) == earlier


def test_one_run_at_a_time_writes_to_an_incremental_archive(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    with locked(path), pytest.raises(TargetBusy, match="another run"), locked(path):
        pass
    with locked(path):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with (
        pytest.raises(TargetForeign, match="not an incremental archive"),
        locked(tmp_path / "other"),
    ):
        pass


def test_pictures_are_png_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    counted = [Counted("t", key, 3, 10, moment, moment) for key in ("a", "é", r"$\frac$")]
    found = Statistics(counted[:1], counted, {"t": 3}, {r"$t^$": [(0.0, 1), (60.0, 2)]})
    picture(found, tmp_path / "one.png")
    draw({("UA", 5): Delays(3, 2, 9), ("AA", 23): Delays(1, 0, 0)}, tmp_path / "two.png")
    for name in ("one.png", "two.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_results_are_compared_up_to_the_last_hour_that_is_closed() -> None:
    times = ["2013-01-01T10:00:00Z", "2013-01-01T10:00:00Z", "2013-07-01T10:00:00Z"]
    table = pa.table(
        {"carrier": ["UA", "UA", "AA"], "time_hour": times, "dep_delay": [3, None, None]}
    )
    first, second = 1_357_034_400, 1_372_672_800
    file = hours_in_file(table)
    assert file == {("UA", first): Delays(2, 1, 3), ("AA", second): Delays(1, 0, 0)}
    assert by_hour_of_day(file) == {("UA", 5): Delays(2, 1, 3), ("AA", 6): Delays(1, 0, 0)}
    closed = {("UA", first): Delays(2, 1, 3)}
    assert Streamed(1, closed).equals(file)
    assert not Streamed(2, closed).equals(file)  # a result is there twice
    assert not Streamed(0, {}).equals(file)
    assert not Streamed(1, {("AA", second): Delays(1, 0, 0)}).equals(file)
