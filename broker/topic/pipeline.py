"""The stages between a session and the log: each may refuse or delay a publish.

Theory of operation. A publish is a run of entries of one producer. Each stage in turn decides on
the publish. "Append": the next stage decides. "Duplicate" or "refuse": the publish ends here.
"Wait": the stage needs the outcome of another publish, or more time. A stage may answer differently
for parts of the run. Then the run is split, and the later stages see only the accepted parts.

If a stage answers "wait", the producer's handle holds the rest of the run, and all later publishes
of the producer. When the wait is over, the same stage decides on the rest. The earlier stages
do not see the rest again. So every stage sees the entries of a producer in send order. No stage
sees an entry again after it has decided on the entry.

Stages are machines: they do no I/O, and time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.broker.errors import ProducerFenced
from magnetar.protos.compression import UNCOMPRESSED_FACTOR
from magnetar.protos.entry import (
    ENTRY_SENT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    NO_CHECKSUM,
    checksums_of,
    payload_bytes_of,
)
from magnetar.protos.errors import (
    ChecksumMismatch,
    EntryTooLarge,
    SendNotSupported,
    UncompressedSizeCorruption,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.broker.log.outstanding import Appended
    from magnetar.broker.topic.meter import Meter
    from magnetar.protos.sends import SendRun


CLOCK_SKEW_MS_MAX: Final = 60_000
"""The time by which a client's clock may be ahead of the broker's when `DelayStage` computes a
delay."""


class Publisher(Protocol):
    """The producer of a publish."""

    @property
    def name(self) -> str: ...

    @property
    def topic_epoch(self) -> int | None: ...  # None: the producer is not exclusive

    @property
    def meter(self) -> Meter: ...

    @property
    def chunks(self) -> Meter: ...

    def on_appended(self, parts: Sequence[Appended]) -> None: ...


@dataclass(slots=True, eq=False)
class Publish:
    """A run of entries of one producer. It passes through the stages into the log."""

    publisher: Publisher
    sends: SendRun
    unknown: int  # the number of its entries that have no outcome yet
    whole: Publish | None = None  # the publish of which this is a part; None: not a part

    @property
    def known(self) -> bool:
        """True when the outcome of each of its entries is known."""
        return self.unknown == 0

    def part(self, start: int, stop: int) -> Publish:
        if start == 0 and stop == len(self.sends):
            return self
        return Publish(self.publisher, self.sends.part(start, stop), stop - start, self)

    def is_in(self, other: Publish) -> bool:
        """Returns True when this publish is `other`, or a part of it."""
        publish: Publish | None = self
        while publish is not None and publish is not other:
            publish = publish.whole
        return publish is not None

    def on_outcome(self, entries: int) -> None:
        """The outcome of this many of its entries is known now."""
        publish: Publish | None = self
        while publish is not None:
            publish.unknown -= entries
            assert publish.unknown >= 0, "an entry has one outcome"
            publish = publish.whole


@dataclass(frozen=True, slots=True)
class Append:
    """This stage accepts the next entries."""

    count: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The log has the next entries already: the producer gets receipts without a position."""

    count: int
    stored_sequence_id: int  # the highest sequence id of this producer in the log


@dataclass(frozen=True, slots=True)
class Refuse:
    """The next entries are not appended. The producer gets the error."""

    count: int
    error: Exception


class Gate:
    """The condition of publishes that wait only for time to pass, not for another publish. The
    stage opens the gate when they may continue."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known = False  # True: it is open


@dataclass(frozen=True, slots=True)
class Wait:
    """The stage decides on the rest of the run again when the outcome of a publish is known, or
    when a gate is open.

    The client must have sent all entries of that publish before the rest of the run. Then no two
    publishes can wait for each other. DuplicatesStage, the only stage that waits for a publish,
    waits only for earlier publishes of a producer with the same name.
    """

    # A publish that the same stage accepted, or a gate. None: the part of this run before the wait.
    until: Publish | Gate | None


Answer = Append | Duplicate | Refuse | Wait


class Stage(Protocol):
    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        """Returns answers for all entries of the run, in order. (): append all entries."""


@dataclass(frozen=True, slots=True)
class Decided:
    publish: Publish
    answer: Append | Duplicate | Refuse


@dataclass(frozen=True, slots=True)
class Held:
    """A publish on which a stage has yet to decide."""

    publish: Publish
    stage: int = 0  # the index of the stage
    # The publish or gate for which this publish waits. None: it waits only for earlier publishes.
    until: Publish | Gate | None = None

    @property
    def ready(self) -> bool:
        """True when the wait is over. The stage decides once no earlier publish is held."""
        return self.until is None or self.until.known


class Pipeline:
    """The stages of one topic."""

    __slots__ = ("stages",)

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages

    def decide(self, publish: Publish, now: float, *, first: int = 0) -> list[Decided | Held]:
        """Let the stages from `first` on decide. Returns the parts of the publish in the order of
        its entries; []: append all. Parts after a Held must wait for it, even if they are
        Decided."""
        stages = self.stages[first:] if first else self.stages
        for number, stage in enumerate(stages, first):
            answers = stage.decide(publish, now)
            if answers:
                return self._split(publish, answers, number, now)
        return []

    def _split(
        self, publish: Publish, answers: Sequence[Answer], number: int, now: float
    ) -> list[Decided | Held]:
        found: list[Decided | Held] = []
        at = 0
        before: Publish | None = None  # the last part that this stage accepted
        is_held = False
        for answer in answers:
            if isinstance(answer, Wait):
                until = answer.until or before
                assert until is not None, "there is nothing to wait for"
                is_own = isinstance(until, Publish) and publish.is_in(until)
                assert not is_own, "the publish would wait for itself"
                found.append(Held(publish.part(at, len(publish.sends)), number, until))
                return found
            part = publish.part(at, at + answer.count)
            at += answer.count
            if not isinstance(answer, Append):
                found.append(Decided(part, answer))
                continue
            before = part
            if is_held:
                found.append(Held(part, number + 1))
                continue
            found += self.decide(part, now, first=number + 1) or [Decided(part, answer)]
            is_held = any(isinstance(each, Held) for each in found)
        assert at == len(publish.sends), "a stage answers for every entry"
        return found


# ---- the stages of every topic -------------------------------------------------------------------


class SizeStage:
    """Refuses entries whose payload is larger than the size that the broker announced at CONNECT,
    and entries that are larger than this size and the room for metadata together.

    Apache's clients compare the payload after compression with the announced size, so a message or
    a batch may be larger before compression. The stage also refuses an entry whose uncompressed
    size is more than UNCOMPRESSED_FACTOR times the announced size, unless the entry is a chunk.
    """

    __slots__ = (
        "_entry_bytes_max",
        "_message_bytes_max",
    )

    def __init__(self, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self._message_bytes_max = message_bytes_max
        self._entry_bytes_max = message_bytes_max + ENTRY_SENT_BYTES_MAX - MESSAGE_BYTES_MAX

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        sends, limit = publish.sends, self._message_bytes_max
        refused: dict[int, Exception] = {}
        for place, view in sends.views.items():
            expanded, expanded_max = view.uncompressed_size, UNCOMPRESSED_FACTOR * limit
            if expanded > expanded_max and view.chunk is None:
                refused[place] = UncompressedSizeCorruption(
                    expanded, f"the limit is {expanded_max} bytes"
                )
        if max(map(len, sends.entries)) > limit:
            for place, entry in enumerate(sends.entries):
                found = sends.views.get(place)
                payload_bytes = payload_bytes_of(entry) if found is None else found.payload_bytes
                if len(entry) > self._entry_bytes_max:
                    refused[place] = EntryTooLarge("entry", len(entry), self._entry_bytes_max)
                elif payload_bytes > limit:
                    refused[place] = EntryTooLarge("payload", payload_bytes, limit)
        return refusing(publish, refused)


class ChecksumStage:
    """Refuses entries whose bytes do not match the checksum that their producer sent with them."""

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        stated = publish.sends.checksums
        found = checksums_of(publish.sends.entries)
        if found == stated:
            return ()
        return refusing(
            publish,
            {
                place: ChecksumMismatch(expected, actual)
                for place, (expected, actual) in enumerate(zip(stated, found, strict=True))
                if expected not in (actual, NO_CHECKSUM)
            },
        )


class FormatStage:
    """Refuses entries whose metadata cannot be read."""

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        errors = publish.sends.errors
        return refusing(publish, errors) if errors else ()


class DelayStage:
    """Refuses messages with a longer delay than the policies allow.

    The delay begins at the publish time by the client's clock, or at the arrival, whichever is
    later. A publish time counts as at most CLOCK_SKEW_MS_MAX after the arrival.
    """

    __slots__ = (
        "_wall_ms",
        "delay_ms_max",
    )

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self.delay_ms_max = 0  # 0: no limit
        self._wall_ms = wall_ms

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        limit_ms = self.delay_ms_max
        if limit_ms == 0 or not publish.sends.views:
            return ()
        now_ms = self._wall_ms()
        refused: dict[int, Exception] = {}
        for place, view in publish.sends.views.items():
            if view.deliver_at_ms is None:
                continue
            began_ms = max(now_ms, min(view.publish_time_ms, now_ms + CLOCK_SKEW_MS_MAX))
            delay_ms = view.deliver_at_ms - began_ms
            if delay_ms > limit_ms:
                why = f"a delay of {delay_ms} ms exceeds the limit of {limit_ms} ms"
                refused[place] = SendNotSupported("deliver_at_time", why)
        return refusing(publish, refused)


class AccessModeStage:
    """Refuses entries of a producer whose exclusive access has gone to another producer."""

    __slots__ = (
        "_current_epoch",
        "_topic",
    )

    def __init__(self, topic: str, current_epoch: Callable[[], int]) -> None:
        self._topic = topic
        self._current_epoch = current_epoch

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        epoch = publish.publisher.topic_epoch
        if epoch is None or epoch >= (current := self._current_epoch()):
            return ()
        why = f"its epoch is {epoch}, the topic's is {current}"
        error = ProducerFenced(self._topic, publish.publisher.name, why)
        return [Refuse(len(publish.sends), error)]


def refusing(publish: Publish, refused: Mapping[int, Exception]) -> Sequence[Answer]:
    """Return answers that refuse the entries at these places and append the others. (): no entry
    is refused."""
    if not refused:
        return ()
    answers: list[Answer] = []
    at = 0
    for place, error in sorted(refused.items()):
        if place > at:
            answers.append(Append(place - at))
        answers.append(Refuse(1, error))
        at = place + 1
    if at < len(publish.sends):
        answers.append(Append(len(publish.sends) - at))
    return answers
