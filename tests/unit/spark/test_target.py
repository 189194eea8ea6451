"""One run at a time installs a whole archive, even if a run is killed at any step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from magnetar.spark.errors import TargetBusy, TargetForeign, TargetNotEmpty
from magnetar.spark.pipelines.target import check_target, put_in_place, staged

if TYPE_CHECKING:
    from pathlib import Path


def made(path: Path, text: str) -> Path:
    (path / "key=1").mkdir(parents=True)
    (path / "key=1" / "part-0.parquet").write_text(text)
    return path


def text_of(path: Path) -> str:
    return (path / "key=1" / "part-0.parquet").read_text()


def test_target_that_is_not_an_archive_is_never_replaced(tmp_path: Path) -> None:
    check_target(tmp_path / "new", overwrite=False)
    check_target(tmp_path, overwrite=False)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "thesis.odt").touch()
    with pytest.raises(TargetNotEmpty):
        check_target(tmp_path, overwrite=False)
    with pytest.raises(TargetForeign, match="thesis"):
        check_target(tmp_path, overwrite=True)
    with pytest.raises(TargetForeign, match="file"):
        check_target(tmp_path / "thesis.odt", overwrite=True)
    with pytest.raises(NotADirectoryError):
        check_target(tmp_path / "thesis.odt" / "archive", overwrite=False)


def test_a_failure_between_the_renames_is_undone_at_once(tmp_path: Path) -> None:
    path = made(tmp_path / "archive", "first")
    with staged(path) as new:
        path.rename(new.with_name("old"))
    assert text_of(path) == "first"
    assert [child.name for child in tmp_path.iterdir()] == ["archive"]


@pytest.mark.parametrize("before", [True, False])
def test_new_archive_replaces_the_old_one(tmp_path: Path, before: bool) -> None:
    path = tmp_path / "deep" / "archive"
    if before:
        made(path, "first")
    with staged(path) as new:
        put_in_place(made(new, "second"), path)
    assert text_of(path) == "second"
    assert [child.name for child in path.parent.iterdir()] == ["archive"]


def test_old_archive_stays_if_no_new_one_is_put_in_place(tmp_path: Path) -> None:
    path = made(tmp_path / "archive", "first")
    with staged(path) as new:
        made(new, "second")
    assert text_of(path) == "first"
    assert [child.name for child in tmp_path.iterdir()] == ["archive"]


def test_second_run_is_refused_without_effect(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    with staged(path) as new:
        made(new, "first")
        with pytest.raises(TargetBusy, match="archive"), staged(path):
            pytest.fail("it was let in")
        put_in_place(new, path)
    assert text_of(path) == "first"


def test_a_run_killed_between_the_renames_is_undone_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    made(tmp_path / ".archive.archiving" / "old", "first")
    made(tmp_path / ".archive.archiving" / "new", "second")
    with staged(path) as new:
        assert text_of(path) == "first"
        assert not new.exists()
    assert text_of(path) == "first"


def test_a_run_killed_after_the_renames_is_done(tmp_path: Path) -> None:
    path = made(tmp_path / "archive", "second")
    made(tmp_path / ".archive.archiving" / "old", "first")
    with staged(path):
        assert text_of(path) == "second"
    assert [child.name for child in tmp_path.iterdir()] == ["archive"]
