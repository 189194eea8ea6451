"""The statistics of a consumer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class ConsumerStatistics:
    """Counts since the consumer was created. `Consumer.get_stats` returns a copy."""

    messages_received: int = 0  # taken by the program
    bytes_received: int = 0  # payloads of these messages
    acknowledged: int = 0  # calls for single messages, and cumulative calls
    negatively_acknowledged: int = 0
    reconsumed_later: int = 0  # published on the retry topic
    dead_lettered: int = 0  # published on the dead-letter topic
    corrupt: int = 0  # entries that could not be decoded
    undecryptable: int = 0  # entries that could not be decrypted
    chunked_given_up: int = 0  # chunked messages that did not become complete
    # Since the last call of get_stats that was at least a second earlier.
    messages_per_second: float = field(default=0.0, compare=False)
    bytes_per_second: float = field(default=0.0, compare=False)

    def plus(self, other: ConsumerStatistics) -> ConsumerStatistics:
        """Return the sums."""
        names = [one.name for one in fields(self)]
        return ConsumerStatistics(*[getattr(self, it) + getattr(other, it) for it in names])
