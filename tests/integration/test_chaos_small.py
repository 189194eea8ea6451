"""The smallest chaos run: during publishes and deliveries, an owner and a bookie die by kill -9,
and the next owner is stopped for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos.run import Setting, run_chaos

from magnetar import ConsumerType
from magnetar.zookeeper_server import JavaMissing, find_java

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper]

SEED = 2


@pytest.fixture(autouse=True)
def _java() -> None:
    try:
        find_java()
    except JavaMissing as missing:
        pytest.skip(str(missing))


@pytest.mark.real_loop(deadline_s=240)
async def test_nothing_acknowledged_is_lost_when_owner_and_bookie_die_and_an_owner_is_stopped(
    tmp_path: Path,
) -> None:
    setting = Setting(
        bookies=3,
        subscription=ConsumerType.Exclusive,
        messages=5_000,
        rate=500.0,
        kills=1,
        pauses=1,
        zookeepers=1,
    )
    result = await run_chaos(setting, SEED, tmp_path)
    assert result.passed, result.text()
