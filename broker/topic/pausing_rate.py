"""A publish rate that the broker enforces by pauses in its reads: the excess waits at the clients.

The messages that were read are published and counted, even beyond the rate. So the token buckets
may fall below zero. The broker does not read on from the publishing connections until tokens are
available again. The average is exact, except that the debt beyond DEBT_PERIODS_MAX periods is
forgotten. A burst exceeds the rate by at most a frame of each connection. As in Pulsar, the other
producers of a paused connection wait as well.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.broker.topic.throttle import buckets_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.topic.pipeline import Answer, Publish
    from magnetar.broker.topic.throttle import Bucket
    from magnetar.metadata.policies import Rate
    from magnetar.protos.sends import SendRun

LOOK_S: Final = 1.0
"""The interval in seconds at which a waiting connection checks the rate, which may have changed."""

DEBT_PERIODS_MAX: Final = 60
"""The limit of the debt, in periods of the rate. A broker's rate has a period of 1 s, so that its
limit is a minute. A compressed batch of 60 bytes may claim a million messages. Without the limit,
all producers of the broker would wait for the claims of one producer."""

WAIT_S_MIN: Final = 0.001
"""The shortest sleep: rounding errors of a fraction of a token can leave a wait of almost 0 s."""


class PausingRate:
    """The publish rate of a non-persistent topic, or of all topics of a broker. As a stage of the
    pipeline it accepts every publish."""

    __slots__ = ("_bytes", "_messages", "_rate")

    def __init__(self) -> None:
        self._rate: Rate | None = None
        self._messages: Bucket | None = None  # None: there is no limit
        self._bytes: Bucket | None = None

    def set_rate(self, rate: Rate, now: float) -> None:
        """Use this rate from now on."""
        if rate == self._rate:
            return
        self._rate = rate
        self._messages, self._bytes = buckets_of(rate, now)

    def take(self, sends: SendRun, now: float) -> None:
        """Count this run, which is published."""
        messages, size = self._messages, self._bytes
        if messages is None or size is None:
            return
        messages.has_tokens(now)
        size.has_tokens(now)
        messages.take(len(sends) + sum([view.num_messages - 1 for view in sends.views.values()]))
        messages.limit_debt(DEBT_PERIODS_MAX)
        size.take(sum(map(len, sends.entries)))
        size.limit_debt(DEBT_PERIODS_MAX)

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        """Count the publish and accept it; see pipeline.py."""
        self.take(publish.sends, now)
        return ()

    def wait_s(self, now: float) -> float:
        """The time for which the publishing connections must not read. 0: they may read on."""
        messages, size = self._messages, self._bytes
        if messages is None or size is None:
            return 0.0
        messages.has_tokens(now)
        size.has_tokens(now)
        return max(messages.wait_s(), size.wait_s())

    async def wait(self) -> None:
        """Return when connections may read on."""
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self.wait_s(loop.time())
            if wait_s <= 0:
                return
            await asyncio.sleep(min(max(wait_s, WAIT_S_MIN), LOOK_S))
