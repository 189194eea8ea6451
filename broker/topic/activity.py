"""The times at which the consumers of a subscription were active, for its statistics. Pure.

Times are milliseconds since 1970-01-01 UTC; 0: never. The names of `describe` are those of Pulsar's
ConsumerStats.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(slots=True)
class Activity:
    """The activity of one consumer, or of all consumers that a subscription has had on this
    broker."""

    first_sent_ms: int = 0
    first_flow_ms: int = 0
    sent_ms: int = 0
    acked_ms: int = 0
    flow_ms: int = 0

    def on_sent(self, now_ms: int) -> None:
        self.sent_ms = now_ms
        self.first_sent_ms = self.first_sent_ms or now_ms

    def on_flow(self, now_ms: int) -> None:
        self.flow_ms = now_ms
        self.first_flow_ms = self.first_flow_ms or now_ms

    def latest(self, other: Activity) -> Activity:
        """Return the later of the two times in each field, but the earlier in `first_sent_ms` and
        `first_flow_ms`."""
        return Activity(
            _earlier(self.first_sent_ms, other.first_sent_ms),
            _earlier(self.first_flow_ms, other.first_flow_ms),
            max(self.sent_ms, other.sent_ms),
            max(self.acked_ms, other.acked_ms),
            max(self.flow_ms, other.flow_ms),
        )

    def describe(self) -> dict[str, int]:
        """The times that the statistics of consumers and of subscriptions have in common."""
        return {
            "lastAckedTimestamp": self.acked_ms,
            "lastConsumedTimestamp": self.sent_ms,
            "lastConsumedFlowTimestamp": self.flow_ms,
        }

    def describe_consumer(self) -> dict[str, object]:
        return {
            **self.describe(),
            "firstMessagesSentTimestamp": self.first_sent_ms,
            "firstConsumedFlowTimestamp": self.first_flow_ms,
            "lastAckedTime": _iso(self.acked_ms),
            "lastConsumedTime": _iso(self.sent_ms),
        }


def _earlier(one: int, other: int) -> int:
    return min(one or other, other or one)


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1_000, UTC).isoformat(timespec="milliseconds")
