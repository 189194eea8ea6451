"""Every interleaving of a writer and its recoverers: all orders in which adds, fences, reads and
write-backs can reach the bookies.

Only the order in which requests arrive at bookies matters for safety. Replies are therefore
immediate. The writer learns of every stored add but of no refusal, so the writer confirms as much
as possible. The search does not explore a state twice.
"""

import copy
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace
from random import Random
from typing import Any

import pytest
from fakes.adds import encode_add
from fakes.ledger_rig import RigBookie, member, open_metadata, payload_bytes, payload_of

from magnetar.bookie.ledger import recovery as recovering
from magnetar.bookie.ledger import writer as writing
from magnetar.bookie.ledger.quorum import Quorum
from magnetar.bookie.ledger.recovery import LedgerRecovery, RecoveryState
from magnetar.metadata.model import LedgerMetadata, LedgerState, Member
from magnetar.protos.envelope import BookieCode, decode_envelope

LIMITS = writing.WriterLimits(add_timeout_s=1e9, quorum_timeout_s=1e9, changes_max=0)
LEDGER, KEY = 7, 0x1234
IN_FLIGHT = 2  # the writer's window


@dataclass
class Case:
    """The values of a case that are equal in all its states."""

    quorum: Quorum
    members: list[Member]
    adds: list[writing.Parts]  # for each entry: the encoded add
    recoverers: int


@dataclass
class State:
    """The state of the writer's adds, the bookies and the recoverers. The search copies each state
    before every step."""

    bookies: list[RigBookie]
    metadata: LedgerMetadata
    stored: list[int]  # for each seat: the number of adds of its stream that have arrived
    accepted: list[set[int]]  # for each seat: the entries that its bookie acked to the writer
    recoveries: list[LedgerRecovery]
    requests: list[tuple[int, Any]]  # (recoverer, action) on its way to a bookie


def confirmed(case: Case, state: State) -> int:
    """The highest entry that the writer can have confirmed by now."""
    entry = 0
    while sum(entry in acks for acks in state.accepted) >= case.quorum.ack_quorum:
        entry += 1
    return entry - 1


def steps(case: Case, state: State) -> list[tuple[str, int]]:
    result = []
    for seat in range(len(case.members)):
        coming = stream(case, seat)[state.stored[seat] :]
        # The writer sends an entry only after entry - IN_FLIGHT is confirmed. A fenced bookie
        # refuses the entry.
        sent = coming and coming[0] - IN_FLIGHT <= confirmed(case, state)
        if sent and not state.bookies[seat].fenced:
            result.append(("add", seat))
    if len(state.recoveries) < case.recoverers:
        result.append(("recover", 0))
    result += [("request", index) for index in range(len(state.requests))]
    return result


def matters(state: State, recoverer: int, action: Any) -> bool:
    """True if the recoverer still uses the answer. Other requests could only fence a bookie, which
    makes data safer: the search loses them."""
    machine = state.recoveries[recoverer]
    if isinstance(action, recovering.Fence):
        return machine.state is RecoveryState.FENCING
    if isinstance(action, recovering.ReadRange):
        return machine.state is RecoveryState.READING and machine.end is None
    return machine.state is RecoveryState.READING


def stream(case: Case, seat: int) -> list[int]:
    """The entries that the writer sends to a seat, in order."""
    return [entry for entry in range(len(case.adds)) if case.quorum.write_set(entry) >> seat & 1]


def take(case: Case, state: State, step: tuple[str, int]) -> None:
    kind, number = step
    if kind == "add":
        entry = stream(case, number)[state.stored[number]]
        state.stored[number] += 1
        if state.bookies[number].add(case.adds[entry]) is BookieCode.OK:
            state.accepted[number].add(entry)
        if state.metadata.state is LedgerState.CLOSED:
            assert state.metadata.last_entry is not None
            assert confirmed(case, state) <= state.metadata.last_entry
    elif kind == "recover":
        if state.metadata.state is LedgerState.OPEN:
            state.metadata = replace(state.metadata, state=LedgerState.IN_RECOVERY)
        if state.metadata.state is LedgerState.IN_RECOVERY:
            machine = LedgerRecovery(state.metadata, limits=LIMITS)
            state.recoveries.append(machine)
            carry_out(case, state, len(state.recoveries) - 1, machine.begin())
    else:
        recoverer, action = state.requests.pop(number)
        deliver(case, state, recoverer, action)
    state.requests = [each for each in state.requests if matters(state, *each)]


def deliver(case: Case, state: State, recoverer: int, action: Any) -> None:
    machine = state.recoveries[recoverer]
    bookie = state.bookies[action.seat]
    match action:
        case recovering.Fence(seat):
            code, known = bookie.last_confirmed(fence=True)
            carry_out(case, state, recoverer, machine.on_fence_answer(seat, code, known, 0.0))
        case recovering.ReadRange(seat, first, last):
            answers = []
            for entry in range(first, last + 1):
                answers.append(bookie.read(entry, fence=True))
                if answers[-1].code is not BookieCode.OK:
                    break
            carry_out(case, state, recoverer, machine.on_answers(seat, answers, 0.0))
            carry_out(case, state, recoverer, machine.on_read_end(seat, BookieCode.OK, 0.0))
        case writing.SendAdd(entry, seat):
            parts = machine.parts(entry)
            if parts is not None:
                assert bookie.add(parts) is BookieCode.OK
                carry_out(case, state, recoverer, machine.on_acks(seat, [entry], 0.0))
    machine.check()


def carry_out(case: Case, state: State, recoverer: int, actions: Any) -> None:
    machine = state.recoveries[recoverer]
    for action in actions:
        match action:
            case recovering.ReadLength(entry):
                held = next(b.entries[entry] for b in state.bookies if entry in b.entries)
                length = decode_envelope(held).length
                carry_out(case, state, recoverer, machine.on_length(length))
            case recovering.Close():
                close(case, state, machine, action)
            case recovering.Abort(why):
                raise AssertionError(why)
            case _:
                state.requests.append((recoverer, action))


def close(case: Case, state: State, machine: LedgerRecovery, action: recovering.Close) -> None:
    if state.metadata.state is LedgerState.CLOSED:
        return
    state.metadata = machine.close_metadata(state.metadata, action)
    last = state.metadata.last_entry
    assert last is not None
    assert last >= confirmed(case, state), "a confirmed entry was cut off"
    assert state.metadata.length == payload_bytes(range(last + 1))
    for entry in range(last + 1):
        holders = case.quorum.write_order(entry)
        copies = sum(entry in state.bookies[seat].entries for seat in holders)
        assert copies >= case.quorum.ack_quorum


def freeze(value: Any) -> Any:
    """Convert a value to a tuple that can be compared and hashed."""
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(freeze(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, LedgerRecovery | writing.LedgerWriter):
        skipped = ("metadata", "quorum", "asked", "ensemble", "_limits", "_targets", "_segments")
        return tuple(freeze(v) for k, v in vars(value).items() if k not in skipped)
    if isinstance(value, dict):
        return tuple((key, freeze(each)) for key, each in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(freeze, value))
    if isinstance(value, set):
        return tuple(sorted(value))
    return value


def key_of(state: State) -> Any:
    return (
        state.metadata.state,
        state.metadata.last_entry,
        tuple(state.stored),
        tuple((bookie.fenced, tuple(sorted(bookie.entries))) for bookie in state.bookies),
        freeze(state.recoveries),
        frozenset(Counter(state.requests).items()),
    )


def clone(value: Any) -> Any:
    """Copy a value, but share immutable parts. This is several times as fast as `copy.deepcopy`."""
    if isinstance(value, list):
        return [clone(each) for each in value]
    if isinstance(value, dict):
        return {key: clone(each) for key, each in value.items()}
    if isinstance(value, set):
        return set(value)
    if isinstance(value, LedgerRecovery | writing.LedgerWriter):
        machine = copy.copy(value)
        vars(machine).update({name: clone(each) for name, each in vars(value).items()})
        return machine
    if getattr(value, "__dataclass_params__", None) and not value.__dataclass_params__.frozen:
        same = copy.copy(value)
        for field in fields(value):
            setattr(same, field.name, clone(getattr(value, field.name)))
        return same
    return value


def beginning(quorum: Quorum, entries: int, recoverers: int) -> tuple[Case, State]:
    """The state before any request has arrived."""
    members = [member(number) for number in range(quorum.ensemble_size)]
    adds, length = [], 0
    for entry in range(entries):
        payload = payload_of(entry)
        length += len(payload)
        adds.append(
            encode_add(
                ledger=LEDGER,
                entry=entry,
                confirmed=max(entry - IN_FLIGHT, -1),
                length=length,
                payload=[payload],
                master_key=KEY,
            )
        )
    case = Case(quorum, members, adds, recoverers)
    metadata = open_metadata(quorum, members)
    begin = State([RigBookie(m) for m in members], metadata, [0] * len(members), [], [], [])
    begin.accepted = [set() for _ in members]
    return case, begin


def explore(quorum: Quorum, entries: int, recoverers: int) -> tuple[int, set[int]]:
    """Return the number of states, and all last entries at which the ledger was closed."""
    case, begin = beginning(quorum, entries, recoverers)
    seen, todo, ends = {key_of(begin)}, [begin], set()
    while todo:
        state = todo.pop()
        choices = steps(case, state)
        if not choices:
            assert state.metadata.state is LedgerState.CLOSED
            assert state.metadata.last_entry is not None
            ends.add(state.metadata.last_entry)
        for choice in choices:
            following = clone(state)
            take(case, following, choice)
            key = key_of(following)
            if key not in seen:
                seen.add(key)
                todo.append(following)
    return len(seen), ends


@pytest.mark.parametrize(
    ("sizes", "entries", "recoverers"),
    [((1, 1, 1), 3, 2), ((2, 2, 2), 3, 1), ((3, 3, 2), 1, 1), ((3, 2, 2), 1, 1)],
)
def test_t15_no_interleaving_loses_a_confirmed_entry(
    sizes: tuple[int, int, int], entries: int, recoverers: int
) -> None:
    states, ends = explore(Quorum(*sizes), entries, recoverers)
    assert states > 100
    assert ends == set(range(-1, entries)), "some outcome was never reached"


@pytest.mark.parametrize("sizes", [(3, 2, 2), (4, 3, 2), (5, 3, 2), (4, 2, 1)])
def test_t15_random_interleavings_of_striped_ledgers_lose_no_confirmed_entry(
    sizes: tuple[int, int, int],
) -> None:
    """Random interleavings with more entries, seats and recoverers than a full search could
    explore."""
    quorum, ends = Quorum(*sizes), Counter[int]()
    for seed in range(600):
        random = Random(seed)
        case, state = beginning(quorum, 5, 3)
        early_share = random.random() * 0.2  # the probability that a recovery begins early
        while choices := steps(case, state):
            recover = ("recover", 0)
            if state.metadata.state is LedgerState.CLOSED:
                # A recovery of a closed ledger does nothing.
                choices = [each for each in choices if each != recover]
            elif recover in choices and len(choices) > 1 and random.random() > early_share:
                choices.remove(recover)
            if not choices:
                break
            take(case, state, random.choice(choices))
        assert state.metadata.state is LedgerState.CLOSED, seed
        assert state.metadata.last_entry is not None
        assert state.metadata.last_entry >= confirmed(case, state), seed
        ends[state.metadata.last_entry] += 1
    assert len(ends) >= 4, f"hardly anything ever happened: {ends}"
