"""Each use of our synchronous and asyncio clients, over both transports."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fakes.blocking import blocking_client
from fakes.standalone_process import StandaloneProcess
from fakes.usage import (
    USES,
    Place,
    asyncio_face,
    survive_a_restart,
)

import magnetar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.cluster

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    """A server that keeps acknowledged messages, because some tests read them again."""
    kept = "--default-retention-time-in-minutes=-1", "--default-retention-size-in-mb=-1"
    process = StandaloneProcess(tmp_path_factory.mktemp("server"), *kept)
    process.start()
    yield process
    process.end()


@pytest.fixture(scope="module")
def over_tcp(server: StandaloneProcess) -> Iterator[tuple[magnetar.Client, str]]:
    client = magnetar.Client(server.pulsar_url, operation_timeout_seconds=20)
    yield client, server.pulsar_url
    client.shutdown()


@pytest.fixture(scope="module", params=["over TCP", "over gRPC"])
def url(request: pytest.FixtureRequest, server: StandaloneProcess) -> str:
    return server.pulsar_url if request.param == "over TCP" else server.service_url


@pytest.fixture(scope="module", params=["synchronous", "asyncio"])
def connected(request: pytest.FixtureRequest, url: str) -> Iterator[tuple[Any, str]]:
    """A synchronous and an asyncio client over each transport."""
    if request.param == "asyncio":
        with blocking_client(url, operation_timeout_seconds=20) as client:
            yield client, url
    else:
        with magnetar.Client(url, operation_timeout_seconds=20) as client:
            yield client, url


def place_of(connected: tuple[Any, str], server: StandaloneProcess) -> Place:
    def make_partitioned(topic: str, count: int) -> None:
        path = f"admin/v2/persistent/public/default/{topic}/partitions"
        url = f"http://localhost:{server.http_port}/{path}"
        httpx.put(url, json=count, timeout=60).raise_for_status()

    client, url = connected
    return Place(client, url, f"t{next(NUMBERS)}", make_partitioned)


@pytest.fixture
def place(connected: tuple[Any, str], server: StandaloneProcess) -> Place:
    return place_of(connected, server)


@pytest.fixture
def place_over_tcp(over_tcp: tuple[magnetar.Client, str], server: StandaloneProcess) -> Place:
    return place_of(over_tcp, server)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_every_use_of_the_client_succeeds_over_each_transport(
    place: Place, use: Callable[[Place], None]
) -> None:
    use(place)


@pytest.mark.real_loop
async def test_the_asyncio_client_sends_and_receives_over_tcp(place_over_tcp: Place) -> None:
    await asyncio_face(place_over_tcp)


def test_messages_in_flight_survive_a_restart_in_order(
    place_over_tcp: Place, server: StandaloneProcess
) -> None:
    """The server is killed while a producer sends: messages without a receipt are resent, in
    order."""
    survive_a_restart(place_over_tcp, kill=server.kill, start=server.start)
