"""Reads every planned entry, also when the topic moves to another broker during the read.

A broker keeps no state for a read. After the loss of a broker, the reader finds the new owner and
continues with the entry after the last one it received. The reader checks for each entry that none
is missing or repeated.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.client.session.backoff import ReconnectDelay
from magnetar.spark.errors import (
    EntriesDeleted,
    OutOfOrder,
    ReadRefused,
    ReadStalled,
    TopicNotFound,
)
from magnetar.spark.range_client import (
    DELETED,
    BrokerLost,
    BrokerRefused,
    Plan,
    frames_of,
    plan_range,
    renews_credentials,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from magnetar.spark.planner import Span
    from magnetar.spark.source.options import ReadOptions

RECORD: Final = struct.Struct(">qqI")  # ledger, entry, bytes of the stored entry that follows
REDIRECTS_MAX: Final = 4  # the redirects in one round; the next round begins after a delay

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RangeEntry:
    """One stored entry of a range."""

    ledger: int
    entry: int
    data: memoryview  # a view of its frame


class TopicReader:
    """Reads one topic: the entries that `direct` yields, and the rest from the topic's owner."""

    def __init__(
        self,
        options: ReadOptions,
        topic: str,
        *,
        owner: str | None = None,
        direct: Callable[[Span], Iterator[RangeEntry]] | None = None,
    ) -> None:
        """`direct` yields the first entries of a span, in order, as far as another source has them.
        None: there is no other source. `owner` None: the reader finds the owner."""
        self._direct = direct
        self._options = options
        self._topic = topic
        self._owner = owner or None  # None: not known
        self._retries = Retries(self._topic, options.read_timeout_s)

    @property
    def owner(self) -> str | None:
        """URL of the topic's owner, as far as the reader knows. None: not known."""
        return self._owner

    def plan(self) -> tuple[Span, ...]:
        """Return the ledgers that can be read now.

        Raises TopicNotFound, ReadRefused, ReadStalled.
        """
        found = self._retry(self._ask_all)
        if not found.exists:
            raise TopicNotFound(self._topic)
        return found.ledgers

    def read(self, spans: Sequence[Span]) -> Iterator[RangeEntry]:
        """Yield each entry once, in order.

        Raises EntriesDeleted, ReadRefused, OutOfOrder, ReadStalled.
        """
        for span in spans:
            following = span.first
            if self._direct is not None:
                for stored in self._direct(span):
                    assert (stored.ledger, stored.entry) == (span.ledger, following), stored
                    following += 1
                    yield stored
            self._retries.on_progress()  # the time of `direct`, and of the caller, does not count
            renewed_at = -1  # the entry at which a broker refused the credentials
            while following <= span.last:
                try:
                    for stored in self._attempt(replace(span, first=following)):
                        following = stored.entry + 1
                        yield stored
                except BrokerLost as error:
                    self._owner = None
                    self._retries.wait(error)
                except BrokerRefused as error:
                    is_first = renewed_at != following
                    if is_first and renews_credentials(self._options.access, error):
                        renewed_at = following
                        continue
                    kind = EntriesDeleted if error.name in DELETED else ReadRefused
                    raise kind(self._topic, span.ledger, following, str(error)) from error

    def _attempt(self, span: Span) -> Iterator[RangeEntry]:
        """Read the span from the current owner. Raises BrokerLost if it ends early."""
        if self._owner is None:
            self._ask_all()
            assert self._owner is not None
        following = span.first
        with frames_of(self._options.access, self._owner, self._topic, span) as frames:
            for frame in frames:
                self._retries.on_progress()
                for stored in records_of(frame):
                    if (stored.ledger, stored.entry) != (span.ledger, following):
                        raise OutOfOrder(
                            self._topic,
                            span.ledger,
                            following,
                            f"{self._owner} sent entry {stored.ledger}:{stored.entry} instead",
                        )
                    following += 1
                    yield stored
                self._retries.on_progress()  # the caller may have taken long
        if following <= span.last:
            raise BrokerLost(f"{self._owner} ended the range before entry {following}")

    def _ask_all(self) -> Plan:
        """Ask the brokers in turn for the plan. Raises BrokerLost, BrokerRefused."""
        failure: BrokerLost | None = None
        for broker in self._options.brokers:
            try:
                return self._follow(broker)
            except BrokerLost as error:
                failure = error
        assert failure is not None
        raise failure

    def _follow(self, broker: str) -> Plan:
        for _ in range(REDIRECTS_MAX + 1):
            plan = plan_range(self._options.access, broker, self._topic)
            if not plan.owner:
                self._owner = broker
                return plan
            broker = plan.owner
        reason = f"no owner after {REDIRECTS_MAX} redirects; the last broker named is {broker}"
        raise BrokerLost(f"topic {self._topic}: {reason}")

    def _retry(self, attempt: Callable[[], T]) -> T:
        while True:
            try:
                return attempt()
            except BrokerLost as error:
                self._retries.wait(error)
            except BrokerRefused as error:
                raise ReadRefused(self._topic, -1, -1, str(error)) from error


def records_of(frame: memoryview) -> Iterator[RangeEntry]:
    """Yield the records of a frame. Raises BrokerLost if the frame ends within a record."""
    at, end = 0, len(frame)
    while at < end:
        data = at + RECORD.size
        if data > end:
            raise BrokerLost("a frame ends within the head of a record")
        ledger, entry, size = RECORD.unpack_from(frame, at)
        at = data + size
        if at > end:
            raise BrokerLost(f"a frame ends within entry {ledger}:{entry}")
        yield RangeEntry(ledger, entry, frame[data:at])


class Retries:
    """The delays between attempts, and the limit of time without progress."""

    def __init__(self, topic: str, limit_s: float) -> None:
        self._topic = topic
        self._limit_s = limit_s
        self.on_progress()

    def on_progress(self) -> None:
        self._delay = ReconnectDelay(Random())
        self._since_s = time.monotonic()

    def wait(self, failure: BrokerLost) -> None:
        """Wait before the next attempt. Raises ReadStalled if the limit is reached."""
        waited_s = time.monotonic() - self._since_s
        if waited_s >= self._limit_s:
            raise ReadStalled(self._topic, waited_s, str(failure)) from failure
        time.sleep(self._delay.on_failed(time.monotonic()))
