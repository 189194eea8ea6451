"""Guard: the edge at which an unexpected exception becomes the failure of one topic.

A bug in a topic's callback, timer or task must not end the broker, which serves thousands of other
topics. The code for bookies and metadata calls a topic's callbacks directly, so their exceptions
would propagate into that code. After the exception, the topic's state in memory may be wrong, so
the topic fails: the broker disconnects the topic's clients and closes the topic, and the next
request opens the topic again from the stored data. The clients see the same as after the death of a
broker. The guard also measures the steps that it runs (runtime/steps.py).

A topic that fails FAILURES_MAX times within WINDOW_S is quarantined: the broker does not open it
for PAUSE_S_FIRST. Each further quarantine takes twice as long, up to PAUSE_S_MAX.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec

from magnetar.runtime.log import get_logger
from magnetar.runtime.steps import StepMeter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.protos.names import TopicName

P = ParamSpec("P")

FAILURES_MAX: Final = 3
WINDOW_S: Final = 60.0
PAUSE_S_FIRST: Final = 30.0
"""The first quarantine. Apache's clients return within a minute after its end: that is the longest
time that they wait between two attempts."""
PAUSE_S_MAX: Final = 600.0
PAUSES_MAX: Final = 10
"""The number up to which the quarantines of a topic are counted. At this number, a quarantine
takes PAUSE_S_MAX."""
FORGET_S: Final = 3600.0
"""After this time without a failure, the earlier failures of a topic are forgotten."""
TOPICS_MAX: Final = 10_000
"""The limit of topics whose failures the broker remembers. Beyond it, the topic that failed longest
ago is forgotten."""

log = get_logger(__name__)


class Failures:
    """Counts the unexpected exceptions that the broker survived, by the place where they
    occurred."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, where: str, name: str, error: BaseException) -> None:
        self.counts[where] += 1
        log.error("unexpected exception", where=where, name=name, exc_info=error)


class Guard:
    """Runs the steps and tasks of one topic, and catches their unexpected exceptions. The guard
    counts and logs each exception, and then calls `on_failure`, which fails the topic: after
    several exceptions, `on_failure` was called several times. Without `failures` the guard catches
    nothing, so that tests find bugs."""

    __slots__ = ("_failures", "_name", "_on_failure", "_steps")

    def __init__(
        self,
        name: str,
        *,
        failures: Failures | None = None,
        steps: StepMeter | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        self._name = name
        self._failures = failures
        self._steps = steps or StepMeter()
        self._on_failure = on_failure

    def call(
        self, step: str, work: Callable[P, object], *arguments: P.args, **options: P.kwargs
    ) -> None:
        """Run one step, and measure it."""
        began = self._steps.begin()
        try:
            work(*arguments, **options)
        except Exception as error:
            self._on_error(step, error)
        finally:
            self._steps.end(step, began)

    async def run(self, task: str, work: Callable[[], Awaitable[Any]]) -> None:
        """Run the work of a task."""
        try:
            await work()
        except Exception as error:
            self._on_error(task, error)

    def _on_error(self, where: str, error: Exception) -> None:
        if self._failures is None:
            raise error
        self._failures.note(where, self._name, error)
        if self._on_failure is not None:
            self._on_failure(error)


class _Failure(NamedTuple):
    time: float
    reason: str


@dataclass(slots=True)
class _Record:
    """The failures of one topic."""

    failures: deque[_Failure] = field(default_factory=lambda: deque(maxlen=FAILURES_MAX))
    pauses: int = 0  # the number of pauses so far, up to PAUSES_MAX
    until: float = float("-inf")  # the end of the last pause

    @property
    def last(self) -> _Failure:
        return self.failures[-1]


class Quarantine:
    """The topics that are refused for a while. `now` is the loop's time."""

    def __init__(self) -> None:
        self._records: dict[TopicName, _Record] = {}  # in the order of their last failures

    def on_failure(self, topic: TopicName, reason: str, now: float) -> None:
        record = self._records.pop(topic, None)
        if record is None or now - record.last.time > FORGET_S:
            record = _Record()
        self._records[topic] = record
        failures = record.failures
        failures.append(_Failure(now, reason))
        if len(failures) == FAILURES_MAX and now - failures[0].time <= WINDOW_S:
            record.until = now + min(PAUSE_S_FIRST * 2**record.pauses, PAUSE_S_MAX)
            record.pauses = min(record.pauses + 1, PAUSES_MAX)
            record.failures = deque([record.last], maxlen=FAILURES_MAX)
        if len(self._records) > TOPICS_MAX:
            del self._records[next(iter(self._records))]

    def refusal(self, topic: TopicName, now: float) -> tuple[str, float] | None:
        """Return the reason of the refusal and its remaining seconds. None: the topic is not
        refused."""
        record = self._records.get(topic)
        if record is None or record.until <= now:
            return None
        return record.last.reason, record.until - now

    def failures_of(self, topic: TopicName, now: float) -> list[str]:
        """Describe the last failures of the topic, at most FAILURES_MAX, if one is younger than
        FORGET_S. A quarantine removes the failures before the one that caused it."""
        record = self._records.get(topic)
        if record is None or now - record.last.time > FORGET_S:
            return []
        return [f"{now - time:.0f} s ago: {reason}" for time, reason in record.failures]

    def describe(self, now: float) -> dict[str, dict[str, object]]:
        """Return the topics that are refused at present, by name."""
        return {
            str(topic): {"reason": record.last.reason, "ends_in_s": round(record.until - now)}
            for topic, record in self._records.items()
            if record.until > now
        }

    def check(self) -> None:
        assert len(self._records) <= TOPICS_MAX
        assert all(record.failures for record in self._records.values()), (
            "a topic without a failure"
        )
