"""The report of a run: a text, and a timeline of receipts with the faults in it (SVG)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

from checkers.history import History, Outcome
from checkers.subscription import redeliveries
from checkers.topic import duplicates, recovered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from checkers.verdict import Anomaly

OUTAGE_TARGET_S: Final = 3.0
BIN_S: Final = 0.1
WIDTH: Final = 1100
HEIGHT: Final = 260
MARGIN: Final = 40


def text(title: str, history: History, found: Sequence[Anomaly], trouble: Sequence[str]) -> str:
    """The events, then the verdict in the last line."""
    begun = history.sends[0].invoked_ns if history.sends else 0
    outcomes = Counter(send.outcome for send in history.sends)
    reads = [len(read) for read in history.reads]
    lines = [
        title,
        f"  sent {len(history.sends)}: "
        + ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in Outcome),
        f"  read {reads} messages, {duplicates(history.reads[0]) if reads else 0} of them sent "
        f"again; {recovered(history)} without a receipt are there",
        f"  delivered {len(history.deliveries)} in {len(history.sessions)} sessions "
        f"({sum(s.closed is Outcome.OK for s in history.sessions)} closed), "
        f"{redeliveries(history)} redelivered before their acknowledgement was answered",
    ]
    for fault in history.faults:
        outage = ""
        if fault.outage_s is not None:
            late = "" if fault.outage_s <= OUTAGE_TARGET_S else f", over {OUTAGE_TARGET_S:g} s"
            outage = f"; served again after {fault.outage_s:.2f} s{late}"
        seconds = (fault.at_ns - begun) / 1e9
        lines.append(f"  {seconds:7.2f} s  {fault.what} {fault.target}: {fault.effect}{outage}")
    lines += _outages(history)
    lines += [f"  longest pause between receipts {longest_pause_s(history):.2f} s"]
    lines += [f"  TROUBLE {each}" for each in trouble]
    lines += [f"  ANOMALY {each}" for each in found]
    lines += ["  FAILED" if found or trouble else "  nothing acknowledged was lost; passed"]
    return "\n".join(lines)


def _outages(history: History) -> list[str]:
    """For each kind of fault: the time until a broker served the topic again."""
    kinds: dict[str, list[float]] = {}
    for fault in history.faults:
        if fault.outage_s is not None:
            kinds.setdefault(fault.what, []).append(fault.outage_s)
    return [
        f"  {what} {len(times)} times, served again after {median(times):.2f} s (median), "
        f"{max(times):.2f} s (longest); {sum(each > OUTAGE_TARGET_S for each in times)} times over "
        f"{OUTAGE_TARGET_S:g} s"
        for what, times in kinds.items()
    ]


def longest_pause_s(history: History) -> float:
    times = sorted(s.answered_ns for s in history.sends if s.outcome is Outcome.OK)
    return max((b - a for a, b in pairwise(times)), default=0) / 1e9


def timeline(title: str, history: History) -> str:
    """Receipts and deliveries per tenth of a second, and a line for each fault."""
    begun = history.sends[0].invoked_ns
    receipts = _rates([s.answered_ns for s in history.sends if s.outcome is Outcome.OK], begun)
    deliveries = _rates([d.received_ns for d in history.deliveries], begun)
    bins = max(len(receipts), len(deliveries), 1)
    top = max([*receipts, *deliveries, 1])
    x_of = (WIDTH - 2 * MARGIN) / (bins * BIN_S)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="14">{title}: receipts (blue) and deliveries (grey) a second, '
        f"at most {top / BIN_S:,.0f}; {bins * BIN_S:.0f} s</text>",
        _line(deliveries, bins, top, "#999999"),
        _line(receipts, bins, top, "#1f5fbf"),
    ]
    for number, fault in enumerate(history.faults):
        x = MARGIN + (fault.at_ns - begun) / 1e9 * x_of
        y = 28 + 12 * (number % 4)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{HEIGHT - MARGIN}" stroke="#c02020" '
            f'stroke-dasharray="3,3"/><text x="{x + 3:.1f}" y="{y}" fill="#c02020">'
            f"{fault.what} {fault.target}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _rates(times_ns: Sequence[int], begun_ns: int) -> list[int]:
    counts = Counter(int((at - begun_ns) / 1e9 / BIN_S) for at in times_ns)
    return [counts[number] for number in range(max(counts, default=0) + 1)]


def _line(counts: Sequence[int], bins: int, top: int, colour: str) -> str:
    step = (WIDTH - 2 * MARGIN) / bins
    high = HEIGHT - 2 * MARGIN - 30
    points = " ".join(
        f"{MARGIN + n * step:.1f},{HEIGHT - MARGIN - count / top * high:.1f}"
        for n, count in enumerate(counts)
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}"/>'
