from __future__ import annotations

from magnetar.broker.topic.meter import RATE_WINDOW_S, Meter


def test_a_steady_flow_shows_its_true_rate() -> None:
    meter = Meter(100.0)
    for tenth in range(1, 1_001):
        meter.count(5, 500, 100.0 + tenth / 10)
        if tenth >= 10:
            assert 45 < meter.rates(100.0 + tenth / 10).messages < 60
    rates = meter.rates(200.0)
    assert 49.5 < rates.messages < 51.0
    assert 4_950 < rates.bytes < 5_100
    assert (meter.messages, meter.bytes) == (5_000, 500_000)


def test_a_rate_fades_and_the_totals_stay() -> None:
    meter = Meter(0.0)
    meter.count(1_000, 0, 1_000.0)
    now = meter.rates(1_000.0).messages
    later = meter.rates(1_000.0 + RATE_WINDOW_S).messages
    assert 0.3 < later / now < 0.4
    assert meter.rates(1_000.0 + 20 * RATE_WINDOW_S).messages < 1e-3
    assert meter.describe("Out", 2_000.0)["msgOutCounter"] == 1_000


def test_a_new_meter_is_not_an_infinite_rate() -> None:
    meter = Meter(5.0)
    assert meter.rates(5.0).messages == 0.0
    meter.count(10, 10, 5.0)
    assert meter.rates(5.0).messages < 11
