"""The reader machine: fallback, speculative reads, refresh of metadata, errors, and the check of
answers."""

from random import Random

import pytest
from fakes.ledger_rig import LEDGER, member, payload_bytes, payload_of

from magnetar.bookie.ledger.health import Grade
from magnetar.bookie.ledger.reader import (
    WINDOWS_MAX,
    Action,
    Ask,
    Deliver,
    GiveUp,
    LedgerEntry,
    RangeRead,
    Refresh,
    Standing,
    outranking,
    sound_prefix,
    standing,
    windows,
)
from magnetar.metadata.model import BookieAddress, BookieRegistration, EntryId, Member
from magnetar.protos.envelope import READ, BookieCode, ReadAnswer, encode_envelope

B = [member(number) for number in range(5)]
OK, NONE = BookieCode.OK, BookieCode.NO_SUCH_ENTRY
ENTRIES = [LedgerEntry(EntryId(3), b"envelope")]


def read(*replicas: Member) -> RangeRead:
    return RangeRead(replicas or B[:3], speculate_after_s=2.0)


def envelope(entry: int, ledger: int = LEDGER) -> bytes:
    return encode_envelope(
        ledger=ledger,
        entry=entry,
        confirmed=entry - 1,
        length=payload_bytes(range(entry + 1)),
        payload=[payload_of(entry)],
    )


def found(*entries: int) -> list[ReadAnswer]:
    return [ReadAnswer(entry, OK, envelope(entry)) for entry in entries]


def frame_of(*answers: ReadAnswer) -> bytes:
    return b"".join(READ.pack(a.entry, a.code, len(a.envelope)) + a.envelope for a in answers)


@pytest.mark.parametrize("code", [code for code in BookieCode if code is not OK])
def test_the_next_replica_is_asked_after_any_failure(code: BookieCode) -> None:
    machine = read()
    assert machine.begin(0.0) == [Ask(B[0])]
    assert machine.on_refused(B[0], code, 0.0) == [Ask(B[1])]
    assert machine.on_entries(B[1], ENTRIES) == [Deliver(ENTRIES, B[1])]
    machine.check()
    assert machine.timer_at() is None


def test_a_read_gives_up_only_after_a_refresh_showed_no_new_replica() -> None:
    machine = read(B[0], B[1])
    machine.begin(0.0)
    machine.on_refused(B[0], NONE, 0.0)
    assert machine.on_refused(B[1], BookieCode.CORRUPT, 0.0) == [Refresh()]
    actions = machine.on_refreshed([B[0], B[1]], 0.0)
    assert actions == [GiveUp({B[0]: NONE, B[1]: BookieCode.CORRUPT})]
    assert machine.on_entries(B[0], ENTRIES) == []


def test_t45_replicas_that_a_refresh_shows_are_asked() -> None:
    machine = read(B[0], B[1])
    machine.begin(0.0)
    machine.on_refused(B[0], BookieCode.CONNECTION_LOST, 0.0)
    machine.on_refused(B[1], BookieCode.CONNECTION_LOST, 0.0)
    assert machine.on_refreshed([B[3], B[1]], 0.0) == [Ask(B[3])]
    actions = machine.on_refused(B[3], BookieCode.CONNECTION_LOST, 0.0)
    assert isinstance(actions[0], GiveUp)  # the reader refreshes only once


def test_a_slow_read_asks_one_more_replica_after_a_growing_delay() -> None:
    machine = read()
    machine.begin(10.0)
    assert machine.timer_at() == 12.0
    assert machine.on_tick(11.9) == []
    assert machine.on_tick(12.0) == [Ask(B[1])]
    assert machine.timer_at() == 16.0
    assert machine.on_tick(16.0) == [Ask(B[2])]
    assert machine.timer_at() is None
    machine.check()
    assert machine.on_entries(B[0], ENTRIES) == [Deliver(ENTRIES, B[0])]
    assert machine.on_entries(B[1], ENTRIES) == []


def test_a_replica_still_being_asked_is_awaited() -> None:
    machine = read(B[0], B[1])
    machine.begin(0.0)
    machine.on_tick(2.0)
    assert machine.on_refused(B[1], NONE, 2.1) == []
    assert machine.on_entries(B[0], ENTRIES) == [Deliver(ENTRIES, B[0])]


@pytest.mark.parametrize("start", range(0, 400, 200))
def test_a_read_with_random_answers_ends_with_one_result(start: int) -> None:
    for seed in range(start, start + 200):
        random = Random(seed)
        machine = read(*B[: random.randint(1, 4)])
        actions: list[Action] = machine.begin(0.0)
        now, asked, ends = 0.0, list[Member](), list[Action]()
        while True:
            for action in actions:
                match action:
                    case Ask(member):
                        assert member not in asked
                        asked.append(member)
                    case Refresh():
                        pass
                    case _:
                        ends.append(action)
            machine.check()
            now += random.random()
            if Refresh() in actions:
                actions = machine.on_refreshed(random.sample(B, 3), now)
            elif machine.asking and random.random() < 0.7:
                member = random.choice(list(machine.asking))
                if random.random() < 0.3:
                    actions = machine.on_entries(member, ENTRIES)
                else:
                    actions = machine.on_refused(
                        member, random.choice([NONE, BookieCode.IO_ERROR]), now
                    )
            elif machine.asking:
                actions = machine.on_tick(now)
            else:
                break
        assert len(ends) == 1, seed


# -- what is a sound answer ----------------------------------------------------------------------


def test_a_sound_prefix_copies_the_payloads() -> None:
    entries, code = sound_prefix(LEDGER, 4, [frame_of(*found(4)), frame_of(*found(5))])
    assert code is OK
    assert [(e.entry, bytes(e.payload), e.length) for e in entries] == [
        (4, payload_of(4), payload_bytes(range(5))),
        (5, payload_of(5), payload_bytes(range(6))),
    ]
    assert len(entries[0].payload.obj) == len(envelope(4))


@pytest.mark.parametrize(
    "bad",
    [
        ReadAnswer(5, OK, envelope(5)[:-1] + b"\xff"),  # T36: one changed byte
        ReadAnswer(5, OK, b""),
        ReadAnswer(5, OK, envelope(6)),  # T37: another entry in it
        ReadAnswer(5, OK, envelope(5, LEDGER + 1)),
        ReadAnswer(6, OK, envelope(6)),
    ],
)
def test_the_prefix_ends_before_a_damaged_or_wrong_entry(bad: ReadAnswer) -> None:
    entries, code = sound_prefix(LEDGER, 4, [frame_of(*found(4), bad, *found(6))])
    assert [entry.entry for entry in entries] == [4]
    assert code is BookieCode.CORRUPT


def test_a_named_refusal_ends_the_prefix() -> None:
    entries, code = sound_prefix(LEDGER, 4, [frame_of(*found(4), ReadAnswer(5, NONE, b""))])
    assert len(entries) == 1
    assert code is NONE
    assert sound_prefix(LEDGER, 4, []) == ([], OK)


def test_an_unknown_answer_has_priority_over_a_negative_answer() -> None:
    assert outranking([NONE, BookieCode.IO_ERROR, NONE]) is BookieCode.IO_ERROR
    assert outranking([NONE, BookieCode.NO_SUCH_LEDGER]) is NONE
    assert outranking([]) is BookieCode.CONNECTION_LOST


# -- whom to ask, and for what -------------------------------------------------------------------


def test_a_replica_is_ranked_by_health_and_registration() -> None:
    listed = registration(read_only=False)
    assert standing(listed, Grade.HEALTHY) is Standing.WELL
    assert standing(listed, Grade.SLOW) is Standing.DOUBTFUL
    assert standing(listed, Grade.FAILING) is Standing.DOUBTFUL
    assert standing(registration(read_only=True), Grade.HEALTHY) is Standing.READ_ONLY
    assert standing(None, Grade.HEALTHY) is Standing.UNKNOWN


def registration(*, read_only: bool) -> BookieRegistration:
    return BookieRegistration(
        bookie=B[0].bookie,
        incarnation=B[0].incarnation,
        boot_epoch=1,
        address=BookieAddress("b0:3181", "b0:3182"),
        http_address="",
        zone="",
        read_only=read_only,
    )


def test_windows_cover_the_range_in_order_and_within_their_bytes() -> None:
    random = Random(5)
    for _ in range(500):
        first, count, size = random.randrange(100), random.randint(1, 200), random.randint(1, 5)
        entry_bytes, bytes_max = random.uniform(1, 5000), random.randint(1, 100_000)
        found, share = windows(
            first, first + count - 1, size=size, entry_bytes=entry_bytes, bytes_max=bytes_max
        )
        assert 1 <= len(found) <= WINDOWS_MAX
        entries = [entry for begin, end in found for entry in range(begin, end + 1)]
        assert entries == list(range(first, first + len(entries)))
        assert len(entries) <= count
        assert all(end - begin + 1 == size for begin, end in found[:-1])
        assert 1 <= share <= bytes_max
        assert len(found) * share <= 2 * bytes_max + 2 * len(found)
        if len(entries) < count and len(found) < WINDOWS_MAX:
            assert (len(found) + 1) * size * entry_bytes >= bytes_max
