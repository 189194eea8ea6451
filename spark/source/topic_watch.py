"""The topics of a query, as a broker pushes them to Spark's driver.

Any broker can push all topics of the cluster. So one stream is enough for up to 1,000 named topics,
or for the namespace of a pattern. While all streams are live and have sent their topics, the driver
polls a broker for topics only every DISCOVERY_S_MAX (driver.py). If a stream ends or is silent, the
driver polls more often, and `follow` opens all streams to the next broker. The first messages of a
stream hold all its topics.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from magnetar.spark.range_client import BrokerLost, BrokerRefused, watch_topics
from magnetar.spark.source.push_stream import REFUSED_S, RETRY_S, SILENCE_S_MAX, PushStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.protos import broker_pb2 as pb
    from magnetar.spark.access import Access

    Asked = tuple[Sequence[str], Sequence[str]]  # topics, namespaces

log = logging.getLogger(__name__)


class TopicWatch:
    """The streams of one query. Used only by the driver's thread."""

    def __init__(
        self,
        access: Access,
        brokers: Sequence[str],
        asked: Sequence[Asked],
        keeps: Callable[[str], bool],
        *,
        silence_s_max: float = SILENCE_S_MAX,
        retry_s: float = RETRY_S,
    ) -> None:
        """`asked`: the topics and namespaces of each stream. `keeps` says whether the query wants a
        topic."""
        self._access = access
        self._brokers = list(brokers)  # the first one is asked next
        self._asked = list(asked)
        self._keeps = keeps
        self._silence_s_max = silence_s_max
        self._retry_s = retry_s
        self._streams: list[_Stream] = []
        self._not_before_s = float("-inf")

    @property
    def is_live(self) -> bool:
        """True when all topics are known and a broker pushes their changes."""
        return bool(self._streams) and all(stream.knows_all for stream in self._streams)

    def take(self) -> list[str] | None:
        """The topics and partitions that exist now. None: nothing was pushed since the last call,
        or `is_live` is False."""
        if not self.is_live or not any(stream.has_news for stream in self._streams):
            return None
        return [topic for stream in self._streams for topic in stream.take()]

    def follow(self) -> None:
        """Open the streams, unless they are open."""
        if self._streams:
            if all(stream.is_live for stream in self._streams):
                return
            refused = any(stream.refused for stream in self._streams)
            self._not_before_s = time.monotonic() + (REFUSED_S if refused else self._retry_s)
            self.close()
            self._brokers.append(self._brokers.pop(0))
        if time.monotonic() < self._not_before_s:
            return
        broker = self._brokers[0]
        try:
            for asked in self._asked:
                self._streams.append(
                    _Stream(self._access, broker, asked, self._keeps, self._silence_s_max)
                )
        except (BrokerLost, BrokerRefused) as error:  # unusable credentials or TLS
            log.info("a stream of topics cannot be opened, the query polls instead: %s", error)
            self._not_before_s = time.monotonic() + REFUSED_S
            self.close()

    def close(self) -> None:
        """End all streams."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()


class _Stream:
    def __init__(
        self,
        access: Access,
        broker: str,
        asked: Asked,
        keeps: Callable[[str], bool],
        silence_s_max: float,
    ) -> None:
        self.has_news = False
        self._keeps = keeps
        self._topics: dict[str, None] = {}
        self._is_whole = False  # the broker has sent all topics
        pushes = watch_topics(access, broker, *asked)
        self._pushes = PushStream(broker, pushes, self._note, silence_s_max=silence_s_max)
        self.close = self._pushes.close

    @property
    def is_live(self) -> bool:
        return self._pushes.is_live

    @property
    def refused(self) -> bool:
        return self._pushes.refused

    @property
    def knows_all(self) -> bool:
        return self._is_whole and self.is_live

    def take(self) -> list[str]:
        with self._pushes.lock:
            self.has_news = False
            return list(self._topics)

    def _note(self, update: pb.TopicsUpdate) -> None:
        for topic in update.gone:
            self._topics.pop(topic, None)
        self._topics |= dict.fromkeys(filter(self._keeps, update.topics))
        self.has_news = self.has_news or bool(update.topics or update.gone) or not self._is_whole
        self._is_whole = self._is_whole or not update.more
