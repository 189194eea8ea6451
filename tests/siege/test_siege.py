"""The short siege: no callback over 50 ms of CPU, honest clients served, memory bounded."""

from __future__ import annotations

import pytest
from siege.run import besiege

SEED = 1
COMMANDS = 2_500


@pytest.mark.real_loop(deadline_s=120)
async def test_honest_clients_are_served_during_a_short_siege() -> None:
    report = await besiege(SEED, COMMANDS)
    assert not report.problems, report.text()
    assert sum(report.sent.values()) >= COMMANDS
