from __future__ import annotations

import random

from magnetar.client.session.backoff import (
    HELD_S,
    RETRY_DELAY_S_FIRST,
    RETRY_DELAY_S_MAX,
    ReconnectDelay,
)


def test_delays_double_to_the_cap_with_jitter() -> None:
    delay = ReconnectDelay(random.Random(1))
    bound_s = RETRY_DELAY_S_FIRST
    for _ in range(20):
        got = delay.on_failed(0.0)
        assert bound_s / 2 <= got <= bound_s
        bound_s = min(bound_s * 2, RETRY_DELAY_S_MAX)
        delay.check()


def test_only_a_lasting_attachment_resets_the_delay() -> None:
    delay = ReconnectDelay(random.Random(1))
    for _ in range(10):
        delay.on_failed(0.0)
    delay.on_attached(10.0)
    assert delay.on_failed(10.0 + HELD_S / 2) >= RETRY_DELAY_S_MAX / 2
    delay.on_attached(20.0)
    assert delay.on_failed(20.0 + HELD_S) <= RETRY_DELAY_S_FIRST


def test_many_clients_do_not_reconnect_at_once() -> None:
    times = {ReconnectDelay(random.Random(seed)).on_failed(0.0) for seed in range(100)}
    assert len(times) == 100
