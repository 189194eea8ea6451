"""The ack tracker compared with a model: a broker and a user that keep all messages in sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consuming.acks import (
    ACK_DELAY_S,
    ACK_GROUPS_IN_FLIGHT_MAX,
    ACK_IDS_MAX,
    AckGroup,
    AckTracker,
)

ENTRIES = 8


def size_of(entry: int) -> int:
    """Entries 0, 3, 6 are not batches; the others hold 2 or 3 messages, or one in a batch."""
    return (1, 2, 3, 1, 3, 1, 1, 2)[entry]


def is_batch(entry: int) -> bool:
    return entry not in (0, 3, 6)


Message = tuple[int, int]


class AckTrackerRig:
    """A tracker, the messages that its user acknowledged, and a broker that receives its groups."""

    def __init__(self, *, batch_indexes: bool) -> None:
        self.tracker = AckTracker(batch_indexes=batch_indexes)
        self.batch_indexes = batch_indexes
        self.now = 0.0
        self.acked: set[Message] = set()
        self.durable: set[Message] = set()
        self.flying: list[AckGroup] = []

    def acknowledge(self, entry: int, index: int, count: int = 1) -> None:
        index %= size_of(entry)
        count = min(count, size_of(entry) - index)
        self.acked |= {(entry, index + at) for at in range(count)}
        place = (index, size_of(entry)) if is_batch(entry) else (-1, 0)
        complete = self.tracker.acknowledge((1, entry), *place, self.now, count)
        if complete:
            assert self.whole(entry)

    def acknowledge_cumulative(self, entry: int, index: int) -> None:
        index %= size_of(entry)
        for before in range(entry):
            self.acked |= {(before, at) for at in range(size_of(before))}
        self.acked |= {(entry, at) for at in range(index + 1)}
        place = (index, size_of(entry)) if is_batch(entry) else (-1, 0)
        self.tracker.acknowledge_cumulative((1, entry), *place, self.now)

    def whole(self, entry: int) -> bool:
        return all((entry, at) in self.acked for at in range(size_of(entry)))

    def take(self, *, hurry: bool) -> None:
        for group in self.tracker.take(self.now, hurry=hurry):
            assert self.said_by(group) <= self.acked, (
                "the tracker acknowledges a message that the user did not"
            )
            self.flying.append(group)

    def said_by(self, group: AckGroup) -> set[Message]:
        said: set[Message] = set()
        for (_, entry), unacked in group.ids.items():
            if group.is_cumulative:
                for before in range(entry):
                    said |= {(before, at) for at in range(size_of(before))}
            if entry >= 0:
                said |= {(entry, at) for at in range(size_of(entry)) if not unacked >> at & 1}
        return said

    def answer(self) -> None:
        if self.flying:
            group = self.flying.pop(0)
            self.durable |= self.said_by(group)
            self.tracker.on_answered(group.number)

    def fail(self) -> None:
        if self.flying:
            self.tracker.on_failed(self.flying.pop(0).number, self.now)

    def disconnect(self, *, arrived: bool) -> None:
        """Break the connection. `arrived`: the broker has received the groups in flight."""
        for group in self.flying:
            if arrived:
                self.durable |= self.said_by(group)
        self.flying.clear()
        self.tracker.on_disconnected(self.now)

    def look(self) -> None:
        """Compare `acknowledged` of the tracker with the model."""
        for entry in range(ENTRIES):
            bits = self.tracker.acknowledged((1, entry), size_of(entry))
            says = {(entry, at) for at in range(size_of(entry)) if bits >> at & 1}
            assert says <= self.acked
            unknown_to_broker = {one for one in self.acked - self.durable if one[0] == entry}
            if self.batch_indexes or self.whole(entry):
                assert unknown_to_broker <= says

    def settle(self) -> None:
        while not self.tracker.settled:
            self.now += ACK_DELAY_S
            self.take(hurry=True)
            assert self.flying
            self.answer()
            self.tracker.check()


ENTRY_INDEX = st.tuples(st.integers(0, ENTRIES - 1), st.integers(0, 2))
STEP = st.one_of(
    st.tuples(st.just("ack"), ENTRY_INDEX),
    st.tuples(st.just("run"), ENTRY_INDEX),
    st.tuples(st.just("cumulative"), ENTRY_INDEX),
    st.tuples(st.just("take"), st.booleans()),
    st.tuples(st.just("answer"), st.none()),
    st.tuples(st.just("fail"), st.none()),
    st.tuples(st.just("disconnect"), st.booleans()),
    st.tuples(st.just("wait"), st.none()),
)


@given(st.lists(STEP, max_size=40), st.booleans())
def test_settled_acknowledgements_equal_the_given_ones(
    steps: list[tuple[str, object]], batch_indexes: bool
) -> None:
    rig = AckTrackerRig(batch_indexes=batch_indexes)
    for step in steps:
        match step:
            case "ack", (entry, index):
                rig.acknowledge(entry, index)
            case "run", (entry, index):
                rig.acknowledge(entry, index, 3)
            case "cumulative", (entry, index):
                rig.acknowledge_cumulative(entry, index)
            case "take", bool(hurry):
                rig.take(hurry=hurry)
            case "answer", _:
                rig.answer()
            case "fail", _:
                rig.fail()
            case "disconnect", bool(arrived):
                rig.disconnect(arrived=arrived)
            case _:
                rig.now += ACK_DELAY_S / 2
        rig.tracker.check()
        rig.look()
    rig.settle()
    if batch_indexes:
        assert rig.durable == rig.acked
    else:
        complete = {one for one in rig.acked if rig.whole(one[0])}
        assert complete <= rig.durable <= rig.acked


def test_acknowledgements_gather_for_a_while() -> None:
    tracker = AckTracker(batch_indexes=True)
    for entry in range(10):
        tracker.acknowledge((1, entry), -1, 0, 5.0 + entry / 1000)
    assert tracker.timer_at() == 5.0 + ACK_DELAY_S
    assert tracker.take(5.0 + ACK_DELAY_S - 0.001) == []
    (group,) = tracker.take(5.0 + ACK_DELAY_S)
    assert list(group.ids) == [(1, entry) for entry in range(10)]
    assert tracker.timer_at() is None
    assert not tracker.settled
    tracker.on_answered(group.number)
    assert tracker.settled


def test_a_full_group_is_sent_at_once() -> None:
    tracker = AckTracker(batch_indexes=True)
    for entry in range(ACK_IDS_MAX - 1):
        tracker.acknowledge((1, entry), -1, 0, 5.0)
    assert tracker.take(5.0) == []
    tracker.acknowledge((1, ACK_IDS_MAX), -1, 0, 5.0)
    (group,) = tracker.take(5.0)
    assert len(group.ids) == ACK_IDS_MAX


def test_a_broker_that_does_not_answer_is_not_flooded() -> None:
    tracker = AckTracker(batch_indexes=True)
    groups: list[AckGroup] = []
    for entry in range((ACK_GROUPS_IN_FLIGHT_MAX + 3) * ACK_IDS_MAX):
        tracker.acknowledge((1, entry), -1, 0, 0.0)
        groups += tracker.take(0.0)
    assert len(groups) == ACK_GROUPS_IN_FLIGHT_MAX
    assert tracker.timer_at() is None
    tracker.on_answered(groups[0].number)
    assert len(tracker.take(0.0)) == 1
    tracker.check()


def test_group_is_not_repeated_at_once_after_a_temporary_refusal() -> None:
    tracker = AckTracker(batch_indexes=True)
    for entry in range(ACK_IDS_MAX):
        tracker.acknowledge((1, entry), -1, 0, 0.0)
    (group,) = tracker.take(0.0)
    tracker.on_failed(group.number, 1.0)
    assert tracker.take(1.0, hurry=True) == []
    assert tracker.timer_at() == 1.0 + ACK_DELAY_S
    (again,) = tracker.take(1.0 + ACK_DELAY_S)
    assert again.ids == group.ids


def test_without_batch_indexes_a_cumulative_ack_in_a_batch_ends_before_it() -> None:
    tracker = AckTracker(batch_indexes=False)
    tracker.acknowledge_cumulative((1, 7), 1, 3, 0.0)
    (group,) = tracker.take(0.0, hurry=True)
    assert group.is_cumulative
    assert group.ids == {(1, 7): 0b111}  # all messages before the batch, none of its own
    tracker.acknowledge((1, 7), 2, 3, 0.0)
    (rest,) = tracker.take(0.0, hurry=True)
    assert rest.ids == {(1, 7): 0}


def test_seek_drops_all_acknowledgements() -> None:
    tracker = AckTracker(batch_indexes=True)
    tracker.acknowledge((1, 1), -1, 0, 0.0)
    tracker.acknowledge((1, 2), 0, 2, 0.0)
    (group,) = tracker.take(0.0, hurry=True)
    tracker.acknowledge((1, 3), -1, 0, 0.0)
    tracker.on_seek()
    tracker.on_answered(group.number)
    assert tracker.settled
    assert tracker.take(9.0) == []
    assert tracker.acknowledged((1, 1), 1) == 0
    tracker.check()
