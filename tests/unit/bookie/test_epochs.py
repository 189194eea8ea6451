"""A running bookie increases its boot epoch. A disk without room for the epoch does not end the
bookie."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry
from support import ManualClock, wait_until

from magnetar.bookie.bookie import open_bookie
from magnetar.bookie.storage.layout import IDENTITY_NEW, find
from magnetar.metadata.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.real_loop
async def test_a_disk_that_takes_no_identity_file_ends_no_bookie(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def epoch() -> int:
        identity = find(tmp_path).identity
        return getattr(identity, "boot_epoch", 0)

    def in_the_way() -> bool:
        try:
            (tmp_path / IDENTITY_NEW).mkdir()  # a folder in the place of the file: the write fails
        except FileExistsError:  # the bookie is writing the file just now
            return False
        return True

    async with open_bookie(
        tmp_path,
        bookie="b1",
        metadata=MemoryStore(),
        clock=ManualClock(),
        chance=Random(1),
        registry=CollectorRegistry(),
        epoch_s=0.02,
    ):
        await wait_until(lambda: epoch() > 2)
        await wait_until(in_the_way)
        await wait_until(lambda: "not counted up" in caplog.text)
        reached = epoch()
        (tmp_path / IDENTITY_NEW).rmdir()
        await wait_until(lambda: epoch() > reached)
