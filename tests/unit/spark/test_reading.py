"""Reads from servers that redirect, die, refuse, or send wrong entries."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import grpc
import pytest
from fakes.range_server import RECORD, RangeServer, Topic, serving
from support import free_port

from magnetar.spark.errors import (
    DataLost,
    EntriesDeleted,
    OutOfOrder,
    ReadRefused,
    ReadStalled,
    TopicNotFound,
)
from magnetar.spark.planner import Span
from magnetar.spark.range_client import BrokerLost
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.partition_reader import RangeEntry, TopicReader, records_of
from magnetar.spark.source.task_reader import entries_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.spark.source.options import ReadOptions

TOPIC = "persistent://public/default/t"
LEDGERS = {3: 10, 8: 1, 9: 4}  # entries


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def flights() -> Topic:
    topic = Topic()
    for ledger, entries in LEDGERS.items():
        for entry in range(entries):
            topic.add_batch(ledger, b"%d:%d" % (ledger, entry), b"second")
    return topic


def options(*brokers: str, timeout_ms: int = 10_000) -> ReadOptions:
    url = "grpc://" + ",".join(broker.removeprefix("grpc://") for broker in brokers)
    return parse_options({"service.url": url, "topic": "t", "readTimeoutMs": str(timeout_ms)})


def ids_read(reader: TopicReader, spans: tuple[Span, ...] | None = None) -> list[tuple[int, int]]:
    return [(read.ledger, read.entry) for read in reader.read(spans or reader.plan())]


ALL = [(ledger, entry) for ledger, entries in LEDGERS.items() for entry in range(entries)]


def test_a_topic_is_planned_and_read(servers: ExitStack) -> None:
    topic = flights()
    server = servers.enter_context(serving(RangeServer(topic)))
    reader = TopicReader(options(server.url), TOPIC)
    ledgers = reader.plan()
    assert [(span.ledger, span.first, span.last) for span in ledgers] == [
        (3, 0, 9),
        (8, 0, 0),
        (9, 0, 3),
    ]
    read = list(reader.read(ledgers))
    assert [(entry.ledger, entry.entry) for entry in read] == ALL
    assert [bytes(entry.data) for entry in read] == [
        topic.ledgers[ledger][entry] for ledger, entry in ALL
    ]
    assert server.plans == 1


def test_a_part_of_a_ledger_is_read(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(flights())))
    reader = TopicReader(options(server.url), TOPIC, owner=server.url)
    assert ids_read(reader, (Span(3, 4, 6, 1), Span(9, 1, 1, 1))) == [
        (3, 4),
        (3, 5),
        (3, 6),
        (9, 1),
    ]
    assert server.plans == 0


def test_the_owner_is_found_through_any_broker(servers: ExitStack) -> None:
    owner = servers.enter_context(serving(RangeServer(flights())))
    other = servers.enter_context(serving(RangeServer(None, owner=owner.url)))
    dead = f"grpc://127.0.0.1:{free_port()}"
    reader = TopicReader(options(dead, other.url), TOPIC)
    assert ids_read(reader) == ALL
    assert reader.owner == owner.url
    assert other.reads == []


def test_a_read_continues_at_the_new_owner_with_the_next_entry(servers: ExitStack) -> None:
    topic = flights()
    new = servers.enter_context(serving(RangeServer(topic)))
    old = servers.enter_context(serving(RangeServer(topic)))

    def die(sent: int, call: grpc.ServicerContext, frame: bytes) -> bytes:
        if sent == 2:
            old.owner = new.url
            call.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return frame

    old.before_frame = die
    reader = TopicReader(options(old.url), TOPIC)
    assert ids_read(reader) == ALL
    assert old.reads == [(3, 0, 9)]
    assert new.reads == [(3, 6, 9), (8, 0, 0), (9, 0, 3)]


def test_the_time_that_the_caller_takes_is_no_time_without_progress(servers: ExitStack) -> None:
    """Spark takes rows when it has processed the rows before them."""
    server = servers.enter_context(serving(RangeServer(flights(), frame_entries=1)))
    broken = []

    def break_once(sent: int, call: grpc.ServicerContext, frame: bytes) -> bytes:
        if sent == 5 and not broken:
            broken.append(sent)
            call.abort(grpc.StatusCode.UNAVAILABLE, "the broker restarts")
        return frame

    server.before_frame = break_once
    reader = TopicReader(options(server.url, timeout_ms=500), TOPIC)
    read = reader.read((Span(3, 0, 9, 1),))
    entries = [next(read).entry for _ in range(5)]
    time.sleep(0.6)
    entries += [stored.entry for stored in read]
    assert entries == list(range(10))
    assert broken


def test_a_span_begins_with_the_whole_time_for_retries(servers: ExitStack) -> None:
    topic = flights()
    server = servers.enter_context(serving(RangeServer(topic)))
    server.before_frame = lambda sent, call, frame: (
        frame if len(server.reads) > 1 else call.abort(grpc.StatusCode.UNAVAILABLE, "restarts")
    )

    def direct(span: Span) -> Iterator[RangeEntry]:
        for entry in range(3):
            time.sleep(0.2)
            data = memoryview(topic.ledgers[span.ledger][entry])
            yield RangeEntry(span.ledger, entry, data)

    given = options(server.url, timeout_ms=500)
    reader = TopicReader(given, TOPIC, owner=server.url, direct=direct)
    assert ids_read(reader, (Span(3, 0, 9, 1),)) == ALL[:10]
    assert len(server.reads) == 2


def test_a_broker_that_no_longer_owns_the_topic_is_left(servers: ExitStack) -> None:
    new = servers.enter_context(serving(RangeServer(flights())))
    old = servers.enter_context(serving(RangeServer(None, owner=new.url)))
    reader = TopicReader(options(old.url), TOPIC, owner=old.url)
    assert ids_read(reader, (Span(9, 0, 3, 1),)) == [(9, 0), (9, 1), (9, 2), (9, 3)]


@pytest.mark.parametrize("keep", [8, RECORD.size + 5, -3])
def test_a_frame_that_was_cut_is_read_again(servers: ExitStack, keep: int) -> None:
    server = servers.enter_context(serving(RangeServer(flights())))
    cuts = iter([keep])
    server.before_frame = lambda sent, call, frame: frame[: next(cuts, None)]
    assert ids_read(TopicReader(options(server.url), TOPIC)) == ALL
    assert len(server.reads) == len(LEDGERS) + 1


def test_a_range_that_ends_early_is_continued(servers: ExitStack) -> None:
    topic = flights()
    server = servers.enter_context(serving(RangeServer(topic)))
    record = RECORD.size + len(topic.ledgers[3][0])
    cuts = iter([2 * record])
    server.before_frame = lambda sent, call, frame: frame[: next(cuts, None)]
    server.frame_entries = 100
    assert ids_read(TopicReader(options(server.url), TOPIC)) == ALL
    assert server.reads[:2] == [(3, 0, 9), (3, 2, 9)]


@pytest.mark.parametrize("wrong", [(3, 1), (3, -1), (4, 0)])
def test_an_entry_out_of_order_ends_the_read(servers: ExitStack, wrong: tuple[int, int]) -> None:
    server = servers.enter_context(serving(RangeServer(flights())))
    server.before_frame = lambda sent, call, frame: RECORD.pack(*wrong, 0) + frame
    with pytest.raises(OutOfOrder, match=r"3:0.*sent") as caught:
        ids_read(TopicReader(options(server.url), TOPIC))
    assert (caught.value.ledger, caught.value.entry) == (3, 0)


def test_an_entry_that_comes_twice_ends_the_read(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(flights())))
    server.before_frame = lambda sent, call, frame: frame + frame
    with pytest.raises(OutOfOrder):
        ids_read(TopicReader(options(server.url), TOPIC))


def test_a_deleted_part_of_a_plan_is_named(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(flights())))
    reader = TopicReader(options(server.url), TOPIC)
    with pytest.raises(EntriesDeleted, match=r"9:2.*RangeDeleted"):
        ids_read(reader, (Span(9, 2, 40, 1),))
    assert len(server.reads) == 1


def test_entries_that_the_broker_does_not_know_yet_are_waited_for(servers: ExitStack) -> None:
    behind = flights()
    tail = behind.ledgers.pop(9)
    server = servers.enter_context(serving(RangeServer(behind, missing="RangeNotConfirmed: no")))

    def learn(call: grpc.ServicerContext) -> None:
        if server.plans == 2:
            behind.ledgers[9] = tail

    server.before_plan = learn
    assert ids_read(TopicReader(options(server.url), TOPIC), (Span(9, 2, 3, 1),)) == [
        (9, 2),
        (9, 3),
    ]
    assert server.plans == 2


@pytest.mark.parametrize("fails", [True, False])
def test_only_deleted_entries_are_lost_data(servers: ExitStack, fails: bool) -> None:
    """A bug of the broker, or a broker that is behind, never counts as a loss."""
    topic = flights()
    server = servers.enter_context(serving(RangeServer(topic)))
    reader = TopicReader(options(server.url, timeout_ms=500), TOPIC)
    spans = (Span(9, 2, 40, 1, TOPIC),)
    if fails:
        with pytest.raises(DataLost, match="RangeDeleted"):
            list(entries_of(reader, spans[0], fails=True))
    else:
        assert list(entries_of(reader, spans[0], fails=False)) == []
    server.missing = "RangeNotConfirmed: no"
    with pytest.raises(ReadStalled, match="RangeNotConfirmed"):
        list(entries_of(reader, spans[0], fails=fails))
    server.before_frame = lambda sent, call, frame: call.abort(
        grpc.StatusCode.INTERNAL, "internal error"
    )
    with pytest.raises(ReadRefused, match="internal error"):
        list(entries_of(reader, Span(9, 0, 3, 1, TOPIC), fails=fails))


def test_a_missing_topic_raises_topic_not_found(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(None)))
    with pytest.raises(TopicNotFound, match="persistent://public/default/t"):
        TopicReader(options(server.url), TOPIC).plan()


def test_a_bug_in_the_broker_is_not_asked_for_twice(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(None)))
    server.before_plan = lambda call: call.abort(grpc.StatusCode.INTERNAL, "internal error")
    with pytest.raises(ReadRefused, match="internal error"):
        TopicReader(options(server.url), TOPIC).plan()
    assert server.plans == 1


@pytest.mark.parametrize(("refusals", "calls"), [(1, 2), (9, 2)])
def test_refused_credentials_are_renewed_once(
    servers: ExitStack, monkeypatch: pytest.MonkeyPatch, refusals: int, calls: int
) -> None:
    """The process may have a token that a broker does not accept any more."""
    monkeypatch.setenv("TOKEN", "t")
    server = servers.enter_context(serving(RangeServer(flights())))
    given = {"service.url": server.url, "topic": "t"} | {
        "pulsar.client.authPluginClassName": "token",
        "pulsar.client.authParams": "env:TOKEN",
    }

    def refuse(sent: int, call: grpc.ServicerContext, frame: bytes) -> bytes:
        if len(server.reads) <= refusals:
            call.abort(grpc.StatusCode.ABORTED, "NotAuthenticated: the token has expired")
        return frame

    server.before_frame = refuse
    reader = TopicReader(parse_options(given), TOPIC, owner=server.url)
    if refusals == 1:
        assert ids_read(reader, (Span(3, 0, 9, 1),)) == ALL[:10]
    else:
        with pytest.raises(ReadRefused, match="the token has expired"):
            ids_read(reader, (Span(3, 0, 9, 1),))
    assert len(server.reads) == calls


def test_a_moment_without_an_owner_is_waited_out(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(flights())))
    failures = iter(["BundleUnavailable: moving", "ReadFailed: no bookie"])

    def fail(call: grpc.ServicerContext) -> None:
        if failure := next(failures, None):
            call.abort(grpc.StatusCode.ABORTED, failure)

    server.before_plan = fail
    assert ids_read(TopicReader(options(server.url), TOPIC)) == ALL
    assert server.plans == 3


def test_brokers_that_name_each_other_end_in_read_stalled(servers: ExitStack) -> None:
    one = servers.enter_context(serving(RangeServer(None)))
    two = servers.enter_context(serving(RangeServer(None, owner=one.url)))
    one.owner = two.url
    with pytest.raises(ReadStalled, match="no owner after 4 redirects"):
        TopicReader(options(one.url, timeout_ms=1500), TOPIC).plan()


def test_read_without_brokers_ends_in_read_stalled() -> None:
    reader = TopicReader(options(f"grpc://127.0.0.1:{free_port()}", timeout_ms=1500), TOPIC)
    with pytest.raises(ReadStalled, match="UNAVAILABLE") as caught:
        reader.plan()
    assert caught.value.waited_s >= 1.5


def test_read_closed_early_ends_the_call(servers: ExitStack) -> None:
    server = servers.enter_context(serving(RangeServer(flights())))
    server.frame_entries = 1
    held, ended = threading.Event(), threading.Event()

    def hold(sent: int, call: grpc.ServicerContext, frame: bytes) -> bytes:
        if sent == 1:  # only the client's cancellation ends it
            assert call.add_callback(ended.set)
            held.set()
            ended.wait(60)
        return frame

    server.before_frame = hold
    reading = TopicReader(options(server.url), TOPIC).read((Span(3, 0, 9, 1),))
    assert next(reading).entry == 0
    assert held.wait(10)  # a server does not begin a frame for a call that has ended
    assert not ended.is_set()
    reading.close()  # type: ignore[attr-defined]
    assert ended.wait(10)
    assert server.reads == [(3, 0, 9)]
    assert "magnetar-read-ahead" not in [thread.name for thread in threading.enumerate()]


def test_records_are_split_and_a_cut_one_raises_broker_lost() -> None:
    frame = RECORD.pack(1, 2, 3) + b"abc" + RECORD.pack(1, 3, 0)
    assert [(r.ledger, r.entry, bytes(r.data)) for r in records_of(memoryview(frame))] == [
        (1, 2, b"abc"),
        (1, 3, b""),
    ]
    with pytest.raises(BrokerLost):
        list(records_of(memoryview(frame)[:-1]))


FAULTS = """
import resource
import numpy as np
from magnetar.spark.source import task_reader
if {keeps}:
    task_reader._keep_freed_memory()
def group():
    return [np.ones(3 << 20, np.uint8) for _ in range(4)]
for _ in range(3):
    group()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    group()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_task_keeps_the_memory_that_it_frees_between_groups_of_entries() -> None:
    def faults(*, keeps: bool) -> int:
        program = [sys.executable, "-c", FAULTS.format(keeps=keeps)]
        return int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)

    assert faults(keeps=True) < faults(keeps=False) / 10
