"""A bookie is killed at any step of a change of incarnation. The next start completes it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from fakes.directories import ENTRIES, fill, given
from fakes.starter import Starter, start_embedded
from support import run

from magnetar.bookie.storage.format import DirectoryState
from magnetar.bookie.storage.layout import WATERMARK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster


@pytest.fixture
def starter() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.close()


@pytest.mark.parametrize("wiped", [False, True])
def test_a_change_of_incarnation_is_completed_after_a_kill_at_any_step(
    tmp_path: Path, starter: Starter, wiped: bool
) -> None:
    async def prepare() -> str:
        directory, incarnation = await start_embedded(
            tmp_path / "base", tmp_path / "base-metadata", seed=1
        )
        fill(directory)
        directory.close()
        return incarnation

    former = run(prepare())
    if wiped:
        shutil.rmtree(tmp_path / "base")
    else:
        (tmp_path / "base" / WATERMARK).unlink()
    died = True
    step = 0
    while died:
        step += 1
        path, metadata = tmp_path / f"{step}", tmp_path / f"{step}-metadata"
        if not wiped:
            shutil.copytree(tmp_path / "base", path)
        shutil.copytree(tmp_path / "base-metadata", metadata)
        died = starter.start_and_die(path, metadata, at_step=step)
        directory, present = run(start_embedded(path, metadata, seed=1000))
        assert present == directory.identity.incarnation != former
        assert directory.identity.state is DirectoryState.READY
        assert directory.storage.owner() == present.encode()
        assert directory.storage.ledgers(-1, ledgers_max=9) == []
        if wiped:
            assert directory.formers == {}
        else:
            assert list(directory.formers) == [former]
            assert given(directory, former) == list(range(ENTRIES))
        directory.close()
        for done in (path, metadata):
            shutil.rmtree(done)
    assert step > 10
