"""Plans the reads of one query on Spark's driver: a DataFrame once, a stream batch by batch.

Spark asks an idle source 100 times a second for new data. The source answers without a call to a
broker. The owners of the topics push new positions (position_watch.py), and a broker pushes the
list of topics (topic_watch.py). The driver polls topics whose owners push nothing, at most once in
`pollIntervalMs`. If no broker pushes the list of topics, the driver asks for the list once in
`discoveryIntervalMs`. The query fails when polls have failed for `readTimeoutMs`, counted from the
first failed poll after a successful one.

With the option `subscription`, the driver moves the subscription to the position that Spark has
committed. Spark passes this position to `latest`, as the end of the last committed batch, and to
`commit`. In a query without a checkpoint, the first call of `latest` creates the subscription where
the query begins, before Spark reads.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from magnetar.protos.names import TopicName
from magnetar.spark.admission import rows_of_bytes, share
from magnetar.spark.errors import DataLost, ReadRefused, ReadStalled
from magnetar.spark.offsets import Offsets, Place, parse_offsets, symbolic
from magnetar.spark.range_client import BrokerLost, BrokerRefused
from magnetar.spark.sealed import worth_reading_directly
from magnetar.spark.source.options import MessagePlace
from magnetar.spark.source.partition_reader import Retries
from magnetar.spark.source.position_watch import PositionWatch
from magnetar.spark.source.tasks import tasks_between
from magnetar.spark.source.topic_view import Clock, TopicView
from magnetar.spark.source.topic_watch import TopicWatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.spark.source.options import Bounds, ReadOptions
    from magnetar.spark.source.position_watch import Known
    from magnetar.spark.source.tasks import Task
    from magnetar.spark.topic_state import TopicState

DISCOVERY_S_MAX: Final = 300.0
"""The interval in seconds at which the driver asks for new topics although a broker pushes them. A
broker that has lost its connection to the metadata store pushes nothing."""

log = logging.getLogger(__name__)


def plan_frame(options: ReadOptions) -> list[Task]:
    """Return the tasks of a DataFrame. Raises TopicNotFound, ReadRefused, ReadStalled."""
    view = TopicView(options)
    view.discover()
    pushed = options.pushed
    topics = [it for it in view.topics if pushed is None or pushed.keeps_topic(TopicName.parse(it))]
    states = _existing(view.states(dict.fromkeys(topics, 0)))
    starts = _start_places(view, options.start, states)
    ends = _end_places(view, options.end, states)
    for topic, state in states.items():
        end = ends[topic]
        if pushed is not None:
            starts[topic], end = _narrowed(view, topic, starts[topic], end, pushed.index_bounds())
        ends[topic] = replace(end, bytes=state.bytes_between(starts[topic], end))
    tasks = tasks_between(options, starts, ends, states)
    return _with_copies(options, view, tasks, states)


class StreamDriver:
    """Plans the batches of one streaming query. Only one thread may use the driver."""

    def __init__(
        self,
        options: ReadOptions,
        *,
        now_ms: int,
        query: str,
        watch: PositionWatch | None = None,
        topics: TopicWatch | None = None,
    ) -> None:
        """`now_ms` is the time at which the query starts, and `query` is its id. Brokers compare
        both to fence older queries of the subscription. If `watch` or `topics` is None, the driver
        creates it with the default limits."""
        self._options = options
        self._view = view = TopicView(options)
        self._watch = watch or PositionWatch(options.access)
        self._topics = topics or TopicWatch(
            options.access, options.brokers, view.asked(), view.keeps
        )
        self._states: dict[str, TopicState | None] = {}
        self._from: dict[str, int] = {}  # topic -> the first ledger that its state has
        self._pushed: Mapping[str, Known] = {}  # the states of topics whose owners push news now
        self._failing: Clock | None = None  # runs from the first failed poll since a successful one
        self._tried = Clock(options.poll_interval_s)
        self._discovered = Clock(options.discovery_interval_s)
        self._frozen = False
        self._batched = Clock(options.trigger_delay_s)  # runs from the planning of the last batch
        self._query = now_ms, query
        self._held: dict[str, Place] = {}
        self._not_held: dict[str, Place] = {}  # the places that a broker refused permanently
        self._hold_failed = Clock(options.poll_interval_s)
        self._warned: dict[str, str] = {}  # topic -> the loss of which the log warned last
        self._reached: dict[str, Place] = {}  # the ends of the last batch

    def initial(self) -> dict[str, Any]:
        """Return the offsets before the first batch."""
        return symbolic(self._options.start.text)

    def freeze(self) -> None:
        """Limit the query to the messages that the topics have now (AvailableNow)."""
        self._view.discover()
        self._ask_states(dict.fromkeys(self._view.topics, 0))
        self._frozen = True

    def latest(
        self, start: dict[str, Any], *, rows_max: int | None, bytes_max: int | None
    ) -> dict[str, Any]:
        """Return the end of the batch that begins at `start`, or `start` if there is no batch.

        Raises DataLost, QueryFenced, TopicNotFound, InvalidOffsets, ReadRefused, ReadStalled.
        """
        offsets = parse_offsets(start)
        is_first = offsets is None
        if offsets is None:
            offsets = Offsets({}, self._begin())
            begins = offsets.begun
        else:
            try:
                self._poll(offsets.places)
                self._add_unknown(offsets.places)
                begins = self._begins_now(offsets.places)
            except (DataLost, ReadStalled):
                self._hold(offsets.places)  # QueryFenced, if a newer query holds the subscription
                raise
            # One call for all places: after a failure, `_hold` makes no call for some time.
            self._hold({**offsets.places, **begins})
            begins = self._held_of(begins, offsets.places)
        starts = {
            topic: begins.get(topic) or offsets.places[topic]
            for topic, state in self._states.items()
            if state is not None and (topic in begins or topic in offsets.places)
        }
        self._reached = starts
        if not (is_first or begins) and self._waits_for_more(starts):
            return start
        ends = self._ends(starts, rows_max, bytes_max)
        self._reached = ends
        # Also return a first batch that has no topics. Otherwise the next call would begin the
        # query again instead of polling.
        if not (is_first or begins) and ends == offsets.places:
            return start
        self._batched.reset()
        division = self._options.target_bytes_per_task, self._options.tasks_max
        return Offsets(ends, begins, division).to_json()

    def report(self) -> dict[str, Any] | None:
        """Return the known ends of the topics, or None if no end is known.

        The differences between these ends and the end of a batch are the rows and bytes that the
        query has not read yet.
        """
        ends = {
            topic: state.end_from(self._reached[topic])
            for topic, state in _existing(self._states).items()
            if topic in self._reached
        }
        return Offsets(ends).to_json() if ends else None

    def tasks(self, start: dict[str, Any], end: dict[str, Any]) -> list[Task]:
        """Return the tasks of a batch.

        Raises DataLost, InvalidOffsets, ReadRefused, ReadStalled.
        """
        first, last = parse_offsets(start), parse_offsets(end)
        if last is None:
            return []
        starts = dict(first.places if first else {}) | dict(last.begun)
        ends = {
            topic: place
            for topic, place in last.places.items()
            if topic in starts and place.index > starts[topic].index
        }
        states = self._states_of(starts, ends)
        for topic, state in states.items():
            if state is None:
                self._lose(topic, f"the topic was deleted; {_unread(starts[topic], ends[topic])}")
            elif (loss := state.lost_between(starts[topic], ends[topic])) is not None:
                self._lose(topic, loss.what)
        options = self._options
        if last.tasks is not None:
            options = replace(options, target_bytes_per_task=last.tasks[0], tasks_max=last.tasks[1])
        known = _existing(states)
        tasks = tasks_between(options, starts, ends, known)
        return _with_copies(options, self._view, tasks, known)

    def commit(self, end: dict[str, Any]) -> None:
        """Move the subscription to `end`: Spark has committed all batches up to `end`.

        Raises QueryFenced.
        """
        offsets = parse_offsets(end)
        if offsets is not None:
            self._hold(offsets.places)

    def close(self) -> None:
        """End the streams from the brokers. Spark calls this method when the query has ended."""
        self._watch.close()
        self._topics.close()

    # Mechanics

    def _begin(self) -> dict[str, Place]:
        """Return the place where the query begins in each topic. Create the subscription at these
        places."""
        if not self._frozen:
            self._view.discover()
            self._ask_states(dict.fromkeys(self._view.topics, 0))
        begins = _start_places(self._view, self._options.start, _existing(self._states))
        if self._options.subscription:
            self._view.hold(self._query, begins)
            self._held |= begins
        return begins

    def _poll(self, places: Mapping[str, Place]) -> None:
        """Update the states: take the states that the owners pushed, and poll if a poll is due."""
        if self._frozen:
            return
        self._topics.follow()
        if (found_now := self._topics.take()) is not None:
            self._view.adopt(found_now)
        self._take_pushed(places)
        unknown = any(topic not in self._pushed for topic in (*self._view.topics, *places))
        if not unknown:
            self._failing = None
        if not (self._tried.is_due and (unknown or self._discovers)):
            return
        self._tried.reset()
        first = not self._states
        try:
            if self._discovers:
                self._view.discover(once=not first)
                self._discovered.reset()
            asks = self._asks(places)
            polled = {it: ledger for it, ledger in asks.items() if it not in self._pushed}
            found = self._view.states(polled, once=not first) if polled else {}
        except BrokerLost as error:
            if self._failing is None:
                self._failing = Clock(self._options.read_timeout_s)
                self._failing.reset()
            elif self._failing.is_due:
                asked, age_s = self._options.asked, self._failing.age_s
                raise ReadStalled(asked, age_s, str(error)) from error
            log.warning("a poll failed, the query continues: %s", error)
        except BrokerRefused as error:
            raise ReadRefused(self._options.asked, -1, -1, str(error)) from error
        else:
            self._states = {it: self._states[it] for it in self._pushed if it in asks} | found
            self._from = {it: self._from[it] for it in self._states if it not in found} | polled
            self._failing = None
            self._follow(asks)

    @property
    def _discovers(self) -> bool:
        """True when it is time to ask for new topics."""
        return self._discovered.is_due and (
            not self._topics.is_live or self._discovered.age_s >= DISCOVERY_S_MAX
        )

    def _asks(self, places: Mapping[str, Place]) -> dict[str, int]:
        """Return the topics whose states the query needs, each with the first ledger needed."""
        asks = {it: places[it].ledger if it in places else 0 for it in self._view.topics}
        return asks | {topic: place.ledger for topic, place in places.items()}

    def _take_pushed(self, places: Mapping[str, Place]) -> None:
        """Adopt the states and the changes of owner that the brokers have pushed."""
        known, moved = self._watch.take()
        for topic, owner in moved.items():
            self._view.set_owner(topic, owner)
        self._pushed = known
        for topic, news in known.items():
            ledger = max(places[topic].ledger if topic in places else 0, news.from_ledger)
            self._states[topic] = news.state and news.state.from_ledger(ledger)
            self._from[topic] = ledger

    def _follow(self, asks: Mapping[str, int]) -> None:
        """Ask the owners to push changes of these topics from now on."""
        owners = {topic: self._view.owner_of(topic) for topic in asks}
        self._watch.follow(
            {topic: (owner, asks[topic]) for topic, owner in owners.items() if owner is not None}
        )

    def _add_unknown(self, places: Mapping[str, Place]) -> None:
        """Ask for the states of topics in the checkpoint that have no state yet, for example
        deleted topics, which `freeze` did not find."""
        unknown = {it: place.ledger for it, place in places.items() if it not in self._states}
        if unknown:
            self._states |= self._view.states(unknown)
            self._from |= unknown

    def _ask_states(self, asks: Mapping[str, int]) -> None:
        self._states = self._view.states(asks)
        self._from = dict(asks)
        self._failing = None

    def _begins_now(self, places: Mapping[str, Place]) -> dict[str, Place]:
        """Return the places where new topics begin, and where topics continue after a loss.

        Raises DataLost.
        """
        begins = {}
        for topic, state in self._states.items():
            place = places.get(topic)
            if place is None:
                if state is not None and self._from.get(topic) == 0:
                    begins[topic] = state.earliest
            elif state is None:
                self._lose(
                    topic, f"the topic was deleted; the query's next message was {place.index}"
                )
            elif (loss := state.lost(place)) is not None:
                self._lose(topic, loss.what)
                begins[topic] = loss.next
        return begins

    def _held_of(
        self, begins: Mapping[str, Place], places: Mapping[str, Place]
    ) -> dict[str, Place]:
        """Leave out new topics that the subscription does not hold because their owner was lost:
        the query does not read a topic before the subscription keeps its messages. The next call of
        `latest` tries again. AvailableNow leaves out no topic, because it ends when there is no
        batch."""
        return {
            it: place
            for it, place in begins.items()
            if it in places
            or not self._options.subscription
            or self._frozen
            or place in (self._held.get(it), self._not_held.get(it))
        }

    def _lose(self, topic: str, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLost(topic, what)
        if self._warned.get(topic) != what:  # Spark may ask 100 times a second
            self._warned[topic] = what
            log.warning("data lost, failOnDataLoss is false: %s: %s", topic, what)

    def _waits_for_more(self, starts: Mapping[str, Place]) -> bool:
        """Return whether the batch waits for `minRowsPerTrigger`. AvailableNow never waits."""
        if self._options.rows_min == 1 or self._frozen or self._batched.is_due:
            return False
        backlog = sum(
            state.end_from(starts[topic]).index - starts[topic].index
            for topic, state in _existing(self._states).items()
            if topic in starts
        )
        return backlog < self._options.rows_min

    def _ends(
        self, starts: Mapping[str, Place], rows_max: int | None, bytes_max: int | None
    ) -> dict[str, Place]:
        """Return the end of the batch in each topic, within the limits."""
        states = {topic: self._states[topic] for topic in starts}
        ends = {it: state.end_from(starts[it]) for it, state in states.items() if state}
        backlogs = {topic: end.index - starts[topic].index for topic, end in ends.items()}
        rows = share(backlogs, rows_max)
        if bytes_max is not None:
            sizes = {topic: end.bytes - starts[topic].bytes for topic, end in ends.items()}
            shares = share(sizes, bytes_max)
            for topic, backlog in backlogs.items():
                fitting = rows_of_bytes(backlog, sizes[topic], shares[topic])
                rows[topic] = min(rows[topic], fitting)
        limits = {
            it: starts[it].index + count for it, count in rows.items() if count < backlogs[it]
        }
        return ends | self._limited(limits, starts, ends)

    def _limited(
        self, limits: Mapping[str, int], starts: Mapping[str, Place], ends: Mapping[str, Place]
    ) -> dict[str, Place]:
        """Return the ends of the batch in the topics that have more rows than the limits allow.

        `limits`: the index of the first message beyond the limit. The batch ends before the entry
        that holds this message, but reads at least one entry. `ends`: the ends without a limit.

        If a topic was deleted or trimmed after the driver got its state, leave the topic out. The
        tasks then find out which messages are lost.
        """
        found = self._view.entries_of_indexes(limits)
        # In these topics, the first entry alone has more rows than the limit.
        large = {it: place for it, place in found.items() if place.index <= starts[it].index}
        found |= self._view.following_entries(large)
        limited = {}
        for topic, end in found.items():
            start, state = starts[topic], self._states[topic]
            assert state is not None, topic
            is_known = any(ledger.id == end.ledger for ledger in state.ledgers)
            if start.index < end.index < ends[topic].index and is_known:
                limited[topic] = replace(end, bytes=start.bytes + state.bytes_between(start, end))
        return limited

    def _states_of(
        self, starts: Mapping[str, Place], ends: Mapping[str, Place]
    ) -> dict[str, TopicState | None]:
        """Return the states of the topics of a batch. If an owner does not know all messages of the
        batch, it has lost the topic, and the driver waits for the next owner.

        Raises ReadRefused, ReadStalled.
        """
        retries = Retries(self._options.asked, self._options.read_timeout_s)
        missing = {
            topic: starts[topic].ledger
            for topic in ends
            if not self._covers(topic, starts[topic], ends[topic])
        }
        states = {topic: self._states.get(topic) for topic in ends} | self._view.states(missing)
        while behind := {
            topic: state
            for topic, state in _existing(states).items()
            if state.is_behind(starts[topic], ends[topic])
        }:
            topic, state = next(iter(behind.items()))
            self._view.forget(list(behind))
            retries.wait(
                BrokerLost(
                    f"{state.owner} knows {topic} up to message {state.next_index - 1}, but the"
                    f" planned batch ends with message {ends[topic].index - 1}"
                )
            )
            states |= self._view.states({it: starts[it].ledger for it in behind})
        return states

    def _covers(self, topic: str, start: Place, end: Place) -> bool:
        state = self._states.get(topic)
        return (
            state is not None
            and state.next_index >= end.index
            and self._from[topic] <= start.ledger
        )

    def _hold(self, places: Mapping[str, Place]) -> None:
        """Move the subscription to `places`, and log failures. If a broker was lost, the driver
        tries again, at most once in `pollIntervalMs`. If a broker refused a place, the driver does
        not try this place again.

        A deleted topic is a refused place, too: `latest` and `tasks` handle its deletion as a loss.
        Raises QueryFenced.
        """
        if not self._options.subscription:
            return
        moved = {
            it: place
            for it, place in places.items()
            if place not in (self._held.get(it), self._not_held.get(it))
        }
        if not moved or not self._hold_failed.is_due:
            return
        failures = self._view.hold_once(self._query, moved)
        self._held |= {it: place for it, place in moved.items() if it not in failures}
        refused = [it for it, error in failures.items() if isinstance(error, BrokerRefused)]
        self._not_held |= {it: moved[it] for it in refused}
        if len(refused) < len(failures):
            self._hold_failed.reset()
        if failures:
            topic, error = next(iter(failures.items()))
            log.warning(
                "the subscription did not move on %d topics, the query continues: %s: %s",
                *(len(failures), topic, error),
            )


def _with_copies(
    options: ReadOptions,
    view: TopicView,
    tasks: list[Task],
    states: Mapping[str, TopicState],
) -> list[Task]:
    """Tell the tasks which of their ledgers they can read from bookies."""
    if options.reads_from_bookies:
        wanted = worth_reading_directly([task.spans for task in tasks], states)
        if wanted:
            sealed = view.copies(wanted)
            for task in tasks:
                task.sealed = sealed.only(span.ledger for span in task.spans)
    return tasks


def _start_places(
    view: TopicView, bounds: Bounds, states: Mapping[str, TopicState]
) -> dict[str, Place]:
    named = {topic: bounds.of(TopicName.parse(topic)) for topic in states}
    return view.places_of(named, states)


def _end_places(
    view: TopicView, bounds: Bounds, states: Mapping[str, TopicState]
) -> dict[str, Place]:
    """Return the places where the read ends. The index of a place is that of the first message not
    read. If the end is in the middle of an entry, the place is after the entry."""
    named = {topic: bounds.of(TopicName.parse(topic)) for topic in states}
    ends = view.places_of(named, states)
    for topic, bound in named.items():
        if isinstance(bound, MessagePlace) and bound.batch_index:
            ends[topic] = replace(ends[topic], entry=ends[topic].entry + 1)
    return ends


def _narrowed(
    view: TopicView, topic: str, start: Place, end: Place, indexes: tuple[int, int | None]
) -> tuple[Place, Place]:
    """Return the part of [start, end) whose messages have an index in [first, behind)."""
    first, behind = indexes
    if first >= end.index or (behind is not None and behind <= start.index):
        return start, start
    if first > start.index:
        start = replace(view.entry_of_index(topic, first), index=first)
    if behind is not None and behind < end.index:
        place = view.entry_of_index(topic, behind)
        # As in `_end_places`: the place is after the entry, and its index ends the read.
        entry = place.entry + 1 if place.index < behind else place.entry
        end = replace(place, entry=entry, index=behind)
    return start, end


def _existing(states: Mapping[str, TopicState | None]) -> dict[str, TopicState]:
    return {topic: state for topic, state in states.items() if state is not None}


def _unread(start: Place, end: Place) -> str:
    return f"messages {start.index} to {end.index - 1} of a planned batch are lost"
