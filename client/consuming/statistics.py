"""The statistics of a consumer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class ConsumerStatistics:
    """Counts since the consumer was created. `Consumer.get_stats` returns a copy."""

    messages_received: int = 0
    """Messages that the program took."""
    bytes_received: int = 0
    """Bytes of the payloads of these messages."""
    acknowledged: int = 0
    """Messages acknowledged individually, by the program or after their copy was stored on the
    retry or dead-letter topic, and calls of `acknowledge_cumulative`."""
    negatively_acknowledged: int = 0
    """Calls of `negative_acknowledge`."""
    reconsumed_later: int = 0
    """Messages that the consumer published on the retry topic."""
    dead_lettered: int = 0
    """Messages that the consumer published on the dead-letter topic."""
    corrupt: int = 0
    """Entries that could not be decoded. All chunks of a message count as one."""
    undecryptable: int = 0
    """Entries that could not be decrypted."""
    chunked_given_up: int = 0
    """How often the consumer gave up an incomplete chunked message. If the consumer requests the
    chunks of a message again, that message may become complete later."""
    messages_per_second: float = field(default=0.0, compare=False)
    """The average rate of `messages_received` between the last two computations. A call of
    `get_stats` computes the rates if the last computation was at least a second ago."""
    bytes_per_second: float = field(default=0.0, compare=False)
    """The rate of `bytes_received` in the same time."""

    def plus(self, other: ConsumerStatistics) -> ConsumerStatistics:
        """Return the sums."""
        names = [one.name for one in fields(self)]
        return ConsumerStatistics(*[getattr(self, it) + getattr(other, it) for it in names])
