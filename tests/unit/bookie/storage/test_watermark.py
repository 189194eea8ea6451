from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from magnetar.bookie.storage.format import (
    WATERMARK_SLOT_BYTES,
    FormatDamaged,
    ManifestState,
    Watermark,
)
from magnetar.bookie.storage.watermark import LAG_S, WatermarkFile, read_watermark

if TYPE_CHECKING:
    from pathlib import Path


class Seconds:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def open_file(path: Path, *, boot_epoch: int = 1, now_s: Seconds | None = None) -> WatermarkFile:
    return WatermarkFile(path / "watermark", boot_epoch=boot_epoch, now_s=now_s or Seconds())


def test_a_new_directory_has_no_watermark(tmp_path: Path) -> None:
    assert read_watermark(tmp_path / "watermark") is None


def test_the_watermark_is_written_when_advance_returns(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    for sequence in [1, 2, 2, 700]:
        file.advance(sequence)
        assert read_watermark(tmp_path / "watermark") == Watermark(1, sequence)
    file.close(sequence=700)


def test_a_torn_write_keeps_the_previous_watermark(tmp_path: Path) -> None:
    path = tmp_path / "watermark"
    file = open_file(tmp_path)
    file.advance(1)
    file.advance(2)
    whole = path.read_bytes()
    for slot, left in [(0, Watermark(1, 2)), (1, Watermark(1, 1))]:
        torn = bytearray(whole)
        torn[slot * WATERMARK_SLOT_BYTES] ^= 0xFF
        path.write_bytes(bytes(torn))
        assert read_watermark(path) == left
    file.close(sequence=2)


def test_a_clean_close_is_recorded_until_the_next_advance(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.advance(5)
    file.close(sequence=6)
    assert read_watermark(tmp_path / "watermark") == Watermark(1, 6, closed=True)
    file = open_file(tmp_path, boot_epoch=2)
    assert read_watermark(tmp_path / "watermark") == Watermark(1, 6, closed=True)
    file.advance(6)
    assert read_watermark(tmp_path / "watermark") == Watermark(2, 6)
    file.close(sequence=6)


def test_an_idle_stores_manifest_change_is_recorded(tmp_path: Path) -> None:
    """The sequence number stays the same. The two slots differ only in the manifest."""
    states = iter([ManifestState(4, 100, 0), ManifestState(4, 180, 5), ManifestState(6, 90, 5)])
    look = [next(states)]
    file = WatermarkFile(
        tmp_path / "watermark", boot_epoch=1, now_s=Seconds(), look_at_manifest=lambda: look[0]
    )
    file.advance(5)
    for noted in states:
        look[0] = noted
        file.follow_manifest()
        assert read_watermark(tmp_path / "watermark") == Watermark(1, 5, manifest=noted)
    file.abandon()


def test_the_watermark_never_goes_back(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.advance(5)
    with pytest.raises(AssertionError):
        file.advance(4)


def test_the_watermark_is_synced_at_most_a_second_late(tmp_path: Path) -> None:
    now_s = Seconds()

    class Counted(WatermarkFile):
        syncs = 0

        def sync(self) -> None:
            self.syncs += 1
            super().sync()

    file = Counted(tmp_path / "watermark", boot_epoch=1, now_s=now_s)
    file.advance(1)
    now_s.now += LAG_S / 2
    file.advance(2)
    assert file.syncs == 0
    now_s.now += LAG_S / 2
    file.advance(3)
    assert file.syncs == 1
    file.advance(4)
    assert file.syncs == 1
    file.close(sequence=4)
    assert file.syncs == 2


@pytest.mark.parametrize("size", [0, 21, WATERMARK_SLOT_BYTES, 2 * WATERMARK_SLOT_BYTES + 1])
def test_a_file_of_another_size_is_damaged(tmp_path: Path, size: int) -> None:
    (tmp_path / "watermark").write_bytes(os.urandom(size))
    with pytest.raises(FormatDamaged):
        read_watermark(tmp_path / "watermark")
