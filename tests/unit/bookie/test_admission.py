"""The decisions of admission, compared with a simple model. The model keeps every entry and decides
on each add alone."""

from __future__ import annotations

import itertools

import pytest
from fakes.bookies import KEY, FaultyStorage, add, envelope
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ManualClock

from magnetar.bookie.admission import (
    Admission,
    Admitted,
    Intake,
    LedgerAdmission,
    refusal,
    same_entry,
)
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import (
    LedgerRecord,
    decode_ledger_record,
    encode_ledger_record,
    entry_key,
    ledger_key,
)
from magnetar.protos.envelope import (
    COPY,
    RECOVERY,
    BookieCode,
    EnvelopeDamaged,
    decode_acks,
    decode_adds,
)

OK, FENCED, UNAUTHORIZED, CONFLICT, IO_ERROR = (
    BookieCode.OK,
    BookieCode.FENCED,
    BookieCode.UNAUTHORIZED,
    BookieCode.CONFLICT,
    BookieCode.IO_ERROR,
)


def make(storage: FaultyStorage, *, ledgers_cached_max: int = 100) -> Admission:
    return Admission(
        storage,
        write=storage.write,
        delete=storage.delete_ledger,
        clock=ManualClock(),
        ledgers_cached_max=ledgers_cached_max,
    )


def codes(admitted: Admitted) -> dict[tuple[int, int], BookieCode]:
    for ack in admitted.stored:
        assert all(code is OK for _, _, code in decode_acks(ack))
    for ack in admitted.refused:
        assert all(code is not OK for _, _, code in decode_acks(ack))
    return {
        (ledger, entry): code
        for ack in admitted.stored + admitted.refused
        for ledger, entry, code in decode_acks(ack)
    }


def admit(admission: Admission, *adds: bytes) -> list[BookieCode]:
    """Admit the adds as one frame, and return their codes. The ids must differ."""
    frame = b"".join(adds)
    found = codes(admission.admit(decode_adds(frame), verified=True))
    return [found[a.ledger, a.entry] for a in decode_adds(frame)]


def record_of(storage: FaultyStorage, ledger: int) -> LedgerRecord | None:
    value = storage.ledger_record(ledger)
    return None if value is None else decode_ledger_record(value)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("right_key", [False, True])
@pytest.mark.parametrize("flags", [0, RECOVERY, COPY, RECOVERY | COPY])
@pytest.mark.parametrize("intake", Intake)
def test_adds_are_refused_by_record_key_flags_and_intake(
    *, known: bool, fenced: bool, right_key: bool, flags: int, intake: Intake
) -> None:
    (offered,) = decode_adds(add(1, 0, flags=flags, master_key=KEY if right_key else KEY + 1))
    record = LedgerRecord(KEY, fenced=fenced, created_ms=0) if known else None
    expected = None
    if known and not right_key:
        expected = UNAUTHORIZED
    elif known and fenced and not flags:
        expected = FENCED
    elif intake is Intake.NONE or (intake is Intake.REPAIRS and not flags):
        expected = BookieCode.READ_ONLY
    assert refusal(offered, LedgerAdmission(record, -1), intake) is expected
    deleted = LedgerAdmission(None, -1, deleted=True)
    assert refusal(offered, deleted, intake) is BookieCode.DELETED


def test_the_first_add_makes_the_record_before_the_entry() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    assert admit(admission, add(7, 0), add(7, 1)) == [OK, OK]
    keys = [key for batch in storage.batches for key, _ in batch]
    assert keys[0] == ledger_key(7)
    assert len(keys) == 3
    record = record_of(storage, 7)
    assert record is not None
    assert (record.master_key, record.fenced) == (KEY, False)
    assert storage.entry(7, 1) == envelope(7, 1)


def test_a_frame_is_one_write() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    admit(admission, add(7, 0), add(8, 0))
    storage.batches.clear()
    admit(admission, *(add(ledger, entry) for entry in range(1, 20) for ledger in (7, 8)))
    assert len(storage.batches) == 1


def test_the_first_add_or_fence_sets_the_master_key() -> None:
    admission = make(FaultyStorage())
    assert admit(admission, add(1, 0, master_key=5)) == [OK]
    assert admit(admission, add(1, 1, master_key=6)) == [UNAUTHORIZED]
    assert admission.fence(2, 5) is OK
    assert admit(admission, add(2, 0, master_key=6, flags=RECOVERY)) == [UNAUTHORIZED]
    assert admission.fence(1, 6) is UNAUTHORIZED
    # The refused request did not fence the ledger.
    assert admit(admission, add(1, 1, master_key=5)) == [OK]


def test_a_fence_refuses_adds_and_accepts_copies() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    admit(admission, add(1, 0))
    assert admission.fence(1, KEY) is OK
    assert admit(admission, add(1, 1)) == [FENCED]
    assert storage.entry(1, 1) is None
    assert admit(admission, add(1, 1, flags=RECOVERY), add(1, 2, flags=COPY)) == [OK, OK]


def test_fencing_an_unknown_ledger_leaves_a_record_with_its_key() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    assert admission.fence(1, KEY) is OK
    assert admit(admission, add(1, 0)) == [FENCED]
    again = make(storage)  # after a restart
    assert admit(again, add(1, 0)) == [FENCED]
    assert admit(again, add(1, 0, master_key=KEY + 1, flags=RECOVERY)) == [UNAUTHORIZED]


def test_fencing_twice_writes_once() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    admission.fence(1, KEY)
    written = len(storage.batches)
    admission.fence(1, KEY)
    assert len(storage.batches) == written


def test_a_recovery_add_fences_and_a_copy_does_not() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    assert admit(admission, add(1, 0, flags=COPY)) == [OK]
    assert admit(admission, add(1, 1)) == [OK]
    assert admit(admission, add(1, 2, flags=RECOVERY)) == [OK]
    assert admit(admission, add(1, 3)) == [FENCED]
    assert admit(make(storage), add(1, 3)) == [FENCED]


def test_a_recovery_add_to_an_unknown_ledger_is_stored_and_fences() -> None:
    storage = FaultyStorage()
    assert admit(make(storage), add(1, 4, flags=RECOVERY)) == [OK]
    assert admit(make(storage), add(1, 5)) == [FENCED]


def test_a_repeated_entry_is_acked_and_the_stored_copy_stays() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    admit(admission, add(1, 0), add(1, 5, confirmed=4))
    # A recoverer wraps the payload again: another `confirmed`, another checksum.
    assert admit(admission, add(1, 5, confirmed=2, flags=RECOVERY)) == [OK]
    assert storage.entry(1, 5) == envelope(1, 5, confirmed=4)


@pytest.mark.parametrize("restart", [False, True])
def test_another_payload_under_the_same_id_is_a_conflict(
    restart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    storage = FaultyStorage()
    admission = make(storage)
    admit(admission, add(1, 5))
    admission = make(storage) if restart else admission
    assert admit(admission, add(1, 5, b"PAYLOAD")) == [CONFLICT]
    assert storage.entry(1, 5) == envelope(1, 5)
    assert "entry offered with other content than stored" in caplog.text


def test_conflicts_are_counted_and_logged_once_per_ledger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    admission = make(FaultyStorage())
    admit(admission, *(add(ledger, entry) for ledger in (1, 2) for entry in range(10)))
    for ledger in (1, 2):
        for entry in range(10):
            assert admit(admission, add(ledger, entry, b"PAYLOAD")) == [CONFLICT]
    assert admission.conflicts == 20
    assert caplog.text.count("entry offered with other content than stored") == 2


def test_another_length_under_the_same_id_is_a_conflict() -> None:
    longer = bytearray(envelope(1, 5))
    longer[31] += 1  # the last byte of `length`; the payload is the same
    with pytest.raises(EnvelopeDamaged):
        same_entry(bytes(longer), envelope(1, 5))
    assert not same_entry(envelope(1, 5), bytes(longer))


def test_a_repeated_entry_in_a_frame_is_acked_and_a_different_payload_conflicts() -> None:
    storage = FaultyStorage()
    admitted = make(storage).admit(
        decode_adds(add(1, 0) + add(1, 0) + add(1, 0, b"PAYLOAD")), verified=True
    )
    assert len(admitted.stored) == 2
    assert [code for ack in admitted.refused for _, _, code in decode_acks(ack)] == [CONFLICT]
    assert storage.entry(1, 0) == envelope(1, 0)


def test_a_gap_is_filled_later() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    assert admit(admission, add(1, 5), add(1, 2), add(1, 0)) == [OK, OK, OK]
    assert storage.entry_ids(1, 0, entries_max=10) == [0, 2, 5]


def test_an_add_with_a_fault_is_answered_with_it_and_changes_nothing() -> None:
    storage = FaultyStorage()
    broken = bytearray(add(1, 1))
    broken[-1] ^= 1
    assert admit(make(storage), add(1, 0), bytes(broken), add(1, 2)) == [OK, BookieCode.CORRUPT, OK]
    assert storage.entry_ids(1, 0, entries_max=10) == [0, 2]


def test_a_damaged_stored_copy_is_unknown_and_not_a_conflict() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    admit(admission, add(1, 0))
    ((key, value),) = [put for batch in storage.batches for put in batch if put[0][:1] == b"E"]
    storage.write([(key, value[:-1] + b"?")])
    assert admit(admission, add(1, 0)) == [IO_ERROR]


@pytest.mark.parametrize("other", [envelope(1, 1), envelope(2, 0)])
def test_the_envelope_of_another_entry_in_its_place_counts_as_damage(other: bytes) -> None:
    storage = FaultyStorage()
    admission = make(storage)
    admit(admission, add(1, 0), add(1, 1))
    storage.write([(entry_key(1, 0), other)])
    assert admit(admission, add(1, 0)) == [IO_ERROR]
    assert admission.conflicts == 0
    assert admit(admission, add(1, 0, flags=COPY)) == [OK]
    assert storage.entry(1, 0) == envelope(1, 0)


@pytest.mark.parametrize("flags", [RECOVERY, COPY])
def test_a_copy_replaces_only_a_damaged_entry(flags: int) -> None:
    storage = FaultyStorage()
    admission = make(storage)
    admit(admission, add(1, 0), add(1, 1))
    key = entry_key(1, 0)
    storage.write([(key, envelope(1, 0)[:-1] + b"?")])
    assert admit(admission, add(1, 0)) == [IO_ERROR]
    assert admit(admission, add(1, 0, flags=flags)) == [OK]
    assert storage.entry(1, 0) == envelope(1, 0)
    assert admit(admission, add(1, 1, b"PAYLOAD", flags=flags)) == [CONFLICT]
    assert storage.entry(1, 1) == envelope(1, 1)


@pytest.mark.parametrize("flags", [RECOVERY, COPY])
def test_damage_at_the_end_of_a_ledger_does_not_prevent_its_repair(flags: int) -> None:
    class EndUnreadable(FaultyStorage):
        def last_entry(self, ledger: int) -> tuple[int, bytes] | None:
            raise StorageFailed("read the last entry", "block checksum mismatch")

        def entry(self, ledger: int, entry: int) -> bytes | None:
            if entry == 1:
                raise StorageFailed("read an entry", "block checksum mismatch")
            return super().entry(ledger, entry)

    storage = EndUnreadable()
    admit(make(storage), add(1, 0), add(1, 1))
    reopened = make(storage)
    assert admit(reopened, add(1, 1)) == [IO_ERROR]
    assert admit(reopened, add(1, 1, flags=flags)) == [OK]
    ordinary = 0 if flags == COPY else flags  # a recoverer's add has fenced the ledger
    rest = [add(1, entry, flags=ordinary) for entry in (2, 3)]
    assert admit(reopened, add(1, 0, b"PAYLOAD", flags=ordinary), *rest) == [CONFLICT, OK, OK]
    assert admit(reopened, add(1, 3, flags=ordinary)) == [OK]
    assert admit(reopened, add(1, 3, b"other", flags=ordinary)) == [CONFLICT]


@pytest.mark.parametrize(
    "record", [b"", b"x" * 22, encode_ledger_record(LedgerRecord(1, True, 1))[1:]]
)
def test_a_damaged_ledger_record_is_unknown_for_that_ledger_only(record: bytes) -> None:
    storage = FaultyStorage()
    storage.write([(ledger_key(1), record)])
    admission = make(storage)
    assert admit(admission, add(1, 0), add(2, 0)) == [IO_ERROR, OK]
    with pytest.raises(StorageFailed):
        admission.fence(1, KEY)
    with pytest.raises(StorageFailed):
        admission.state(1)


def test_an_unreadable_store_is_unknown() -> None:
    storage = FaultyStorage()
    admission = make(storage)
    admit(admission, add(1, 0))
    storage.failing["read"] = StorageFailed("read", "Input/output error")
    assert admit(admission, add(1, 0), add(2, 0), add(1, 1)) == [IO_ERROR, IO_ERROR, OK]


def test_a_ledger_state_evicted_from_the_cache_is_read_again() -> None:
    storage = FaultyStorage()
    admission = make(storage, ledgers_cached_max=2)
    for ledger in range(10):
        admit(admission, add(ledger, 3))
    assert len(admission._states) == 2
    assert admit(admission, *(add(ledger, 3) for ledger in range(10))) == [OK] * 10
    assert admit(admission, add(0, 3, b"PAYLOAD")) == [CONFLICT]
    admission.fence(5, KEY)
    admit(admission, add(1, 4), add(2, 4))
    assert admit(admission, add(5, 4)) == [FENCED]


def test_a_query_of_an_unknown_ledger_stores_no_state() -> None:
    admission = make(FaultyStorage())
    assert admission.state(1).record is None
    assert not admission._states


class Twin:
    """A simple model: keeps all entries, and scans all of them for each add."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], bytes] = {}
        self.keys: dict[int, int] = {}
        self.fenced: set[int] = set()

    def fence(self, ledger: int, key: int) -> BookieCode:
        if self.keys.setdefault(ledger, key) != key:
            return UNAUTHORIZED
        self.fenced.add(ledger)
        return OK

    def add(self, ledger: int, entry: int, payload: bytes, key: int, flags: int) -> BookieCode:
        if self.keys.get(ledger, key) != key:
            return UNAUTHORIZED
        if ledger in self.fenced and not flags:
            return FENCED
        self.keys[ledger] = key
        if flags & RECOVERY:
            self.fenced.add(ledger)
        if self.entries.get((ledger, entry), payload) != payload:
            return CONFLICT
        self.entries[ledger, entry] = payload
        return OK


ADDS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 5),
        st.sampled_from([b"a" * 7, b"b" * 7]),
        st.sampled_from([KEY, KEY, KEY, 5]),
        st.sampled_from([0, 0, 0, RECOVERY, COPY]),
    ),
    max_size=8,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("frame"), ADDS),
        st.tuples(st.just("fence"), st.integers(0, 2), st.sampled_from([KEY, KEY, 5])),
        st.tuples(st.just("restart")),
    ),
    max_size=12,
)


@given(steps=STEPS, cached=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_random_adds_and_fences_get_the_answers_of_the_simple_model(
    steps: list[tuple], cached: int
) -> None:
    storage, twin = FaultyStorage(), Twin()
    admission = make(storage, ledgers_cached_max=cached)
    for step in steps:
        match step:
            case ("frame", adds):
                frame = b"".join(
                    add(ledger, entry, payload, master_key=key, flags=flags)
                    for ledger, entry, payload, key, flags in adds
                )
                admitted = admission.admit(decode_adds(frame), verified=True)
                got = sorted(
                    ack
                    for acks in (admitted.stored, admitted.refused)
                    for a in acks
                    for ack in decode_acks(a)
                )
                assert got == sorted((a[0], a[1], twin.add(*a)) for a in adds)
            case ("fence", ledger, key):
                assert admission.fence(ledger, key) is twin.fence(ledger, key)
            case ("restart",):
                storage.sync()
                storage = storage.crash()
                admission = make(storage, ledgers_cached_max=cached)
        for ledger, entry in itertools.product(range(3), range(6)):
            stored = storage.entry(ledger, entry)
            assert (stored and stored[36:]) == twin.entries.get((ledger, entry))
        for ledger in range(3):
            record = record_of(storage, ledger)
            assert (record and record.master_key) == twin.keys.get(ledger)
            assert bool(record and record.fenced) == (ledger in twin.fenced)
