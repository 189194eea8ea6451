"""The states of topics as their owners push them to Spark's driver.

One thread for each stream receives the states. The driver's thread takes them 100 times a second,
without a call to a broker. `take` returns no state of a topic whose stream has ended or is silent.
The driver then asks the topic's owner, and `follow` begins a new stream.

After a broker refused a stream, or did not know the call, the driver polls the broker's topics for
a while. Then it tries a stream again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.spark.access import ANONYMOUS
from magnetar.spark.range_client import BrokerLost, BrokerRefused, watch_positions
from magnetar.spark.source.push_stream import REFUSED_S, RETRY_S, SILENCE_S_MAX, PushStream
from magnetar.spark.source.topic_view import TOPICS_PER_CALL, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.protos import broker_pb2 as pb
    from magnetar.spark.access import Access
    from magnetar.spark.topic_state import TopicState

STREAMS_MAX: Final = 32
"""The streams of one query, each with a thread. Topics that would need another stream are
polled."""

STREAMS_SPARE: Final = 3
"""How many more streams to one broker may be open than its topics need. Topics that appear later
get a stream of their own. When one more stream would exceed this limit, the driver closes all
streams to the broker and opens as few as its topics need."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """The state of a topic, as its stream reports it."""

    state: TopicState | None  # None: the topic does not exist
    from_ledger: int  # the state has the ledgers from this one on


class PositionWatch:
    """The streams of one query. Used only by the driver's thread."""

    def __init__(
        self,
        access: Access = ANONYMOUS,
        *,
        streams_max: int = STREAMS_MAX,
        silence_s_max: float = SILENCE_S_MAX,
        retry_s: float = RETRY_S,
    ) -> None:
        self._access = access
        self._streams_max = streams_max
        self._silence_s_max = silence_s_max
        self._retry_s = retry_s
        self._streams: list[_Stream] = []
        self._not_before_s: dict[str, float] = {}  # owner -> when to open the next stream

    def take(self) -> tuple[dict[str, Known], dict[str, str]]:
        """Return the current states, keyed by topic. Also return the new owner of each topic that
        its broker does not serve any more; "": the new owner is not known."""
        known: dict[str, Known] = {}
        moved: dict[str, str] = {}
        for stream in list(self._streams):
            stream.copy_to(known, moved)
            if not stream.is_live:
                self._drop(stream)
        return known, moved

    def follow(self, wanted: Mapping[str, tuple[str, int]]) -> None:
        """Watch these topics: {topic: (URL of its owner, first ledger of interest)}."""
        for stream in list(self._streams):
            if not any(it in wanted and wanted[it][0] == stream.owner for it in stream.topics):
                self._drop(stream)
        covered = {(it, stream.owner) for stream in self._streams for it in stream.topics}
        by_owner: dict[str, dict[str, int]] = {}
        lacking: dict[str, dict[str, int]] = {}
        for topic, (owner, ledger) in wanted.items():
            by_owner.setdefault(owner, {})[topic] = ledger
            if (topic, owner) not in covered:
                lacking.setdefault(owner, {})[topic] = ledger
        now_s = time.monotonic()
        for owner, topics in lacking.items():
            if now_s < self._not_before_s.get(owner, now_s):
                continue
            self._not_before_s[owner] = now_s + self._retry_s
            present = [stream for stream in self._streams if stream.owner == owner]
            needed = -(-len(by_owner[owner]) // TOPICS_PER_CALL)
            if len(present) + 1 > needed + STREAMS_SPARE:
                for stream in present:
                    self._drop(stream)
                topics = by_owner[owner]
            self._open(owner, topics)

    def close(self) -> None:
        """End all streams."""
        for stream in list(self._streams):
            self._drop(stream)

    def _open(self, owner: str, topics: Mapping[str, int]) -> None:
        names = list(topics)
        for at in range(0, len(names), TOPICS_PER_CALL):
            if len(self._streams) >= self._streams_max:
                log.info("%d topics are polled, all streams are in use", len(names) - at)
                return
            part = {name: topics[name] for name in names[at : at + TOPICS_PER_CALL]}
            try:
                stream = _Stream(self._access, owner, part, self._silence_s_max)
            except (BrokerLost, BrokerRefused) as error:  # no credentials, or no TLS
                log.info("%d topics are polled: %s", len(names) - at, error)
                return
            self._streams.append(stream)

    def _drop(self, stream: _Stream) -> None:
        stream.close()
        self._streams.remove(stream)
        if stream.refused:
            self._not_before_s[stream.owner] = time.monotonic() + REFUSED_S


class _Stream:
    """One stream of a broker, and the states of its topics."""

    def __init__(
        self, access: Access, owner: str, topics: Mapping[str, int], silence_s_max: float
    ) -> None:
        self.owner = owner
        self.topics: frozenset[str] = frozenset(topics)
        self._names: Sequence[str] = list(topics)
        self._known: dict[str, Known] = {}
        self._moved: dict[str, str] = {}
        self._from = dict(topics)
        pushes = watch_positions(access, owner, topics)
        self._pushes = PushStream(owner, pushes, self._note_all, silence_s_max=silence_s_max)
        self.close = self._pushes.close

    @property
    def is_live(self) -> bool:
        return self._pushes.is_live

    @property
    def refused(self) -> bool:
        return self._pushes.refused

    def copy_to(self, known: dict[str, Known], moved: dict[str, str]) -> None:
        """Add the new owners to `moved`. If the stream is live, add the states to `known`."""
        with self._pushes.lock:
            moved |= self._moved
            self._moved.clear()
            if self.is_live:
                known |= self._known

    def _note_all(self, update: pb.PositionsUpdate) -> None:
        for topic in update.topics:
            self._note(topic)

    def _note(self, update: pb.TopicUpdate) -> None:
        name, plan = self._names[update.topic], update.plan
        if plan.owner_url or plan.error:
            self._known.pop(name, None)
            self._moved[name] = plan.owner_url
            self.topics -= {name}
            return
        state = state_of(self.owner, plan) if plan.exists else None
        if state is None:
            self._from[name] = 0  # the stream has all ledgers of a topic that is created again
        before = self._known.get(name)
        if state is not None and before is not None and before.state is not None:
            state = before.state.updated(
                state, from_ledger=update.from_ledger, first_ledger=update.first_ledger
            )
        self._known[name] = Known(state, self._from[name])
