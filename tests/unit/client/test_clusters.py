"""A client that moves between clusters: the choice as a machine, and the client among fakes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import EARLIEST, TOPIC, A, B, world_of
from fakes.session_broker import UNASKED, FakeBrokers

import magnetar
from magnetar.client.asyncio import Client
from magnetar.client.clusters import ClusterChoice, ClusterWatch
from magnetar.client.errors import InvalidConfiguration
from magnetar.client.options import ClientOptions
from magnetar.client.service_info import AutoClusterFailover, ServiceInfo, ServiceInfoProvider
from magnetar.client.session.reachability import is_reachable
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from magnetar.client.session.pool import Purpose
    from magnetar.runtime.frames import FrameStream

C = "grpc://c:6660"
INFOS = [ServiceInfo(url) for url in (A, B, C)]


def choice(**options: int) -> ClusterChoice:
    return ClusterChoice(AutoClusterFailover(INFOS[0], INFOS[1:], **options))


def test_a_cluster_is_left_after_failures_in_a_row() -> None:
    one = choice(failover_threshold=2)
    assert one.on_probed(current=False, primary=False) == []
    assert one.on_probed(current=True, primary=True) == []
    assert one.on_probed(current=False, primary=False) == []
    assert one.on_probed(current=False, primary=False) == [1, 2]


def test_the_primary_is_taken_back_after_successes_in_a_row() -> None:
    one = choice(switch_back_threshold=2)
    one.move(1)
    assert one.on_probed(current=True, primary=True) == []
    assert one.on_probed(current=True, primary=False) == []
    assert one.on_probed(current=True, primary=True) == []
    assert one.on_probed(current=True, primary=True) == [0]
    one.move(0)
    assert one.on_probed(current=True, primary=True) == []


def test_a_dead_secondary_is_left_too() -> None:
    one = choice()
    one.move(1)
    assert one.on_probed(current=False, primary=False) == [0, 2]


def test_a_primary_that_refuses_the_return_does_not_hide_a_dead_secondary() -> None:
    one = choice(failover_threshold=2)
    one.move(1)
    assert one.on_probed(current=True, primary=True) == [0]  # no `move`: the client refused it
    assert one.current == 1
    assert one.on_probed(current=True, primary=True) == [0]
    assert one.on_probed(current=False, primary=True) == [0]
    assert one.on_probed(current=False, primary=True) == [0, 2]


class Dialers:
    """One dialer to several clusters."""

    def __init__(self, clusters: dict[str, FakeBrokers]) -> None:
        self.clusters = clusters

    def open(self, broker: str, purpose: Purpose) -> FrameStream:
        return self.clusters[broker].open(broker, purpose)

    async def close(self) -> None:
        return None


@asynccontextmanager
async def client_between(source: Any, down: set[str]) -> AsyncIterator[tuple[Client, Any, Any]]:
    """A client of clusters A and B. `down`: the URLs that no probe reaches."""

    async def probe(url: str, _: float) -> bool:
        return url not in down

    async with FakeBrokers(A) as one, FakeBrokers(B) as two:
        dialers: Any = Dialers({A: one, B: two})
        client = Client.in_environment(ClientOptions(source), world_of(dialers, probe=probe))
        try:
            yield client, one, two
        finally:
            client.shutdown()


async def test_a_client_fails_over_and_back() -> None:
    down: set[str] = set()
    failover = AutoClusterFailover(INFOS[0], [INFOS[1]], check_interval_ms=1000)
    async with client_between(failover, down) as (client, one, two):
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await producer.send(b"at a")
        assert (await consumer.receive(1000)).data() == b"at a"
        assert client.get_service_info().service_url == A
        down.add(A)
        await asyncio.sleep(1.5)
        assert client.get_service_info().service_url == B
        await producer.send(b"at b")
        assert (await consumer.receive(5000)).data() == b"at b"
        assert (len(one.topic(TOPIC).entries), len(two.topic(TOPIC).entries)) == (1, 1)
        down.clear()
        await asyncio.sleep(1.5)
        assert client.get_service_info() is INFOS[0]
        await producer.send(b"at a again")
        assert len(one.topic(TOPIC).entries) == 2


async def test_acknowledgements_of_one_cluster_do_not_reach_the_other() -> None:
    down: set[str] = set()
    failover = AutoClusterFailover(INFOS[0], [INFOS[1]], check_interval_ms=1000)
    async with client_between(failover, down) as (client, one, two):
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        producer = await client.create_producer("t")
        await producer.send(b"0")
        message = await consumer.receive(1000)
        down.add(A)
        await asyncio.sleep(0.95)
        await consumer.acknowledge(message)  # 50 ms before the move: not sent yet
        await asyncio.sleep(1)
        await producer.send(b"0 at b")
        assert (await consumer.receive(5000)).message_id() == message.message_id()
        await asyncio.sleep(1)
        assert two.topic(TOPIC).subscriptions["s"].acks == []
        assert one.topic(TOPIC).subscriptions["s"].acks == []


async def test_no_cluster_is_left_for_one_that_is_down_too() -> None:
    failover = AutoClusterFailover(INFOS[0], [INFOS[1]], check_interval_ms=1000)
    async with client_between(failover, {A, B}) as (client, _, _two):
        await client.create_producer("t")
        await asyncio.sleep(5)
        assert client.get_service_info().service_url == A


class Provider(ServiceInfoProvider):
    def __init__(self, info: Any = INFOS[0]) -> None:
        self.info = info
        self.update: Callable[[ServiceInfo], None] | None = None
        self.closed = 0

    def initial_service_info(self) -> ServiceInfo:
        return self.info  # type: ignore[no-any-return]

    def initialize(self, on_service_info_update: Callable[[ServiceInfo], None]) -> None:
        self.update = on_service_info_update

    def close(self) -> None:
        self.closed += 1


async def wait_until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - a thread makes the condition true
        await asyncio.sleep(0.001)


@pytest.mark.real_loop(deadline_s=30)
async def test_a_client_follows_its_provider() -> None:
    provider = Provider()
    async with client_between(provider, set()) as (client, _, two):
        producer = await client.create_producer("t")
        await wait_until(lambda: provider.update)
        assert provider.update is not None
        with pytest.raises(TypeError, match="ServiceInfo"):
            provider.update("grpc://b")  # type: ignore[arg-type]
        provider.update(ServiceInfo("no url"))  # logged; the client stays where it is
        await asyncio.to_thread(provider.update, INFOS[1])
        await producer.send(b"x")
        while not two.topic(TOPIC).entries:
            await producer.send(b"x")
        assert client.get_service_info() is INFOS[1]
        await client.close()
        assert provider.closed == 1


@pytest.mark.real_loop(deadline_s=30)
async def test_an_update_after_close_logs_no_move(caplog: pytest.LogCaptureFixture) -> None:
    provider = Provider()
    async with client_between(provider, set()) as (client, _, _two):
        await client.create_producer("t")
        await wait_until(lambda: provider.update)
        assert provider.update is not None
        await client.close()
        provider.update(INFOS[1])
        await asyncio.sleep(0)  # the turn of the loop that takes the update
        await asyncio.sleep(0)
        assert client.get_service_info().service_url == A
        assert "moved to another cluster" not in caplog.text


def test_wrong_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="service_url"):
        ClientOptions(5)  # type: ignore[arg-type]
    failover = AutoClusterFailover(INFOS[0], [INFOS[1]])
    with pytest.raises(InvalidConfiguration, match="tls_trust_certs_file_path"):
        ClientOptions(failover, tls_trust_certs_file_path="x")
    with pytest.raises(InvalidConfiguration, match="authentication"):
        ClientOptions(failover, authentication=magnetar.AuthenticationToken("x"))
    with pytest.raises(TypeError, match="ServiceInfo"):
        magnetar.Client(Provider("grpc://a"))


async def test_messages_of_one_cluster_are_not_acknowledged_in_the_other() -> None:
    down: set[str] = set()
    failover = AutoClusterFailover(INFOS[0], [INFOS[1]], check_interval_ms=1000)
    async with client_between(failover, down) as (client, _one, two):
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        producer = await client.create_producer("t")
        for _ in range(2):
            await producer.send(b"at a")
        first, second = [await consumer.receive(1000) for _ in range(2)]
        down.add(A)
        await asyncio.sleep(1.5)
        await producer.send(b"0 at b")
        await producer.send(b"1 at b")
        await consumer.acknowledge(first)  # cluster B has other messages with these ids
        await consumer.acknowledge_cumulative(second)
        await asyncio.sleep(1)
        assert two.topic(TOPIC).subscriptions["s"].acks == []
        for _ in range(2):
            await consumer.acknowledge(await consumer.receive(5000))
        await consumer.close()
        assert not two.topic(TOPIC).subscriptions["s"].unacked


async def test_a_reader_begins_at_the_earliest_message_of_the_other_cluster() -> None:
    down: set[str] = set()
    failover = AutoClusterFailover(INFOS[0], [INFOS[1]], check_interval_ms=1000)
    async with client_between(failover, down) as (client, one, two):
        one.topic(TOPIC).ledger = 1000
        producer = await client.create_producer("t")
        await producer.send(b"at a")
        reader = await client.create_reader("t", magnetar.MessageId.earliest)
        assert (await reader.read_next(1000)).data() == b"at a"
        down.add(A)
        await asyncio.sleep(1.5)
        await producer.send(b"at b")
        assert two.topic(TOPIC).entries
        assert (await reader.read_next(5000)).data() == b"at b"


async def test_sequence_ids_of_another_cluster_do_not_make_pending_messages_stored() -> None:
    down: set[str] = set()
    failover = AutoClusterFailover(INFOS[0], [INFOS[1]], check_interval_ms=1000)
    async with client_between(failover, down) as (client, one, two):
        two.last_sequence_ids["p"] = 100
        producer = await client.create_producer("t", producer_name="p")
        one.brokers[A].reads.clear()
        told: list[magnetar.Result] = []
        producer.send_async(b"0", lambda result, _: told.append(result))
        await asyncio.sleep(0.1)
        down.add(A)
        await asyncio.sleep(1.5)
        assert told == [magnetar.Result.Interrupted]  # cluster A may have stored the message
        await producer.send(b"1")
        assert [sequence_id for sequence_id, _ in two.sends] == [101]


async def test_schema_versions_of_one_cluster_are_forgotten_in_the_other() -> None:
    down: set[str] = set()
    failover = AutoClusterFailover(INFOS[0], [INFOS[1]], check_interval_ms=1000)
    async with client_between(failover, down) as (client, _one, _two):
        schema = magnetar.schema.JsonSchema(Row)
        consumer = await client.subscribe("t", "s", schema=schema)
        decoder = consumer._subscriber.subscription.decoder
        assert decoder is not None
        decoder._known[TOPIC, b"0"] = lambda _: None
        down.add(A)
        await asyncio.sleep(1.5)
        assert decoder._known == {}
        assert decoder._forgotten == 1


class Row(magnetar.schema.Record):  # type: ignore[misc]
    number = magnetar.schema.Integer()


@pytest.mark.parametrize("bad", ["no url", "grpc://b:6660,:bad:"])
async def test_a_secondary_cluster_that_cannot_be_used_is_passed_over(bad: str) -> None:
    down: set[str] = set()
    failover = AutoClusterFailover(INFOS[0], [ServiceInfo(bad), INFOS[1]], check_interval_ms=1000)

    async def probe(url: str, timeout_s: float) -> bool:
        return await is_reachable(url, timeout_s) if url == "no url" else url not in down

    async with FakeBrokers(A) as one, FakeBrokers(B) as two:
        dialers: Any = Dialers({A: one, B: two})
        client = Client.in_environment(ClientOptions(failover), world_of(dialers, probe=probe))
        try:
            producer = await client.create_producer("t")
            down.add(A)
            await asyncio.sleep(2.5)
            assert client.get_service_info() is INFOS[1]
            await producer.send(b"x")
            assert len(two.topic(TOPIC).entries) == 1
        finally:
            client.shutdown()


async def test_a_client_that_cannot_return_to_its_primary_still_leaves_a_dead_secondary() -> None:
    up = {A: False, B: True, C: True}
    used: list[ServiceInfo] = []
    readable = False

    def move(info: ServiceInfo) -> bool:
        if info is INFOS[0] and not readable:
            raise InvalidConfiguration("the certificates cannot be read")
        used.append(info)
        return True

    async def probe(url: str, _: float) -> bool:
        return up[url]

    failover = AutoClusterFailover(INFOS[0], INFOS[1:], check_interval_ms=1000)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ClusterWatch(failover, move, probe, 1.0).run())
        await asyncio.sleep(1.5)
        assert used == [INFOS[1]]
        up[A] = True
        await asyncio.sleep(5)
        assert used == [INFOS[1]]
        up[B] = False
        await asyncio.sleep(1)
        assert used == INFOS[1:]
        readable = True
        await asyncio.sleep(1)
        assert used == [*INFOS[1:], INFOS[0]]
        task.cancel()


@pytest.mark.real_loop
async def test_a_host_name_that_is_none_is_not_reachable() -> None:
    assert not await is_reachable("grpc://" + "x" * 70 + ":6660", 1.0)


async def test_a_url_that_cannot_be_used_changes_nothing() -> None:
    async with client_between(A, set()) as (client, one, _):
        producer = await client.create_producer("t")
        before = client._dialer._dialer
        client._new_dialer = lambda _: Dialers({})  # type: ignore[method-assign]
        with pytest.raises(magnetar.InvalidUrl):
            client._move(ServiceInfo("grpc://a:6660,:bad:"))
        assert client._dialer._dialer is before
        one.brokers[A].sessions[0].stream.abort("lost")
        await producer.send(b"x")
        assert client.get_service_info().service_url == A


async def test_a_broker_named_before_a_move_is_not_used_after_it() -> None:
    async with client_between(A, set()) as (client, one, two):
        producer = await client.create_producer("t")
        (session,) = one.brokers[A].sessions
        for producer_id in list(session.producers):
            session.send(
                pb.CommandCloseProducer(
                    producer_id=producer_id, request_id=UNASKED, assignedBrokerServiceUrl=A
                )
            )
        await asyncio.sleep(0.001)  # the producer waits before it attaches again
        assert not producer.is_connected()
        client._move(INFOS[1])
        await producer.send(b"x")
        assert len(two.topic(TOPIC).entries) == 1
        assert len(one.brokers[A].sessions) == 1
