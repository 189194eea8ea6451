"""The short siege: no callback over 50 ms of CPU, honest clients served, memory bounded."""

from __future__ import annotations

import pytest
from siege.run import besiege

SEED = 1
COMMANDS = 2_500


@pytest.mark.real_loop(deadline_s=120)
async def test_a_short_siege_takes_nothing_from_honest_clients() -> None:
    report = await besiege(SEED, COMMANDS)
    assert not report.problems, report.text()
    assert sum(report.sent.values()) >= COMMANDS
