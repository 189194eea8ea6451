"""The writer machine: a test for each rule of ensemble changes, then random worlds."""

from random import Random

import pytest
from fakes.ledger_rig import LEDGER, LedgerRig, WriterActor, member, payload_of, recover_fully

from magnetar.bookie.ledger.quorum import Quorum
from magnetar.bookie.ledger.verdict import ADD_VERDICTS, AddVerdict
from magnetar.bookie.ledger.writer import (
    ENTRY_OVERHEAD_BYTES,
    Action,
    Confirm,
    Fail,
    FindSpares,
    LedgerWriter,
    Missed,
    RecordEnsemble,
    SendAdd,
    WriterLimits,
    WriterState,
)
from magnetar.metadata.model import EntryId, LedgerState, Member
from magnetar.protos.envelope import BookieCode

LIMITS = WriterLimits(add_timeout_s=5.0, quorum_timeout_s=30.0, changes_max=3)
B = [member(number) for number in range(8)]


def writer(size: int = 3, write: int = 3, ack: int = 2, **more: object) -> LedgerWriter:
    quorum = Quorum(size, write, ack)
    return LedgerWriter(quorum, B[:size], limits=LIMITS, now=0.0, **more)  # type: ignore[arg-type]


def append(machine: LedgerWriter, count: int = 1, *, now: float = 0.0) -> None:
    for _ in range(count):
        machine.append(10, (b"head", b"body"), now)
        machine.check()


def ack(machine: LedgerWriter, seat: int, *entries: int) -> list[Action]:
    actions = machine.on_acks(seat, entries)
    machine.check()
    return actions


def lose(machine: LedgerWriter, seat: int) -> list[Action]:
    actions = machine.on_add_failed(seat, BookieCode.CONNECTION_LOST)
    machine.check()
    return actions


def exchange(machine: LedgerWriter, spares: dict[int, Member], *, now: float = 1.0) -> list[Action]:
    """Report the spares as found and the new ensemble as recorded."""
    (record,) = machine.on_spares_found(spares)
    machine.check()
    assert isinstance(record, RecordEnsemble)
    assert record.first == machine.confirmed + 1
    assert all(record.members[seat] == spare for seat, spare in spares.items())
    actions = machine.on_recorded(now)
    machine.check()
    assert machine.ensemble == record.members
    return actions


def no_spares(machine: LedgerWriter) -> list[Action]:
    actions = machine.on_spares_found({})
    machine.check()
    return actions


# -- appending and confirming --------------------------------------------------------------------


def test_an_entry_goes_to_its_write_set_and_is_confirmed_at_the_ack_quorum() -> None:
    machine = writer(4, 3, 2)
    assert machine.append(10, (b"", b""), 0.0) == (0, 1, 2)
    assert machine.append(10, (b"", b""), 0.0) == (1, 2, 3)
    assert machine.append(10, (b"", b""), 0.0) == (0, 2, 3)
    assert ack(machine, 2, 0, 1, 2) == []
    assert ack(machine, 0, 0, 2) == [Confirm(0)]  # entry 1 delays entry 2
    assert ack(machine, 1, 1) == [Confirm(2)]
    assert machine.confirmed_length == 30


def test_confirmation_is_in_order_and_repeated_acks_count_once() -> None:
    machine = writer()
    append(machine, 2)
    assert ack(machine, 0, 1) == []
    assert ack(machine, 0, 1, 1) == []
    assert ack(machine, 1, 1) == []
    assert ack(machine, 0, 0) == []
    assert ack(machine, 2, 0) == [Confirm(1)]
    assert ack(machine, 2, 0, 1) == []


def test_acks_from_outside_the_write_set_do_not_count() -> None:
    machine = writer(4, 2, 2)
    append(machine)
    assert ack(machine, 0, 0) == []
    assert ack(machine, 3, 0) == []
    assert machine.confirmed == -1


def test_an_entry_is_kept_until_its_whole_write_set_has_answered() -> None:
    machine = writer()
    append(machine, 2)
    ack(machine, 0, 0, 1)
    ack(machine, 1, 0, 1)
    assert machine.confirmed == 1
    assert machine.parts(0) == (b"head", b"body")
    assert machine.laggards == 0b100
    assert machine.lag_bytes == 20 + 2 * ENTRY_OVERHEAD_BYTES
    assert machine.in_flight_bytes == 0
    ack(machine, 2, 0)
    assert machine.parts(0) is None
    assert machine.parts(1) is not None
    assert machine.lag_bytes == 10 + ENTRY_OVERHEAD_BYTES
    ack(machine, 2, 1)
    assert machine.laggards == 0
    assert machine.lag_bytes == 0


def test_an_entry_is_released_when_the_laggard_fails() -> None:
    machine = writer()
    append(machine)
    ack(machine, 0, 0)
    ack(machine, 1, 0)
    assert lose(machine, 2) == []
    assert machine.parts(0) is None


def test_a_ledger_that_nothing_is_appended_to_looks_for_no_spares() -> None:
    machine = writer()
    append(machine)
    ack(machine, 0, 0)
    ack(machine, 1, 0)
    assert lose(machine, 2) == []
    assert machine.on_spares() == []
    append(machine)
    ack(machine, 0, 1)
    ack(machine, 1, 1)
    assert machine.idle  # the entry has two copies only, so the writer looks for a third bookie
    assert machine.on_spares() == [FindSpares((2,))]


# -- what a refusal means ------------------------------------------------------------------------


def test_every_code_but_ok_has_a_verdict() -> None:
    assert set(ADD_VERDICTS) == set(BookieCode) - {BookieCode.OK}
    for code in BookieCode:
        if not code.definite:  # an unknown outcome never ends the ledger
            assert ADD_VERDICTS[code] is AddVerdict.BOOKIE_FAILED


@pytest.mark.parametrize("code", [code for code in BookieCode if code is not BookieCode.OK])
def test_each_refusal_has_the_effect_of_its_verdict(code: BookieCode) -> None:
    machine = writer()
    append(machine, 2)
    actions = machine.on_add_failed(1, code)
    machine.check()
    if ADD_VERDICTS[code] is AddVerdict.BOOKIE_FAILED:
        assert actions == [FindSpares((1,))]
    else:
        assert actions == [Fail(code)]
        # I5: after the failure nothing succeeds any more.
        assert ack(machine, 0, 0, 1) == []
        assert ack(machine, 2, 0, 1) == []
        assert machine.on_tick(100.0) == []
        assert machine.confirmed == -1
        assert machine.in_flight_bytes == 0


# -- ensemble change: W1 to W10, T12 to T14 ------------------------------------------------------


def test_w1_w2_nothing_is_confirmed_while_the_ensemble_is_recorded() -> None:
    machine = writer()
    append(machine, 2)
    assert lose(machine, 2) == [FindSpares((2,))]
    ack(machine, 0, 0)
    assert ack(machine, 1, 0) == [Confirm(0)]  # the search for spares delays no confirmation
    record = RecordEnsemble(1, (B[0], B[1], B[3]))
    assert machine.on_spares_found({2: B[3]}) == [record]
    assert machine.ensemble == (B[0], B[1], B[2])  # W1: the new one is not used yet
    assert ack(machine, 0, 1) == []
    assert ack(machine, 1, 1) == []
    assert machine.confirmed == 0
    assert machine.on_recorded(1.0) == [Missed(B[2], 0, 0), SendAdd(1, 2), Confirm(1)]
    machine.check()
    assert machine.segment_first == 1


def test_w2_after_a_failed_change_the_entries_acked_meanwhile_are_confirmed() -> None:
    machine = writer()
    append(machine)
    lose(machine, 2)
    machine.on_spares_found({2: B[3]})
    ack(machine, 0, 0)
    ack(machine, 1, 0)
    assert machine.on_not_recorded() == [Confirm(0)]
    machine.check()
    assert machine.ensemble == (B[0], B[1], B[2])
    append(machine)
    assert machine.on_spares() == [FindSpares((2,))]


def test_w3_the_change_reaches_every_pending_entry_in_one_step() -> None:
    """The acks of the replaced seat are removed from all entries before an entry is confirmed."""
    machine = writer(3, 3, 2)
    append(machine, 3)
    ack(machine, 2, 0, 1, 2)
    lose(machine, 2)
    ack(machine, 0, 1, 2)
    actions = exchange(machine, {2: B[3]}, now=1.0)
    machine.check()
    assert actions == [SendAdd(0, 2), SendAdd(1, 2), SendAdd(2, 2)]
    assert machine.confirmed == -1  # seat 2's old acks no longer count
    assert ack(machine, 2, 0, 1, 2) == []  # entry 0 has the new member only
    assert ack(machine, 0, 0) == [Confirm(2)]


def test_w5_a_member_that_returns_after_two_changes_gets_the_entry_again() -> None:
    """The ensemble changes from A to B and back to A. The writer sends the entry to the member
    again."""
    machine = writer()
    append(machine)
    lose(machine, 2)
    assert exchange(machine, {2: B[3]}, now=1.0) == [SendAdd(0, 2)]
    assert lose(machine, 2) == [FindSpares((2,))]
    assert exchange(machine, {2: B[2]}, now=2.0) == [SendAdd(0, 2)]
    machine.check()
    ack(machine, 2, 0)
    assert ack(machine, 0, 0) == [Confirm(0)]


def test_t12_an_entry_appended_during_the_change_reaches_the_new_member() -> None:
    machine = writer()
    append(machine)
    lose(machine, 0)
    assert machine.append(10, (b"", b""), 0.5) == (1, 2)
    actions = exchange(machine, {0: B[3]})
    assert actions == [SendAdd(0, 0), SendAdd(1, 0)]
    machine.check()


def test_t12_a_failure_during_the_change_leads_to_another_round() -> None:
    machine = writer(3, 3, 1)
    append(machine)
    assert lose(machine, 0) == [FindSpares((0,))]
    machine.on_spares_found({0: B[3]})
    assert lose(machine, 1) == []
    assert machine.on_recorded(1.0) == [SendAdd(0, 0), FindSpares((1,))]
    machine.check()


def test_t12_a_failure_during_the_search_leads_to_another_round() -> None:
    machine = writer(3, 3, 1)
    append(machine)
    lose(machine, 0)
    assert lose(machine, 1) == []
    assert exchange(machine, {0: B[3]}) == [SendAdd(0, 0), FindSpares((1,))]


def test_t12_a_failed_replacement_leads_to_another_search() -> None:
    machine = writer()
    append(machine)
    lose(machine, 2)
    exchange(machine, {2: B[3]}, now=1.0)
    assert lose(machine, 2) == [FindSpares((2,))]


def test_t12_striped_change_touches_only_the_entries_of_that_seat() -> None:
    machine = writer(4, 2, 2)
    append(machine, 4)  # write sets 01 12 23 30
    ack(machine, 1, 0, 1)
    lose(machine, 3)
    actions = exchange(machine, {3: B[4]})
    assert actions == [SendAdd(2, 3), SendAdd(3, 3)]
    machine.check()


def test_t13_earlier_acks_of_a_replaced_bookie_do_not_count() -> None:
    """The machine drops the earlier acks of a replaced bookie. The appender (in random worlds: the
    writer actor) drops later acks, because the bookie has no seat any more."""
    machine = writer(3, 3, 2)
    append(machine)
    ack(machine, 2, 0)
    lose(machine, 2)
    exchange(machine, {2: B[3]}, now=1.0)
    assert ack(machine, 0, 0) == []
    assert machine.confirmed == -1


def test_w8_changes_are_limited() -> None:
    machine = writer(2, 2, 1)
    append(machine)
    for number in range(LIMITS.changes_max):
        assert lose(machine, 1) == [FindSpares((1,))]
        exchange(machine, {1: B[2 + number]})
    assert lose(machine, 1) == []
    assert machine.on_spares() == []
    assert ack(machine, 0, 0) == [Confirm(0)]


def test_w9_w10_confirmed_entries_are_neither_changed_nor_sent_again() -> None:
    machine = writer()
    append(machine, 3)
    ack(machine, 0, 0, 1)
    ack(machine, 1, 0, 1)
    before = machine.confirmed, machine.confirmed_length, machine.length
    assert lose(machine, 1) == [FindSpares((1,))]
    assert exchange(machine, {1: B[3]}) == [SendAdd(2, 1)]
    machine.check()
    assert (machine.confirmed, machine.confirmed_length, machine.length) == before
    assert machine.segment_first == 2
    ack(machine, 2, 0, 1)  # the laggard of the sealed segment
    assert machine.parts(0) is None


def test_t14_without_a_spare_the_ledger_continues_at_the_ack_quorum() -> None:
    machine = writer()
    append(machine)
    lose(machine, 2)
    ack(machine, 0, 0)
    assert no_spares(machine) == []
    assert ack(machine, 1, 0) == [Confirm(0)]
    assert machine.append(10, (b"", b""), 1.0) == (0, 1)
    ack(machine, 0, 1)
    assert ack(machine, 1, 1) == [Confirm(1)]
    assert machine.parts(1) is None  # the entry awaits no seat
    assert not machine.stuck


def test_t14_a_spare_that_arrives_later_is_used() -> None:
    machine = writer()
    append(machine)
    lose(machine, 2)
    no_spares(machine)
    assert machine.on_spares() == [FindSpares((2,))]
    assert exchange(machine, {2: B[3]}) == [SendAdd(0, 2)]


def test_partial_replacement_continues_with_the_remaining_members() -> None:
    machine = writer(3, 3, 2)
    append(machine)
    lose(machine, 1)
    lose(machine, 2)
    assert no_spares(machine) == [FindSpares((1, 2))]
    assert exchange(machine, {1: B[3]}) == [SendAdd(0, 1)]  # and no further search for seat 2
    assert machine.on_spares() == [FindSpares((2,))]


def test_a_new_failure_requests_spares_again_for_earlier_failed_seats() -> None:
    machine = writer(4, 4, 2)
    append(machine)
    lose(machine, 1)
    no_spares(machine)
    assert lose(machine, 2) == [FindSpares((1, 2))]


def test_with_too_few_seats_the_writer_is_stuck_and_waits() -> None:
    machine = writer()
    append(machine)
    lose(machine, 1)
    no_spares(machine)
    assert not machine.stuck
    lose(machine, 2)
    assert not machine.stuck  # the writer is looking for spares
    no_spares(machine)
    assert machine.stuck
    assert machine.on_rejoin(1, 1.0) == [SendAdd(0, 1)]
    assert not machine.stuck


def test_a_returning_member_gets_the_unconfirmed_entries() -> None:
    machine = writer()
    append(machine, 2)
    lose(machine, 2)
    no_spares(machine)
    ack(machine, 0, 0, 1)
    ack(machine, 1, 0)
    assert machine.on_rejoin(2, 1.0) == [Missed(B[2], 0, 0), SendAdd(1, 2)]
    machine.check()
    assert ack(machine, 2, 1) == [Confirm(1)]
    assert machine.on_rejoin(2, 1.0) == []  # the member has rejoined already


def test_an_ack_of_a_failed_member_counts() -> None:
    machine = writer()
    append(machine, now=0.0)
    machine.on_tick(5.0)
    no_spares(machine)
    assert machine.stuck
    ack(machine, 0, 0)
    assert ack(machine, 1, 0) == [Confirm(0)]


def test_a_member_that_is_back_before_a_spare_is_found_keeps_its_seat() -> None:
    machine = writer()
    append(machine)
    lose(machine, 2)
    assert machine.on_rejoin(2, 1.0) == [SendAdd(0, 2)]
    assert machine.on_spares_found({2: B[3]}) == []
    machine.check()
    assert machine.ensemble == (B[0], B[1], B[2])


def test_rejoin_while_the_change_is_recorded_is_harmless() -> None:
    machine = writer()
    append(machine)
    lose(machine, 2)
    machine.on_spares_found({2: B[3]})
    assert machine.on_rejoin(2, 1.0) == [SendAdd(0, 2)]
    machine.check()
    ack(machine, 2, 0)
    assert machine.on_recorded(1.0) == [SendAdd(0, 2)]
    machine.check()


def test_a_lost_ledger_ignores_found_spares_and_recorded_changes() -> None:
    machine = writer()
    append(machine)
    lose(machine, 2)
    assert machine.on_add_failed(0, BookieCode.FENCED) == [Fail(BookieCode.FENCED)]
    assert machine.on_spares_found({2: B[3]}) == []
    machine = writer()
    append(machine)
    lose(machine, 2)
    machine.on_spares_found({2: B[3]})
    machine.on_add_failed(0, BookieCode.FENCED)
    assert machine.on_recorded(1.0) == []
    assert machine.on_not_recorded() == []


def test_w7_a_spare_that_has_another_seat_raises_an_assertion_error() -> None:
    machine = writer()
    append(machine)
    lose(machine, 2)
    with pytest.raises(AssertionError, match="a bookie has two seats"):
        machine.on_spares_found({2: B[0]})


# -- time and memory -----------------------------------------------------------------------------


def test_a_silent_bookie_is_replaced_after_the_add_timeout() -> None:
    machine = writer()
    append(machine, now=1.0)
    ack(machine, 0, 0)
    ack(machine, 1, 0)
    append(machine, now=3.0)
    assert machine.on_tick(5.9) == []
    assert machine.on_tick(6.0) == [FindSpares((2,))]


def test_a_fresh_member_has_its_own_time_for_old_entries() -> None:
    machine = writer()
    append(machine, now=0.0)
    lose(machine, 2)
    exchange(machine, {2: B[3]}, now=4.0)
    assert machine.on_tick(5.0) == [FindSpares((0, 1))]
    no_spares(machine)
    assert machine.on_tick(8.9) == []
    assert machine.on_tick(9.0) == [FindSpares((0, 1, 2))]


def test_the_quorum_timeout_fails_the_ledger() -> None:
    machine = writer()
    append(machine, 2, now=0.0)
    ack(machine, 0, 0)
    machine.on_tick(5.0)
    no_spares(machine)
    assert machine.on_tick(29.9) == []
    assert machine.on_tick(30.0) == [Fail(BookieCode.TIMEOUT)]
    assert machine.seal() == (-1, 0)


def test_a_laggard_fails_if_the_others_suffice() -> None:
    machine = writer()
    append(machine, 3)
    ack(machine, 0, 0, 1, 2)
    ack(machine, 1, 0, 1, 2)
    append(machine)
    assert machine.on_lagging(machine.laggards) == [FindSpares((2,))]
    assert machine.lag_bytes == 0


def test_a_laggard_that_is_needed_is_waited_for() -> None:
    machine = writer()
    append(machine, 2)
    ack(machine, 0, 0)
    ack(machine, 1, 0)
    lose(machine, 1)
    no_spares(machine)
    assert machine.laggards == 0b100
    assert machine.on_lagging(machine.laggards) == []
    assert machine.laggards == 0b100


def test_in_flight_bytes_count_payload_and_overhead() -> None:
    machine = writer()
    append(machine, 3)
    assert machine.in_flight_bytes == 3 * (10 + ENTRY_OVERHEAD_BYTES)
    ack(machine, 0, 0)
    ack(machine, 1, 0)
    assert machine.in_flight_bytes == 2 * (10 + ENTRY_OVERHEAD_BYTES)


def test_sealing_gives_the_confirmed_end_and_stops_everything() -> None:
    machine = writer()
    append(machine, 2)
    ack(machine, 0, 0, 1)
    ack(machine, 1, 0, 1)
    assert machine.seal() == (1, 20)
    machine.check()
    assert machine.state is WriterState.SEALED
    assert lose(machine, 2) == []
    assert ack(machine, 2, 0) == []
    assert machine.on_tick(1000.0) == []


def test_describe_shows_the_awaited_seats() -> None:
    machine = writer()
    append(machine)
    ack(machine, 1, 0)
    assert machine.describe().splitlines()[1] == "  entry 0: acked by [1], awaited from [0, 2]"


# -- random worlds -------------------------------------------------------------------------------

QUORUMS = [(3, 3, 2), (2, 2, 2), (3, 2, 2), (5, 3, 2), (3, 3, 3), (1, 1, 1), (4, 3, 2), (4, 2, 1)]


def writer_world(seed: int) -> WriterActor:
    """Run a writer without recoveries. Bookies come and go, and messages are lost."""
    random = Random(seed)
    quorum = Quorum(*random.choice(QUORUMS))
    world = LedgerRig.build(
        quorum,
        quorum.ensemble_size + random.randrange(4),
        random,
        loss=random.choice([0.0, 0.01, 0.05]),
    )
    actor = WriterActor(world)
    for _ in range(150):
        chance = random.random()
        if chance < 0.30:
            actor.append()
        elif chance < 0.33:
            bookie = random.choice(list(world.bookies.values()))
            bookie.up = not bookie.up
        elif chance < 0.35:
            actor.tick()
        else:
            for _ in range(4):
                world.step()
    world.loss = 0.0
    for bookie in world.bookies.values():
        bookie.up = True
    return actor


@pytest.mark.parametrize("start", range(0, 240, 60))
def test_every_append_of_every_world_is_confirmed_in_the_end(start: int) -> None:
    entries = changes = missed = 0
    for seed in range(start, start + 60):
        actor = writer_world(seed)
        machine, world = actor.machine, actor.world
        for _ in range(200):
            actor.tick()
            while world.step():
                pass
            if machine.idle:
                break
        assert machine.confirmed == machine.appended == world.confirmed, (seed, machine.describe())
        actor.close()
        while world.step():
            pass
        assert actor.closed, seed
        world.check_closed()
        missed += check_missed(actor)
        entries += machine.confirmed + 1
        changes += machine.changes
    assert entries > 1500, "the worlds did not do anything"
    assert changes > 50, "the fault had no effect"
    assert missed > 50, "no member ever missed an entry"


def check_missed(actor: WriterActor) -> int:
    """Assert that the writer reported all entries that a listed member lacks. Return their
    number."""
    world, told = actor.world, set[tuple[Member, int]]()
    for each in actor.missed:
        told |= {(each.member, entry) for entry in range(each.first, each.last + 1)}
    last = world.metadata.last_entry
    assert last is not None
    lacking = set()
    for entry in range(last + 1):
        members = world.metadata.segment_of(EntryId(entry)).members
        holders = [members[seat] for seat in world.quorum.write_order(entry)]
        lacking |= {
            (member, entry) for member in holders if entry not in world.bookies[member].entries
        }
    assert lacking <= told
    return len(lacking)


def test_a_read_only_bookie_is_replaced_at_once() -> None:
    world = LedgerRig.build(Quorum(3, 3, 2), 4, Random(1))
    actor = WriterActor(world)
    seated = actor.machine.ensemble[1]
    world.bookies[seated].read_only = True
    actor.append()
    while world.step():
        pass
    assert seated not in actor.machine.ensemble
    assert world.metadata.last_segment.members == actor.machine.ensemble
    assert world.confirmed == 0


def test_t42_a_zombie_writer_confirms_nothing_after_a_recovery() -> None:
    world = LedgerRig.build(Quorum(3, 3, 2), 5, Random(2))
    actor = WriterActor(world)
    for _ in range(3):
        actor.append()
    while world.step():
        pass
    recover_fully(world)
    for _ in range(3):
        actor.append()
    while world.step():
        pass
    assert actor.machine.state is WriterState.FAILED
    assert world.confirmed == 2
    assert world.metadata.state is LedgerState.CLOSED
    assert world.metadata.last_entry == 2
    assert world.metadata.ledger == LEDGER
    assert world.metadata.length == sum(len(payload_of(entry)) for entry in range(3))
