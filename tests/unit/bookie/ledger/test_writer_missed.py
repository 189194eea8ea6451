"""The writer machine and absent members: the delay before a replacement, the entries that members
missed, and the limit of ensemble changes without a confirmed entry."""

import pytest
from fakes.ledger_rig import member

from magnetar.bookie.ledger.quorum import Quorum
from magnetar.bookie.ledger.writer import (
    CHANGES_IN_VAIN_MAX,
    Action,
    Confirm,
    Fail,
    FindSpares,
    LedgerWriter,
    Missed,
    RecordEnsemble,
    SendAdd,
    WriterLimits,
)
from magnetar.protos.envelope import BookieCode

B = [member(number) for number in range(40)]
LOST = BookieCode.CONNECTION_LOST


def writer(
    size: int = 3, write: int = 3, ack: int = 2, *, delay_s: float = 0.0, changes_max: int = 30
) -> LedgerWriter:
    limits = WriterLimits(
        add_timeout_s=5.0,
        quorum_timeout_s=30.0,
        changes_max=changes_max,
        change_delay_s=delay_s,
    )
    return LedgerWriter(Quorum(size, write, ack), B[:size], limits=limits, now=0.0)


def append(machine: LedgerWriter, count: int = 1, *, now: float = 0.0) -> None:
    for _ in range(count):
        machine.append(10, (b"head", b"body"), now)
        machine.check()


def ack(machine: LedgerWriter, seats: list[int], *entries: int) -> list[Action]:
    actions: list[Action] = []
    for seat in seats:
        actions += machine.on_acks(seat, entries)
        machine.check()
    return actions


def fail(machine: LedgerWriter, seat: int, code: BookieCode = LOST) -> list[Action]:
    actions = machine.on_add_failed(seat, code)
    machine.check()
    return actions


def tick(machine: LedgerWriter, now: float) -> list[Action]:
    actions = machine.on_tick(now)
    machine.check()
    return actions


# -- delayed change ------------------------------------------------------------------------------


def test_a_seat_is_kept_for_a_member_whose_stream_was_lost_until_the_delay_ends() -> None:
    machine = writer(delay_s=2.0)
    append(machine)
    assert fail(machine, 2) == []
    assert ack(machine, [0, 1], 0) == [Confirm(0)]
    assert tick(machine, 10.0) == []  # the delay runs from the first tick
    append(machine, now=10.0)
    assert tick(machine, 11.9) == []
    assert machine.on_spares() == []  # a change of the list of bookies does not end it
    assert tick(machine, 12.0) == [FindSpares((2,))]


def test_a_member_that_is_back_in_time_keeps_its_seat() -> None:
    machine = writer(delay_s=2.0)
    append(machine, 2)
    fail(machine, 2)
    ack(machine, [0, 1], 0)
    tick(machine, 1.0)
    assert machine.on_rejoin(2, 1.5) == [Missed(B[2], 0, 0), SendAdd(1, 2)]
    machine.check()
    assert tick(machine, 4.0) == []
    assert machine.changes == 0
    ack(machine, [0, 1, 2], 1)
    append(machine, now=4.0)
    assert fail(machine, 2) == []  # the delay starts again
    tick(machine, 4.5)
    assert tick(machine, 6.4) == []
    assert tick(machine, 6.5) == [FindSpares((2,))]


def test_a_seat_that_is_needed_to_confirm_is_not_kept() -> None:
    machine = writer(delay_s=2.0)
    append(machine)
    assert fail(machine, 2) == []
    assert fail(machine, 1) == [FindSpares((1, 2))]


def test_a_seat_is_not_kept_if_no_entry_could_be_confirmed_without_it() -> None:
    machine = writer(3, 3, 3, delay_s=2.0)
    append(machine)
    assert fail(machine, 0) == [FindSpares((0,))]


@pytest.mark.parametrize("code", [BookieCode.READ_ONLY, BookieCode.IO_ERROR, BookieCode.TIMEOUT])
def test_a_bookie_that_refuses_is_replaced_at_once(code: BookieCode) -> None:
    """A bookie that refused an add would refuse it again after a delay."""
    machine = writer(delay_s=2.0)
    append(machine)
    assert fail(machine, 2, code) == [FindSpares((2,))]


def test_a_refusal_ends_the_delay() -> None:
    machine = writer(delay_s=2.0)
    append(machine)
    fail(machine, 2)
    assert fail(machine, 2, BookieCode.READ_ONLY) == [FindSpares((2,))]


def test_a_member_that_refused_is_replaced_at_once_after_its_stream_is_lost() -> None:
    machine = writer(delay_s=2.0)
    append(machine)
    fail(machine, 2, BookieCode.IO_ERROR)
    machine.on_spares_found({})
    assert fail(machine, 2) == []
    assert machine.on_spares() == [FindSpares((2,))]


def test_a_silent_or_lagging_member_is_replaced_without_a_further_delay() -> None:
    machine = writer(delay_s=2.0)
    append(machine)
    ack(machine, [0, 1], 0)
    assert tick(machine, 5.0) == []  # idle: the next append starts the search for a spare
    append(machine, now=5.0)
    assert machine.on_spares() == [FindSpares((2,))]

    machine = writer(delay_s=2.0)
    append(machine, 2)
    ack(machine, [0, 1], 0)
    assert machine.on_lagging(machine.laggards) == [FindSpares((2,))]


def test_remembered_failures_lead_to_a_change_when_something_is_appended_again() -> None:
    """#1390: tolerated failures must not leave a ledger at its ack quorum permanently."""
    machine = writer(delay_s=2.0)
    assert fail(machine, 2) == []
    tick(machine, 0.0)
    assert tick(machine, 2.0) == []  # nothing was appended
    append(machine, now=100.0)
    assert machine.maybe_find() == [FindSpares((2,))]


# -- what members missed -------------------------------------------------------------------------


def test_an_entry_in_flight_to_the_member_counts_as_missed_once_it_is_confirmed() -> None:
    machine = writer()
    append(machine, 3)
    ack(machine, [0, 1, 2], 0)
    fail(machine, 2)
    assert machine.missed == []  # the member has all confirmed entries
    ack(machine, [0, 1], 1, 2)
    assert machine.missed == [Missed(B[2], 1, 2)]
    machine.seal()
    assert machine.missed == [Missed(B[2], 1, 2)]


def test_a_member_that_fails_on_an_idle_ledger_misses_the_next_entries() -> None:
    machine = writer()
    append(machine)
    ack(machine, [0, 1, 2], 0)
    fail(machine, 1)
    assert machine.missed == []
    append(machine)
    ack(machine, [0, 2], 1)
    assert machine.missed == [Missed(B[1], 1, 1)]


def test_striped_members_miss_from_their_own_first_entry_on() -> None:
    machine = writer(4, 2, 1)
    append(machine, 4)
    fail(machine, 0)  # holds 0 and 3
    fail(machine, 2)  # holds 1 and 2
    ack(machine, [1], 0, 1)
    ack(machine, [3], 2, 3)
    assert machine.missed == [Missed(B[0], 0, 3), Missed(B[2], 1, 3)]


def test_a_replaced_member_missed_the_confirmed_entries_of_its_old_segment() -> None:
    machine = writer()
    append(machine, 2)
    fail(machine, 2)
    ack(machine, [0, 1], 0)
    (record,) = machine.on_spares_found({2: B[3]})
    assert record == RecordEnsemble(1, (B[0], B[1], B[3]))
    assert machine.on_recorded(1.0) == [Missed(B[2], 0, 0), SendAdd(1, 2)]
    machine.check()
    assert machine.missed == []


def test_a_member_with_all_confirmed_entries_missed_nothing() -> None:
    machine = writer()
    append(machine)
    fail(machine, 2)
    machine.on_spares_found({2: B[3]})
    assert machine.on_recorded(1.0) == [SendAdd(0, 2)]
    fail(machine, 2)
    assert machine.on_rejoin(2, 1.0) == [SendAdd(0, 2)]


# -- changes in vain -----------------------------------------------------------------------------


def test_t35_ensemble_changes_stop_when_every_ensemble_fails() -> None:
    machine = writer()
    append(machine)
    for number in range(CHANGES_IN_VAIN_MAX):
        assert fail(machine, 0) == [FindSpares((0,))]
        machine.on_spares_found({0: B[3 + number]})
        machine.on_recorded(1.0)
        machine.check()
    for seat in range(3):
        assert fail(machine, seat) == []
    assert machine.on_spares() == []
    assert machine.on_tick(29.0) == []
    assert machine.on_tick(30.0) == [Fail(BookieCode.TIMEOUT)]


def test_changes_with_confirmations_between_are_not_in_vain() -> None:
    machine = writer()
    for round_number in range(2 * CHANGES_IN_VAIN_MAX):
        append(machine)
        assert fail(machine, 0) == [FindSpares((0,))]
        machine.on_spares_found({0: B[3 + round_number]})
        machine.on_recorded(1.0)
        machine.check()
        assert ack(machine, [0, 1], round_number) == [Confirm(round_number)]
    assert machine.changes == 2 * CHANGES_IN_VAIN_MAX


def test_a_confirmed_entry_resets_the_count_of_failed_ensembles() -> None:
    machine = writer()
    append(machine)
    for number in range(CHANGES_IN_VAIN_MAX):
        fail(machine, 0)
        machine.on_spares_found({0: B[3 + number]})
        machine.on_recorded(1.0)
    assert fail(machine, 0) == []
    ack(machine, [1, 2], 0)
    append(machine)
    assert machine.maybe_find() == [FindSpares((0,))]


def test_owed_entries_are_confirmed_and_still_awaited() -> None:
    machine = writer(5, 3, 2)
    append(machine, 4)
    for entry in range(3):
        first, second, _ = machine.quorum.write_order(entry)
        ack(machine, [first, second], entry)
    assert machine.confirmed == 2
    assert machine.owed == {2: [0], 3: [1], 4: [2]}
    ack(machine, [3], 1)
    fail(machine, 4)
    # `missed`, not `owed`, has the entries that a failed member lacks.
    assert machine.owed == {2: [0]}
    machine.fail(BookieCode.FENCED)
    machine.seal()
    assert machine.owed == {2: [0]}
