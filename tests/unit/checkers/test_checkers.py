"""Planted histories: every anomaly is found by its checker, and a clean history passes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from checkers.faults import check_faults
from checkers.history import Delivery, Fault, History, Outcome, Place, Read, Send, Session
from checkers.subscription import check_subscription, redeliveries
from checkers.topic import check_topic, duplicates, recovered

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECOND = 1_000_000_000


def clean() -> History:
    """Ten messages in batches of two, and two consumers, one after the other.

    The receipts of messages 4 and 5 are lost with the first ledger's owner, so the producer resends
    these messages. The outcome of message 9 is unknown, and the message is stored.
    """
    history = History()
    places = [Place(7, n // 2, n % 2) for n in range(6)]
    stored = list(zip([0, 1, 2, 3, 4, 5], places, strict=True))
    stored += [(n, Place(9, (n - 4) // 2, n % 2)) for n in range(4, 10)]
    last = dict(stored)
    for number in range(10):
        history.sends.append(Send(number, number * SECOND, Outcome.OK, number + 1, last[number]))
    history.sends[9].outcome = Outcome.INFO
    history.sends[9].place = None
    read = [Read(number, place) for number, place in stored]
    history.reads = [read, list(read)]
    history.sessions = [
        Session(0, opened_ns=0, closed=Outcome.OK, closed_ns=20 * SECOND),
        Session(1, opened_ns=21 * SECOND, closed=Outcome.OK, closed_ns=30 * SECOND),
    ]
    history.deliveries = [
        Delivery(number, place, 0 if at < 6 else 1, (at if at < 6 else 21 + at) * SECOND)
        for at, (number, place) in enumerate(stored)
    ]
    return history


def kinds(history: History) -> set[str]:
    return {each.kind for each in check_topic(history) + check_subscription(history)}


def test_a_clean_history_passes() -> None:
    history = clean()
    assert kinds(history) == set()
    assert duplicates(history.reads[0]) == 2
    assert recovered(history) == 1
    assert redeliveries(history) == 0


def both_reads(change: Callable[[list[Read]], None]) -> Callable[[History], None]:
    def planted(history: History) -> None:
        for read in history.reads:
            change(read)

    return planted


def lose(history: History) -> None:
    for number, read in enumerate(history.reads):
        history.reads[number] = [record for record in read if record.number != 3]


def misplace(history: History) -> None:
    history.sends[3].place = Place(7, 1, 0)  # where message 2 is


def fork(history: History) -> None:
    history.reads[1] = list(history.reads[1])
    del history.reads[1][4]


def fork_value(history: History) -> None:
    history.reads[1][11] = Read(8, history.reads[1][11].place)


def phantom(history: History) -> None:
    del history.sends[9]


def abort(history: History) -> None:
    history.sends[9].outcome = Outcome.FAIL


def reorder_receipts(history: History) -> None:
    history.sends[2].place, history.sends[3].place = history.sends[3].place, history.sends[2].place


def reorder_reads(history: History) -> None:
    for read in history.reads:
        read[0], read[1] = Read(1, read[0].place), Read(0, read[1].place)


def resend(history: History) -> None:
    history.sends[4].place = Place(7, 2, 0)  # the first copy


def unsort(read: list[Read]) -> None:
    read[8], read[9] = read[9], read[8]


def undeliver(history: History) -> None:
    history.deliveries = [d for d in history.deliveries if d.number != 2]


def deliver_unknown(history: History) -> None:
    history.deliveries.append(Delivery(99, Place(9, 9, 9), 1, 29 * SECOND))


def deliver_again(history: History) -> None:
    history.deliveries.append(Delivery(0, Place(7, 0, 0), 1, 29 * SECOND))


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("lost", lose),
        ("misplaced", misplace),
        ("forked", fork),
        ("forked", fork_value),
        ("phantom", phantom),
        ("aborted-read", abort),
        ("reordered-receipts", reorder_receipts),
        ("reordered-reads", reorder_reads),
        ("resent-after-receipt", resend),
        ("unsorted-read", both_reads(unsort)),
        ("undelivered", undeliver),
        ("unknown-delivery", deliver_unknown),
        ("answered-ack-lost", deliver_again),
    ],
)
def test_an_anomaly_is_found(kind: str, plant: Callable[[History], None]) -> None:
    history = clean()
    plant(history)
    assert kind in kinds(history)


def test_a_redelivery_is_allowed_while_the_acknowledgement_has_no_answer() -> None:
    history = clean()
    deliver_again(history)
    history.sessions[0].closed = Outcome.INFO
    assert kinds(history) == set()
    assert redeliveries(history) == 1


def test_a_redelivery_to_a_session_that_was_open_already_is_no_proof() -> None:
    history = clean()
    deliver_again(history)
    history.sessions[1].opened_ns = 19 * SECOND
    assert kinds(history) == set()


def test_a_lost_message_whose_outcome_was_unknown_is_no_anomaly() -> None:
    history = clean()
    for read in history.reads:
        del read[11]
    history.deliveries = [d for d in history.deliveries if d.number != 9]
    assert kinds(history) == set()
    assert recovered(history) == 0


def test_a_fault_without_effect_or_a_missing_fault_is_an_anomaly() -> None:
    history = History()
    history.faults = [Fault("kill-owner", "broker-1", 0, bitten=True)]
    assert check_faults(history, {"kill-owner": 1}) == []
    history.faults.append(Fault("kill-owner", "broker-2", 0, bitten=False, effect="same owner"))
    assert [each.kind for each in check_faults(history, {"kill-owner": 1})] == [
        "fault-without-effect"
    ]
    missing = check_faults(history, {"kill-owner": 2, "kill-bookie": 1})
    assert [each.kind for each in missing] == ["fault-without-effect", "fault-missing"]
    assert missing[1].count == 2


def test_a_history_is_kept_as_lines(tmp_path: Path) -> None:
    clean().save(tmp_path / "history.jsonl")
    records = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert len(records) == 10 + 12 + 2 + 24
    assert records[0]["kind"] == "send"
    assert records[0]["place"] == [7, 0, 0]
