"""A streaming query to which a broker pushes its topics: its requests, and its behaviour when a
stream ends."""

from __future__ import annotations

import queue
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from fakes.range_server import RangeServer, Topic, serving
from support import wait_for

from magnetar.protos import broker_pb2 as pb
from magnetar.spark.access import ANONYMOUS
from magnetar.spark.source import driver as driver_module
from magnetar.spark.source.driver import StreamDriver
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.topic_watch import TopicWatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAMESPACE = "public/default"
TOPIC = f"persistent://{NAMESPACE}/t"
HOUR_MS = "3600000"


@pytest.fixture
def server() -> Iterator[RangeServer]:
    topic = Topic()
    topic.add_batch(3, b"one")
    with serving(RangeServer(topic, found=queue.Queue())) as server:
        yield server


def watch_of(
    *servers: RangeServer, silence_s_max: float = 6.0, namespaces: Sequence[str] = (NAMESPACE,)
) -> TopicWatch:
    """A watch with a stream for each namespace."""
    asked: list[tuple[list[str], list[str]]] = [([], [namespace]) for namespace in namespaces]
    brokers = [server.url for server in servers]
    return TopicWatch(
        ANONYMOUS,
        brokers,
        asked,
        lambda topic: "-not" not in topic,
        silence_s_max=silence_s_max,
        retry_s=0.01,
    )


def push(server: RangeServer, *topics: str, gone: tuple[str, ...] = (), more: bool = False) -> None:
    assert server.found is not None
    server.found.put(pb.TopicsUpdate(topics=topics, gone=gone, more=more))


def follows(watch: TopicWatch) -> bool:
    watch.follow()
    return watch.is_live


def test_topics_are_known_when_all_parts_of_the_list_have_arrived_and_then_by_changes(
    server: RangeServer,
) -> None:
    watch = watch_of(server)
    watch.follow()
    push(server, "a", "a-not", more=True)
    assert server.found is not None
    wait_for(server.found.empty)
    assert watch.take() is None
    assert not watch.is_live
    push(server, "b")
    wait_for(lambda: watch.is_live)
    assert watch.take() == ["a", "b"]
    assert watch.take() is None  # nothing has changed
    push(server, "c", gone=("a", "a-not"))
    wait_for(lambda: watch.take() == ["b", "c"])
    assert server.topic_watches == [[NAMESPACE]]
    watch.close()
    assert not watch.is_live


def test_an_empty_list_of_topics_counts_as_a_list(server: RangeServer) -> None:
    watch = watch_of(server)
    watch.follow()
    push(server)
    wait_for(lambda: watch.take() == [])
    watch.close()


@pytest.mark.parametrize("end", ["closed", "silent", "dead"])
def test_another_broker_is_watched_when_one_ends_or_is_silent(
    server: RangeServer, end: str
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(serving(RangeServer(None, found=queue.Queue())))
        watch = watch_of(first, server, silence_s_max=1.0 if end == "silent" else 6.0)
        watch.follow()
        push(first, "a")
        wait_for(lambda: watch.take() == ["a"])
        if end == "closed":
            assert first.found is not None
            first.found.put(None)
        elif end == "dead":
            stack.close()
        wait_for(lambda: not watch.is_live)
        assert watch.take() is None
        push(server, "a", "b")
        wait_for(lambda: follows(watch))
        assert watch.take() == ["a", "b"]
        watch.close()


def test_topics_are_known_when_every_stream_has_sent_its_list(
    server: RangeServer,
) -> None:
    one: queue.Queue[pb.TopicsUpdate | None] = queue.Queue()
    two: queue.Queue[pb.TopicsUpdate | None] = queue.Queue()
    server.found_in = {"a/one": one, "a/two": two}
    watch = watch_of(server, namespaces=("a/one", "a/two"))
    watch.follow()
    one.put(pb.TopicsUpdate(topics=["a"]))
    wait_for(one.empty)
    assert watch.take() is None
    assert not watch.is_live
    two.put(pb.TopicsUpdate(topics=["b"]))
    wait_for(lambda: watch.take() == ["a", "b"])
    watch.close()


def driver_of(server: RangeServer, **options: str) -> StreamDriver:
    given = {
        "service.url": server.url,
        "topicsPattern": f"{NAMESPACE}/t.*",
        "startingOffsets": "earliest",
        "pollIntervalMs": "1",
    }
    return StreamDriver(parse_options(given | options, streaming=True), now_ms=0, query="q")


def goes_on(driver: StreamDriver, at: dict[str, Any]) -> bool:
    """Let the driver check for changes. Returns whether there are none."""
    return driver.latest(at, rows_max=None, bytes_max=None) is at


def test_a_pushed_topic_is_read_without_asking_for_topics(server: RangeServer) -> None:
    driver = driver_of(server, discoveryIntervalMs="50")
    at = driver.latest(driver.initial(), rows_max=None, bytes_max=None)
    assert at["t"] == {}
    driver.latest(at, rows_max=None, bytes_max=None)
    push(server)
    wait_for(lambda: goes_on(driver, at) and driver._topics.is_live)
    before = server.finds
    push(server, TOPIC, f"persistent://{NAMESPACE}/other")
    wait_for(lambda: driver.latest(at, rows_max=None, bytes_max=None) != at)
    assert set(driver.latest(at, rows_max=None, bytes_max=None)["t"]) == {TOPIC}
    assert server.finds == before
    driver.close()


def test_topics_are_asked_for_rarely_although_they_are_pushed(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker may have lost its connection to the metadata store."""
    monkeypatch.setattr(driver_module, "DISCOVERY_S_MAX", 0.2)
    driver = driver_of(server, discoveryIntervalMs="1")
    at = driver.latest(driver.initial(), rows_max=None, bytes_max=None)
    driver.latest(at, rows_max=None, bytes_max=None)
    push(server)
    wait_for(lambda: goes_on(driver, at) and driver._topics.is_live)
    before = server.finds
    wait_for(lambda: goes_on(driver, at) and server.finds > before)
    driver.close()


def test_a_broker_that_does_not_know_the_call_is_asked_for_topics(server: RangeServer) -> None:
    server.found = None
    driver = driver_of(server, discoveryIntervalMs="20")
    at = driver.latest(driver.initial(), rows_max=None, bytes_max=None)
    wait_for(lambda: goes_on(driver, at) and server.finds > 5)
    assert len(server.topic_watches) == 1
    driver.close()
