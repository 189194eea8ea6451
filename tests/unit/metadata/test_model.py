"""The invariants of the records. Each invalid record breaks one invariant."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from magnetar.metadata.errors import InvalidLedgerMetadata, InvalidRecord
from magnetar.metadata.model import (
    BUNDLES_DEFAULT,
    HASH_SPACE,
    BookieAddress,
    BookieId,
    BookieRegistration,
    BrokerId,
    DroppedHead,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    NamespaceBundles,
    Ownership,
    Segment,
    TopicLedger,
    TopicRecord,
)


def member(name: str, incarnation: str = "0" * 32) -> Member:
    return Member(BookieId(name), incarnation)


def segment(first: int, *names: str) -> Segment:
    return Segment(EntryId(first), tuple(map(member, names)))


OPEN = LedgerMetadata(
    ledger=LedgerId(5),
    state=LedgerState.OPEN,
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=2,
    segments=(segment(0, "a", "b", "c"), segment(10, "a", "b", "d")),
    master_key=1,
    creator_token=2,
    created_ms=3,
)
CLOSED = replace(OPEN, state=LedgerState.CLOSED, last_entry=EntryId(20), length=100)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ledger": -1}, "ledger id"),
        ({"ledger": 1 << 63}, "ledger id"),
        ({"ack_quorum": 0}, "quorums 3/2/0"),
        ({"ack_quorum": 3}, "quorums 3/2/3"),
        ({"write_quorum": 4}, "quorums 3/4/2"),
        ({"ensemble_size": 2}, "members"),
        ({"master_key": -1}, "master key"),
        ({"master_key": 1 << 64}, "master key"),
        ({"creator_token": 1 << 64}, "creator token"),
        ({"created_ms": -1}, "created"),
        ({"segments": ()}, "no segments"),
        ({"segments": (segment(1, "a", "b", "c"),)}, "entry 0"),
        ({"segments": (segment(0, "a", "b", "c"), segment(0, "a", "b", "d"))}, "increase"),
        (
            {"segments": (segment(0, *"abc"), segment(9, *"abd"), segment(8, *"abe"))},
            "increase",
        ),
        ({"segments": (segment(0, "a", "b"),)}, "2 members instead of 3"),
        ({"segments": (segment(0, "a", "b", "a"),)}, "twice"),
        ({"last_entry": 1}, "last entry"),
        ({"length": 1}, "length"),
        ({"state": LedgerState.IN_RECOVERY, "last_entry": 1, "length": 1}, "last entry"),
        ({"state": LedgerState.CLOSED}, "without a last entry"),
        ({"state": LedgerState.CLOSED, "last_entry": 20}, "without a length"),
        ({"state": LedgerState.CLOSED, "last_entry": 8, "length": 1}, "up to 9 were confirmed"),
        ({"state": LedgerState.CLOSED, "last_entry": 20, "length": -1}, "length -1"),
    ],
)
def test_a_ledger_that_no_writer_can_have_made_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidLedgerMetadata, match=reason):
        replace(OPEN, **changes)


def test_two_incarnations_of_a_bookie_count_as_one_bookie() -> None:
    twice = Segment(EntryId(0), (member("a"), member("b"), member("a", "1" * 32)))
    with pytest.raises(InvalidLedgerMetadata, match="twice"):
        replace(OPEN, segments=(twice,))


def test_valid_edge_cases_of_a_ledger_are_accepted() -> None:
    replace(OPEN, ensemble_size=3, write_quorum=3, ack_quorum=3)
    replace(CLOSED, last_entry=EntryId(9), length=50)  # no entry was confirmed in the last segment
    empty = replace(CLOSED, segments=OPEN.segments[:1], last_entry=EntryId(-1), length=0)
    assert empty.last_entry == -1
    with pytest.raises(InvalidLedgerMetadata, match="empty"):
        replace(empty, length=1)
    with pytest.raises(InvalidLedgerMetadata, match="confirmed"):
        replace(CLOSED, segments=OPEN.segments[:1], last_entry=EntryId(-2), length=0)
    replace(CLOSED, length=0)  # entries may be empty


@pytest.mark.parametrize(("entry", "first"), [(0, 0), (9, 0), (10, 10), (11, 10), (10**9, 10)])
def test_the_segment_of_an_entry(entry: int, first: int) -> None:
    assert OPEN.segment_of(EntryId(entry)).first_entry == first


def test_another_ensemble_is_appended_or_replaces_the_last() -> None:
    members = [member(name) for name in "xyz"]
    appended = OPEN.with_ensemble(EntryId(11), members)
    assert appended.segments == (*OPEN.segments, segment(11, "x", "y", "z"))
    replaced = OPEN.with_ensemble(EntryId(10), members)
    assert replaced.segments == (OPEN.segments[0], segment(10, "x", "y", "z"))
    assert OPEN.last_segment == segment(10, "a", "b", "d")
    with pytest.raises(InvalidLedgerMetadata, match="backwards"):
        OPEN.with_ensemble(EntryId(9), members)
    with pytest.raises(InvalidLedgerMetadata, match="twice"):
        OPEN.with_ensemble(EntryId(11), [member("x"), member("y"), member("x")])
    with pytest.raises(AssertionError):
        CLOSED.with_ensemble(EntryId(21), members)


def test_unknown_fields_are_ignored_in_comparisons() -> None:
    assert replace(OPEN, unknown=b"later") == OPEN
    newer = Member(BookieId("a"), "0" * 32, b"later")
    assert newer == member("a")
    assert hash(newer) == hash(member("a"))


@pytest.mark.parametrize("incarnation", ["", "0" * 31, "0" * 33, "G" + "0" * 31, "A" * 32])
def test_an_incarnation_is_32_hex_digits(incarnation: str) -> None:
    with pytest.raises(InvalidRecord, match="incarnation"):
        member("a", incarnation)
    with pytest.raises(InvalidRecord, match="incarnation"):
        Ownership(BrokerId("b"), incarnation, 1)


def test_a_registration_with_an_invalid_field_is_refused() -> None:
    good = BookieRegistration(
        BookieId("b"),
        "0" * 32,
        1,
        BookieAddress(data="host:3181", grpc="host:3182"),
        http_address="",
        zone="",
        read_only=False,
    )
    assert good.member == member("b")
    for changes in (
        {"bookie": ""},
        {"address": BookieAddress(data="", grpc="host:3182")},
        {"address": BookieAddress(data="host:3181", grpc="")},
        {"boot_epoch": -1},
        {"incarnation": "x"},
    ):
        with pytest.raises(InvalidRecord):
            replace(good, **changes)  # type: ignore[arg-type]


# ---- bundles -------------------------------------------------------------------------------------


def test_a_namespace_starts_with_four_equal_bundles() -> None:
    assert NamespaceBundles().names == (
        "0x00000000_0x40000000",
        "0x40000000_0x80000000",
        "0x80000000_0xc0000000",
        "0xc0000000_0xffffffff",
    )


@pytest.mark.parametrize(
    ("topic_hash", "index"),
    [(0, 0), (0x3FFFFFFF, 0), (0x40000000, 1), (0x2BAD45F7, 0), (0xC0000000, 3), (0xFFFFFFFF, 3)],
)
def test_a_bundle_is_half_open_and_the_last_one_closed(topic_hash: int, index: int) -> None:
    bundles = NamespaceBundles()
    assert bundles.bundle_of(topic_hash) == bundles.names[index]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 128])
def test_a_divided_hash_space_has_equal_bundles_and_the_last_takes_the_remainder(
    count: int,
) -> None:
    bundles = NamespaceBundles.divided(count)
    sizes = [after - before for before, after in pairwise(bundles.boundaries)]
    assert len(sizes) == len(bundles.names) == count
    assert set(sizes[:-1]) <= {HASH_SPACE // count}
    assert sizes[-1] == HASH_SPACE // count + HASH_SPACE % count
    for name, (start, end) in zip(bundles.names, pairwise(bundles.boundaries), strict=True):
        assert bundles.bundle_of(start) == bundles.bundle_of(end - 1) == name


def test_the_default_bundles_are_a_space_divided_by_four() -> None:
    """Clusters of versions without namespace records have these bundles."""
    assert NamespaceBundles.divided(BUNDLES_DEFAULT) == NamespaceBundles()


@pytest.mark.parametrize(
    "boundaries",
    [(), (0,), (1, HASH_SPACE), (0, HASH_SPACE - 1), (0, 5, 5, HASH_SPACE), (0, 7, 5, HASH_SPACE)],
)
def test_bundles_cover_the_hash_space_without_overlap(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRecord, match="boundar"):
        NamespaceBundles(boundaries)


# ---- topics --------------------------------------------------------------------------------------


def ledgers(*ids: int, indexes: tuple[int, ...] | None = None) -> tuple[TopicLedger, ...]:
    starts = indexes or (0,) * len(ids)
    return tuple(
        TopicLedger(LedgerId(ledger), start) for ledger, start in zip(ids, starts, strict=True)
    )


def test_a_topics_ledgers_increase_and_none_is_used_and_deleted() -> None:
    TopicRecord(1, ledgers(1, 5, 9), cursor_ledgers=(LedgerId(3),), deleting=(LedgerId(0),))
    with pytest.raises(InvalidRecord, match="5 follows 5"):
        TopicRecord(1, ledgers(5, 5))
    with pytest.raises(InvalidRecord, match="3 follows 5"):
        TopicRecord(1, ledgers(5, 3))
    with pytest.raises(InvalidRecord, match="backwards"):
        TopicRecord(1, ledgers(1, 2, indexes=(5, 4)))
    with pytest.raises(InvalidRecord, match=r"\[5\]"):
        TopicRecord(1, ledgers(5), deleting=(LedgerId(5),))
    with pytest.raises(InvalidRecord, match=r"\[3\]"):
        TopicRecord(1, cursor_ledgers=(LedgerId(3),), deleting=(LedgerId(3),))
    with pytest.raises(InvalidRecord, match="5 was dropped"):
        TopicRecord(1, ledgers(5), dropped=DroppedHead(LedgerId(5), EntryId(0), 7))
    with pytest.raises(InvalidRecord, match="epoch"):
        TopicRecord(-1)
