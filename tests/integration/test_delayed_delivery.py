"""Delayed delivery on one standalone server, with Apache's client over TCP and ours over gRPC."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from fakes.client_api import CLIENTS, Api, client_api
from fakes.standalone_process import StandaloneProcess
from support import wait_for

from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

TIMEOUT_MS = 30_000
TICK_S = 0.2
_numbers = itertools.count()


def now_s() -> float:
    return SystemClock().now_ms() / 1_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(
        tmp_path_factory.mktemp("server"),
        "--is-delayed-delivery-deliver-at-time-strict",
        f"--delayed-delivery-tick-time-millis={int(TICK_S * 1_000)}",
        "--delayed-delivery-max-delay-in-millis=1000000",
        "--message-expiry-check-interval-in-minutes=0.01",
        "--backlog-quota-check-interval-in-seconds=1",
    )
    process.start()
    yield process
    process.end()


@pytest.fixture(params=CLIENTS)
def api(request: pytest.FixtureRequest, server: StandaloneProcess) -> Iterator[Api]:
    with client_api(server, request.param) as found:
        yield found


@pytest.fixture
def topic() -> str:
    return f"delayed-{next(_numbers)}"


@pytest.mark.parametrize("kind", ["Shared", "KeyShared"])
def test_messages_arrive_in_the_order_of_their_times_and_never_early(
    api: Api, topic: str, kind: str
) -> None:
    consumer = api.subscribe(topic, kind)
    producer = api.client.create_producer(topic, batching_enabled=True)
    begun_s = now_s()  # all messages are stored before the first one is due
    due = {
        text: begun_s + delay_s
        for text, delay_s in ((b"third", 3.5), (b"first", 2.5), (b"second", 3.0), (b"last", 4.0))
    }
    for text in (b"third", b"first", b"second"):
        delay = timedelta(seconds=due[text] - now_s())
        producer.send_async(text, lambda *_: None, deliver_after=delay)
    producer.send_async(b"last", lambda *_: None, deliver_at=int(due[b"last"] * 1_000))
    producer.send_async(b"now", lambda *_: None)
    producer.flush()
    for expected in (b"now", b"first", b"second", b"third", b"last"):
        message = consumer.receive(TIMEOUT_MS)
        late_s = now_s() - due.get(message.data(), begun_s)
        consumer.acknowledge(message)
        assert message.data() == expected
        assert late_s >= -0.002
        assert expected == b"now" or late_s < 5 * TICK_S + 1


@pytest.mark.parametrize("kind", ["Exclusive", "Failover"])
def test_exclusive_and_failover_deliver_delayed_messages_at_once(
    api: Api, topic: str, kind: str
) -> None:
    consumer = api.subscribe(topic, kind)
    api.client.create_producer(topic).send(b"later", deliver_after=timedelta(seconds=600))
    assert consumer.receive(TIMEOUT_MS).data() == b"later"


def test_messages_with_a_time_in_the_past_are_delivered_at_once(api: Api, topic: str) -> None:
    consumer = api.subscribe(topic, "Shared")
    producer = api.client.create_producer(topic)
    producer.send(b"a", deliver_at=1)
    producer.send(b"b", deliver_at=int(now_s() * 1_000) - 5_000)
    assert [consumer.receive(TIMEOUT_MS).data() for _ in range(2)] == [b"a", b"b"]


def test_delay_beyond_the_limit_is_refused(api: Api, topic: str) -> None:
    consumer = api.subscribe(topic, "Shared")
    producer = api.client.create_producer(topic)
    with pytest.raises(api.module.PulsarException):
        producer.send(b"later", deliver_after=timedelta(seconds=2_000))
    producer.send(b"now")
    assert consumer.receive(TIMEOUT_MS).data() == b"now"


def test_delayed_messages_are_counted_explained_and_cleared(api: Api, topic: str) -> None:
    consumer = api.subscribe(topic, "Shared")
    producer = api.client.create_producer(topic)
    for _ in range(5):
        producer.send(b"later", deliver_after=timedelta(seconds=900))
    wait_for(lambda: api.stats(topic)["msgDelayed"] == 5)
    stats = api.stats(topic)
    assert stats["msgBacklog"] == 5
    assert stats["delayedMessageIndexSizeInBytes"] > 0
    assert "delayed: 5 entries are delayed; the next is due at" in str(stats["waitingFor"])
    api.call(topic, "subscription/s/skip_all", method="POST")
    stats = api.stats(topic)
    assert (stats["msgBacklog"], stats["msgDelayed"]) == (0, 0)
    producer.send(b"now")
    assert consumer.receive(TIMEOUT_MS).data() == b"now"


def test_delayed_messages_expire_by_the_time_to_live(api: Api, topic: str) -> None:
    consumer = api.subscribe(topic, "Shared")
    producer = api.client.create_producer(topic)
    producer.send(b"later", deliver_after=timedelta(seconds=900))
    api.call(topic, "messageTTL?messageTTL=1", method="POST")
    wait_for(lambda: api.stats(topic)["totalMsgExpired"] == 1)
    assert api.stats(topic)["msgDelayed"] == 0
    api.call(topic, "messageTTL", method="DELETE")
    producer.send(b"last", deliver_after=timedelta(seconds=2))
    assert consumer.receive(TIMEOUT_MS).data() == b"last"


def test_a_long_delay_exceeds_the_backlog_quota(api: Api, topic: str) -> None:
    """A delayed message is part of the backlog, even if every other message is acknowledged."""
    consumer = api.subscribe(topic, "Shared")
    producer = api.client.create_producer(topic)
    producer.send(bytes(50_000), deliver_after=timedelta(seconds=900))
    producer.send(b"now")
    consumer.acknowledge(consumer.receive(TIMEOUT_MS))
    quota = {"limitSize": 40_000, "policy": "producer_exception"}
    api.call(topic, "backlogQuota", quota, method="POST")
    wait_for(lambda: api.call(topic, "stats")["publishers"] == [])
    with pytest.raises(api.module.PulsarException):
        api.client.create_producer(topic)
    api.call(topic, "backlogQuota", method="DELETE")
    wait_for(lambda: api.call(topic, "stats")["publishers"])  # the first producer has reconnected
    producer.send(b"after")
    assert consumer.receive(TIMEOUT_MS).data() == b"after"


def test_delay_holds_when_no_consumer_is_connected(api: Api, topic: str) -> None:
    consumer = api.subscribe(topic, "Shared")
    producer = api.client.create_producer(topic)
    due = now_s() + 4
    producer.send(b"later", deliver_at=int(due * 1_000))
    producer.send(b"now")
    consumer.acknowledge(consumer.receive(TIMEOUT_MS))
    consumer.close()
    assert api.stats(topic)["msgDelayed"] == 1
    consumer = api.subscribe(topic, "Shared")
    assert consumer.receive(TIMEOUT_MS).data() == b"later"
    assert now_s() >= due - 0.002


def test_delay_holds_over_a_restart(api: Api, server: StandaloneProcess, topic: str) -> None:
    consumer = api.subscribe(topic, "Shared")
    producer = api.client.create_producer(topic)
    due = now_s() + 4  # the delay may end before the server has restarted
    producer.send(b"later", deliver_at=int(due * 1_000))
    producer.send(b"much later", deliver_after=timedelta(seconds=900))
    for number in range(10):
        producer.send(b"%d" % number)
    for _ in range(10):
        consumer.acknowledge(consumer.receive(TIMEOUT_MS))
    wait_for(lambda: api.stats(topic)["msgBacklog"] == 2)
    consumer.close()  # the answer waits until the acknowledgements are stored
    producer.close()
    server.kill()
    server.start()
    consumer = api.subscribe(topic, "Shared")
    api.client.create_producer(topic).send(b"after")
    found = {consumer.receive(TIMEOUT_MS).data() for _ in range(2)}
    assert found == {b"later", b"after"}
    assert now_s() >= due - 0.002
    assert api.stats(topic)["msgDelayed"] == 1
