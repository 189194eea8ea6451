"""The plan of a stream's driver if a broker is behind, or if the topic was created again."""

from __future__ import annotations

import time
from contextlib import ExitStack
from threading import Barrier
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fakes.range_server import RangeServer, Topic, serving
from support import wait_for

from magnetar.spark.errors import DataLost, ReadStalled, TopicNotFound
from magnetar.spark.offsets import Offsets, Place
from magnetar.spark.source.driver import StreamDriver, plan_frame
from magnetar.spark.source.options import parse_options

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPIC = "persistent://public/default/t"
START = Offsets({TOPIC: Place(3, 0, 0)}).to_json()
END = Offsets({TOPIC: Place(9, 4, 10)}).to_json()


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def topic_of(**ledgers: int) -> Topic:
    topic = Topic()
    for ledger, entries in ledgers.items():
        for _ in range(entries):
            topic.add_batch(int(ledger.removeprefix("l")), b"one")
    return topic


def driver_of(server: RangeServer, **options: str) -> StreamDriver:
    given = {"service.url": server.url, "topic": "t", "startingOffsets": "earliest"} | options
    return StreamDriver(parse_options(given, streaming=True), now_ms=0, query="q")


def entries_in(tasks: Any) -> list[tuple[int, int, int]]:
    return [(span.ledger, span.first, span.last) for task in tasks for span in task.spans]


def test_a_repeated_batch_waits_for_an_owner_that_knows_its_messages(servers: ExitStack) -> None:
    behind, whole = topic_of(l3=6, l9=2), topic_of(l3=6, l9=4)
    server = servers.enter_context(serving(RangeServer(behind)))

    def take_over(call: grpc.ServicerContext) -> None:
        if server.plans == 2:
            server.topic = whole

    server.before_plan = take_over
    assert entries_in(driver_of(server).tasks(START, END)) == [(3, 0, 5), (9, 0, 3)]
    assert server.plans == 2


def test_a_batch_whose_end_no_broker_knows_is_not_planned_in_part(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(topic_of(l3=6, l9=2))))
    for loses in ("true", "false"):
        driver = driver_of(server, readTimeoutMs="300", failOnDataLoss=loses)
        expected = "up to message 7, but the planned batch ends with message 9"
        with pytest.raises(ReadStalled, match=expected):
            driver.tasks(START, END)


def test_a_planned_batch_of_a_topic_that_was_created_again_is_lost(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(topic_of(l20=30))))
    with pytest.raises(DataLost, match="created again"):
        driver_of(server).tasks(START, END)
    assert driver_of(server, failOnDataLoss="false").tasks(START, END) == []


def test_a_broker_that_does_not_answer_is_asked_once_in_an_interval(servers: ExitStack) -> None:
    """Spark asks an idle source 100 times a second."""
    server = servers.enter_context(serving(RangeServer(topic_of(l3=6, l9=4))))
    driver = driver_of(server, pollIntervalMs="200")
    end = driver.latest(START, rows_max=None, bytes_max=None)
    assert end["t"][TOPIC][:3] == [9, 4, 10]
    server.before_plan = lambda call: call.abort(grpc.StatusCode.UNAVAILABLE, "away")
    before, until_s = server.plans, time.monotonic() + 1.0
    while time.monotonic() < until_s:
        assert driver.latest(end, rows_max=None, bytes_max=None) == end
    assert 2 <= server.plans - before <= 6


def test_a_repeated_batch_has_the_same_tasks_although_the_options_have_changed(
    servers: ExitStack,
) -> None:
    """If the tasks differed, an exactly-once sink would take unstored rows for stored ones."""
    server = servers.enter_context(serving(RangeServer(topic_of(l3=60, l9=40))))
    driver = driver_of(server, targetBytesPerTask="500", maxPartitions="5")
    end = driver.latest(START, rows_max=None, bytes_max=None)
    tasks = driver.tasks(START, end)
    assert len(tasks) == 5
    again = driver_of(server, targetBytesPerTask="400", maxPartitions="9")
    assert [task.spans for task in again.tasks(START, end)] == [task.spans for task in tasks]
    del end["tasks"]  # a checkpoint of an earlier version
    assert len(again.tasks(START, end)) == 9


def test_a_batch_waits_for_enough_rows_or_until_the_trigger_delay_has_passed(
    servers: ExitStack,
) -> None:
    """pulsar-spark#117."""
    topic = topic_of(l3=2)
    server = servers.enter_context(serving(RangeServer(topic)))
    given = {"minRowsPerTrigger": "3", "pollIntervalMs": "1"}
    driver = driver_of(server, maxTriggerDelay="1h", **given)
    first = driver.latest(START, rows_max=None, bytes_max=None)  # the first batch does not wait
    assert first["t"][TOPIC][:3] == [3, 2, 2]
    topic.add_batch(3, b"one", b"two")
    for _ in range(20):
        assert driver.latest(first, rows_max=None, bytes_max=None) is first
    assert driver.report() is not None
    topic.add_batch(3, b"three")
    wait_for(lambda: driver.latest(first, rows_max=None, bytes_max=None) != first)
    second = driver.latest(first, rows_max=None, bytes_max=None)
    assert second["t"][TOPIC][:3] == [3, 4, 5]

    driver = driver_of(server, maxTriggerDelay="300ms", **given)
    began_s = time.monotonic()
    third = driver.latest(START, rows_max=None, bytes_max=None)
    topic.add_batch(3, b"four")
    wait_for(lambda: driver.latest(third, rows_max=None, bytes_max=None) != third)
    assert time.monotonic() - began_s >= 0.3


def test_brokers_search_the_limits_of_many_topics_at_the_same_time(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(topic_of(l3=6))))
    together = Barrier(4)
    server.before_entry = lambda call: together.wait(5)
    given = {"service.url": server.url, "topics": "a,b,c,d", "startingOffsets": "earliest"}
    options = parse_options(given | {"readTimeoutMs": "300"}, streaming=True)
    driver = StreamDriver(options, now_ms=0, query="q")
    end = driver.latest(driver.initial(), rows_max=8, bytes_max=None)
    assert [place[:3] for place in end["t"].values()] == [[3, 2, 2]] * 4


def test_brokers_search_the_times_of_many_topics_at_the_same_time(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(topic_of(l3=6))))
    together = Barrier(4)
    server.before_entry = lambda call: together.wait(5)
    given = {"service.url": server.url, "topics": "a,b,c,d", "readTimeoutMs": "300"}
    given["startingTime"] = "1700000000000"
    driver = StreamDriver(parse_options(given, streaming=True), now_ms=0, query="q")
    end = driver.latest(driver.initial(), rows_max=None, bytes_max=None)
    assert [place[:3] for place in end["t"].values()] == [[3, 6, 6]] * 4
    assert plan_frame(parse_options(given | {"endingTime": "1700000000001"})) == []


def test_available_now_reads_fewer_rows_than_a_batch_waits_for(servers: ExitStack) -> None:
    topic = topic_of(l3=2)
    server = servers.enter_context(serving(RangeServer(topic)))
    driver = driver_of(server, minRowsPerTrigger="5")
    first = driver.latest(START, rows_max=None, bytes_max=None)
    topic.add_batch(3, b"one")
    driver.freeze()
    assert driver.latest(first, rows_max=None, bytes_max=None)["t"][TOPIC][:3] == [3, 3, 3]


def test_a_query_waits_for_a_topic_that_does_not_exist_and_reads_all_of_it(
    servers: ExitStack,
) -> None:
    """pulsar-spark#86."""
    server = servers.enter_context(serving(RangeServer(topic_of(l3=2))))
    server.absent = frozenset({TOPIC})
    with pytest.raises(TopicNotFound, match=TOPIC):
        driver_of(server).latest({"v": 1, "start": "latest"}, rows_max=None, bytes_max=None)
    given = {"startingOffsets": "latest", "discoveryIntervalMs": "1", "pollIntervalMs": "1"}
    driver = driver_of(server, waitingForNonExistedTopic="true", **given)
    start = driver.latest(driver.initial(), rows_max=None, bytes_max=None)
    assert start["t"] == {}
    assert driver.latest(start, rows_max=None, bytes_max=None) is start
    server.absent = frozenset()
    wait_for(lambda: driver.latest(start, rows_max=None, bytes_max=None) != start)
    end = driver.latest(start, rows_max=None, bytes_max=None)
    assert entries_in(driver.tasks(start, end)) == [(3, 0, 1)]


def test_a_query_without_topics_asks_for_them_once_in_an_interval(servers: ExitStack) -> None:
    """Spark asks an idle source 100 times a second."""
    server = servers.enter_context(serving(RangeServer(topic_of(l3=2))))
    given = {"service.url": server.url, "topicsPattern": "public/default/x.*"}
    options = parse_options(given | {"discoveryIntervalMs": "200"}, streaming=True)
    driver = StreamDriver(options, now_ms=0, query="q")
    at = driver.latest(driver.initial(), rows_max=None, bytes_max=None)
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        assert driver.latest(at, rows_max=None, bytes_max=None) is at
    assert 2 <= server.finds <= 8


def test_a_query_that_was_idle_for_long_survives_one_failed_poll(servers: ExitStack) -> None:
    """The read timeout counts from the first failed poll, not from the last successful one."""
    server = servers.enter_context(serving(RangeServer(topic_of(l3=6, l9=4))))
    driver = driver_of(server, pollIntervalMs="1", readTimeoutMs="100")
    end = driver.latest(START, rows_max=None, bytes_max=None)
    server.before_plan = lambda call: call.abort(grpc.StatusCode.UNAVAILABLE, "away")
    time.sleep(0.15)  # the trigger interval is longer than the read timeout
    assert driver.latest(end, rows_max=None, bytes_max=None) == end
    time.sleep(0.15)
    with pytest.raises(ReadStalled, match="away"):
        driver.latest(end, rows_max=None, bytes_max=None)


def test_a_loss_is_logged_once(servers: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    """Spark asks an idle source 100 times a second."""
    server = servers.enter_context(serving(RangeServer(topic_of(l20=30))))
    given = {"failOnDataLoss": "false", "minRowsPerTrigger": "1000", "pollIntervalMs": "1"}
    driver = driver_of(server, **given)
    end = Offsets({TOPIC: Place(9, 4, 50)}).to_json()
    for _ in range(5):
        driver.latest(end, rows_max=None, bytes_max=None)
    assert caplog.text.count("data lost") == 1
