"""The probe process tries to open a store. The tests check if the store or the probe is blamed."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from magnetar.bookie.errors import DirectoryUnusable, OpenTooSlow
from magnetar.bookie.storage.opening import Effort, effort_of, probe
from magnetar.bookie.storage.rocks import RocksStorage

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real_loop


async def test_a_store_that_does_not_open_is_blamed(tmp_path: Path) -> None:
    reason = await probe(tmp_path, "whole", tmp_path / "none", "0", deadline_s=30)
    assert reason is not None
    assert "no store" in reason


async def test_a_probe_that_fails_by_itself_does_not_blame_the_store(tmp_path: Path) -> None:
    with pytest.raises(DirectoryUnusable, match="ValueError"):
        await probe(tmp_path, "whole", deadline_s=30)


async def test_a_probe_that_crashes_for_want_of_memory_does_not_blame_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RocksStorage(tmp_path / "store", create=True).close()
    python = f'ulimit -v {120 << 10}; exec {sys.executable} "$@"'
    monkeypatch.setattr(sys, "executable", program(tmp_path, python))

    with pytest.raises(DirectoryUnusable, match="Cannot allocate memory"):
        await probe(tmp_path, "whole", tmp_path / "store", "0", deadline_s=30)


async def test_a_probe_that_crashes_where_there_is_memory_blames_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing = f'[ $3 = means ] && exec {sys.executable} "$@"; echo what >&2; kill -SEGV $$'
    monkeypatch.setattr(sys, "executable", program(tmp_path, crashing))

    assert await probe(tmp_path, "whole", tmp_path, "0", deadline_s=30) == "what"


@pytest.mark.parametrize("doing", ["exec sleep 60", "exec cat /dev/zero > /dev/null"])
async def test_a_slow_probe_is_refused_and_names_the_setting_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path, doing))

    with pytest.raises(OpenTooSlow, match="open_deadline_s"):
        await probe(tmp_path, "whole", tmp_path, "0", deadline_s=1)


async def test_a_probe_that_computes_without_end_blames_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path, "while :; do :; done"))

    # Others may compute at the same time.
    reason = await probe(tmp_path, "whole", tmp_path, "0", deadline_s=3, spinning_share=0.0)
    assert reason is not None
    assert "without an end" in reason


def test_only_a_process_that_computes_without_io_spins() -> None:
    before = Effort(1.0, 500)
    assert Effort(4.5, 500).spins_since(before, 30)
    assert not Effort(4.5, 501).spins_since(before, 30)
    assert not Effort(1.1, 500).spins_since(before, 30), "the process waits for the disk or a core"
    unknown = effort_of(2**22 + 1)  # no such process
    assert not unknown.spins_since(unknown, 30)


def test_the_effort_of_a_process_includes_its_writes_and_cpu(tmp_path: Path) -> None:
    before = effort_of(os.getpid())
    (tmp_path / "file").write_bytes(bytes(10_000))
    assert effort_of(os.getpid()).bytes >= before.bytes + 10_000
    while effort_of(os.getpid()).cpu_s <= before.cpu_s:
        pass


def program(directory: Path, text: str) -> str:
    path = directory / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
