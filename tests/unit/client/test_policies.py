"""Redelivery delays and dead-letter policies."""

from __future__ import annotations

import pulsar
import pytest

from magnetar.client.consumer import subscription_of
from magnetar.client.encryption import CryptoKeyReader
from magnetar.client.errors import InvalidConfiguration
from magnetar.client.options import ConsumerOptions
from magnetar.client.policies import (
    ConsumerDeadLetterPolicy,
    DeadLetterPolicyBuilder,
    MultiplierRedeliveryBackoff,
)


def test_delays_double_up_to_the_maximum() -> None:
    """Pulsar's table for a minimum of 1 s, a maximum of 60 s and the factor 2."""
    backoff = MultiplierRedeliveryBackoff(1000, 60_000, 2)
    delays_s = [backoff.next(count) / 1000 for count in range(8)]
    assert delays_s == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.next(-1) == 1000
    assert backoff.next(10**6) == 60_000


@pytest.mark.parametrize(
    "values", [(-1, 5, 2), (5, 1, 2), (1, 5, 0.5), (True, 5, 2), (1.5, 5, 2), (1, 5, float("nan"))]
)
def test_an_invalid_backoff_is_refused(values: tuple[int, int, float]) -> None:
    with pytest.raises(InvalidConfiguration):
        MultiplierRedeliveryBackoff(*values)


def test_a_dead_letter_policy_has_the_values_of_apaches() -> None:
    for given in ((3,), (3, "dead"), (3, "dead", "first")):
        ours, theirs = ConsumerDeadLetterPolicy(*given), pulsar.ConsumerDeadLetterPolicy(*given)
        for name in ("max_redeliver_count", "dead_letter_topic", "initial_subscription_name"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.policy().getMaxRedeliverCount() == theirs.policy().getMaxRedeliverCount()
    built = DeadLetterPolicyBuilder().maxRedeliverCount(2).deadLetterTopic("d")
    policy = built.initialSubscriptionName("i").build()
    assert (policy.getDeadLetterTopic(), policy.getInitialSubscriptionName()) == ("d", "i")


def test_a_dead_letter_policy_without_redeliveries_is_refused() -> None:
    for count in (0, -1, None, 1.5):
        with pytest.raises(ValueError, match="max_redeliver_count"):
            ConsumerDeadLetterPolicy(count)  # type: ignore[arg-type]


def test_a_dead_letter_policy_sets_no_ack_timeout() -> None:
    options = ConsumerOptions("t", "s", dead_letter_policy=ConsumerDeadLetterPolicy(3))
    assert subscription_of(options).unacked_timeout_s is None


def test_a_retry_topic_has_sixteen_passes_by_default() -> None:
    policy = subscription_of(ConsumerOptions("t", "s", enable_retry=True)).dead_letters
    assert policy is not None
    assert policy.max_redeliver_count == 16


def test_keys_that_encrypt_letters_need_a_key_reader_and_names() -> None:
    policy = ConsumerDeadLetterPolicy(3, encryption_keys=["k"])
    assert policy.encryption_keys == ["k"]
    with pytest.raises(InvalidConfiguration, match="encryption_keys needs a crypto_key_reader"):
        ConsumerOptions("t", "s", dead_letter_policy=policy)
    with pytest.raises(InvalidConfiguration, match="at most 16 keys"):
        ConsumerOptions(
            "t",
            "s",
            dead_letter_policy=ConsumerDeadLetterPolicy(3, encryption_keys=["k"] * 17),
            crypto_key_reader=CryptoKeyReader("", ""),
        )
    for wrong in ("k", [""], [5]):
        with pytest.raises(InvalidConfiguration, match="encryption_keys"):
            ConsumerDeadLetterPolicy(3, encryption_keys=wrong)  # type: ignore[arg-type]
