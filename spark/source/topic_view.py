"""The topics of a query, as Spark's driver sees them. The driver asks the owners of the topics.

One call to a broker covers up to 1,000 of its topics. A broker that does not own a topic names the
owner, which the view remembers.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.model import (
    BookieId,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    Segment,
)
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.names import TopicName
from magnetar.spark.errors import QueryFenced, ReadRefused, TopicNotFound
from magnetar.spark.offsets import Place
from magnetar.spark.range_client import (
    BrokerLost,
    BrokerRefused,
    error_named,
    find_entries,
    find_topics,
    hold_topics,
    ledger_copies,
    plan_topics,
)
from magnetar.spark.sealed import Sealed
from magnetar.spark.source.options import Edge, MessagePlace, Time
from magnetar.spark.source.partition_reader import REDIRECTS_MAX, Retries
from magnetar.spark.topic_state import Ledger, TopicState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized

    from magnetar.spark.source.options import Bound, ReadOptions

TOPICS_PER_CALL: Final = 1_000
COPIES_MAX: Final = 1_000  # ledgers of one request
ENTRIES_AT_ONCE: Final = 32  # entries that brokers search at the same time

T = TypeVar("T")

log = logging.getLogger(__name__)


class TopicView:
    """The topics of a query, their states and their owners. For one thread."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._brokers = list(options.brokers)  # the first one is asked first
        self._owners: dict[str, str] = {}
        self._missing: list[str] = []  # the missing topics that the log named last
        self._has_found = False  # a topic has existed since the view was created
        self.topics: tuple[str, ...] = ()  # full names; partitions instead of partitioned topics

    def discover(self, *, once: bool = False) -> None:
        """Set `topics`. With `once`, a failure raises BrokerLost or BrokerRefused. Otherwise the
        call is repeated after BrokerLost.

        Raises TopicNotFound if no topic was found before and a topic that the user named does not
        exist. With failOnDataLoss false, this is an error only if none of the topics exists; with
        waitingForNonExistedTopic, never. Raises ReadRefused, ReadStalled.
        """
        attempt = self._find_all
        found, missing = attempt() if once else self._retry(attempt)
        options = self._options
        fails = not options.waits_for_topics and (options.fail_on_data_loss or not found)
        if missing and not self._has_found and fails:
            raise TopicNotFound(missing[0])
        if missing and missing != self._missing:
            log.warning("%d topics do not exist, the first one is %s", len(missing), missing[0])
        self._missing = missing
        self.adopt(found)

    def asked(self) -> list[tuple[list[str], list[str]]]:
        """The topics and the namespaces of each request. The requests together find all topics."""
        if (pattern := self._options.pattern) is not None:
            return [([], [str(pattern.namespace)])]
        return [(chunk, []) for chunk in _chunks([str(topic) for topic in self._options.topics])]

    def keeps(self, topic: str) -> bool:
        """Return whether the query wants a topic that a broker has found."""
        pattern = self._options.pattern
        return pattern is None or pattern.matches(TopicName.parse(topic))

    def adopt(self, found: Iterable[str]) -> None:
        """Set `topics` to these: a broker has found all topics that the query wants."""
        self.topics = tuple(sorted(found) if self._options.pattern is not None else found)
        self._has_found = self._has_found or bool(self.topics)

    def states(
        self, from_ledgers: Mapping[str, int], *, once: bool = False
    ) -> dict[str, TopicState | None]:
        """Ask for the states of topics, with the ledgers from the given one on.

        None: the topic does not exist. `once` as in `discover`. Raises ReadRefused, ReadStalled.
        """
        found: dict[str, TopicState | None] = {}

        def attempt() -> None:
            self._plan({it: at for it, at in from_ledgers.items() if it not in found}, found)

        if once:
            attempt()
        else:
            self._retry(attempt, found)
        return found

    def place_of(self, topic: str, bound: Bound, state: TopicState) -> Place:
        """The place that a bound names in a topic.

        Raises TopicNotFound, ReadRefused, ReadStalled.
        """
        match bound:
            case Edge.EARLIEST:
                return state.earliest
            case Edge.LATEST:
                return state.latest
            case Time() if not state.ledgers:  # the search would open an empty topic
                return state.latest
            case Time():
                return self._entry(topic, _entry_since(topic, bound))
            case MessagePlace(ledger, entry, batch_index):
                place = self.entry_at(topic, ledger, entry)
                if (place.ledger, place.entry) != (ledger, entry) or not batch_index:
                    return place
                following = self.entry_at(topic, ledger, entry + 1).index
                index = min(place.index + batch_index, following)
                return Place(ledger, entry, index)
            case _:
                raise AssertionError(bound)

    def places_of(
        self, bounds: Mapping[str, Bound], states: Mapping[str, TopicState]
    ) -> dict[str, Place]:
        """The place that the bound of each topic names. The brokers search the times of several
        topics at the same time.

        Raises TopicNotFound, ReadRefused, ReadStalled.
        """
        found = self._entries(
            {
                topic: _entry_since(topic, bound)
                for topic, bound in bounds.items()
                if isinstance(bound, Time) and states[topic].ledgers
            }
        )
        return {
            topic: found.get(topic) or self.place_of(topic, bound, states[topic])
            for topic, bound in bounds.items()
        }

    def entry_of_index(self, topic: str, index: int) -> Place:
        """The place of the entry that holds the message with this index. The place has the index of
        the entry's first message.

        Raises TopicNotFound, ReadRefused, ReadStalled.
        """
        return self._entry(topic, pb.FindEntryRequest(topic=topic, index=index))

    def entry_at(self, topic: str, ledger: int, entry: int) -> Place:
        """The place of the first entry at or after this one.

        Raises TopicNotFound, ReadRefused, ReadStalled.
        """
        return self._entry(topic, _entry_from(topic, ledger, entry))

    def entries_of_indexes(self, indexes: Mapping[str, int]) -> dict[str, Place]:
        """Like `entry_of_index`, for many topics. Topics that do not exist are left out.

        Raises ReadRefused, ReadStalled.
        """
        return self._entries(
            {it: pb.FindEntryRequest(topic=it, index=index) for it, index in indexes.items()}
        )

    def following_entries(self, places: Mapping[str, Place]) -> dict[str, Place]:
        """The places of the entries after these. Topics that do not exist are left out.

        Raises ReadRefused, ReadStalled.
        """
        return self._entries(
            {it: _entry_from(it, place.ledger, place.entry + 1) for it, place in places.items()}
        )

    def copies(self, ledgers: Mapping[str, Sequence[int]]) -> Sealed:
        """The bookies that have copies of these ledgers. `ledgers`: {topic: its sealed ledgers}.
        Ledgers for which no owner answers are left out."""
        found = Sealed()
        for broker, topics in self._by_owner(ledgers):
            for chunk in _copies_chunks({topic: ledgers[topic] for topic in topics}):
                try:
                    found = found.merged(
                        sealed_of(ledger_copies(self._options.access, broker, chunk))
                    )
                except (BrokerLost, BrokerRefused) as error:
                    log.warning("ledgers are read from brokers, copies are unknown: %s", error)
        return found

    def hold(self, query: tuple[int, str], places: Mapping[str, Place]) -> None:
        """Move the subscription of the options to these places. Create it where it does not exist.

        `query` is the start in ms and the id of the query. After a failure for one topic, the other
        topics are still moved. Raises QueryFenced, ReadRefused, ReadStalled.
        """
        left = dict(places)
        self._retry(lambda: self._hold_all(query, left))

    def hold_once(
        self, query: tuple[int, str], places: Mapping[str, Place]
    ) -> dict[str, BrokerLost | BrokerRefused]:
        """Like `hold`, with one attempt. Returns the failures, keyed by topic.

        Raises QueryFenced.
        """
        left = dict(places)
        failures: dict[str, BrokerLost | BrokerRefused] = {}
        with suppress(BrokerLost, BrokerRefused):
            self._hold_all(query, left, failures)
        return failures

    def owner_of(self, topic: str) -> str | None:
        """URL of the topic's owner; None: it is not known."""
        return self._owners.get(topic)

    def set_owner(self, topic: str, owner: str) -> None:
        """Note the owner that a broker has named. "": the broker does not know the owner."""
        if owner:
            self._owners[topic] = owner
        else:
            self._owners.pop(topic, None)

    def forget(self, topics: Mapping[str, object] | Sequence[str]) -> None:
        """Forget the owner of these topics: it does not answer, or does not own them any more. The
        view then asks the next broker of the options."""
        for topic in topics:
            self._owners.pop(topic, None)
        self._brokers.append(self._brokers.pop(0))

    # Mechanics

    def _hold_all(
        self,
        query: tuple[int, str],
        left: dict[str, Place],
        failures: dict[str, BrokerLost | BrokerRefused] | None = None,
    ) -> None:
        """Move all topics that can be moved, and take them out of `left`. If topics remain, raise
        the first BrokerRefused, or else the first BrokerLost. `failures` gets all failures."""
        failed: dict[str, BrokerLost | BrokerRefused] = {} if failures is None else failures
        for _ in range(REDIRECTS_MAX + 1):
            asked = {topic: place for topic, place in left.items() if topic not in failed}
            for broker, topics in self._by_owner(asked):
                self._hold(broker, query, {topic: left[topic] for topic in topics}, left, failed)
            if not left.keys() - failed.keys():
                break
        for topic in left:
            reason = f"no owner of {topic} after {REDIRECTS_MAX} redirects"
            failed.setdefault(topic, BrokerLost(reason))
        lasting = (it for it in failed.values() if isinstance(it, BrokerRefused))
        failure = next(lasting, next(iter(failed.values()), None))
        if failure is not None:
            raise failure

    def _hold(
        self,
        broker: str,
        query: tuple[int, str],
        places: Mapping[str, Place],
        left: dict[str, Place],
        failed: dict[str, BrokerLost | BrokerRefused],
    ) -> None:
        request = pb.HoldTopicsRequest(
            subscription=self._options.subscription, query_start_ms=query[0], query=query[1]
        )
        for topic, place in places.items():
            named = pb.EntryPlace(ledger=place.ledger, entry=place.entry)
            request.topics.add(topic=topic, place=named)
        try:
            answers = hold_topics(self._options.access, broker, request)
        except BrokerLost as error:
            self.forget(places)
            failed |= dict.fromkeys(places, error)
            return
        except BrokerRefused as error:
            failed |= dict.fromkeys(places, error)
            return
        for topic, held in zip(places, answers, strict=True):
            if held.owner_url:
                self._owners[topic] = held.owner_url
                continue
            if held.error:
                self._owners.pop(topic, None)
                failed[topic] = failure = error_named(broker, held.error)
                if failure.name == "QueryFenced":
                    raise QueryFenced(str(failure))
                continue
            del left[topic]

    def _find_all(self) -> tuple[list[str], list[str]]:
        broker = self._brokers[0]
        found: dict[str, None] = {}
        missing: list[str] = []
        try:
            for topics, namespaces in self.asked():
                reply = find_topics(self._options.access, broker, topics, namespaces)
                found |= dict.fromkeys(filter(self.keeps, reply.topics))
                missing += reply.missing
        except BrokerLost:
            self._brokers.append(self._brokers.pop(0))
            raise
        return list(found), missing

    def _plan(self, asks: dict[str, int], found: dict[str, TopicState | None]) -> None:
        for _ in range(REDIRECTS_MAX + 1):
            for broker, topics in self._by_owner(asks):
                self._plan_of(broker, {topic: asks[topic] for topic in topics}, found)
                for topic in topics:
                    if topic in found:
                        del asks[topic]
            if not asks:
                return
        raise BrokerLost(f"no owner of {next(iter(asks))} after {REDIRECTS_MAX} redirects")

    def _plan_of(
        self, broker: str, asks: Mapping[str, int], found: dict[str, TopicState | None]
    ) -> None:
        try:
            plans = plan_topics(self._options.access, broker, asks)
        except BrokerLost:
            self.forget(asks)
            raise
        for topic, plan in zip(asks, plans, strict=True):
            if plan.owner_url:
                self._owners[topic] = plan.owner_url
            elif plan.error:
                self._owners.pop(topic, None)
                raise error_named(broker, plan.error)
            else:
                self._owners[topic] = broker
                found[topic] = state_of(broker, plan) if plan.exists else None

    def _entry(self, topic: str, request: pb.FindEntryRequest) -> Place:
        found = self._entries({topic: request})
        if topic not in found:
            raise TopicNotFound(topic)
        return found[topic]

    def _entries(self, requests: Mapping[str, pb.FindEntryRequest]) -> dict[str, Place]:
        """The places that the requests name. Topics that do not exist are left out."""
        found: dict[str, Place | None] = {}  # None: the topic does not exist

        def attempt() -> None:
            self._find_entries({it: ask for it, ask in requests.items() if it not in found}, found)

        self._retry(attempt, found)
        return {topic: place for topic, place in found.items() if place is not None}

    def _find_entries(
        self, asks: dict[str, pb.FindEntryRequest], found: dict[str, Place | None]
    ) -> None:
        for _ in range(REDIRECTS_MAX + 1):
            for topics in _chunks(list(asks), ENTRIES_AT_ONCE):
                self._find_some({topic: asks[topic] for topic in topics}, found)
            asks = {topic: ask for topic, ask in asks.items() if topic not in found}
            if not asks:
                return
        raise BrokerLost(f"no owner of {next(iter(asks))} after {REDIRECTS_MAX} redirects")

    def _find_some(
        self, asks: Mapping[str, pb.FindEntryRequest], found: dict[str, Place | None]
    ) -> None:
        """Ask the owners at the same time, then raise the first BrokerRefused or BrokerLost."""
        calls = [(self._owners.get(it, self._brokers[0]), ask) for it, ask in asks.items()]
        failures: dict[str, BrokerLost | BrokerRefused] = {}
        replies = find_entries(self._options.access, calls)
        for topic, reply in zip(asks, replies, strict=True):
            if isinstance(reply, BrokerLost | BrokerRefused):
                failures[topic] = reply
            elif reply.owner_url:
                self._owners[topic] = reply.owner_url
            elif reply.exists:
                found[topic] = Place(reply.ledger, reply.entry, reply.first_index)
            else:
                found[topic] = None
        if lost := [it for it, error in failures.items() if isinstance(error, BrokerLost)]:
            self.forget(lost)
        if failures:
            raise max(failures.values(), key=lambda error: error.definite)

    def _by_owner(self, topics: Mapping[str, object]) -> list[tuple[str, list[str]]]:
        by_owner: dict[str, list[str]] = {}
        for topic in topics:
            by_owner.setdefault(self._owners.get(topic, self._brokers[0]), []).append(topic)
        return [(broker, part) for broker, all_of in by_owner.items() for part in _chunks(all_of)]

    def _retry(self, attempt: Callable[[], T], done: Sized = ()) -> T:
        """Repeat an attempt after BrokerLost. An attempt that adds to `done` has made progress.

        Raises ReadRefused, ReadStalled.
        """
        retries = Retries(self._options.asked, self._options.read_timeout_s)
        before = len(done)
        while True:
            try:
                return attempt()
            except BrokerLost as error:
                if len(done) > before:
                    retries.on_progress()
                    before = len(done)
                retries.wait(error)
            except BrokerRefused as error:
                raise ReadRefused(self._options.asked, -1, -1, str(error)) from error


class Clock:
    """Says when an interval has passed."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s = float("-inf")

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._last_s >= self._interval_s

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._last_s

    def reset(self) -> None:
        self._last_s = time.monotonic()


def _chunks(items: Sequence[str], size: int = TOPICS_PER_CALL) -> Iterator[list[str]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def _entry_from(topic: str, ledger: int, entry: int) -> pb.FindEntryRequest:
    """Ask for the first entry at or after this one."""
    return pb.FindEntryRequest(topic=topic, place=pb.EntryPlace(ledger=ledger, entry=entry))


def _entry_since(topic: str, time: Time) -> pb.FindEntryRequest:
    """Ask for the first entry published at this time or later."""
    return pb.FindEntryRequest(topic=topic, publish_time_ms=time.ms)


def _copies_chunks(ledgers: Mapping[str, Sequence[int]]) -> Iterator[dict[str, list[int]]]:
    """Requests with at most COPIES_MAX ledgers each."""
    rest = iter([(topic, ledger) for topic, part in ledgers.items() for ledger in part])
    while part := list(islice(rest, COPIES_MAX)):
        chunk: dict[str, list[int]] = {}
        for topic, ledger in part:
            chunk.setdefault(topic, []).append(ledger)
        yield chunk


def sealed_of(reply: pb.PlanTopicsReply) -> Sealed:
    """The sealed ledgers of an answer, without the ledgers whose data is invalid."""
    ledgers: dict[int, LedgerMetadata] = {}
    addresses: dict[Member, str] = {}
    for plan in reply.topics:
        for copies in plan.copies:
            try:
                metadata = _metadata_of(copies, reply.bookies)
            except (InvalidRecord, IndexError) as error:
                log.error("the data about copies of ledger %d is invalid: %s", copies.ledger, error)
                continue
            ledgers[copies.ledger] = metadata
            for segment in copies.segments:
                for place in segment.members:
                    addresses[_member(reply.bookies[place])] = reply.bookies[place].address
    return Sealed(ledgers, addresses)


def _metadata_of(copies: pb.LedgerCopies, bookies: Sequence[pb.BookieData]) -> LedgerMetadata:
    """The metadata of a sealed ledger. Raises InvalidRecord, IndexError."""
    segments = tuple(
        Segment(EntryId(part.first_entry), tuple(_member(bookies[it]) for it in part.members))
        for part in copies.segments
    )
    return LedgerMetadata(
        ledger=LedgerId(copies.ledger),
        state=LedgerState.CLOSED,
        ensemble_size=len(segments[0].members),
        write_quorum=copies.write_quorum,
        ack_quorum=copies.ack_quorum,
        segments=segments,
        master_key=copies.read_key,  # the key that reads present
        creator_token=0,
        created_ms=0,
        last_entry=EntryId(copies.last_entry),
        length=copies.length,
    )


def _member(bookie: pb.BookieData) -> Member:
    return Member(BookieId(bookie.bookie), bookie.incarnation)


def state_of(broker: str, plan: pb.TopicPlan) -> TopicState:
    """The state that a broker's answer gives."""
    ledgers = (
        Ledger(it.ledger, it.last_entry, it.first_index, it.bytes, it.sealed) for it in plan.ledgers
    )
    return TopicState(broker, tuple(ledgers), plan.first_index, plan.next_index)
