"""Spark copies a topic exactly once under kills: `make spark-kills` alone prints a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos.spark_exactly_once import run_spark_kills

from magnetar.spark.errors import JavaMissing
from magnetar.spark.session import require_java

if TYPE_CHECKING:
    from pathlib import Path

# The test runs up to three Java processes and a Magnetar cluster on two cores.
pytestmark = [pytest.mark.spark, pytest.mark.night, pytest.mark.real_loop(deadline_s=2_400)]


@pytest.mark.timeout(2_400)
async def test_twenty_kills_lose_nothing_and_duplicate_nothing_with_and_without_shuffle(
    tmp_path: Path,
) -> None:
    try:
        require_java()
    except JavaMissing as missing:
        pytest.skip(str(missing))
    result = await run_spark_kills(tmp_path, kills=20, seed=1)
    assert result.passed, result.text()
    assert len(result.kills) == 20
