"""Steps that threads pass to the loop: no message is lost, repeated or out of order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consuming.steps import Call, Progress, Step, Steps
from magnetar.client.message import Delivery, Message
from magnetar.client.thread_bridge import LoopThread
from magnetar.protos.batch import open_batch
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch

BATCH = 4


class StillLoop:
    """A loop that runs nothing by itself."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def call_soon_threadsafe(self, function: Any) -> None:
        self.asked.append(function)

    def run(self) -> None:
        asked, self.asked = self.asked, []
        for function in asked:
            function()


def deliveries() -> list[Delivery]:
    """Two batches, and an entry that is none."""
    _, payload = encode_batch([OutgoingMessage(b"x", n) for n in range(BATCH)], EntryHeader("p", 1))
    return [
        Delivery("t", -1, "p", 1, b"", 0, None, 0, key=(1, entry), batch=batch)
        for entry, batch in enumerate(
            [open_batch(payload, 0, BATCH, sequence_id=0) if it < 2 else None for it in range(3)]
        )
    ]


def messages() -> list[Message]:
    return [
        Message(None, None, one, index)
        for one in deliveries()
        for index in (range(BATCH) if one.batch is not None else (-1,))
    ]


Told = list[tuple[str, tuple[int, int], int]]


class Core:
    """Notes single messages, in the order of the steps."""

    def __init__(self) -> None:
        self.told: Told = []
        self.steps = self.runs = 0

    def take(self, steps: Any) -> None:
        for step in steps:
            self.steps += 1
            self._carry_out(step)

    def _carry_out(self, step: Step) -> None:
        if isinstance(step, Call):
            step.function(step.argument)
            return
        assert isinstance(step, Progress)
        for what, runs in ("taken", step.taken), ("acked", step.acknowledged):
            self.runs += len(runs)
            for one, first, end in runs:
                assert one.key is not None
                self.told += [(what, one.key, index) for index in range(first, end)]


@given(st.lists(st.tuples(st.sampled_from(["take", "ack", "call", "run"]), st.integers(0, 8))))
def test_every_message_is_counted_once_and_taken_before_it_is_acknowledged(
    moves: list[tuple[str, int]],
) -> None:
    loop, core, known = StillLoop(), Core(), messages()
    steps = Steps(loop, core.take)  # type: ignore[arg-type]
    expected: Told = []
    waiting, taken = list(known), []
    for move, number in moves:
        if move == "take" and waiting:
            message = waiting.pop(0)
            taken.append(message)
            steps.on_taken(message)
            expected.append(("taken", message.delivery.key or (0, 0), message.place))
        elif move == "ack" and taken:
            message = taken[number % len(taken)]
            steps.on_acknowledged(message)
            expected.append(("acked", message.delivery.key or (0, 0), message.place))
        elif move == "call":
            steps.put(Call(core.told.append, ("call", (0, 0), len(expected))))
            expected.append(("call", (0, 0), len(expected)))
        elif move == "run":
            loop.run()
    loop.run()
    assert sorted(core.told) == sorted(expected)
    for kind in ("taken", "acked"):  # each kind keeps its order relative to the calls
        assert [it for it in core.told if it[0] in (kind, "call")] == [
            it for it in expected if it[0] in (kind, "call")
        ]
    for at, (kind, *place) in enumerate(core.told):
        assert kind != "acked" or ("taken", *place) in core.told[:at]


def test_a_batch_is_one_step() -> None:
    loop, core = StillLoop(), Core()
    steps = Steps(loop, core.take)  # type: ignore[arg-type]
    for message in messages()[:BATCH]:
        steps.on_taken(message)
        steps.on_acknowledged(message)
    loop.run()
    assert (core.steps, core.runs) == (1, 2)
    assert len(core.told) == 2 * BATCH


def test_messages_of_many_deliveries_are_one_step() -> None:
    loop, core = StillLoop(), Core()
    steps = Steps(loop, core.take)  # type: ignore[arg-type]
    known = messages()
    firsts = [steps.on_taken(message) for message in known]
    assert firsts == [message.place in (0, -1) for message in known]
    for message in known:
        steps.on_acknowledged(message)
    loop.run()
    assert (core.steps, core.runs) == (1, 6)


def test_a_thread_lets_the_loop_carry_out_what_was_put() -> None:
    thread, core = LoopThread("test"), Core()
    steps = thread.add(Steps(thread.loop, core.take))
    for count, message in enumerate(messages(), start=1):
        steps.on_taken(message)
        while len(core.told) < count:
            steps.let_loop_run()
    steps.let_loop_run()  # there is nothing to wait for
    thread.stop()


def test_a_busy_loop_does_not_hold_a_thread_up() -> None:
    steps = Steps(StillLoop(), Core().take)  # type: ignore[arg-type]
    steps.on_taken(messages()[0])
    steps.let_loop_run()
