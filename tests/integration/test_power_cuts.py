"""A few power cuts and kills of a real bookie under load; `make powercuts` does 50 of each."""

from __future__ import annotations

import subprocess
from random import Random
from typing import TYPE_CHECKING

import pytest
from power.disk import DiskUnusable, LoopDisk
from power.run import Tally, run_turns

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop(deadline_s=240)]


async def turns_of(path: Path, seed: int, *, turns: int, cuts: bool, lying: bool = False) -> Tally:
    try:
        return await run_turns(path, Random(seed), turns=turns, cuts=cuts, lying=lying)
    except DiskUnusable as unusable:
        pytest.skip(str(unusable))


def test_a_disk_is_back_when_no_other_namespace_holds_what_was_cut(tmp_path: Path) -> None:
    try:
        disk = LoopDisk(tmp_path, size_mb=64)
    except DiskUnusable as unusable:
        pytest.skip(str(unusable))
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; sleep 1"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as container:
            assert container.stdout is not None
            container.stdout.readline()
            disk.cut()
            disk.restore()
            (disk.path / "file").write_bytes(b"written")
    finally:
        disk.close()


async def test_power_cuts_lose_nothing_acknowledged(tmp_path: Path) -> None:
    tally = await turns_of(tmp_path, 2, turns=3, cuts=True)
    assert (tally.turns, tally.lost, tally.renewed) == (3, 0, 0)
    assert tally.acked


async def test_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    tally = await turns_of(tmp_path, 3, turns=3, cuts=False)
    assert (tally.turns, tally.lost, tally.renewed) == (3, 0, 0)


async def test_the_same_cuts_do_lose_entries_that_were_not_synced(tmp_path: Path) -> None:
    assert (await turns_of(tmp_path, 4, turns=3, cuts=True, lying=True)).lost > 0
