"""The machine's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from magnetar.runtime.clock import SystemClock


def test_the_clock_tells_milliseconds_of_now() -> None:
    stamp = datetime.fromtimestamp(SystemClock().now_ms() / 1000, tz=UTC)
    assert abs(datetime.now(tz=UTC) - stamp) < timedelta(seconds=5)
