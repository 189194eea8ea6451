"""Our client over Pulsar's TCP protocol. The other tests of the client go over gRPC."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import httpx
import pytest
from fakes.standalone_process import StandaloneProcess
from fakes.usage import USES, Place, asyncio_face, survive_a_restart

import magnetar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.cluster

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    """It keeps acknowledged messages: some tests read them again."""
    kept = "--default-retention-time-in-minutes=-1", "--default-retention-size-in-mb=-1"
    process = StandaloneProcess(tmp_path_factory.mktemp("server"), *kept)
    process.start()
    yield process
    process.end()


@pytest.fixture(scope="module")
def connected(server: StandaloneProcess) -> Iterator[tuple[magnetar.Client, str]]:
    client = magnetar.Client(server.pulsar_url, operation_timeout_seconds=20)
    yield client, server.pulsar_url
    client.shutdown()


@pytest.fixture
def place(connected: tuple[magnetar.Client, str], server: StandaloneProcess) -> Place:
    def make_partitioned(topic: str, count: int) -> None:
        path = f"admin/v2/persistent/public/default/{topic}/partitions"
        url = f"http://localhost:{server.http_port}/{path}"
        httpx.put(url, json=count, timeout=60).raise_for_status()

    client, url = connected
    return Place(client, url, f"t{next(NUMBERS)}", make_partitioned)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_every_use_works_over_tcp(place: Place, use: Callable[[Place], None]) -> None:
    use(place)


@pytest.mark.real_loop
async def test_the_asyncio_client_works_over_tcp(place: Place) -> None:
    await asyncio_face(place)


def test_messages_in_flight_survive_a_restart_in_order(
    place: Place, server: StandaloneProcess
) -> None:
    """The server is killed under a producer: what had no receipt is sent again, in order."""
    survive_a_restart(place, kill=server.kill, start=server.start)
