"""60,000 hashes of a Key_Shared subscription that drain together: the memory of the broker, its
statistics, and the delivery of other keys."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_api import CLIENTS, client_api
from fakes.standalone_process import StandaloneProcess
from support import wait_for

from magnetar.broker.dispatch.sticky_hash import hash_of, ring_slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fakes.client_api import Api

pytestmark = [pytest.mark.cluster, pytest.mark.night]

HASHES = 60_000
DRAINING_BYTES_MAX = 5_000_000
TIMEOUT_S = 120
TIMEOUT_MS = 20_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(
        tmp_path_factory.mktemp("server"), "--max-unacked-messages-per-consumer=0"
    )
    process.start()
    yield process
    process.end()


@pytest.fixture(scope="module", params=CLIENTS)
def api(request: pytest.FixtureRequest, server: StandaloneProcess) -> Iterator[Api]:
    with client_api(server, request.param) as found:
        yield found


def keys_of_hashes(count: int) -> list[str]:
    """One key for each of this number of hashes."""
    found: dict[int, str] = {}
    for number in itertools.count():
        found.setdefault(ring_slot(hash_of(f"key-{number}")), f"key-{number}")
        if len(found) == count:
            break
    return list(found.values())


def resident_bytes(server: StandaloneProcess) -> int:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    [size] = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(size) * 1_024


def test_60_000_hashes_drain_within_5_mb(api: Api, server: StandaloneProcess) -> None:
    topic = f"draining-{api.module.__name__}"
    *keys, other = keys_of_hashes(HASHES + 1)
    relaxed = api.module.ConsumerKeySharedPolicy(allow_out_of_order_delivery=True)
    first = api.subscribe(
        topic,
        "KeyShared",
        "first",
        receiver_queue_size=HASHES,
        max_total_receiver_queue_size_across_partitions=HASHES,
        key_shared_policy=relaxed,
    )
    producer = api.client.create_producer(
        topic, batching_enabled=False, max_pending_messages=5_000, block_if_queue_full=True
    )
    failed: list[Any] = []

    def on_sent(result: Any, _: object) -> None:
        if result != api.module.Result.Ok:
            failed.append(result)

    for key in keys:
        producer.send_async(b"x", on_sent, partition_key=key)
    producer.flush()
    assert not failed
    wait_for(lambda: api.stats(topic)["unackedMessages"] == HASHES, deadline_s=TIMEOUT_S)
    second = api.subscribe(topic, "KeyShared", "second", key_shared_policy=relaxed)
    second.close()  # the measurement below leaves out the cost of a join without draining
    before = resident_bytes(server)
    # This consumer requires the order, so all hashes drain.
    second = api.subscribe(topic, "KeyShared", "second")
    grown = resident_bytes(server) - before
    print(f"{HASHES} hashes drain: the server has grown by {grown / 1e6:.1f} MB")
    assert grown < DRAINING_BYTES_MAX
    found = api.stats(topic)
    assert found["drainingHashesCount"] == found["drainingHashesUnackedMessages"] == HASHES
    producer.send(b"waits", partition_key=keys[0])
    producer.send(b"goes on", partition_key=other)
    wait_for(lambda: api.stats(topic)["msgInReplay"] == 1)
    assert api.stats(topic)["unackedMessages"] == HASHES + 1
    first.close()
    texts = set()
    while len(texts) < 3:
        message = second.receive(timeout_millis=TIMEOUT_MS)
        second.acknowledge(message)
        texts.add(message.data())
    assert texts == {b"x", b"waits", b"goes on"}
    assert api.stats(topic)["drainingHashesCount"] == 0
    second.close()
    producer.close()
