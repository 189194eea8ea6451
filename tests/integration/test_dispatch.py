"""Subscription types, redelivery and the active consumer, over both transports."""

from __future__ import annotations

import itertools
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_api import OURS_OVER_TCP, Api, client_api
from fakes.standalone_process import StandaloneProcess

import magnetar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.cluster

TIMEOUT_MS = 20_000
SILENT_MS = 1_500
"""More than the time that a replaced active consumer has."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.start()
    yield process
    process.end()


@pytest.fixture(scope="module")
def libraries(server: StandaloneProcess) -> Iterator[dict[str, Api]]:
    with (
        client_api(server, "apache") as apache,
        client_api(server, "ours") as ours,
        client_api(server, OURS_OVER_TCP) as over_tcp,
    ):
        yield {"6650": apache, "grpc": ours, OURS_OVER_TCP: over_tcp}


@pytest.fixture(params=["6650", "grpc"])
def library(request: pytest.FixtureRequest, libraries: dict[str, Api]) -> Api:
    found: Api = libraries[request.param]
    return found


@pytest.fixture(params=["grpc", OURS_OVER_TCP])
def ours(request: pytest.FixtureRequest, libraries: dict[str, Api]) -> Api:
    """Our client over each transport, for features that Apache's client does not have."""
    found: Api = libraries[request.param]
    return found


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"dispatch{next(_numbers)}"


def create_partitions(server: StandaloneProcess, topic: str, number: int) -> None:
    request = urllib.request.Request(
        f"http://localhost:{server.http_port}/admin/v2/persistent/public/default/{topic}/partitions",
        b"%d" % number,
        {"content-type": "application/json"},
        method="PUT",
    )
    urllib.request.urlopen(request, timeout=30).close()


def send(library: Api, topic: str, *texts: str, keys: bool = False) -> None:
    producer = library.client.create_producer(topic, batching_enabled=False)
    for text in texts:
        producer.send(text.encode(), partition_key=text if keys else None)
    producer.close()


def receive(consumer: Any, count: int) -> list[Any]:
    return [consumer.receive(timeout_millis=TIMEOUT_MS) for _ in range(count)]


def texts(messages: list[Any]) -> list[str]:
    return [message.data().decode() for message in messages]


def is_silent(library: Api, consumer: Any, milliseconds: int = SILENT_MS) -> bool:
    try:
        message = consumer.receive(timeout_millis=milliseconds)
    except library.module.Timeout:
        return True
    raise AssertionError(f"it got {message.data()!r}")


def wait_until(holds: Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


# ---- several subscriptions -----------------------------------------------------------------------


def test_each_subscription_gets_all_messages_and_its_consumers_divide_them(
    library: Api, topic: str
) -> None:
    alone = library.client.subscribe(
        topic, "alone", initial_position=library.module.InitialPosition.Earliest
    )
    assert library.stats(topic, "alone")["type"] == "Exclusive", "the default"
    queue = [library.subscribe(topic, "Shared", subscription="queue") for _ in range(3)]
    expected = [str(number) for number in range(12)]
    send(library, topic, *expected)
    assert texts(receive(alone, 12)) == expected
    shares = [texts(library.drain(consumer)) for consumer in queue]
    assert sorted(text for share in shares for text in share) == sorted(expected)
    assert all(shares)
    for consumer in (alone, *queue):
        consumer.close()


# ---- Exclusive -----------------------------------------------------------------------------------


def test_second_exclusive_consumer_and_another_type_are_refused(library: Api, topic: str) -> None:
    busy = library.module.ConsumerBusy
    first = library.subscribe(topic, "Exclusive")
    for kind in ("Exclusive", "Shared", "Failover"):
        with pytest.raises(busy):
            library.subscribe(topic, kind)
    send(library, topic, "a")
    first.acknowledge(receive(first, 1)[0])
    first.close()
    second = library.subscribe(topic, "Shared")
    with pytest.raises(busy):
        library.subscribe(topic, "Failover")
    send(library, topic, "b")
    assert texts(receive(second, 1)) == ["b"]
    second.close()


def test_exclusive_consumer_takes_all_partitions(
    server: StandaloneProcess, library: Api, topic: str
) -> None:
    create_partitions(server, topic, 3)
    only = library.subscribe(topic, "Exclusive")
    with pytest.raises(library.module.ConsumerBusy):
        library.subscribe(topic, "Exclusive")
    with pytest.raises(library.module.ConsumerBusy):
        library.subscribe(f"{topic}-partition-1", "Exclusive")
    for partition in range(3):
        send(library, f"{topic}-partition-{partition}", str(partition))
    assert sorted(texts(receive(only, 3))) == ["0", "1", "2"]
    only.close()


@pytest.mark.parametrize("kind", ["Exclusive", "Failover"])
def test_negative_ack_on_a_single_active_type_redelivers_everything_in_order(
    library: Api, topic: str, kind: str
) -> None:
    consumer = library.subscribe(topic, kind, negative_ack_redelivery_delay_ms=100)
    send(library, topic, "a", "b", "c", "d")
    messages = receive(consumer, 4)
    consumer.acknowledge(messages[0])
    consumer.acknowledge(messages[2])
    consumer.negative_acknowledge(messages[3])
    again = receive(consumer, 2)
    assert texts(again) == ["b", "d"]
    assert [message.redelivery_count() for message in again] == [0, 0]
    consumer.acknowledge_cumulative(again[1])
    assert is_silent(library, consumer, 500)
    consumer.close()


def test_redelivery_of_everything_returns_no_message_twice(ours: Api, topic: str) -> None:
    """Apache's client keeps its queue. Ours empties it, and drops what the broker sent before it
    got the request."""
    consumer = ours.subscribe(topic, "Exclusive")
    expected = [str(number) for number in range(300)]
    send(ours, topic, *expected)
    for taken in (0, 1, 50):
        assert texts(receive(consumer, taken)) == expected[:taken]
        consumer.redeliver_unacknowledged_messages()
        consumer.get_stats()  # the client has emptied its queue, on a thread of its own
    assert texts(receive(consumer, 300)) == expected
    assert is_silent(ours, consumer, 500)
    consumer.close()


# ---- Failover ------------------------------------------------------------------------------------


def test_standby_takes_over_at_the_first_unacknowledged_message(library: Api, topic: str) -> None:
    """The consumers of one topic become active in the order of their subscribing, not of their
    names."""
    first = library.subscribe(topic, "Failover", "z")
    second = library.subscribe(topic, "Failover", "y")
    third = library.subscribe(topic, "Failover", "x")
    send(library, topic, *"abcdefgh")
    messages = receive(first, 8)
    assert texts(messages) == list("abcdefgh")
    first.acknowledge_cumulative(messages[3])
    assert is_silent(library, second)
    found = library.stats(topic)
    assert (found["type"], found["activeConsumerName"]) == ("Failover", "z")
    first.close()
    assert texts(receive(second, 4)) == list("efgh")
    assert library.stats(topic)["activeConsumerName"] == "y"
    second.close()  # this consumer has acknowledged nothing
    assert texts(receive(third, 4)) == list("efgh")
    assert library.stats(topic)["activeConsumerName"] == "x"
    third.close()


def test_standby_gets_all_messages_when_the_active_consumer_has_taken_none(
    library: Api, topic: str
) -> None:
    first = library.subscribe(topic, "Failover", "first")
    second = library.subscribe(topic, "Failover", "second")
    send(library, topic, *"abc")
    first.close()
    assert texts(receive(second, 3)) == list("abc")
    second.close()


def test_standby_takes_over_from_a_client_of_the_other_transport(
    libraries: dict[str, Api], topic: str
) -> None:
    one, two = libraries["6650"], libraries["grpc"]
    first = one.subscribe(topic, "Failover", "b")
    second = two.subscribe(topic, "Failover", "a")
    send(one, topic, "x", "y")
    messages = receive(first, 2)
    first.acknowledge(messages[1])
    first.close()
    assert texts(receive(second, 1)) == ["x"]
    third = one.subscribe(topic, "Failover", "c")
    second.close()
    assert texts(receive(third, 1)) == ["x"]
    third.close()


@pytest.mark.parametrize(
    ("names", "active", "leaving", "then_active"),
    [("CAB", "ABCABCABC", "A", "BCBCBCBCB"), ("DCBA", "AB", "AB", "CD")],
)
def test_partitions_are_spread_over_the_consumers(
    server: StandaloneProcess,
    library: Api,
    topic: str,
    names: str,
    active: str,
    leaving: str,
    then_active: str,
) -> None:
    create_partitions(server, topic, len(active))

    def found() -> str:
        parts = [f"{topic}-partition-{index}" for index in range(len(active))]
        return "".join(library.stats(part)["activeConsumerName"] for part in parts)

    consumers = {name: library.subscribe(topic, "Failover", name) for name in names}
    wait_until(lambda: found() == active)
    for name in leaving:
        consumers.pop(name).close()
    wait_until(lambda: found() == then_active)
    for consumer in consumers.values():
        consumer.close()


def test_each_partition_has_one_active_consumer_and_the_others_stand_by(
    server: StandaloneProcess, library: Api, topic: str
) -> None:
    create_partitions(server, topic, 3)
    consumers = [library.subscribe(topic, "Failover", f"c{number:02}") for number in range(15)]
    for index in range(3):
        partition = f"{topic}-partition-{index}"
        wait_until(lambda at=partition: len(library.stats(at)["consumers"]) == 15)
        send(library, partition, str(index))
    got = [texts(receive(consumer, 1)) for consumer in consumers[:3]]
    assert got == [["0"], ["1"], ["2"]]
    for standby in consumers[3:]:
        assert library.drain(standby) == []
    for consumer in consumers:
        consumer.close()


def test_former_active_consumer_may_still_process_messages_that_the_next_one_gets(
    server: StandaloneProcess, library: Api, topic: str
) -> None:
    """The active consumer of partition 0 is the first by name."""
    create_partitions(server, topic, 1)
    partition = f"{topic}-partition-0"
    former = library.subscribe(partition, "Failover", "b")
    send(library, partition, "x", "y")
    held = receive(former, 2)
    following = library.subscribe(partition, "Failover", "a")
    again = receive(following, 2)
    assert texts(again) == texts(held) == ["x", "y"]
    former.acknowledge(held[0])  # late
    following.acknowledge(again[1])
    former.close()
    following.close()
    last = library.subscribe(partition, "Failover")
    assert is_silent(library, last, 500)
    last.close()


def test_better_priority_takes_over_after_the_active_consumer_has_acknowledged(
    ours: Api, topic: str
) -> None:
    low = ours.subscribe(topic, "Failover", "low", priority_level=1)
    send(ours, topic, "a", "b")
    messages = receive(low, 2)
    high = ours.subscribe(topic, "Failover", "high", priority_level=0)
    assert (low.is_active(), high.is_active()) == (True, False)
    for message in messages:
        low.acknowledge(message)
    wait_until(lambda: high.is_active() and not low.is_active())
    send(ours, topic, "c")
    message = receive(high, 1)[0]
    assert message.data() == b"c"
    high.acknowledge(message)
    high.close()
    wait_until(low.is_active)
    low.close()


def test_active_consumer_that_acknowledges_nothing_is_replaced_after_the_delay(
    ours: Api, topic: str
) -> None:
    low = ours.subscribe(topic, "Failover", "low", priority_level=1)
    send(ours, topic, "a", "b")
    messages = receive(low, 2)
    high = ours.subscribe(topic, "Failover", "high", receiver_queue_size=1)
    assert texts(receive(high, 1)) == ["a"]
    low.acknowledge(messages[0])  # late
    low.acknowledge(messages[1])
    low.close()
    high.close()
    last = ours.subscribe(topic, "Failover")
    assert is_silent(ours, last, 500)
    last.close()


def test_seek_closes_only_the_active_consumer(library: Api, topic: str) -> None:
    first = library.subscribe(topic, "Failover", "first", start_message_id_inclusive=True)
    second = library.subscribe(topic, "Failover", "second")
    send(library, topic, "a", "b", "c")
    messages = receive(first, 3)
    first.acknowledge_cumulative(messages[2])
    since = {it["consumerName"]: it["connectedSince"] for it in library.stats(topic)["consumers"]}
    first.seek(messages[1].message_id())
    assert texts(receive(second, 2)) == ["b", "c"]
    wait_until(lambda: len(library.stats(topic)["consumers"]) == 2)
    after = {it["consumerName"]: it["connectedSince"] for it in library.stats(topic)["consumers"]}
    assert after["second"] == since["second"]
    assert after["first"] != since["first"]
    assert library.stats(topic)["activeConsumerName"] == "second"
    first.close()
    second.close()


def test_failover_of_a_non_persistent_topic(library: Api, topic: str) -> None:
    volatile = f"non-persistent://public/default/{topic}"
    first = library.subscribe(volatile, "Failover", "first")
    second = library.subscribe(volatile, "Failover", "second")
    send(library, volatile, "a")
    assert texts(receive(first, 1)) == ["a"]
    first.close()
    send(library, volatile, "b")
    assert texts(receive(second, 1)) == ["b"]
    second.close()


# ---- Shared --------------------------------------------------------------------------------------


def test_negative_acks_on_shared_redeliver_single_messages_with_their_counts(
    library: Api, topic: str
) -> None:
    consumer = library.subscribe(topic, "Shared", negative_ack_redelivery_delay_ms=100)
    send(library, topic, "a", "b", "c")
    messages = receive(consumer, 3)
    consumer.acknowledge(messages[0])
    for count in (1, 2):
        consumer.negative_acknowledge(messages[1])
        (messages[1],) = receive(consumer, 1)
        assert (messages[1].data(), messages[1].redelivery_count()) == (b"b", count)
    other = library.subscribe(topic, "Shared")
    consumer.close()
    again = {it.data(): it.redelivery_count() for it in receive(other, 2)}
    assert again == {b"b": 3, b"c": 1}
    assert is_silent(library, other, 500)
    other.close()


@pytest.mark.parametrize("kind", ["Shared", "KeyShared", "Failover", "Exclusive"])
def test_drain_aware_leave_redelivers_nothing(ours: Api, topic: str, kind: str) -> None:
    first = ours.subscribe(topic, kind, "first")
    second = None if kind == "Exclusive" else ours.subscribe(topic, kind, "second")
    send(ours, topic, *"abcdef", keys=True)
    taken = receive(first, 1)
    got = texts(taken)

    def work() -> None:
        """Acknowledge more slowly than the broker handles the request to leave."""
        while True:
            time.sleep(0.2)
            first.acknowledge(taken.pop())
            try:
                taken.append(first.receive(timeout_millis=1_000))
            except magnetar.PulsarException:
                return
            got.extend(texts(taken))

    worker = threading.Thread(target=work)
    worker.start()
    first.close(drain=True)
    worker.join()
    send(ours, topic, "g", keys=True)
    second = second or ours.subscribe(topic, kind, "second")
    rest = receive(second, 7 - len(got))
    assert sorted(got + texts(rest)) == list("abcdefg")
    assert {message.redelivery_count() for message in rest} == {0}
    assert is_silent(ours, second, 300)
    second.close()


def test_partly_acknowledged_batch_is_redelivered_without_what_was_acknowledged(
    library: Api, topic: str
) -> None:
    producer = library.client.create_producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=200
    )
    consumer = library.subscribe(topic, "Shared", batch_index_ack_enabled=True)
    for text in "abcde":
        producer.send_async(text.encode(), lambda *_: None)
    producer.flush()
    messages = receive(consumer, 5)
    consumer.acknowledge(messages[0])
    consumer.acknowledge(messages[3])
    consumer.close()
    again = library.subscribe(topic, "Shared", batch_index_ack_enabled=True)
    assert texts(receive(again, 3)) == ["b", "c", "e"]
    again.close()
    producer.close()


def test_consumer_of_a_better_priority_gets_the_messages_while_it_has_permits(
    ours: Api, topic: str
) -> None:
    low = ours.subscribe(topic, "Shared", "low", priority_level=1, receiver_queue_size=10)
    high = ours.subscribe(topic, "Shared", "high", priority_level=0, receiver_queue_size=4)
    send(ours, topic, *"abcdefgh")
    assert texts(receive(high, 1)) == ["a"]
    assert texts(receive(low, 1))[0] > "d"
    low.close()
    high.close()
