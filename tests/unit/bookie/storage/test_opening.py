"""What the process that tries a store says of it, and of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import run

from magnetar.bookie.errors import DirectoryUnusable
from magnetar.bookie.storage.opening import probe

if TYPE_CHECKING:
    from pathlib import Path


def test_a_store_that_does_not_open_is_to_blame(tmp_path: Path) -> None:
    async def main() -> None:
        reason = await probe(tmp_path, "whole", tmp_path / "none", "0", deadline_s=30)
        assert reason is not None
        assert "no store" in reason

    run(main())


def test_a_probe_that_fails_by_itself_does_not_blame_the_store(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(DirectoryUnusable, match="ValueError"):
            await probe(tmp_path, "whole", deadline_s=30)

    run(main())
