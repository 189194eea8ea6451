"""The recovery machine: its named steps, scenarios that lost data in other systems, and random
worlds."""

from dataclasses import replace
from random import Random

import pytest
from fakes.ledger_rig import (
    LEDGER,
    LIMITS,
    LedgerRig,
    RecoveryActor,
    RigBookie,
    WriterActor,
    member,
    open_metadata,
    payload_bytes,
    payload_of,
    recover_fully,
)

from magnetar.bookie.ledger.quorum import Quorum
from magnetar.bookie.ledger.recovery import (
    Abort,
    Action,
    Close,
    Fence,
    LedgerRecovery,
    ReadLength,
    ReadRange,
    RecoveryState,
)
from magnetar.bookie.ledger.writer import FindSpares, SendAdd
from magnetar.metadata.model import EntryId, LedgerMetadata, LedgerState, Segment
from magnetar.protos.envelope import (
    ADD,
    RECOVERY,
    BookieCode,
    ReadAnswer,
    add_envelope,
    decode_envelope,
    encode_envelope,
)

B = [member(number) for number in range(8)]
OK, NONE, NO_LEDGER = BookieCode.OK, BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER
UNKNOWN = [code for code in BookieCode if not code.definite]


def claimed(
    size: int = 3, write: int = 3, ack: int = 2, *, segments: tuple[Segment, ...] = ()
) -> LedgerMetadata:
    """The metadata that the recoverer has stored with its claim."""
    metadata = open_metadata(Quorum(size, write, ack), B[:size])
    return replace(metadata, state=LedgerState.IN_RECOVERY, segments=segments or metadata.segments)


def recovery(size: int = 3, write: int = 3, ack: int = 2, **more: object) -> LedgerRecovery:
    return LedgerRecovery(claimed(size, write, ack, **more), limits=LIMITS)  # type: ignore[arg-type]


def envelope(entry: int, *, confirmed: int = -1, ledger: int = LEDGER) -> bytes:
    return encode_envelope(
        ledger=ledger,
        entry=entry,
        confirmed=confirmed,
        length=payload_bytes(range(entry + 1)),
        payload=[payload_of(entry)],
    )


def found(*entries: int) -> list[ReadAnswer]:
    return [ReadAnswer(entry, OK, envelope(entry)) for entry in entries]


def missing(entry: int, code: BookieCode = NONE) -> list[ReadAnswer]:
    return [ReadAnswer(entry, code, b"")]


def fence(
    machine: LedgerRecovery, seat: int, code: BookieCode = NONE, confirmed: int = -1
) -> list[Action]:
    actions = machine.on_fence_answer(seat, code, confirmed, 0.0)
    machine.check()
    return actions


def answer(machine: LedgerRecovery, seat: int, *answers: ReadAnswer) -> list[Action]:
    """Give the machine all answers of a read, then the end of the read."""
    actions = machine.on_answers(seat, answers, 0.0)
    machine.check()
    actions += machine.on_read_end(seat, OK, 0.0)
    machine.check()
    return actions


def ack(machine: LedgerRecovery, seat: int, *entries: int) -> list[Action]:
    actions = machine.on_acks(seat, entries, 0.0)
    machine.check()
    return actions


def begun(size: int = 3, write: int = 3, ack: int = 2, *, confirmed: int = -1) -> LedgerRecovery:
    """A recovery that has fenced its bookies and reads from entry `confirmed` + 1."""
    machine = recovery(size, write, ack)
    assert machine.begin() == [Fence(seat) for seat in range(size)]
    for seat in range(size):
        if machine.state is RecoveryState.FENCING:
            fence(machine, seat, OK if confirmed >= 0 else NONE, confirmed)
    assert machine.state is RecoveryState.READING
    return machine


def closes(actions: list[Action]) -> list[Close]:
    return [action for action in actions if isinstance(action, Close)]


def aborts(actions: list[Action]) -> list[str]:
    return [action.why for action in actions if isinstance(action, Abort)]


# -- R2: fencing ---------------------------------------------------------------------------------


def test_r2_reading_begins_once_no_writer_can_confirm() -> None:
    machine = recovery()
    machine.begin()
    assert fence(machine, 0) == []
    actions = fence(machine, 2)  # Qw - Qa + 1 = 2 of 3; a hung bookie does not matter (T18)
    assert [a for a in actions if isinstance(a, ReadRange)] == [
        ReadRange(seat, 0, 2047) for seat in range(3)
    ]
    assert fence(machine, 1) == []


def test_r2_coverage_goes_by_windows_when_striped() -> None:
    machine = recovery(6, 3, 2)
    machine.begin()
    for seat in (1, 2, 4):
        assert fence(machine, seat) == []
    assert fence(machine, 5)  # 0 and 3 are unknown, and share no write set
    assert machine.state is RecoveryState.READING


@pytest.mark.parametrize("code", [*UNKNOWN, BookieCode.UNAUTHORIZED, BookieCode.BAD_REQUEST])
def test_r2_an_unclear_answer_is_not_a_fence(code: BookieCode) -> None:
    machine = recovery()
    machine.begin()
    fence(machine, 0)
    assert fence(machine, 1, code) == []
    actions = fence(machine, 2, code)
    assert len(aborts(actions)) == 1
    assert code.name in aborts(actions)[0]


@pytest.mark.parametrize("code", [OK, NONE, NO_LEDGER])
def test_r2_a_clear_answer_is_a_fence(code: BookieCode) -> None:
    machine = recovery(1, 1, 1)
    machine.begin()
    fence(machine, 0, code)
    assert machine.state is RecoveryState.READING


def test_t4_an_empty_ledger_is_closed_empty_only_with_enough_negatives() -> None:
    machine = begun()
    assert answer(machine, 0, *missing(0)) == []
    actions = answer(machine, 1, *missing(0, NO_LEDGER))
    assert actions == [Close(-1, 0, machine.metadata.segments)]

    machine = begun()
    answer(machine, 0, *missing(0))
    assert machine.on_read_end(1, BookieCode.CONNECTION_LOST, 0.0) == []
    actions = machine.on_read_end(2, BookieCode.TIMEOUT, 0.0)
    assert len(aborts(actions)) == 1


# -- R3: where to begin --------------------------------------------------------------------------


def test_r3_reads_begin_after_the_highest_confirmed_entry_that_a_bookie_reports() -> None:
    machine = recovery()
    machine.begin()
    fence(machine, 0, OK, 4)
    actions = fence(machine, 1, OK, 7)
    assert actions[0] == ReadRange(0, 8, 8 + 2047)


def test_t3_reads_never_begin_before_the_last_segment() -> None:
    """The bookies of a new ensemble without entries report no confirmed entry."""
    segments = (Segment(EntryId(0), tuple(B[:3])), Segment(EntryId(10), tuple(B[3:6])))
    machine = recovery(segments=segments)
    machine.begin()
    fence(machine, 0)
    actions = fence(machine, 1)
    assert [a.first for a in actions if isinstance(a, ReadRange)] == [10, 10, 10]
    answer(machine, 0, *missing(10))
    # T52: the recovery wrote no entry back, so the recoverer reads the length from the last entry.
    assert answer(machine, 1, *missing(10)) == [ReadLength(9)]
    assert machine.on_length(1234) == [Close(9, 1234, (segments[1],))]
    closed = machine.close_metadata(machine.metadata, Close(9, 1234, (segments[1],)))
    assert closed.segments == segments
    assert (closed.state, closed.last_entry, closed.length) == (LedgerState.CLOSED, 9, 1234)


# -- R4: what a read proves ----------------------------------------------------------------------


def test_one_sound_copy_is_enough_and_is_written_back_everywhere() -> None:
    machine = begun()
    actions = machine.on_answers(1, found(0), 0.0)
    assert [a for a in actions if isinstance(a, SendAdd)] == [SendAdd(0, s) for s in range(3)]


def test_a_positive_answer_outweighs_negatives_that_are_not_enough() -> None:
    machine = begun()
    answer(machine, 0, *missing(0))
    assert machine.next == 0
    machine.on_answers(1, found(0), 0.0)
    assert machine.next == 1


@pytest.mark.parametrize("code", UNKNOWN)
def test_an_unknown_answer_is_no_negative(code: BookieCode) -> None:
    machine = begun()
    answer(machine, 0, *missing(0, code))
    answer(machine, 1, *missing(0, code))
    actions = answer(machine, 2, *missing(0))
    assert len(aborts(actions)) == 1
    assert closes(actions) == []


def test_with_equal_quorums_one_negative_is_a_proof() -> None:
    machine = begun(3, 3, 3)
    assert closes(answer(machine, 2, *missing(0)))


@pytest.mark.parametrize(
    "bad",
    [
        ReadAnswer(0, OK, envelope(0)[:-1] + b"\0"),  # checksum
        ReadAnswer(0, OK, envelope(0)[:20]),
        ReadAnswer(0, OK, envelope(1)),  # T37: another entry in it
        ReadAnswer(0, OK, envelope(0, ledger=LEDGER + 1)),
        ReadAnswer(1, OK, envelope(1)),  # not the entry that was asked for
    ],
)
def test_a_damaged_or_wrong_copy_is_unknown(bad: ReadAnswer) -> None:
    machine = begun()
    answer(machine, 0, bad)
    assert machine.next == 0
    answer(machine, 1, *missing(0))
    assert machine.end is None
    assert closes(answer(machine, 2, *missing(0)))


def test_a_read_that_ends_without_an_answer_proves_nothing() -> None:
    machine = begun()
    assert answer(machine, 0) == []
    answer(machine, 1)
    assert len(aborts(answer(machine, 2))) == 1


def test_entries_are_decided_in_order_when_later_answers_come_first() -> None:
    machine = begun()
    answer(machine, 0, *found(0, 1), *missing(2))
    assert machine.next == 2
    answer(machine, 1, *found(0, 1, 2, 3), *missing(4))
    assert machine.next == 4
    assert machine.end is None  # one negative for 4; seat 0 is asked again
    assert closes(answer(machine, 2, *missing(0))) == []


def test_a_seat_that_lacked_an_entry_is_asked_on_after_others_had_it() -> None:
    machine = begun()
    assert answer(machine, 0, *missing(0)) == []  # not asked again yet
    actions = machine.on_answers(1, found(0), 0.0)
    assert ReadRange(0, 1, 1 + 2047) in actions


def test_striped_reads_ask_a_seat_for_its_own_entries_only() -> None:
    machine = recovery(4, 2, 2)
    machine.begin()
    for seat in range(4):
        fence(machine, seat)
    asked = [machine._reads[seat].asked for seat in range(4)]
    assert asked == [0, 0, 1, 2]


# -- R5, R6: writing back ------------------------------------------------------------------------


def test_r5_write_backs_are_the_bytes_that_were_found_with_the_recovery_flag() -> None:
    """All copies of an entry stay equal. No copy has a higher "confirmed" than its writer knew
    (D15)."""
    machine = begun()
    found_bytes = envelope(0, confirmed=-1)
    machine.on_answers(2, [ReadAnswer(0, OK, found_bytes)], 0.0)
    parts = machine.parts(0)
    assert parts is not None
    assert add_envelope(parts) == found_bytes
    assert ADD.unpack(parts[0]) == (RECOVERY, len(found_bytes), machine.metadata.master_key)


def test_r5_the_end_waits_for_every_write_back() -> None:
    machine = begun()
    answer(machine, 0, *found(0, 1), *missing(2))
    assert answer(machine, 1, *missing(0)) == [ReadRange(1, 2, 2 + 2047)]
    assert answer(machine, 1, *missing(2)) == []
    assert machine.end == 1
    assert ack(machine, 0, 0, 1) == []
    assert ack(machine, 1, 0) == []
    length = payload_bytes(range(2))
    assert ack(machine, 2, 1) == [Close(1, length, machine.metadata.segments)]


def test_r6_a_failed_member_is_replaced_without_a_metadata_write() -> None:
    machine = begun()
    answer(machine, 0, *found(0, 1), *missing(2))
    ack(machine, 0, 0)
    ack(machine, 1, 0)
    lost = machine.on_add_failed(2, BookieCode.CONNECTION_LOST, 0.0)
    assert lost == [FindSpares((2,))]
    new = (B[0], B[1], B[5])
    assert machine.on_spares_found({2: B[5]}, 0.0) == [SendAdd(1, 2)]
    assert machine.metadata.segments == (Segment(EntryId(0), tuple(B[:3])),)
    assert machine.asked == tuple(B[:3])  # the members to read stay the same
    ack(machine, 1, 1)
    ack(machine, 2, 1)
    (close,) = closes(answer(machine, 1, *found(0, 1), *missing(2)))
    assert close.segments == (Segment(EntryId(0), tuple(B[:3])), Segment(EntryId(1), new))


def test_r6_without_a_spare_recovery_continues_with_the_ack_quorum() -> None:
    machine = begun()
    answer(machine, 0, *found(0), *missing(1))
    answer(machine, 1, *found(0), *missing(1))
    machine.on_add_failed(2, BookieCode.CONNECTION_LOST, 0.0)
    assert machine.on_spares_found({}, 0.0) == []
    ack(machine, 0, 0)
    assert closes(ack(machine, 1, 0))


def test_r6_a_member_that_failed_before_write_backs_is_replaced_at_the_first() -> None:
    machine = begun()
    assert machine.on_add_failed(1, BookieCode.CONNECTION_LOST, 0.0) == []
    assert machine.on_add_failed(2, BookieCode.CONNECTION_LOST, 0.0) == []
    actions = machine.on_answers(0, found(0), 0.0)
    assert SendAdd(0, 0) in actions
    assert FindSpares((1, 2)) in actions
    assert aborts(actions) == []
    assert set(machine.on_spares_found({1: B[5], 2: B[6]}, 0.0)) == {SendAdd(0, 1), SendAdd(0, 2)}
    machine.check()


def test_r6_with_too_few_bookies_for_write_backs_recovery_aborts() -> None:
    machine = begun()
    answer(machine, 0, *found(0), *missing(1))
    machine.on_add_failed(1, BookieCode.CONNECTION_LOST, 0.0)
    assert machine.on_add_failed(2, BookieCode.IO_ERROR, 0.0) == []
    assert machine.on_spares_found({}, 0.0) == [FindSpares((1, 2))]
    assert len(aborts(machine.on_spares_found({}, 0.0))) == 1
    assert machine.state is RecoveryState.ABORTED
    assert ack(machine, 0, 0) == []


def test_another_payload_under_the_same_id_aborts() -> None:
    machine = begun()
    answer(machine, 0, *found(0), *missing(1))
    assert len(aborts(machine.on_add_failed(2, BookieCode.CONFLICT, 0.0))) == 1


def test_silence_during_write_back_is_a_failure() -> None:
    machine = begun()
    answer(machine, 0, *found(0), *missing(1))
    ack(machine, 0, 0)
    assert machine.on_tick(5.0) == [FindSpares((1, 2))]


# -- R7: the end ---------------------------------------------------------------------------------


def test_r7_the_close_keeps_changes_by_others_to_sealed_segments() -> None:
    """T53: replicas of a sealed segment were moved between the claim and the close."""
    segments = (Segment(EntryId(0), tuple(B[:3])), Segment(EntryId(5), tuple(B[1:4])))
    machine = recovery(segments=segments)
    moved = replace(machine.metadata, segments=(Segment(EntryId(0), tuple(B[4:7])), segments[1]))
    private = (Segment(EntryId(5), tuple(B[1:4])), Segment(EntryId(6), tuple(B[2:5])))
    closed = machine.close_metadata(moved, Close(6, 99, private))
    assert closed.segments == (moved.segments[0], *private)


def test_r7_a_changed_last_segment_fails_the_close() -> None:
    machine = recovery()
    touched = replace(machine.metadata, segments=(Segment(EntryId(0), tuple(B[1:4])),))
    with pytest.raises(AssertionError, match="last segment"):
        machine.close_metadata(touched, Close(-1, 0, touched.segments))


def test_t52_unreadable_last_entry_aborts_rather_than_closing_with_a_wrong_length() -> None:
    machine = begun(confirmed=3)
    answer(machine, 0, *missing(4))
    assert answer(machine, 1, *missing(4)) == [ReadLength(3)]
    assert len(aborts(machine.on_length(None))) == 1


def test_t52_the_length_is_that_of_the_last_entry_not_of_the_fence_answers() -> None:
    """A bookie may hold entries after a gap. Their length is not the length of the ledger."""
    machine = begun()
    answer(machine, 0, *found(0), *missing(1))
    answer(machine, 1, *missing(0))
    answer(machine, 2, *missing(0))
    answer(machine, 1, *missing(1))
    ack(machine, 0, 0)
    (close,) = closes(ack(machine, 1, 0))
    assert close.length == payload_bytes(range(1))


def test_nothing_happens_after_the_end() -> None:
    machine = begun()
    answer(machine, 0, *missing(0))
    assert closes(answer(machine, 1, *missing(0)))
    assert machine.on_answers(2, found(0), 0.0) == []
    assert machine.on_read_end(2, BookieCode.TIMEOUT, 0.0) == []
    assert machine.on_tick(1e6) == []
    assert ack(machine, 0, 0) == []
    assert "decided" in machine.describe()


# -- scenarios with bookies ----------------------------------------------------------------------


def deliver_all(world: LedgerRig) -> None:
    while world.step():
        pass


def test_t2_an_add_that_lands_on_an_unfenced_bookie_is_refused() -> None:
    """The last-confirmed reads fence only bookies 0 and 1. Bookie 1 has entry 0. The adds of the
    entry to bookies 0 and 2 are under way. Each read also fences its bookie, so "no such entry"
    from bookies 0 and 2 is final."""
    bookies = [RigBookie(each) for each in B[:3]]
    world = LedgerRig.build(Quorum(3, 3, 2), 3, Random(1))
    writer = WriterActor(world)
    writer.append()
    add = writer.machine.parts(0)
    assert add is not None
    assert bookies[1].add(add) is OK
    machine = recovery()
    machine.begin()
    for seat in (0, 1):
        fence(machine, seat, *bookies[seat].last_confirmed(fence=True))
    assert not bookies[2].fenced
    answer(machine, 2, bookies[2].read(0, fence=True))
    assert closes(answer(machine, 0, bookies[0].read(0, fence=True)))
    assert bookies[0].add(add) is BookieCode.FENCED
    assert bookies[2].add(add) is BookieCode.FENCED


def test_t2_in_any_order_the_add_is_refused_or_included() -> None:
    for seed in range(60):
        world = LedgerRig.build(Quorum(3, 3, 2), 3, Random(seed))
        writer = WriterActor(world)
        writer.append()
        deliver_all(world)
        writer.append()  # three adds under way
        actor = RecoveryActor(world)
        actor.begin()
        deliver_all(world)  # the seed chooses the order
        assert actor.result is not None
        world.check_closed()


def test_t18_a_hung_bookie_is_not_waited_for() -> None:
    world = LedgerRig.build(Quorum(3, 3, 2), 3, Random(1))
    writer = WriterActor(world)
    for _ in range(5):
        writer.append()
    deliver_all(world)
    hung = world.metadata.last_segment.members[1]
    call = world.call

    def silent(to: object, request: object, reply: object) -> None:
        if to != hung:
            call(to, request, reply)  # type: ignore[arg-type]

    world.call = silent  # type: ignore[method-assign]
    actor = RecoveryActor(world)
    actor.begin()
    deliver_all(world)
    assert actor.result is not None
    world.check_closed()


def test_t18_two_unreachable_bookies_of_three_abort() -> None:
    world = LedgerRig.build(Quorum(3, 3, 2), 3, Random(1))
    writer = WriterActor(world)
    writer.append()
    deliver_all(world)
    for dead in world.metadata.last_segment.members[:2]:
        world.bookies[dead].up = False
    actor = RecoveryActor(world)
    actor.begin()
    deliver_all(world)
    assert actor.done
    assert actor.result is None
    assert "TIMEOUT" in actor.why
    assert world.metadata.state is LedgerState.IN_RECOVERY
    recover_fully(world)
    world.check_closed()


def test_t17_two_recoverers_agree_although_a_write_back_fails() -> None:
    for seed in range(60):
        world = LedgerRig.build(Quorum(3, 3, 2), 5, Random(seed))
        writer = WriterActor(world)
        for _ in range(3):
            writer.append()
        for _ in range(8):
            world.step()
        actors = [RecoveryActor(world), RecoveryActor(world)]
        for actor in actors:
            actor.begin()
        for _ in range(10):
            world.step()
        victim = world.bookies[world.metadata.last_segment.members[seed % 3]]
        victim.up = False
        deliver_all(world)
        victim.up = True
        recover_fully(world)
        world.check_closed()
        ends = {actor.result.last_entry for actor in actors if actor.result is not None}
        assert ends <= {world.metadata.last_entry}


def test_t19_an_entry_on_one_bookie_is_kept_or_dropped_for_all_readers() -> None:
    ends = set()
    for seed in range(40):
        world = LedgerRig.build(Quorum(3, 3, 2), 3, Random(seed))
        writer = WriterActor(world)
        writer.append()
        world.step()  # one add arrives; the other adds are lost with the writer
        world.flying.clear()
        recover_fully(world)
        world.check_closed()
        ends.add(world.metadata.last_entry)
    assert ends == {-1, 0}


def test_d15_a_readers_view_of_confirmed_never_gets_ahead_of_the_close() -> None:
    """Only one bookie holds the unconfirmed entries 0 and 1. The first recoverer dies while it
    writes them back. The second recoverer closes the ledger without them. No client may have
    learned that entry 0 is confirmed."""
    for seed in range(200):
        world = LedgerRig.build(Quorum(3, 3, 2), 4, Random(seed))
        writer = WriterActor(world)
        writer.append()
        writer.append()
        for parts in (writer.machine.parts(0), writer.machine.parts(1)):
            assert parts is not None
            world.bookies[writer.machine.ensemble[0]].add(parts)
        world.flying.clear()
        first, second = RecoveryActor(world), RecoveryActor(world)
        first.begin()
        for step in range(60):
            if step == seed % 20:
                second.begin()
            if step == 10 + seed % 30:
                first.dead = True
            world.step()
            world.peek()
        recover_fully(world)
        world.check_closed()


# -- random worlds -------------------------------------------------------------------------------

QUORUMS = [(3, 3, 2), (2, 2, 2), (3, 2, 2), (5, 3, 2), (3, 3, 3), (1, 1, 1), (4, 3, 2), (4, 2, 1)]


def crowded_world(seed: int) -> tuple[LedgerRig, WriterActor, list[RecoveryActor]]:
    """Run a writer that changes its ensemble and closes the ledger. Up to three recoverers start at
    any time and die at any step. Bookies die and return, and replies are lost (T12, T15, T16,
    T17)."""
    random = Random(seed)
    quorum = Quorum(*random.choice(QUORUMS))
    world = LedgerRig.build(
        quorum,
        quorum.ensemble_size + random.randrange(4),
        random,
        loss=random.choice([0.0, 0.02, 0.08]),
    )
    writer, recoverers = WriterActor(world), list[RecoveryActor]()
    for turn in range(150):
        chance = random.random()
        if chance < 0.20:
            writer.append()
        elif chance < 0.22:
            bookie = random.choice(list(world.bookies.values()))
            bookie.up = not bookie.up
        elif chance < 0.25:
            writer.tick()
        elif chance < 0.30:
            world.peek()
        elif chance < 0.32 and len(recoverers) < 3 and turn > 60:
            recoverers.append(RecoveryActor(world))
            recoverers[-1].begin()
        elif chance < 0.325 and recoverers:
            random.choice(recoverers).dead = True
        elif chance < 0.335 and turn > 100:
            writer.close()
        else:
            for _ in range(3):
                world.step()
    return world, writer, recoverers


@pytest.mark.parametrize("start", range(0, 160, 40))
def test_random_worlds_neither_lose_nor_invent_entries(start: int) -> None:
    confirmed = recovered = closed_by_writer = aborted = 0
    for seed in range(start, start + 40):
        world, writer, recoverers = crowded_world(seed)
        recover_fully(world)
        world.check_closed()
        results = {actor.result.last_entry for actor in recoverers if actor.result is not None}
        assert results <= {world.metadata.last_entry}, seed
        confirmed += world.confirmed + 1
        recovered += sum(a.machine.recovered for a in recoverers if a.machine is not None)
        closed_by_writer += writer.closed
        aborted += sum(a.done and a.result is None for a in recoverers)
    assert confirmed > 300, "the worlds did not do anything"
    assert recovered > 30
    assert aborted > 0, "no recovery ever met an unknown"


def test_a_fenced_bookie_takes_recovery_adds_only() -> None:
    bookie = RigBookie(B[0])
    machine = begun()
    machine.on_answers(0, found(0), 0.0)
    parts = machine.parts(0)
    assert parts is not None
    assert bookie.add(parts) is OK
    assert bookie.fenced
    assert decode_envelope(bookie.entries[0]).entry == 0
