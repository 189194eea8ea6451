"""The judge of `chaos.every_consumer`: each planted anomaly is found, and a good record passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos.every_consumer import CONSUMERS, KEYS, Kill, Record

from magnetar import ConsumerType

if TYPE_CHECKING:
    from collections.abc import Callable

SENT = 2 * KEYS
KILL = Kill(begun=10.0, settled=14.0, owner="a", next_owner="b")


def good() -> Record:
    record = Record(SENT, dict.fromkeys(range(SENT), "Ok"), kills=[KILL])
    for kind in CONSUMERS:
        record.deliveries[kind] = [(number, float(number)) for number in range(SENT)]
    record.read, record.changes = list(range(SENT)), list(range(SENT))
    record.table = {f"key-{number}": KEYS + number for number in range(KEYS)}
    return record


def shared(record: Record) -> list[tuple[int, float]]:
    return record.deliveries[ConsumerType.Shared]


def test_a_good_record_passes() -> None:
    record = good()
    shared(record).append((9, 11.0))  # a kill lies between the two
    shared(record).insert(0, shared(record).pop(5))  # no order is promised
    assert record.anomalies() == []
    assert record.all_seen
    assert "passed" in record.text()


def swap(seen: list[tuple[int, float]], one: int, other: int) -> None:
    seen[one], seen[other] = seen[other], seen[one]


PLANTED: dict[str, Callable[[Record], object]] = {
    "Shared: lost 1": lambda it: shared(it).pop(),
    "Shared: 3 was redelivered": lambda it: shared(it).append((3, 5.0)),
    "Shared: 20 was redelivered": lambda it: shared(it).append((20, 30.0)),
    "Exclusive: 9 was redelivered": lambda it: it.deliveries[ConsumerType.Exclusive].append(
        (9, 11.0)
    ),
    "Exclusive: 3 was delivered after 4": lambda it: swap(
        it.deliveries[ConsumerType.Exclusive], 3, 4
    ),
    "Failover: 3 was delivered after 4": lambda it: swap(
        it.deliveries[ConsumerType.Failover], 3, 4
    ),
    f"KeyShared: 1 was delivered after {KEYS + 1}": lambda it: swap(
        it.deliveries[ConsumerType.KeyShared], 1, KEYS + 1
    ),
    "reader: 6 in place of 5": lambda it: it.read.pop(5),
    "reader: 33 numbers": lambda it: it.read.append(SENT),
    "table view: {": lambda it: it.table.update({"key-0": 0}),
    "table view's changes: 6 in place of 5": lambda it: it.changes.pop(5),
    "not Ok: {1: 'Timeout'}": lambda it: it.outcomes.update({1: "Timeout"}),
    "32 sent, 31 answered": lambda it: it.outcomes.pop(1),
    "kill 0 did not meet the owner": lambda it: it.kills.__setitem__(0, Kill(1.0, 2.0, "a", "a")),
    "late": lambda it: it.trouble.append("late"),
}


@pytest.mark.parametrize("found", PLANTED)
def test_a_planted_anomaly_is_found(found: str) -> None:
    record = good()
    PLANTED[found](record)
    assert any(found in it for it in record.anomalies()), record.anomalies()
    assert "FAILED" in record.text()


def test_keys_have_no_order_among_each_other() -> None:
    record = good()
    swap(record.deliveries[ConsumerType.KeyShared], 1, 2)
    assert record.anomalies() == []
