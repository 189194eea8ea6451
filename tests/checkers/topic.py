"""Checks that a topic kept what the receipts told one producer.

Without deduplication the client resends a message whose receipt was lost, so the topic may hold it
twice. The receipt then names the last copy.

    lost                    acknowledged, but missing in a read to the end
    misplaced               acknowledged at a place where a read finds another message, or none
    forked                  one read finds a message at a place, another read finds another or none
    phantom                 read, and never sent
    aborted-read            read, although its send definitely failed
    reordered-receipts      a later message was acknowledged at an earlier place
    reordered-reads         the first copy of a message precedes the first copy of an earlier one
    resent-after-receipt    a copy follows the one that the receipt names
    unsorted-read           a read returns a message after one with the same or a later place
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from checkers.history import History, Outcome, Place, Read, Send
from checkers.verdict import Anomaly, anomalies

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_topic(history: History) -> list[Anomaly]:
    """All anomalies of the sends and of every read. The history needs at least one read."""
    assert history.reads, "the history has no read"
    sends = {send.number: send for send in history.sends}
    acked = [send for send in history.sends if send.outcome is Outcome.OK]
    found: dict[str, list[object]] = {
        "reordered-receipts": [
            f"{a.number} at {a.place}, {b.number} at {b.place}"
            for a, b in pairwise(sorted(acked, key=lambda send: send.number))
            if a.place is None or b.place is None or not a.place < b.place
        ],
        "forked": _forks(history.reads),
    }
    for read in history.reads:
        for kind, examples in _check_read(read, sends, acked).items():
            found.setdefault(kind, []).extend(examples)
    return anomalies(found)


def duplicates(read: Sequence[Read]) -> int:
    """Return the number of copies beyond the first one of each message. They are allowed without
    deduplication."""
    return len(read) - len({record.number for record in read})


def recovered(history: History) -> int:
    """Return the number of stored messages whose send had an unknown outcome."""
    seen = {record.number for read in history.reads for record in read}
    return sum(send.outcome is Outcome.INFO and send.number in seen for send in history.sends)


def _check_read(
    read: Sequence[Read], sends: dict[int, Send], acked: Sequence[Send]
) -> dict[str, list[object]]:
    at = {record.place: record.number for record in read}
    last = {record.number: record.place for record in read}
    first = list(dict.fromkeys(record.number for record in read))
    return {
        "lost": [send.number for send in acked if send.number not in last],
        "misplaced": [
            f"{send.number} at {send.place} is {at.get(_place(send))}"
            for send in acked
            if send.number in last and at.get(_place(send)) != send.number
        ],
        "phantom": [number for number in first if number not in sends],
        "aborted-read": [
            number for number in first if number in sends and sends[number].outcome is Outcome.FAIL
        ],
        "reordered-reads": [f"{b} after {a}" for a, b in pairwise(first) if b < a],
        "resent-after-receipt": [
            f"{send.number} at {send.place}, again at {last[send.number]}"
            for send in acked
            if send.number in last and last[send.number] > _place(send)
        ],
        "unsorted-read": [
            f"{b.place} after {a.place}" for a, b in pairwise(read) if not a.place < b.place
        ],
    }


def _forks(reads: Sequence[Sequence[Read]]) -> list[object]:
    """Return the places at which a later read differs from the first one."""
    if not reads:
        return []
    first = {record.place: record.number for record in reads[0]}
    found: list[object] = []
    for read in reads[1:]:
        other = {record.place: record.number for record in read}
        # A later read may only have further messages after the end of the first read.
        end = max(first, default=Place(-1, -1))
        found += [
            f"{place}: {first.get(place)} and {other.get(place)}"
            for place in sorted(first.keys() | {place for place in other if place <= end})
            if first.get(place) != other.get(place)
        ]
    return found


def _place(send: Send) -> Place:
    assert send.place is not None, f"{send.number} was acknowledged without a place"
    return send.place
