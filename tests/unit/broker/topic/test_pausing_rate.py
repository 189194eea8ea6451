"""A rate limit that pauses the reads of a connection."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fakes.entries import entry_of, sends_of

from magnetar.broker.topic.pausing_rate import PausingRate
from magnetar.metadata.policies import Rate
from magnetar.protos.entry import BATCH_MESSAGES_MAX
from magnetar.protos.sends import RUN_ENTRIES_MAX

SENDS = sends_of(*[entry_of("x" * 100) for _ in range(10)])


def test_no_rate_lets_everything_through() -> None:
    rate = PausingRate()
    rate.take(SENDS, 0.0)
    assert rate.wait_s(0.0) == 0.0
    rate.set_rate(Rate(0, 0, 1), 0.0)
    rate.take(SENDS, 0.0)
    assert rate.wait_s(0.0) == 0.0


def test_the_excess_over_the_rate_is_waited_for_afterwards() -> None:
    rate = PausingRate()
    rate.set_rate(Rate(5, 0, 1), 0.0)
    rate.take(SENDS, 0.0)  # five messages above the rate
    assert 1.0 < rate.wait_s(0.0) <= 1.2
    assert rate.wait_s(1.3) == 0.0


def test_a_rate_of_only_bytes_limits_publishes() -> None:
    rate = PausingRate()
    size = sum(map(len, SENDS.entries))
    rate.set_rate(Rate(0, size, 10), 0.0)
    rate.take(SENDS, 0.0)
    assert rate.wait_s(0.0) > 0
    assert rate.wait_s(1.0) == 0.0


async def test_the_average_is_exact_and_a_changed_rate_ends_the_wait() -> None:
    rate, loop = PausingRate(), asyncio.get_running_loop()
    began = loop.time()
    rate.set_rate(Rate(100, 0, 1), began)
    for _ in range(60):  # 600 messages, of which 100 are there at once
        rate.take(SENDS, loop.time())
        await rate.wait()
    assert 4.9 < loop.time() - began < 5.2
    rate.set_rate(Rate(1, 0, 60), loop.time())
    rate.take(SENDS, loop.time())
    waiting = asyncio.create_task(rate.wait())  # noqa: TID251
    await asyncio.sleep(5)
    rate.set_rate(Rate(0, 0, 1), loop.time())
    async with asyncio.timeout(2):
        await waiting


def test_a_batch_that_claims_a_million_messages_stops_producers_for_a_minute_at_most() -> None:
    rate = PausingRate()
    rate.set_rate(Rate(1_000, 0, 1), 0.0)
    view = replace(entry_of("x"), is_batch=True, num_messages=BATCH_MESSAGES_MAX)
    run = sends_of(*[entry_of("x") for _ in range(RUN_ENTRIES_MAX)])
    run.views = dict.fromkeys(range(RUN_ENTRIES_MAX), view)
    rate.take(run, 0.0)
    assert 59 < rate.wait_s(0.0) < 61
