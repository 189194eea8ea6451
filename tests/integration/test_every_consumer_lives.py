"""Consumers of all types, a reader and a table view live through kills of brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos.every_consumer import run_every_consumer

from magnetar.zookeeper_server import JavaMissing, find_java

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper]


@pytest.fixture(autouse=True)
def _java() -> None:
    try:
        find_java()
    except JavaMissing as missing:
        pytest.skip(str(missing))


@pytest.mark.night
@pytest.mark.timeout(900)
@pytest.mark.real_loop(deadline_s=800)
async def test_no_message_is_lost_disordered_or_repeated_without_a_reason(tmp_path: Path) -> None:
    record = await run_every_consumer(tmp_path, kills=20)
    assert record.anomalies() == [], record.text()
    assert len(record.kills) == 20
