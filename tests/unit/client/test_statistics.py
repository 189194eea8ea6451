"""The counters of producers and consumers, and their rates."""

from __future__ import annotations

import asyncio

import pytest
from fakes.client_world import EARLIEST, TOPIC, client_among, publish, receive

from magnetar.client.errors import MessageTooBig
from magnetar.client.producing.statistics import (
    LATENCIES_MAX,
    ProducerStatistics,
    SendCounter,
    statistics_of,
)
from magnetar.client.rates import Rates


def test_rates_are_averages_since_the_last_question_a_second_ago() -> None:
    rates = Rates(100.0)
    assert rates.rates(10, 1000, 100.5) == (0.0, 0.0)
    assert rates.rates(20, 2000, 102.0) == (10.0, 1000.0)
    assert rates.rates(30, 3000, 102.5) == (10.0, 1000.0)
    assert rates.rates(40, 3000, 104.0) == (10.0, 500.0)


def test_latencies_are_shares_of_the_last_entries_of_all_publishers() -> None:
    one, two = SendCounter(), SendCounter()
    one.latencies_s.extend([1.0] * LATENCIES_MAX)
    one.latencies_s.extend([number / 1000 for number in range(1, 51)])
    assert len(one.latencies_s) == LATENCIES_MAX
    one.latencies_s.clear()
    one.latencies_s.extend([number / 1000 for number in range(1, 51)])
    two.latencies_s.extend([number / 1000 for number in range(51, 101)])
    stats = statistics_of([one, two])
    assert stats.latency_ms_50pct == pytest.approx(50)
    assert stats.latency_ms_95pct == pytest.approx(95)
    assert stats.latency_ms_99pct == pytest.approx(99)
    assert stats.latency_ms_max == pytest.approx(100)
    assert stats.latency_ms_mean == pytest.approx(50.5)
    assert statistics_of([]) == ProducerStatistics()


async def test_a_producer_counts_its_messages_and_errors() -> None:
    async with client_among() as (client, cluster):
        producer = await publish(client, 6, batch=3)
        with pytest.raises(MessageTooBig):
            await producer.send(bytes(6 << 20))
        cluster.topic(TOPIC).hold_receipts = True
        producer.send_async(b"pending", None)
        producer._publisher.seal()
        await asyncio.sleep(2)
        stats = producer.get_stats()
        assert (stats.messages_sent, stats.entries_sent) == (8, 3)
        assert (stats.messages_stored, stats.messages_failed) == (6, 1)
        assert stats.pending_messages == 1
        assert stats.bytes_sent == sum(
            len(entry) for entry in cluster.topic(TOPIC).entries.values()
        )
        assert stats.messages_per_second == pytest.approx(8 / 2, rel=0.1)


async def test_a_consumer_counts_and_measures() -> None:
    async with client_among() as (client, _):
        await publish(client, 10)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await receive(consumer, 10)
        await asyncio.sleep(2)
        stats = consumer.get_stats()
        assert (stats.messages_received, stats.bytes_received) == (10, 10)
        assert stats.messages_per_second == pytest.approx(5, rel=0.1)
        assert stats.bytes_per_second == pytest.approx(5, rel=0.1)
        await asyncio.sleep(2)
        assert consumer.get_stats().messages_per_second == 0
