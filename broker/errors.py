"""What can go wrong in a broker, each with its data and with whether the outcome is known.

`definite` is True when the call that raised certainly changed nothing. Raised by `append_nowait`
every error means that nothing was appended; reported for contexts that were accepted before, the
same error leaves their outcome unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magnetar.broker.log.position import Position


class BrokerError(Exception):
    """Base of every operating error of this package."""

    definite = True


# ---- the log of a topic --------------------------------------------------------------------------


class LogError(BrokerError):
    """Base of what a log raises."""


class LogFenced(LogError):
    """Another broker has taken the topic over (or it was deleted): this log is done."""

    definite = False

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"{topic} belongs to another broker now: {why}")
        self.topic = topic
        self.why = why


class LogClosed(LogError):
    """The log was closed here, or is closing."""

    definite = False

    def __init__(self, topic: str) -> None:
        super().__init__(f"the log of {topic} is closed")
        self.topic = topic


class LogUnavailable(LogError):
    """Bookies or metadata do not answer at the moment; try again later."""

    definite = False

    def __init__(self, topic: str, doing: str, cause: Exception) -> None:
        super().__init__(f"{topic}: {doing} failed: {cause}")
        self.topic = topic
        self.doing = doing
        self.cause = cause


class LogDamaged(LogError):
    """What is stored contradicts itself: a ledger is gone, a record cannot be read. The topic is
    not served before someone has looked at it; nothing is skipped silently."""

    def __init__(self, topic: str, ledger: int, why: str) -> None:
        super().__init__(f"{topic}: ledger {ledger}: {why}")
        self.topic = topic
        self.ledger = ledger
        self.why = why


class EntryTooLarge(LogError):
    """Refused before anything was appended."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"an entry of {size} bytes, at most {limit} are allowed")
        self.size = size
        self.limit = limit


class ReadFailed(LogError):
    """Entries could not be read now; they may well be readable later."""

    definite = False

    def __init__(self, position: Position, cause: Exception) -> None:
        super().__init__(f"entry {position} cannot be read: {cause}")
        self.position = position
        self.cause = cause


# ---- cursors -------------------------------------------------------------------------------------


class CursorError(BrokerError):
    """Base of what cursors raise besides LogFenced and LogClosed."""


class SubscriptionNotFound(CursorError):
    """There is no durable subscription of this name."""

    def __init__(self, subscription: str) -> None:
        super().__init__(f"subscription {subscription!r} does not exist")
        self.subscription = subscription


class TooManyReceipts(CursorError):
    """More acknowledgements wait for a receipt than a topic may hold. The acknowledgement itself
    was noted and will become durable; only this answer is not given."""

    definite = False

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} acknowledgements wait for their receipt")
        self.limit = limit


class InvalidCursorRecord(CursorError):
    """Stored cursor state that cannot be read (FORMAT.md)."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"cursor record: {reason}")
        self.reason = reason
