"""Checks that the faults of a run had an effect: a run without effects proves nothing.

fault-without-effect    the nemesis acted, and saw no effect
fault-missing           a kind of fault had an effect less often than planned
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from checkers.verdict import Anomaly, anomalies

if TYPE_CHECKING:
    from collections.abc import Mapping

    from checkers.history import History


def check_faults(history: History, planned: Mapping[str, int]) -> list[Anomaly]:
    """`planned`: for each kind of fault, the number of times that it must have had an effect."""
    bitten = Counter(fault.what for fault in history.faults if fault.bitten)
    return anomalies(
        {
            "fault-without-effect": [
                f"{fault.what} {fault.target}: {fault.effect}"
                for fault in history.faults
                if not fault.bitten
            ],
            "fault-missing": [
                f"{what}: {bitten[what]} of {count}"
                for what, count in planned.items()
                if bitten[what] < count
            ],
        }
    )
