"""Pushes the states of topics to a client (WatchPositions), so that an idle query sends no
requests.

One task of a watch sends one message after the other, at most one in GATHER_S. The next message
holds all changes that happen while a message is sent, so a slow client needs no queue. For each
changed topic, a message holds the last ledger that the client knows and all newer ledgers, or all
ledgers of a topic that was created again.

A watch follows the log of each of its open topics, and the broker's TopicChanges. A watch does not
open a topic, unless the topic's last ledger must be recovered (log/closed.py): no message is
published to a topic before the broker opens it. If this broker does not own a topic, or cannot open
it, the watch reports the topic once. The client then looks for the owner.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import RequestRefused, TopicNotFound
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.broker.session import ranges
from magnetar.broker.session.topic_ranges import (
    CONCURRENT_MAX,
    TOPICS_MAX,
    other_owner,
    plan_of,
    require_few,
    stored_name,
    text_of,
)
from magnetar.protos import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.broker.broker import Broker
    from magnetar.broker.log.log import Log
    from magnetar.protos.names import TopicName

    Send = Callable[[bytes], Awaitable[None]]

BEAT_S: Final = 2.0
"""Seconds between two messages while nothing changes. A client that gets no message for three such
periods asks the owners of the topics."""

GATHER_S: Final = 0.01
"""Seconds between two messages of a watch: at most 100 of them in a second, even if clients publish
50,000 messages/s to a topic."""

NEWS_LEDGERS_MAX: Final = 5_000
"""When an update has this many ledgers of open topics, at 2.4 us each, the next update has the
other open topics. A topic's record bounds the number of its ledgers."""

WATCHES_MAX: Final = 256
"""The limit of watches of one broker. A query has one watch for each 1,000 of its topics."""

WATCHED_MAX: Final = 50_000
"""The limit for the topics of all watches of a broker; a topic of two watches counts twice. Each
topic needs 1 KB."""


class PositionWatches:
    """The watches of one broker."""

    def __init__(self, *, watched_max: int = WATCHED_MAX, beat_s: float = BEAT_S) -> None:
        self._watched_max = watched_max
        self._beat_s = beat_s
        self._running: dict[_Watch, int] = {}  # -> the number of its topics

    async def serve(self, broker: Broker, asked: pb.WatchPositionsRequest, send: Send) -> None:
        """Push until the client leaves or `end_all` is called. Raises NotAllowed, InvalidTopicName,
        RequestRefused, and the errors of `send`."""
        count = len(asked.topics)
        require_few("topics", count, TOPICS_MAX)
        if len(self._running) >= WATCHES_MAX:
            raise RequestRefused(f"the broker has {WATCHES_MAX} watches, which is the limit")
        if sum(self._running.values()) + count > self._watched_max:
            raise RequestRefused(f"more than {self._watched_max} topics would be watched")
        watch = _Watch(broker, asked, send, self._beat_s)
        self._running[watch] = count
        try:
            await watch.run()
        finally:
            del self._running[watch]

    def end_all(self) -> None:
        """End every watch. The clients then ask the owners of the topics."""
        for watch in self._running:
            watch.end()


def _nothing() -> None:
    """Do nothing: there is no watch to end."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A topic of a watch."""

    name: TopicName
    from_ledger: int  # the next message has the ledgers from this one on
    log: Log | None = None  # None: the topic is not open here
    seen: bool = False  # the client knows whether the topic exists
    over: bool = False  # the client gets no more updates about the topic
    unwatch: Callable[[], None] = _nothing  # ends the watch of the broker's changes
    unfollow: Callable[[], None] = _nothing  # ends the watch of `log`


class _Watch:
    def __init__(
        self, broker: Broker, asked: pb.WatchPositionsRequest, send: Send, beat_s: float
    ) -> None:
        self._beat_s = beat_s
        self._broker = broker
        self._send = send
        self._topics = [_Watched(stored_name(it.topic), it.from_ledger) for it in asked.topics]
        # By place in the request:
        self._changed: dict[int, None] = dict.fromkeys(range(len(self._topics)))
        self._looks: dict[int, asyncio.Task[None]] = {}
        self._found: dict[int, pb.TopicPlan] = {}  # the plans to send, of topics not open here
        self._woken = asyncio.Event()
        self._ended = False

    def end(self) -> None:
        self._ended = True
        self._woken.set()

    async def run(self) -> None:
        for place, watched in enumerate(self._topics):
            on_change = partial(self._on_change, place)
            watched.unwatch = self._broker.changes.watch(watched.name, on_change)
        try:
            async with asyncio.TaskGroup() as group:
                await self._push(group)
                for task in self._looks.values():
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for watched in self._topics:
                watched.unwatch()
                watched.unfollow()

    async def _push(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + self._beat_s
        while not self._ended:
            self._woken.clear()
            self._begin_looks(group)
            update = self._take_news()
            if not update.topics and loop.time() < beat_at:
                await self._wait_until(beat_at)
                continue
            await self._broker.standstill.wait_sure()
            await self._send(update.SerializeToString())
            beat_at = loop.time() + self._beat_s
            await asyncio.sleep(GATHER_S)

    async def _wait_until(self, time: float) -> None:
        try:
            async with asyncio.timeout_at(time):
                await self._woken.wait()
        except TimeoutError:
            return

    def _on_change(self, place: int) -> None:
        self._changed[place] = None
        self._woken.set()

    def _begin_looks(self, group: asyncio.TaskGroup) -> None:
        """Find out about the changed topics whose logs are not open."""
        for place in list(self._changed):
            watched = self._topics[place]
            if watched.over:
                del self._changed[place]
            elif watched.log is not None and not watched.log.has_ended:
                continue  # `_take_news` reports this topic
            elif len(self._looks) >= CONCURRENT_MAX:
                return
            elif place not in self._looks:
                del self._changed[place]
                self._looks[place] = group.create_task(self._look(place))

    async def _look(self, place: int) -> None:
        watched = self._topics[place]
        try:
            found = await self._state_of(place, watched)
        except OPERATING_ERRORS as error:
            found = pb.TopicPlan(error=text_of(error))
        del self._looks[place]
        if found is not None and not watched.over:  # `over`: an update ended it meanwhile
            self._found[place] = found
        self._woken.set()

    async def _state_of(self, place: int, watched: _Watched) -> pb.TopicPlan | None:
        """Return the update for a topic without an open log here. None: no update, or the topic has
        an open log now."""
        if owner := await other_owner(self._broker, watched.name):
            return pb.TopicPlan(owner_url=owner)
        if watched.seen and not self._broker.is_open(watched.name):
            exists = await self._broker.exists(watched.name)
            return None if exists else pb.TopicPlan(exists=False)
        if (chain := await self._broker.closed_chain(watched.name)) is not None:
            return plan_of(chain, ranges.of_chain(chain, watched.from_ledger))
        try:
            log = (await self._broker.stored_topic(watched.name, create=False)).log
        except TopicNotFound:
            return pb.TopicPlan(exists=False)
        if not log.has_ended:  # otherwise the topic is closing, and `_on_change` is called
            watched.unfollow()
            watched.log = log
            if watched.seen and watched.from_ledger not in log.chain.counts:
                # Another topic has this name now, or the ledger was trimmed. The ledgers of another
                # topic may have smaller ids, so the next message has all ledgers.
                watched.from_ledger = 0
            watched.unfollow = log.watch(
                partial(self._on_change, place), read_position=lambda: EARLIEST
            )
            self._changed[place] = None
        return None

    def _take_news(self) -> pb.PositionsUpdate:
        update = pb.PositionsUpdate()
        for place, found in self._found.items():
            watched = self._topics[place]
            watched.seen = True
            watched.over = bool(found.owner_url or found.error)
            if watched.over:
                watched.unwatch()
                watched.unfollow()
                watched.log = None
            update.topics.add(topic=place, plan=found)
            if found.ledgers:
                watched.from_ledger = found.ledgers[-1].ledger
        self._found.clear()
        ledgers = 0
        for place in list(self._changed):
            log = self._topics[place].log
            if log is not None and not log.has_ended:
                del self._changed[place]
                news = _news(place, self._topics[place], log)
                update.topics.append(news)
                ledgers += len(news.plan.ledgers)
                if ledgers >= NEWS_LEDGERS_MAX:
                    break  # the others stay in `_changed`, for the next update
        return update


def _news(place: int, watched: _Watched, log: Log) -> pb.TopicUpdate:
    chain = log.chain
    parts = ranges.of_log(log, watched.from_ledger)
    update = pb.TopicUpdate(
        topic=place,
        plan=plan_of(chain, parts),
        from_ledger=watched.from_ledger,
        first_ledger=chain.records[0].ledger if chain.records else chain.newest + 1,
    )
    if parts:
        watched.from_ledger = parts[-1].ledger
    watched.seen = True
    return update
