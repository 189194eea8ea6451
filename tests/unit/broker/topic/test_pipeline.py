"""The stages before the log: the fate of each entry, and the order of the answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest
from fakes.entries import entry_of, sends_of
from fakes.numbered import chunks, numbered
from fakes.sessions import FakeProducerSession
from hypothesis import example, given, settings
from hypothesis import strategies as st

from magnetar.broker.cursor.sequences import Sequences, SequenceState
from magnetar.broker.errors import ProducerFenced
from magnetar.broker.log.budget import PublishBudget
from magnetar.broker.log.outstanding import Appended, Outstanding
from magnetar.broker.log.position import Position
from magnetar.broker.topic.contract import ClientInfo, ProducerRequest
from magnetar.broker.topic.duplicates import DuplicatesStage
from magnetar.broker.topic.holding import Holding
from magnetar.broker.topic.meter import Meter
from magnetar.broker.topic.pipeline import (
    AccessModeStage,
    Answer,
    Append,
    ChecksumStage,
    Decided,
    DelayStage,
    Duplicate,
    FormatStage,
    Held,
    Pipeline,
    Publish,
    Refuse,
    SizeStage,
    Wait,
)
from magnetar.broker.topic.producer import ProducerHandle
from magnetar.protos.compression import UNCOMPRESSED_FACTOR
from magnetar.protos.entry import ENTRY_SENT_BYTES_MAX, MESSAGE_BYTES_MAX, NO_CHECKSUM, Chunk
from magnetar.protos.errors import ChecksumMismatch, EntryTooLarge, MalformedEntry
from magnetar.protos.sends import SendRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.broker.errors import LogError
    from magnetar.broker.log.log import Log
    from magnetar.protos.entry import EntryView

NUMBERS = 1_000_000  # sequence ids in all: what is stored has the highest


# ---- random stages over random runs, against a model that knows each entry's fate ----------------


@dataclass
class Scripted:
    """A stage with a fixed answer for each entry. The stage waits before some of the answers, only
    for publishes whose entries were all sent before (see Wait)."""

    plan: Mapping[tuple[str, int], str]
    sent: Sequence[tuple[str, int]] = ()  # the entries of all producers in send order
    seen: list[tuple[str, int]] = field(default_factory=list)
    passed: list[Publish] = field(default_factory=list)
    waits: dict[tuple[str, int], Publish | None] = field(default_factory=dict)

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        name = publish.publisher.name
        answers: list[Answer] = []
        for number in publish.sends.sequence_ids:
            key = name, number
            what = self.plan.get(key, "append")
            if what.startswith("wait") and key not in self.waits:
                within = what.endswith("within") and any(isinstance(a, Append) for a in answers)
                others = [each for each in self.passed if self._is_before(each, key)]
                if within or others:
                    self.waits[key] = None if within else others[len(others) // 2]
                    answers.append(Wait(self.waits[key]))
                    return self._passing(publish, answers)
            until = self.waits.get(key)
            assert until is None or until.known, "asked again before the outcome was known"
            self.seen.append(key)
            answers.append(_answer(what))
        return self._passing(publish, answers)

    def _is_before(self, other: Publish, key: tuple[str, int]) -> bool:
        last = other.publisher.name, other.sends.sequence_ids[-1]
        return self.sent.index(last) < self.sent.index(key)

    def _passing(self, publish: Publish, answers: list[Answer]) -> Sequence[Answer]:
        if any(isinstance(answer, Append) for answer in answers):
            self.passed.append(publish)
        plain = all(isinstance(answer, Append) for answer in answers)
        return () if plain else answers


def _answer(what: str) -> Answer:
    if "duplicate" in what:
        return Duplicate(1, NUMBERS)
    return Refuse(1, ValueError(what)) if "refuse" in what else Append(1)


class World:
    """Producers, the topic's part of their work, and a log that confirms when the test calls
    `confirm`."""

    def __init__(self, names: Sequence[str], stages: Sequence[Scripted | DuplicatesStage]) -> None:
        self.outstanding = Outstanding(next_index=0)
        self.budget = PublishBudget()
        self.sent: list[tuple[str, int]] = []
        self.appended: list[tuple[str, int]] = []
        self.entry = 0
        self.stages = stages
        for stage in stages:
            if isinstance(stage, Scripted):
                stage.sent = self.sent
        self.holding = Holding()
        self.sessions: dict[str, FakeProducerSession] = {}
        self.handles: dict[str, ProducerHandle] = {}
        for name in names:
            self.connect(name)

    def connect(self, name: str) -> None:
        """Connect a producer of this name. It takes the place of the earlier one, if any."""
        if name in self.handles:
            self.handles[name].close_nowait()
            self.resume()
        self.sessions[name] = FakeProducerSession()
        self.handles[name] = ProducerHandle(
            ProducerRequest(1, name, ClientInfo("here", "1")),
            name,
            self.sessions[name],
            cast("Log", self),
            Pipeline(self.stages),
            self.holding,
            connected_since="",
            leave=lambda _: None,
            log_failed=self.failed,
            now=0.0,
        )

    def send(self, name: str, count: int) -> None:
        """Send the next entries of this producer as one publish."""
        first = sum(sender == name for sender, _ in self.sent)
        self.sent += [(name, first + place) for place in range(count)]
        self.handles[name].publish(sends_of(*[entry_of("x")] * count, first=first), 0.0)

    def failed(self, error: LogError) -> None:
        raise error

    def append(
        self,
        entries: Sequence[bytes],
        views: Mapping[int, EntryView],
        context: object,
        *,
        now: float,
    ) -> None:
        publish = cast("Publish", context)
        assert len(entries) == len(publish.sends.sequence_ids)
        self.appended += [(publish.publisher.name, n) for n in publish.sends.sequence_ids]
        self.outstanding.take(entries, views, context, now_ms=0)
        self.outstanding.on_sent(len(entries))

    def confirm(self, count: int) -> None:
        """Decide a publish as PersistentTopic does."""
        count = min(count, self.outstanding.in_flight)
        parts = self.outstanding.confirm(count, ledger=1, first_entry=self.entry)
        self.entry += count
        groups: dict[ProducerHandle, list[Appended]] = {}
        for part in parts:
            publish = cast("Publish", part.context)
            publish.on_outcome(part.count)
            at = Position(1, part.first_entry + part.count - 1)
            for stage in self.stages:
                if isinstance(stage, DuplicatesStage):
                    stage.on_appended(publish, part.start, part.stop, at, 0)
            groups.setdefault(cast("ProducerHandle", publish.publisher), []).append(part)
        for handle, group in groups.items():
            handle.on_appended(group)
        self.resume()

    def resume(self) -> None:
        assert not self.holding.resume(0.0)
        self.holding.check()


FATES = st.sampled_from(
    ["append"] * 4
    + ["duplicate", "refuse", "wait append", "wait duplicate", "wait refuse"]
    + ["wait append within", "wait duplicate within"]
)
PLANS = st.dictionaries(st.tuples(st.sampled_from("ab"), st.integers(0, 14)), FATES, max_size=25)
STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 6))
    | st.tuples(st.just("confirm"), st.integers(1, 8)),
    min_size=4,
    max_size=14,
)


@settings(max_examples=400)
@example(
    first={},
    second=dict.fromkeys((("a", 2), ("a", 3), ("b", 1)), "wait append"),
    steps=[("a", 1), ("a", 3), ("a", 1), ("b", 2)],
)
@given(PLANS, PLANS, STEPS)
def test_answers_come_in_send_order_whatever_the_stages_say(
    first: dict[tuple[str, int], str],
    second: dict[tuple[str, int], str],
    steps: list[tuple[str, int]],
) -> None:
    stages = [Scripted(first), Scripted(second)]
    world = World("ab", stages)
    sent = {"a": 0, "b": 0}
    for who, count in steps:
        if who == "confirm":
            world.confirm(count)
        else:
            world.send(who, count)
            sent[who] += count
        for name, session in world.sessions.items():
            numbers = [number for number, _ in session.answers]
            assert numbers == list(range(len(numbers))), "in send order, each once"
            assert world.handles[name].outstanding == sent[name] - len(numbers)
    while world.outstanding.in_flight:
        world.confirm(3)
    assert len(world.holding) == 0
    for name, session in world.sessions.items():
        assert [number for number, _ in session.answers] == list(range(sent[name]))
        for number, answer in session.answers:
            assert kind(answer) == fate(first, second, (name, number))
        appended = [number for owner, number in world.appended if owner == name]
        assert appended == sorted(appended), "appended in send order"
        for stage in stages:
            seen = [number for owner, number in stage.seen if owner == name]
            assert seen == sorted(set(seen)), "a stage decides once on each entry, in send order"
    assert all(publish.known for stage in stages for publish in stage.passed)


def kind(answer: Position | Exception) -> str:
    if isinstance(answer, Exception):
        return "refuse"
    return "duplicate" if answer == (-1, -1) else "append"


def fate(
    first: Mapping[tuple[str, int], str],
    second: Mapping[tuple[str, int], str],
    key: tuple[str, int],
) -> str:
    for plan in (first, second):
        for outcome in ("duplicate", "refuse"):
            if outcome in plan.get(key, "append"):
                return outcome
    return "append"


NUMBER = st.integers(0, 6)
BATCH = st.tuples(NUMBER, st.integers(1, 3)).map(lambda it: tuple(range(it[0], it[0] + it[1] + 1)))
SENDS = st.builds(
    lambda name, numbers: (name, numbered(name, *numbers)),
    st.sampled_from("ab"),
    st.lists(NUMBER | BATCH, min_size=1, max_size=5),
) | st.builds(
    lambda name, number, which: (name, chunks(name, number, 3, which=tuple(which))),
    st.sampled_from("ab"),
    NUMBER,
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
RESENDS = st.lists(
    SENDS
    | st.tuples(st.just("connect"), st.sampled_from("ab"))
    | st.tuples(st.just("confirm"), st.integers(1, 8))
    | st.just(("visit", 0)),
    min_size=4,
    max_size=14,
)


@settings(max_examples=400)
@example(steps=[("a", numbered("a", 5, 5)), ("b", numbered("b", 1))], producers_max=1)
@given(RESENDS, st.sampled_from([1, 2]))
def test_every_repeated_entry_gets_an_answer(
    steps: list[tuple[str, SendRun | str | int]], producers_max: int
) -> None:
    """With `producers_max` 1, the stage forgets the stored sequence ids of one producer when the
    other producer stores an entry."""
    stage = DuplicatesStage()
    stage.sequences = Sequences(1, SequenceState(), producers_max=producers_max)
    world = World("ab", [stage])
    sent: dict[str, list[int]] = {"a": [], "b": []}
    with_chunks: set[str] = set()
    for what, value in steps:
        if isinstance(value, SendRun):
            world.handles[what].publish(value, 0.0)
            sent[what] += value.sequence_ids
            if any(view.chunk is not None for view in value.views.values()):
                with_chunks.add(what)
        elif isinstance(value, str):
            world.connect(value)
            sent[value].clear()
        elif what == "confirm":
            world.confirm(value)
        else:
            stage.forget_idle()
    while world.outstanding.in_flight:
        world.confirm(8)
    assert len(world.holding) == 0
    for name, session in world.sessions.items():
        assert [number for number, _ in session.answers] == sent[name]
        stored = [number for owner, number in world.appended if owner == name]
        if producers_max == 2 and name not in with_chunks:
            assert stored == sorted(set(stored)), "each sequence id is stored once, in order"


def test_the_rest_of_a_run_is_decided_after_its_held_part() -> None:
    """The first stage splits the run; the second holds the first part."""
    first = Scripted({("a", 2): "refuse"})
    second = Scripted({("a", 1): "wait append"})
    world = World("a", [first, second])
    world.send("a", 1)
    world.send("a", 3)
    assert second.seen == [("a", 0)]
    assert world.sessions["a"].answers == []
    world.confirm(1)
    assert second.seen == [("a", 0), ("a", 1), ("a", 3)]
    world.confirm(2)
    assert [kind(answer) for _, answer in world.sessions["a"].answers] == [
        "append",
        "append",
        "refuse",
        "append",
    ]


def test_publishes_held_at_the_end_of_a_producer_get_an_outcome() -> None:
    """Another producer that waits for this outcome continues."""
    first = Scripted({})
    second = Scripted({("a", 1): "wait append within"})
    world = World("ab", [first, second])
    world.send("a", 2)
    assert world.handles["a"].outstanding == 2
    [held] = first.passed
    world.confirm(0)
    assert not held.known
    first.waits[("b", 0)] = held

    class WaitsForHeld:
        def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
            return () if held.known else [Wait(held)]

    waiting = ProducerHandle(
        ProducerRequest(2, "c", ClientInfo("here", "1")),
        "c",
        FakeProducerSession(),
        cast("Log", world),
        Pipeline([WaitsForHeld()]),
        world.holding,
        connected_since="",
        leave=lambda _: None,
        log_failed=world.failed,
        now=0.0,
    )
    waiting.publish(sends_of(entry_of("x")), 0.0)
    assert waiting in world.holding
    world.handles["a"].close_nowait()
    world.resume()
    assert not held.known, "the first entry is in flight still"
    world.confirm(1)
    assert held.known
    assert waiting not in world.holding
    assert world.appended == [("a", 0), ("c", 0)]
    assert world.budget.held == 0


# ---- the stages that every topic has -------------------------------------------------------------


class FakeProducer:
    """A producer as stages know it."""

    name = "p"

    def __init__(self, topic_epoch: int | None = None) -> None:
        self.topic_epoch = topic_epoch
        self.meter = Meter(0.0)

    def on_appended(self, parts: Sequence[Appended]) -> None:
        raise AssertionError("nothing is appended here")


def publish_of(sends: SendRun, *, topic_epoch: int | None = None) -> Publish:
    return Publish(FakeProducer(topic_epoch), sends, len(sends))


def test_entries_are_refused_by_their_sizes() -> None:
    sends = sends_of(*[entry_of("x") for _ in range(4)])
    sends.entries[1] = bytes(ENTRY_SENT_BYTES_MAX + 1)
    sends.views[2].payload_bytes = MESSAGE_BYTES_MAX + 1
    answers = SizeStage().decide(publish_of(sends), 0.0)
    refused = answers[1]
    assert answers[0] == Append(1)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, EntryTooLarge)
    assert refused.error.size == ENTRY_SENT_BYTES_MAX + 1
    assert isinstance(answers[2], Refuse)
    assert "payload" in str(answers[2].error)
    assert answers[3:] == [Append(1)]
    assert SizeStage().decide(publish_of(sends_of(entry_of("x"))), 0.0) == ()


def test_size_before_compression_has_a_limit_too() -> None:
    sends = sends_of(*[entry_of("x") for _ in range(3)])
    limit = UNCOMPRESSED_FACTOR * 1_000
    sends.views[0].uncompressed_size = limit
    sends.views[1].uncompressed_size = limit + 1
    sends.views[2].uncompressed_size = limit + 1
    sends.views[2].chunk = Chunk("u", 0, 2, 10)  # all of its chunks together have that size
    answers = SizeStage(1_000).decide(publish_of(sends), 0.0)
    assert [type(answer) for answer in answers] == [Append, Refuse, Append]
    assert isinstance(answers[1], Refuse)
    assert "16001 bytes: the limit is 16000 bytes" in str(answers[1].error)


def test_smaller_limit_refuses_smaller_entries() -> None:
    sends = sends_of(entry_of("x" * 1_000), entry_of("x" * 1_001), entry_of("x" * 20_000))
    answers = SizeStage(1_000).decide(publish_of(sends), 0.0)
    assert [type(answer) for answer in answers] == [Append, Refuse, Refuse]
    assert isinstance(answers[1], Refuse)
    assert "payload of 1001 bytes exceeds the limit of 1000" in str(answers[1].error)


NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("publish_ms", "delay_ms", "accepted"),
    [
        (NOW_MS, 5_000, True),
        (NOW_MS, 5_001, False),
        (NOW_MS - 3_000, 5_000, True),  # on its way since the publish time
        (NOW_MS + 60_000, 65_000, True),  # the client's clock is ahead
        (NOW_MS + 60_001, 65_001, False),
        (NOW_MS, -(1 << 62), True),
        (NOW_MS, (1 << 63) - 1 - NOW_MS, False),
        (1 << 62, (1 << 63) - 1 - NOW_MS, False),
    ],
)
def test_delay_beyond_the_limit_is_refused_by_name(
    publish_ms: int, delay_ms: int, accepted: bool
) -> None:
    stage = DelayStage(lambda: NOW_MS)
    sends = sends_of(entry_of("x"), entry_of("y", publish_time_ms=publish_ms))
    sends.views[1].deliver_at_ms = NOW_MS + delay_ms
    assert stage.decide(publish_of(sends), 0.0) == (), "there is no limit"
    stage.delay_ms_max = 5_000
    answers = stage.decide(publish_of(sends), 0.0)
    if accepted:
        assert answers == ()
        return
    assert answers[0] == Append(1)
    assert isinstance(answers[1], Refuse)
    assert "deliver_at_time" in str(answers[1].error)
    assert "exceeds the limit of 5000 ms" in str(answers[1].error)


@pytest.mark.parametrize("over", [0, 1])
def test_a_plain_payload_may_have_the_limit_and_no_more(over: int) -> None:
    view = entry_of("x")
    entry = bytes(view.data) + bytes(MESSAGE_BYTES_MAX - view.payload_bytes + over)
    sends = sends_of(view)
    sends.entries[0] = entry
    sends.views.clear()
    answers = SizeStage().decide(publish_of(sends), 0.0)
    assert [type(answer) for answer in answers] == ([Refuse] if over else [])


def test_an_entry_is_refused_for_its_checksum_if_it_states_one() -> None:
    sends = sends_of(*[entry_of("x")] * 3)
    sends.checksums[0] ^= 1
    sends.checksums[1] = NO_CHECKSUM
    answers = ChecksumStage().decide(publish_of(sends), 0.0)
    assert isinstance(answers[0], Refuse)
    assert isinstance(answers[0].error, ChecksumMismatch)
    assert answers[1:] == [Append(2)]
    sends.checksums[0] ^= 1
    assert ChecksumStage().decide(publish_of(sends), 0.0) == ()


def test_an_entry_that_cannot_be_read_is_refused_with_the_reason() -> None:
    sends = sends_of(*[entry_of("x")] * 3)
    error = sends.errors[2] = MalformedEntry("a reason")
    assert FormatStage().decide(publish_of(sends), 0.0) == [Append(2), Refuse(1, error)]
    sends.errors.clear()
    assert FormatStage().decide(publish_of(sends), 0.0) == ()


def test_a_producer_of_an_earlier_epoch_is_refused() -> None:
    stage = AccessModeStage("topic", lambda: 7)
    sends = sends_of(*[entry_of("x")] * 2)
    [answer] = stage.decide(publish_of(sends, topic_epoch=6), 0.0)
    assert isinstance(answer, Refuse)
    assert answer.count == 2
    assert isinstance(answer.error, ProducerFenced)
    assert stage.decide(publish_of(sends, topic_epoch=7), 0.0) == ()
    assert stage.decide(publish_of(sends), 0.0) == ()


def test_the_first_stage_that_objects_decides() -> None:
    sends = sends_of(*[entry_of("x")] * 2)
    sends.checksums[1] ^= 1
    sends.errors[1] = MalformedEntry("also")
    pipeline = Pipeline([SizeStage(), ChecksumStage(), FormatStage()])
    publish = publish_of(sends)
    first, second = pipeline.decide(publish, 0.0)
    assert isinstance(first, Decided)
    assert first.answer == Append(1)
    assert isinstance(second, Decided)
    assert isinstance(second.answer, Refuse)
    assert isinstance(second.answer.error, ChecksumMismatch)
    assert not isinstance(second, Held)
