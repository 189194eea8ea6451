"""The stored form of cursor state: round trips, golden bytes, and agreement with FORMAT.md."""

from __future__ import annotations

import contextlib
import re
import struct
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.cursor import format as stored
from magnetar.broker.cursor.acks import AckState
from magnetar.broker.errors import InvalidCursorRecord
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.metadata.model import LedgerId, TopicLedger

REPOSITORY = Path(__file__).parents[4]

positions = st.builds(Position, st.integers(-1, 1 << 62), st.integers(-1, 1 << 31))
numbers = st.lists(st.integers(0, (1 << 32) - 1), min_size=1, unique=True)


def read(records: list[bytes], *, replay_from: int = 0) -> list[stored.Record]:
    entry = b"".join([stored.header(replay_from=replay_from), *records])
    assert stored.read_header(entry) == replay_from
    return list(stored.read_records(memoryview(entry)))


@given(
    st.integers(0, (1 << 32) - 1),
    st.none() | positions,
    st.dictionaries(st.integers(0, 1 << 62), numbers, max_size=3),
    st.dictionaries(positions.filter(lambda p: p.entry >= 0), st.integers(1, 1 << 130), max_size=3),
)
def test_delta_round_trip(
    subscription: int,
    mark: Position | None,
    acked: dict[int, list[int]],
    batches: dict[Position, int],
) -> None:
    written = stored.delta(
        subscription,
        mark=mark,
        acked={ledger: array("I", entries) for ledger, entries in acked.items()},
        batches=batches.items(),
    )
    found: dict[int, set[int]] = {}
    for record in read(written):
        assert record.subscription == subscription
        match record:
            case stored.Marked():
                assert record.mark == mark
            case stored.Entries():
                found.setdefault(record.ledger, set()).update(record.entries)
            case stored.Ranges():
                ((first, last),) = record.ranges
                found.setdefault(record.ledger, set()).update(range(first, last + 1))
            case stored.Batch():
                assert record.remaining == batches.pop(record.position)
            case _:
                pytest.fail(f"unexpected {record}")
    assert found == {ledger: set(entries) for ledger, entries in acked.items()}
    assert batches == {}


def test_each_record_kind_has_its_golden_bytes() -> None:
    chain = Chain()
    chain.open_ledger(TopicLedger(LedgerId(7), 0))
    chain.grow(100, next_index=100)
    state = AckState(chain, Position(7, 1))
    for entry in (3, 4, 5, 99):
        state.on_ack(Position(7, entry))
    for entry in range(40, 60, 2):
        state.on_ack(Position(7, entry))
    state.on_ack_batch_index(Position(7, 20), 0b101)
    assert b"".join(stored.snapshot(9, state)) == b"".join(
        [
            b"\x01\x09\0\0\0\x10\0\0\0" + struct.pack("<qq", 7, 1),
            b"\x04\x09\0\0\0\x19\0\0\0" + struct.pack("<qI", 7, 0),
            b"\x38\0\0\0\0\x55\x55\x05\0\0\0\0\x08",
            b"\x05\x09\0\0\0\x0d\0\0\0" + struct.pack("<qI", 7, 20) + b"\x05",
        ]
    )
    delta = stored.delta(
        9,
        mark=Position(7, -1),
        acked={7: array("I", [5, 3]), 8: array("I", [2, 1, 0])},
        batches=[],
        redeliveries={9: {2: 1, 4: 3}},
    )
    assert b"".join(delta) == b"".join(
        [
            b"\x01\x09\0\0\0\x10\0\0\0" + struct.pack("<qq", 7, -1),
            b"\x02\x09\0\0\0\x10\0\0\0" + struct.pack("<qII", 7, 5, 3),
            b"\x03\x09\0\0\0\x10\0\0\0" + struct.pack("<qII", 8, 0, 2),
            b"\x06\x09\0\0\0\x18\0\0\0" + struct.pack("<qIIII", 9, 2, 1, 4, 3),
        ]
    )
    assert stored.header(replay_from=300) == b"\x02\x2c\x01\0\0\0\0\0\0"


def test_format_page_lists_version_and_kinds_of_the_code() -> None:
    page = (REPOSITORY / "broker/cursor/FORMAT.md").read_text()
    assert f"Version {stored.VERSION}." in page
    rows = dict(re.findall(r"^\| (\d) \| ([A-Z]+) \|", page, flags=re.MULTILINE))
    assert rows == {str(kind.value): kind.name for kind in stored.Kind}


def test_large_state_is_cut_into_bounded_records_and_entries() -> None:
    chain = Chain()
    chain.open_ledger(TopicLedger(LedgerId(1), 0))
    count = 12_000_000
    chain.grow(count, next_index=count)
    state = AckState(chain, EARLIEST)
    state.on_acked_bits(1, 0, b"\xaa" * (count // 8))
    written = stored.snapshot(1, state)
    groups = stored.entries_of(written)
    assert [record for group in groups for record in group] == written
    assert len(groups) > 1
    for group in groups:
        size = len(stored.header(replay_from=0)) + sum(len(record) for record in group)
        assert size <= stored.ENTRY_BYTES_MAX
    many = array("I", range(0, 400_000, 2))
    delta = stored.delta(1, mark=None, acked={1: many}, batches=[])
    assert max(len(record) for record in delta) < stored.BODY_BYTES_MAX + 100
    assert [e for r in read(delta) if isinstance(r, stored.Entries) for e in r.entries] == list(
        many
    )


def test_version_1_is_read() -> None:
    assert GOOD[0] == stored.VERSION
    assert list(stored.read_records(b"\x01" + GOOD[1:])) == list(stored.read_records(GOOD))


def test_sparse_acks_are_stored_as_ranges_and_dense_ones_as_bits() -> None:
    chain = Chain()
    chain.open_ledger(TopicLedger(LedgerId(1), 0))
    chain.grow(50_000, next_index=50_000)
    behind_one_gap = AckState(chain, EARLIEST)
    for entry in range(1, 50_000):
        behind_one_gap.on_ack(Position(1, entry))
    assert sum(map(len, stored.snapshot(1, behind_one_gap))) < 100
    every_other = AckState(chain, EARLIEST)
    for entry in range(1, 50_000, 2):
        every_other.on_ack(Position(1, entry))
    assert sum(map(len, stored.snapshot(1, every_other))) < 50_000 // 8 + 100


GOOD = stored.header(replay_from=0) + stored.delta(3, mark=Position(1, 2), acked={}, batches=[])[0]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (b"", "an entry has only"),
        (GOOD[:5], "an entry has only"),
        (b"\x00" + GOOD[1:], "format version 0 is not known; this broker reads versions 1 to 2"),
        (b"\x03" + GOOD[1:], "format version 3 is not known; this broker reads versions 1 to 2"),
        (GOOD[:12], "cut off"),
        (GOOD[:-1], "exceeds"),
        (GOOD + b"\0", "cut off"),
        (GOOD[:9] + b"\x63" + GOOD[10:], "kind 99"),
        (GOOD[:9] + struct.pack("<BII", 1, 3, 3) + b"abc", "kind 1"),
        (GOOD[:9] + struct.pack("<BII", 2, 3, 9) + bytes(9), "kind 2"),
        (GOOD[:9] + struct.pack("<BII", 2, 3, 2) + bytes(2), "kind 2"),
        (GOOD[:9] + struct.pack("<BII", 3, 3, 12) + bytes(12), "kind 3"),
        (GOOD[:9] + struct.pack("<BIIqII", 3, 3, 16, 1, 9, 8), "ends before it begins"),
        (GOOD[:9] + struct.pack("<BIIqI", 4, 3, 12, 1, 4), "begin at entry 4"),
        (GOOD[:9] + struct.pack("<BIIqI", 5, 3, 12, 1, 4), "empty ack set"),
        (GOOD[:9] + struct.pack("<BIIqI", 6, 3, 12, 1, 4), "kind 6"),
    ],
)
def test_unreadable_entry_raises_invalid_cursor_record_with_reason(entry: bytes, why: str) -> None:
    with pytest.raises(InvalidCursorRecord, match=why):
        list(stored.read_records(entry))


@given(st.binary(max_size=80))
def test_arbitrary_bytes_raise_only_invalid_cursor_record(junk: bytes) -> None:
    for entry in (junk, GOOD[:9] + junk):
        with contextlib.suppress(InvalidCursorRecord):
            list(stored.read_records(entry))
