"""The topics that a consumer of several topics consumes, now and later.

A source lists the topics once, and then reports changes until it is cancelled. Names are full names
of topics without partitions, or of partitions.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.client.asking import asking, partitions_of
from magnetar.client.errors import (
    ConnectError,
    InvalidTopicName,
    OperationNotSupported,
    PulsarException,
    TopicNotFound,
)
from magnetar.client.options import RegexSubscriptionMode
from magnetar.client.session.backoff import ReconnectDelay
from magnetar.client.session.pool import Purpose
from magnetar.client.session.watch import TopicWatch
from magnetar.client.together import together
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.errors import InvalidNamespaceName
from magnetar.protos.errors import InvalidTopicName as InvalidName
from magnetar.protos.names import Domain, NamespaceName, TopicName
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence

    from magnetar.client.environment import Parts

    # Called with the name of a topic that the pattern matches, and with the function that says
    # whether the pattern matches a name. Returns True to leave the topic out.
    Without = Callable[[TopicName, Callable[[TopicName], bool]], bool]

log = get_logger(__name__)

MISSING_TOPICS_S: Final = 5.0
"""Seconds between two checks for listed topics that are missing."""


NAMES_AT_ONCE_MAX: Final = 1_000
"""Names that a pattern is compared with in one turn of the loop: some 8 ms."""


class Follower(Protocol):
    """The consumer that a source informs."""

    def on_topics(self, topics: Collection[str]) -> None:
        """Use exactly these topics."""

    def on_topics_changed(self, new: Collection[str], gone: Collection[str]) -> None:
        """Join the new topics, and leave the deleted topics."""

    @property
    def is_missing_some(self) -> bool:
        """True when the consumer lacks a subscription to at least one reported topic."""


class Source(Protocol):
    """The topics of one consumer."""

    title: str
    """The result of the consumer's `topic()`."""

    creates_topics: bool
    """True when the broker may create a topic because the consumer subscribes to it."""

    may_miss: bool
    """True when the consumer begins although one of its topics does not exist."""

    async def first(self) -> list[str]:
        """Return the topics with which the consumer begins. With `may_miss`, some may not exist."""

    async def follow(self, follower: Follower) -> None:
        """Report changes until this call is cancelled."""


class Partitions:
    """The partitions of one topic. Their number may grow."""

    creates_topics = True
    may_miss = False

    def __init__(self, topic: TopicName, count: int, parts: Parts) -> None:
        self.title = str(topic)
        self._topic = topic
        self._count = count
        self._parts = parts

    async def first(self) -> list[str]:
        return _partitions(self._topic, self._count)

    async def follow(self, follower: Follower) -> None:
        while True:
            await asyncio.sleep(self._parts.partitions_update_s)
            try:
                count = await self._parts.lookup.partitions(self.title, creates=False)
            except PulsarException as error:  # the next check may succeed
                log.info("partitions not read", topic=self.title, reason=str(error))
            else:
                self._count = max(self._count, count)
                follower.on_topics(_partitions(self._topic, self._count))


class TopicList:
    """Listed topics, with their partitions. The consumer subscribes to a missing topic after the
    topic has been created."""

    creates_topics = True
    may_miss = True

    def __init__(self, topics: Sequence[TopicName], parts: Parts) -> None:
        self._topics = list(dict.fromkeys(topics))
        self.title = ",".join(map(str, self._topics))
        self._counts: dict[TopicName, int] = {}
        self._parts = parts

    async def first(self) -> list[str]:
        counts = await together(self._partitions_now(topic) for topic in self._topics)
        self._counts.update(zip(self._topics, counts, strict=True))
        return self._names()

    async def _partitions_now(self, topic: TopicName) -> int:
        """Return the number of partitions. A missing topic has none until it exists."""
        try:
            return await partitions_of(str(topic), self._parts)
        except TopicNotFound:
            return 0

    async def follow(self, follower: Follower) -> None:
        while True:
            pause_s = self._parts.partitions_update_s
            if follower.is_missing_some:
                pause_s = min(pause_s, MISSING_TOPICS_S)
            await asyncio.sleep(pause_s)
            for topic in self._topics:
                await self._look_at(topic)
            follower.on_topics(self._names())

    async def _look_at(self, topic: TopicName) -> None:
        try:
            count = await self._parts.lookup.partitions(str(topic), creates=False)
        except PulsarException as error:  # the next check may succeed
            log.info("partitions not read", topic=str(topic), reason=str(error))
        else:
            self._counts[topic] = max(self._counts[topic], count)

    def _names(self) -> list[str]:
        names = [name for it in self._topics for name in _partitions(it, self._counts[it])]
        return list(dict.fromkeys(names))  # the list may name a topic and one of its partitions


class Pattern:
    """The topics of a namespace whose names match a pattern, also those that are created later.

    The client asks the broker to announce new and deleted topics that match. If the broker refuses
    the pattern, the client asks for announcements of all topics of the namespace. The client also
    asks for the list of topics when no announcement has arrived for `period_s`.
    """

    creates_topics = False  # a topic that was deleted must not come back
    may_miss = True  # a topic may be deleted after it was listed

    def __init__(
        self,
        pattern: re.Pattern[str],
        mode: RegexSubscriptionMode,
        period_s: float,
        parts: Parts,
        without: Without = lambda *_: False,
    ) -> None:
        """`without`: see Without. Raises InvalidTopicName if the pattern names no namespace."""
        namespace, names = _split(pattern.pattern)
        self.title = f"persistent://{namespace}/{names}"
        # The whole name must match one of the alternatives.
        end = "\n)" if pattern.flags & re.VERBOSE else ")"  # a line may end with a comment
        text = f"{namespace}/(?:{names}{end}" if "|" in names else f"{namespace}/{names}"
        self._namespace = str(namespace)
        self._pattern = re.compile(text, pattern.flags)
        plain = pattern.flags == re.compile("").flags
        self._asked = text if plain else f"{namespace}/.*"  # brokers know no flags
        self._domains = _DOMAINS[mode]
        self._mode = _MODES[mode]
        self._period_s = period_s
        self._parts = parts
        self._without = without

    async def first(self) -> list[str]:
        return await self._matching(await asking(self._list, self._parts, self._namespace))

    async def follow(self, follower: Follower) -> None:
        delay = ReconnectDelay(self._parts.random)
        loop = asyncio.get_running_loop()
        while True:
            pause_s = self._period_s
            try:
                async with self._watch() as watch:
                    delay.on_attached(loop.time())
                    # List after the watch began: it announces only topics that are created later.
                    follower.on_topics(await self._matching(await self._list()))
                    await self._report(watch, follower)
            except ConnectError:
                pause_s = min(delay.on_failed(loop.time()), self._period_s)
            except PulsarException as error:
                log.info("topics are not announced", pattern=self.title, reason=str(error))
            await asyncio.sleep(pause_s)
            await self._look(follower)

    @asynccontextmanager
    async def _watch(self) -> AsyncIterator[TopicWatch]:
        connection = await self._parts.lookup.any_broker(Purpose.CONSUME)
        if not connection.watches_topics:
            reason = f"the broker {connection.server_version!r} does not announce topics"
            raise OperationNotSupported(reason, broker=connection.broker)
        watch = TopicWatch(connection, next(self._parts.ids))
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                try:
                    await watch.begin(self._namespace, self._asked)
                except ConnectError:
                    raise
                except PulsarException:
                    self._asked = f"{self._namespace}/.*"
                    await watch.begin(self._namespace, self._asked)
            yield watch
        except TimeoutError:
            raise ConnectError("the broker did not answer the request to watch topics") from None
        finally:
            watch.close()

    async def _report(self, watch: TopicWatch, follower: Follower) -> None:
        """Report announcements until the session ends."""
        while True:
            try:
                async with asyncio.timeout(self._period_s):
                    new, gone = await watch.changes()
            except TimeoutError:
                await self._look(follower)
            else:
                follower.on_topics_changed(await self._matching(new), gone)

    async def _look(self, follower: Follower) -> None:
        try:
            names = await self._list()
        except PulsarException as error:  # the next check may succeed
            log.info("topics not listed", pattern=self.title, reason=str(error))
        else:
            follower.on_topics(await self._matching(names))

    async def _list(self) -> list[str]:
        return await self._parts.lookup.topics(self._namespace, self._mode)

    async def _matching(self, names: Collection[str]) -> list[str]:
        """Return the names that match. Other tasks have their turn after NAMES_AT_ONCE_MAX
        names."""
        found = []
        for number, text in enumerate(names, 1):
            if number % NAMES_AT_ONCE_MAX == 0:
                await asyncio.sleep(0)
            try:
                name = TopicName.parse(text)
            except InvalidName:  # a broker with other rules may allow such a name
                log.info("a topic was ignored: its name is not supported", topic=text)
                continue
            if self._matches(name) and not self._without(name, self._matches):
                found.append(text)
        return found

    def _matches(self, name: TopicName) -> bool:
        path = f"{name.tenant}/{name.namespace}/{name.base.topic}"
        return name.domain in self._domains and self._pattern.fullmatch(path) is not None


_INLINE_FLAGS: Final = re.compile(r"\A\(\?[aiLmsux]+\)")
"""Flags at the beginning of a pattern. `re.Pattern.flags` contains them, too."""


def namespace_of(pattern: re.Pattern[str]) -> NamespaceName:
    """Return the namespace of a pattern's topics. Raises InvalidTopicName if it names none."""
    namespace, _ = _split(pattern.pattern)
    return namespace


def _partitions(topic: TopicName, count: int) -> list[str]:
    return [str(topic.with_partition(index)) for index in range(count)] or [str(topic)]


def _split(pattern: str) -> tuple[NamespaceName, str]:
    """Return the namespace of a pattern, and the pattern of the topics' names in it."""
    text = _INLINE_FLAGS.sub("", pattern).removeprefix("^")
    domain, separator, rest = text.partition("://")
    if separator and domain not in tuple(Domain):
        raise InvalidTopicName(f"the pattern {pattern!r} has an unknown domain")
    if not separator:
        rest = text
    parts = rest.split("/", 2)
    if len(parts) == 1 and not separator:
        parts = ["public", "default", rest]
    try:
        if len(parts) != 3:
            raise InvalidNamespaceName(pattern, "expected tenant/namespace/pattern")
        return NamespaceName.parse("/".join(parts[:2])), parts[2]
    except InvalidNamespaceName as error:
        raise InvalidTopicName(f"topic: the pattern needs a namespace: {error}") from None


_DOMAINS: Final = {
    RegexSubscriptionMode.PersistentOnly: (Domain.PERSISTENT,),
    RegexSubscriptionMode.NonPersistentOnly: (Domain.NON_PERSISTENT,),
    RegexSubscriptionMode.AllTopics: tuple(Domain),
}
_MODES: Final = {
    RegexSubscriptionMode.PersistentOnly: pb.CommandGetTopicsOfNamespace.PERSISTENT,
    RegexSubscriptionMode.NonPersistentOnly: pb.CommandGetTopicsOfNamespace.NON_PERSISTENT,
    RegexSubscriptionMode.AllTopics: pb.CommandGetTopicsOfNamespace.ALL,
}
