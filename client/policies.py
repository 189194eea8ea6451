"""The policies of a consumer: redelivery delays and dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, Self

from magnetar.client.errors import InvalidConfiguration, WrongType

if TYPE_CHECKING:
    from collections.abc import Sequence

RECONSUME_TIMES_MAX: Final = 16
"""The maximum number of passes of a message through the retry topic if the consumer has no
dead-letter policy, as in Apache's client."""


class RedeliveryBackoff(Protocol):
    """The delays before the client requests the redelivery of a message."""

    def next(self, redelivery_count: int) -> int:
        """Return the delay in milliseconds.

        `redelivery_count`: the number of earlier redeliveries of the message.
        """


class MultiplierRedeliveryBackoff:
    """A delay that grows by a factor with each redelivery, up to a maximum.

    Raises InvalidConfiguration unless 0 <= min_delay_ms <= max_delay_ms and multiplier >= 1.
    """

    def __init__(
        self, min_delay_ms: int = 1000, max_delay_ms: int = 60_000, multiplier: float = 2
    ) -> None:
        for name, value in (("min_delay_ms", min_delay_ms), ("max_delay_ms", max_delay_ms)):
            if type(value) is not int or value < 0:
                raise InvalidConfiguration(f"{name} must be an integer >= 0, not {value!r}")
        if max_delay_ms < min_delay_ms:
            raise InvalidConfiguration("max_delay_ms must not be below min_delay_ms")
        if not multiplier >= 1:  # also for NaN
            raise InvalidConfiguration(f"multiplier must be a number >= 1, not {multiplier!r}")
        self.min_delay_ms = min_delay_ms
        self.max_delay_ms = max_delay_ms
        self.multiplier = multiplier

    def next(self, redelivery_count: int) -> int:
        """Return the delay in milliseconds before the next redelivery."""
        if redelivery_count <= 0 or self.min_delay_ms == 0:
            return self.min_delay_ms
        try:
            delay_ms = self.min_delay_ms * self.multiplier**redelivery_count
        except OverflowError:
            return self.max_delay_ms
        return int(min(delay_ms, self.max_delay_ms))


@dataclass(frozen=True, slots=True)
class DeadLetterPolicy:
    """The values of a ConsumerDeadLetterPolicy."""

    max_redeliver_count: int
    dead_letter_topic: str  # "": <topic>-<subscription>-DLQ
    retry_letter_topic: str  # "": <topic>-<subscription>-RETRY
    initial_subscription_name: str  # "": none
    encryption_keys: tuple[str, ...] = ()  # (): the client does not encrypt the copies

    def __post_init__(self) -> None:
        if type(self.max_redeliver_count) is not int or self.max_redeliver_count < 1:
            raise InvalidConfiguration(
                f"max_redeliver_count must be an integer above 0, not {self.max_redeliver_count!r}"
            )
        for name in ("dead_letter_topic", "retry_letter_topic", "initial_subscription_name"):
            if not isinstance(getattr(self, name), str):
                raise InvalidConfiguration(f"{name} must be str, not {getattr(self, name)!r}")
        for key in self.encryption_keys:
            given: object = key
            if not isinstance(given, str) or not given:
                raise InvalidConfiguration(f"encryption_keys must be names, not {key!r}")

    # The names of Apache's extension module

    def getMaxRedeliverCount(self) -> int:
        return self.max_redeliver_count

    def getDeadLetterTopic(self) -> str:
        return self.dead_letter_topic

    def getInitialSubscriptionName(self) -> str:
        return self.initial_subscription_name


class DeadLetterPolicyBuilder:
    """Builds a DeadLetterPolicy, with the names of Apache's extension module."""

    def __init__(self) -> None:
        self._max_redeliver_count = 2**31 - 1
        self._dead_letter_topic = ""
        self._initial_subscription_name = ""

    def maxRedeliverCount(self, max_redeliver_count: int) -> Self:
        self._max_redeliver_count = max_redeliver_count
        return self

    def deadLetterTopic(self, dead_letter_topic: str) -> Self:
        self._dead_letter_topic = dead_letter_topic
        return self

    def initialSubscriptionName(self, name: str) -> Self:
        self._initial_subscription_name = name
        return self

    def build(self) -> DeadLetterPolicy:
        """Return the policy. Raises InvalidConfiguration if a value is invalid."""
        return DeadLetterPolicy(
            self._max_redeliver_count, self._dead_letter_topic, "", self._initial_subscription_name
        )


class ConsumerDeadLetterPolicy:
    """Moves a message to the dead-letter topic after `max_redeliver_count` redeliveries.

    Without a retry topic, a program receives a message at most `max_redeliver_count` + 1 times. The
    broker counts redeliveries on Shared and Key_Shared subscriptions only. With a retry topic, the
    consumer also moves a message after `max_redeliver_count` passes through it, and each pass
    begins a new count of redeliveries.

    - `max_redeliver_count`: the number of redeliveries before the move; at least 1.
    - `dead_letter_topic`: the topic of the copies. None: `<topic>-<subscription>-DLQ`, unless the
      namespace has a topic of Pulsar's old name, `<subscription>-DLQ`.
    - `initial_subscription_name`: the name of a subscription of the dead-letter topic. The broker
      creates the subscription before it stores the first copy. None: no subscription; messages can
      be deleted before a consumer subscribes.
    - `retry_letter_topic`: the retry topic. None: `<topic>-<subscription>-RETRY`, unless the
      namespace has a topic `<subscription>-RETRY`. Apache's Python client does not have this
      parameter; its Java client does.
    - `encryption_keys`: the names of the public keys with which the consumer encrypts the copies on
      both topics. The consumer's `crypto_key_reader` reads the keys. None: the consumer does not
      encrypt the copies, as in Pulsar. In Apache's Java client, a customizer of the copies'
      producers sets the keys.

    Raises InvalidConfiguration for invalid values.
    """

    def __init__(
        self,
        max_redeliver_count: int,
        dead_letter_topic: str | None = None,
        initial_subscription_name: str | None = None,
        retry_letter_topic: str | None = None,
        *,
        encryption_keys: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(encryption_keys, list | tuple | None):
            raise WrongType(f"encryption_keys must be a list of names, not {encryption_keys!r}")
        self._policy = DeadLetterPolicy(
            max_redeliver_count,
            _text(dead_letter_topic),
            _text(retry_letter_topic),
            _text(initial_subscription_name),
            tuple(encryption_keys or ()),
        )

    @property
    def encryption_keys(self) -> list[str]:
        """The names of the keys that encrypt the copies. []: the copies are not encrypted."""
        return list(self._policy.encryption_keys)

    @property
    def dead_letter_topic(self) -> str:
        """The dead-letter topic. "": the default name."""
        return self._policy.dead_letter_topic

    @property
    def retry_letter_topic(self) -> str:
        """The retry topic. "": the default name."""
        return self._policy.retry_letter_topic

    @property
    def max_redeliver_count(self) -> int:
        """The number of redeliveries before the consumer moves a message."""
        return self._policy.max_redeliver_count

    @property
    def initial_subscription_name(self) -> str:
        """The subscription that the broker creates with the dead-letter topic. "": none."""
        return self._policy.initial_subscription_name

    def policy(self) -> DeadLetterPolicy:
        """Return the values of the policy."""
        return self._policy


def _text(value: str | None) -> str:
    return "" if value is None else value
