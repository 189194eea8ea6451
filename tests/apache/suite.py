"""Our client over `pulsar://` against a real Apache Pulsar.

`make pulsar` fetches Pulsar's jars and runs this file; `make test` does not. Without the jars or
Java, every test is skipped with the reason.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from apache.server import FILES, ApachePulsar, token_of
from fakes.usage import (
    EARLIEST,
    SHARED,
    USES,
    Place,
    asyncio_face,
    data,
    numbers,
    sent,
    survive_a_restart,
    take,
)

import magnetar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUMBERS = itertools.count()
TLS: dict[str, Any] = {
    "tls_trust_certs_file_path": str(FILES / "ca.pem"),
    "tls_validate_hostname": True,
}
CERTIFICATE = str(FILES / "client.pem"), str(FILES / "client-key.pem")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApachePulsar]:
    process = ApachePulsar(tmp_path_factory.mktemp("pulsar"))
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def client(server: ApachePulsar) -> Iterator[magnetar.Client]:
    client = magnetar.Client(server.url, operation_timeout_seconds=20)
    yield client
    client.shutdown()


@pytest.fixture
def place(client: magnetar.Client, server: ApachePulsar) -> Place:
    return Place(client, server.url, f"t{next(NUMBERS)}", server.put)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_every_use_of_the_client_succeeds_with_apache_pulsar(
    place: Place, use: Callable[[Place], None]
) -> None:
    use(place)


@pytest.mark.real_loop
async def test_the_asyncio_client_sends_and_receives_with_apache_pulsar(place: Place) -> None:
    await asyncio_face(place)


@pytest.mark.parametrize("ours_sends", [True, False])
def test_apaches_client_and_ours_read_each_others_messages(
    place: Place, server: ApachePulsar, ours_sends: bool
) -> None:
    logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null")
    theirs = pulsar.Client(server.url, logger=logger)
    sender: Any = place.client if ours_sends else theirs
    producer = sender.create_producer(place.topic, batching_enabled=True)
    for value in numbers(20):
        producer.send_async(value, lambda *_: None, properties={"a": "b"}, partition_key="k")
    producer.flush()
    producer.close()
    receiver: Any = theirs if ours_sends else place.client
    library = pulsar if ours_sends else magnetar
    consumer = receiver.subscribe(
        place.topic, "s", initial_position=library.InitialPosition.Earliest
    )
    got = [consumer.receive(30_000) for _ in range(20)]
    assert [message.data() for message in got] == numbers(20)
    assert {message.partition_key() for message in got} == {"k"}
    assert [message.properties() for message in got] == [{"a": "b"}] * 20
    theirs.close()


def test_magnetars_own_features_are_refused_by_name(place: Place) -> None:
    consumer = place.client.subscribe(place.topic, "s")
    with pytest.raises(magnetar.OperationNotSupported, match=r"drain=True.*Pulsar Server ?4"):
        consumer.close(drain=True)
    in_order = magnetar.ConsumerKeySharedPolicy(ordered_negative_acks=True)
    with pytest.raises(magnetar.OperationNotSupported, match=r"ordered_negative_acks.*Pulsar"):
        place.client.subscribe(
            place.topic,
            "in-order",
            consumer_type=magnetar.ConsumerType.KeyShared,
            key_shared_policy=in_order,
        )


WAYS_IN: list[tuple[dict[str, Any], bool]] = [
    ({"authentication": magnetar.AuthenticationToken(token_of("admin"))}, False),
    ({"authentication": magnetar.AuthenticationToken(lambda: token_of("admin"))}, False),
    ({"authentication": magnetar.AuthenticationBasic("admin", "secret")}, False),
    ({"authentication": magnetar.AuthenticationTLS(*CERTIFICATE)}, True),
    ({"authentication": magnetar.AuthenticationToken(token_of("admin"))}, True),
    ({}, True),
]


@pytest.mark.parametrize(("options", "tls"), WAYS_IN)
def test_a_client_with_valid_credentials_publishes_and_consumes(
    server: ApachePulsar, options: dict[str, Any], tls: bool
) -> None:
    url = server.tls_url if tls else server.url
    topic = f"t{next(NUMBERS)}"
    with magnetar.Client(url, **options, **(TLS if tls else {})) as client:
        consumer = client.subscribe(topic, "s", SHARED, initial_position=EARLIEST)
        sent(client, topic, numbers(10))
        assert data(take(consumer, 10)) == numbers(10)


@pytest.mark.parametrize(
    ("authentication", "error"),
    [
        (magnetar.AuthenticationToken("nonsense"), magnetar.AuthenticationError),
        (magnetar.AuthenticationToken(token_of("admin") + "x"), magnetar.AuthenticationError),
        (magnetar.AuthenticationBasic("admin", "wrong"), magnetar.AuthenticationError),
        (magnetar.AuthenticationToken(token_of("stranger")), magnetar.AuthorizationError),
    ],
)
def test_a_client_with_invalid_credentials_gets_the_reason_at_once(
    server: ApachePulsar, authentication: magnetar.Authentication, error: type[Exception]
) -> None:
    began = time.monotonic()
    with (
        magnetar.Client(server.url, authentication=authentication) as client,
        pytest.raises(error),
    ):
        client.create_producer(f"t{next(NUMBERS)}")
    assert time.monotonic() - began < 10.0, "the client waited for the operation's timeout"


def test_messages_in_flight_survive_a_restart_in_order(place: Place, server: ApachePulsar) -> None:
    """The server is killed while a producer sends: the client resends messages without a receipt,
    in order."""
    survive_a_restart(place, kill=server.kill, start=server.start)
