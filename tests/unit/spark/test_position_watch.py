"""A streaming query whose topics are watched: its requests, and its behaviour at a stream's end."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any

import pytest
from fakes.range_server import RangeServer, Topic, serving
from support import wait_for

from magnetar.protos import broker_pb2 as pb
from magnetar.spark.offsets import Offsets, Place
from magnetar.spark.source.driver import StreamDriver
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.position_watch import PositionWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPIC = "persistent://public/default/t"
START = Offsets({TOPIC: Place(3, 0, 0)}).to_json()

Json = dict[str, Any]


@pytest.fixture
def server() -> Iterator[RangeServer]:
    topic = Topic()
    topic.add_batch(3, b"one")
    with serving(RangeServer(topic, pushes=queue.Queue())) as server:
        yield server


def driver_of(server: RangeServer, *, silence_s_max: float = 6.0, **options: str) -> StreamDriver:
    given = {"service.url": server.url, "topic": "t", "pollIntervalMs": "1"} | options
    return StreamDriver(
        parse_options(given, streaming=True),
        now_ms=0,
        query="q",
        watch=PositionWatch(silence_s_max=silence_s_max),
    )


def latest(driver: StreamDriver, start: Json = START) -> int:
    """The index of the next message, as far as the driver knows it."""
    index: int = driver.latest(start, rows_max=None, bytes_max=None)["t"][TOPIC][2]
    return index


def test_an_idle_query_calls_no_broker(server: RangeServer) -> None:
    driver = driver_of(server)
    assert latest(driver) == 1
    server.push()
    wait_for(lambda: latest(driver) == 1 and _is_quiet(driver, server))
    before = server.plans, server.finds
    until_s = time.monotonic() + 0.3
    while time.monotonic() < until_s:
        assert latest(driver) == 1
    assert (server.plans, server.finds) == before
    assert server.watched == [{TOPIC: 3}]
    driver.close()


def _is_quiet(driver: StreamDriver, server: RangeServer) -> bool:
    """Return whether the driver looks again without a request to the broker."""
    before = server.plans
    time.sleep(0.002)
    latest(driver)
    return server.plans == before


def test_pushed_positions_are_read_without_a_poll(server: RangeServer) -> None:
    driver = driver_of(server, pollIntervalMs="3600000")
    assert latest(driver) == 1
    assert server.topic is not None
    server.push()
    server.topic.add_batch(3, b"two", b"three")
    server.topic.add_batch(7, b"four")
    server.push(from_ledger=3, first_ledger=3)
    wait_for(lambda: latest(driver) == 4)
    end = driver.latest(START, rows_max=None, bytes_max=None)
    spans = [
        (it.ledger, it.first, it.last) for task in driver.tasks(START, end) for it in task.spans
    ]
    assert spans == [(3, 0, 1), (7, 0, 0)]
    assert server.plans == 1
    driver.close()


@pytest.mark.parametrize("end", ["closed", "silent", "moved"])
def test_a_topic_whose_stream_ends_is_polled(server: RangeServer, end: str) -> None:
    driver = driver_of(server, silence_s_max=1.0 if end == "silent" else 6.0)
    assert latest(driver) == 1
    server.push()
    wait_for(lambda: _is_quiet(driver, server))
    assert server.topic is not None
    assert server.pushes is not None
    server.topic.add_batch(3, b"two")
    if end == "closed":
        server.pushes.put(None)
    elif end == "moved":
        moved = pb.TopicUpdate(plan=pb.TopicPlan(owner_url=server.url))
        server.pushes.put(pb.PositionsUpdate(topics=[moved]))
    wait_for(lambda: latest(driver) == 2)
    wait_for(lambda: latest(driver) == 2 and len(server.watched) == 2)
    driver.close()


def test_a_broker_without_the_call_is_polled_and_asked_once(server: RangeServer) -> None:
    server.pushes = None
    driver = driver_of(server)
    assert latest(driver) == 1
    wait_for(lambda: latest(driver) == 1 and len(server.watched) == 1)
    assert server.topic is not None
    server.topic.add_batch(3, b"two")
    wait_for(lambda: latest(driver) == 2)
    assert len(server.watched) == 1
    driver.close()


def test_new_topics_get_streams_until_all_are_gathered_in_one(server: RangeServer) -> None:
    watch = PositionWatch(retry_s=0)
    wanted: dict[str, tuple[str, int]] = {}
    for number in range(6):
        wanted[f"{TOPIC}-{number}"] = server.url, 0
        watch.follow(wanted)
        wait_for(lambda count=number + 1: len(server.watched) == count)
    assert [len(part) for part in server.watched] == [1, 1, 1, 1, 5, 1]
    watch.close()
