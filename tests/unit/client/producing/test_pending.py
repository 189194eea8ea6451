"""The queue of entries without receipts, compared with a list of names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.producing.pending import PendingEntries, PendingEntry, ReceiptOutOfOrder


def entry(sequence: int, due_at: float | None = 100.0) -> PendingEntry:
    return PendingEntry(
        sequence_id=sequence,
        highest_sequence_id=sequence,
        is_batch=False,
        parts=[b"entry"],
        dones=[lambda *_: None],
        messages=1,
        message_bytes=5,
        due_at=due_at,
    )


STEP = st.sampled_from(
    ["append", "append", "append", "receipt", "receipts", "expire", "attach", "detach"]
)


@given(st.lists(STEP, max_size=60))
def test_each_entry_is_reported_once_and_receipts_match(steps: list[str]) -> None:
    pending = PendingEntries()
    sent: list[int] = []  # entries that the broker has not answered yet, in order
    reported: list[int] = []
    alive: list[int] = []  # entries that were appended and not reported
    number = 0
    for now, step in enumerate(steps):
        match step:
            case "append":
                pending.append(entry(number, due_at=now + 10.0))
                alive.append(number)
                if pending.attached:
                    sent.append(number)
                number += 1
            case "receipt" | "receipts" if sent:
                count = 1 if step == "receipt" else 3
                answers, sent = sent[:count], sent[count:]
                if step == "receipt":
                    told = [pending.on_receipt(answers[0])]
                else:
                    told = pending.on_receipts([*answers, -1])  # -1: an id that was never sent
                for answered, got in zip(answers, told, strict=True):
                    assert (got is None) == (answered in reported)
                    if got is not None:
                        assert got.sequence_id == answered
                        assert got.parts
                        reported.append(answered)
                        alive.remove(answered)
            case "expire":
                for got in pending.expire(float(now)):
                    assert got.parts
                    reported.append(got.sequence_id)
                    alive.remove(got.sequence_id)
            case "attach" if not pending.attached:
                sent = [one.sequence_id for one in pending.on_attached()]
                assert sent == alive
            case "detach":
                pending.on_detached()
                sent = []
        pending.check()
        assert pending.appended == number
        assert pending.reported == len(reported)
    left = [one.sequence_id for one in pending.abandon()]
    assert left == alive
    assert sorted(reported + left) == list(range(number))
    pending.check()


def test_a_receipt_out_of_order_is_refused() -> None:
    pending = PendingEntries()
    pending.append(entry(1))
    pending.append(entry(2))
    pending.on_attached()
    with pytest.raises(ReceiptOutOfOrder) as caught:
        pending.on_receipt(2)
    assert (caught.value.sequence_id, caught.value.expected) == (2, 1)
    pending.on_receipt(1)
    pending.on_receipt(2)
    with pytest.raises(ReceiptOutOfOrder):
        pending.on_receipt(2)


def test_the_late_receipt_of_an_expired_entry_does_not_confirm_the_next_one() -> None:
    pending = PendingEntries()
    pending.append(entry(7, due_at=1.0))
    pending.append(entry(7, due_at=2.0))  # the user may give the same number twice
    pending.on_attached()
    (expired,) = pending.expire(1.5)
    assert expired.parts == [b"entry"]
    assert pending.emptied == 1
    assert pending.on_receipt(7) is None
    got = pending.on_receipt(7)
    assert got is not None
    assert got.due_at == 2.0


def test_the_timer_is_due_with_the_oldest_pending_entry() -> None:
    pending = PendingEntries()
    assert pending.timer_at() is None
    pending.append(entry(1, due_at=3.0))
    pending.append(entry(2, due_at=4.0))
    pending.on_attached()
    assert pending.timer_at() == 3.0
    pending.expire(3.0)
    assert pending.timer_at() == 4.0
    never = PendingEntries()
    never.append(entry(1, due_at=None))
    assert never.timer_at() is None
    assert never.expire(1e9) == []
