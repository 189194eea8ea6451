"""The publish rate of a topic: token buckets of messages and bytes in front of the log.

A publish passes while tokens are available, and takes one token for each message and each byte. So
the buckets may fall below zero, and the average is exact. Without tokens, the producer holds its
publishes behind a gate, which opens when the buckets are above zero again. Other producers on the
same connection continue until the held producer has gathered HELD_BYTES_MAX (producer.py), or all
producers of the broker together hold so many bytes that none may gather more
(`PublishBudget.may_gather`). From then on the broker does not read from the connection, because the
client would send without end.

While all producers of the broker together hold too many bytes (`PublishBudget.may_hold`), publishes
pass even without tokens. Then the broker does not read from the connections of the producers that
are over their rate until the gate opens, or producers may hold publishes again (`wait_room` of the
producer). The average stays exact, and waiting publishes of a slow rate take no memory from the
other topics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.topic.pipeline import Gate, Wait, refusing
from magnetar.protos.entry import payload_bytes_of
from magnetar.protos.errors import EntryTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.log.budget import PublishBudget
    from magnetar.broker.topic.pipeline import Answer, Publish
    from magnetar.metadata.policies import Rate


class Bucket:
    """Tokens that arrive at a steady rate. The bucket holds at most the tokens of one period."""

    def __init__(self, tokens_max: int, period_s: float, now: float) -> None:
        self.tokens_max = tokens_max  # 0: no limit
        self.period_s = period_s
        self._tokens = float(tokens_max)
        self._at = now

    def has_tokens(self, now: float) -> bool:
        if not self.tokens_max:
            return True
        gained = max(now - self._at, 0.0) * self.tokens_max / self.period_s
        self._tokens = min(self._tokens + gained, float(self.tokens_max))
        self._at = now
        return self._tokens > 0

    def take(self, tokens: int) -> None:
        self._tokens -= tokens

    def limit_debt(self, periods_max: int) -> None:
        """Limit the debt to the tokens of this many periods."""
        self._tokens = max(self._tokens, -float(periods_max * self.tokens_max))

    def wait_s(self) -> float:
        """The time until tokens are available, counted from the last `has_tokens`."""
        if not self.tokens_max or self._tokens > 0:
            return 0.0
        return (1.0 - self._tokens) * self.period_s / self.tokens_max


def buckets_of(rate: Rate, now: float) -> tuple[Bucket | None, Bucket | None]:
    """The buckets of messages and of bytes. None: no limit."""
    if not (rate.messages_max or rate.bytes_max):
        return None, None
    return (
        Bucket(rate.messages_max, rate.period_s, now),
        Bucket(rate.bytes_max, rate.period_s, now),
    )


class RateStage:
    """Holds publishes while the rate is exceeded. When the stage finds that the rate is exceeded,
    it calls `wake_at` with the time at which the caller must call `open`."""

    __slots__ = ("_budget", "_bytes", "_gate", "_messages", "_rate", "_wake_at")

    def __init__(self, wake_at: Callable[[float], None], budget: PublishBudget) -> None:
        """`budget` says whether the broker has memory for one more held publish."""
        self._wake_at = wake_at
        self._budget = budget
        self._rate: Rate | None = None
        self._messages: Bucket | None = None
        self._bytes: Bucket | None = None
        self._gate: Gate | None = None  # None: open

    def set_rate(self, rate: Rate, now: float) -> None:
        """Use this rate from now on, also for the publishes that are held."""
        if rate == self._rate:
            return
        self._rate = rate
        self._messages, self._bytes = buckets_of(rate, now)
        self.open()

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        messages, size = self._messages, self._bytes
        if messages is None or size is None:
            return ()
        if self._gate is None and not (messages.has_tokens(now) and size.has_tokens(now)):
            size.has_tokens(now)
            self._gate = Gate()
            self._wake_at(now + max(messages.wait_s(), size.wait_s()))
        if self._gate is not None and self._budget.may_hold:
            return [Wait(self._gate)]
        sends = publish.sends
        messages.take(len(sends) + sum([view.num_messages - 1 for view in sends.views.values()]))
        size.take(sum(map(len, sends.entries)))
        return ()

    @property
    def is_exceeded(self) -> bool:
        """True when publishes are held, or would be held if the broker had memory for them."""
        return self._gate is not None

    def open(self) -> None:
        """Open the gate. The caller then resumes the producers with held publishes."""
        if self._gate is not None:
            self._gate.known = True
            self._gate = None


class TopicSizeStage:
    """Refuses entries whose payload is larger than the topic's policy allows. Chunks are exempt: a
    message in chunks is meant to be larger than one entry may be."""

    __slots__ = "bytes_max"

    def __init__(self) -> None:
        self.bytes_max = 0  # 0: no limit of the topic's own

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        sends, limit = publish.sends, self.bytes_max
        if not limit or max(map(len, sends.entries)) <= limit:
            return ()
        refused: dict[int, Exception] = {}
        for place, entry in enumerate(sends.entries):
            view = sends.views.get(place)
            if view is not None and view.chunk is not None:
                continue
            size = payload_bytes_of(entry) if view is None else view.payload_bytes
            if size > limit:
                refused[place] = EntryTooLarge("payload", size, limit)
        return refusing(publish, refused)
