"""Claims of a directory: it is created, kept or refused, and never changed if another program owns
it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from magnetar.claim import DirectoryRefused, claimed

if TYPE_CHECKING:
    from pathlib import Path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_claimed_directory_is_created_and_can_be_claimed_again(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    for _ in range(2):
        with claimed(directory, "oven"):
            (directory / "data").touch()
        assert names(directory) == ["data", "oven"]
    assert (directory / "oven").read_text() == "magnetar oven 1\n"


def test_a_directory_has_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        claimed(tmp_path, "oven"),
        pytest.raises(DirectoryRefused, match="another process uses it"),
        claimed(tmp_path, "oven"),
    ):
        pass
    with claimed(tmp_path, "oven"):
        pass


def test_lost_and_found_of_a_new_disk_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    with claimed(tmp_path, "oven"):
        pass


def test_the_directory_of_another_owner_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(DirectoryRefused, match=r"it holds thesis\.tex"), claimed(tmp_path, "oven"):
        pass
    assert names(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("text", ["magnetar oven 2\n", "magnetar standalone 1\n", "x"])
def test_a_directory_of_another_version_or_owner_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "oven").write_text(text)
    with (
        pytest.raises(DirectoryRefused, match="does not contain 'magnetar oven 1'"),
        claimed(tmp_path, "oven"),
    ):
        pass
    assert (tmp_path / "oven").read_text() == text


def test_a_directory_can_be_claimed_after_a_crash_of_the_first_start(tmp_path: Path) -> None:
    """The mark may be absent, empty or whole. No other file exists before the mark is whole."""
    (tmp_path / "oven").touch()
    with claimed(tmp_path, "oven"):
        (tmp_path / "data").touch()
    (tmp_path / "oven").write_text("")
    with pytest.raises(DirectoryRefused), claimed(tmp_path, "oven"):
        pass


def test_a_file_or_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DirectoryRefused, match="it is a file"), claimed(directory, "oven"):
            pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DirectoryRefused, match="Permission denied"), claimed(tmp_path, "oven"):
        pass
