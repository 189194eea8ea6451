"""A chaos run of stops alone: its plan, and the lines of its report about outages."""

from __future__ import annotations

from random import Random

from chaos.nemesis import Pause, plan
from chaos.report import text
from chaos.run import stops
from checkers.history import Fault, History


def test_a_run_of_stops_stops_the_owner_and_kills_nothing() -> None:
    setting = stops(100)
    faults = plan(
        Random(1), kills=setting.kills, pauses=setting.pauses, bookie_first=setting.bookies == 3
    )
    assert len(faults) == 100
    assert all(isinstance(fault, Pause) for fault in faults)


def test_the_report_counts_the_outages_that_took_too_long() -> None:
    history = History()
    history.faults += [Fault("pause-owner", "b", 0, True, "", s) for s in (2.0, 2.5, 3.5)]
    history.faults.append(Fault("kill-bookie", "b", 0, True, ""))
    assert (
        "  pause-owner 3 times, served again after 2.50 s (median), 3.50 s (longest); "
        "1 times over 3 s\n"
    ) in text("title", history, [], [])
