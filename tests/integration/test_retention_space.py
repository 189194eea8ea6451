"""Retention frees space: from a message's acknowledgement to the bookie's disk."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

import magnetar.asyncio
from magnetar.bookie.bookie import open_bookie, registration
from magnetar.bookie.collector import CollectorConfig
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.local import LocalBookiePeer
from magnetar.bookie.registration import Registration
from magnetar.bookie.upkeep import UpkeepConfig
from magnetar.broker.config import BrokerConfig
from magnetar.broker.main import BrokerProcess
from magnetar.metadata.embedded import EmbeddedStore
from magnetar.metadata.model import BookieAddress
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path

    from magnetar.bookie.ledger.peer import BookiePeer
    from magnetar.metadata.model import Member

pytestmark = pytest.mark.cluster

MESSAGES, MESSAGE_BYTES = 64, 1 << 20
FREED_SHARE = 0.8
FREED_S = 90.0  # with the collector's default interval: five minutes
ADDRESS = BookieAddress(data="in-process:1", grpc="in-process:1")


def size_of(directory: Path) -> int:
    sizes = 0
    for file in (directory / "store").iterdir():
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:
            continue
    return sizes


@pytest.mark.real_loop(deadline_s=240)
async def test_acknowledged_messages_give_their_space_back(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path / "metadata")
    async with (
        open_bookie(
            tmp_path / "bookie",
            bookie="b1",
            metadata=store,
            clock=SystemClock(),
            chance=random.Random(1),
            registry=CollectorRegistry(),
            upkeep_config=UpkeepConfig(collector=CollectorConfig(interval_s=2.0)),
        ) as bookie,
        asyncio.TaskGroup() as group,
    ):

        def open_peer(member: Member, _: BookieAddress) -> BookiePeer:
            return LocalBookiePeer(member, bookie, group=group)

        entry = Registration(store, registration(bookie, address=ADDRESS))
        registering = group.create_task(entry.run())
        await entry.wait_held()
        broker = BrokerProcess(
            BrokerConfig(
                id="b",
                metadata_url="embedded",
                grpc_port=0,
                pulsar_port=0,
                http_port=0,
                ensemble_size=1,
                write_quorum=1,
                ack_quorum=1,
                managed_ledger_max_size_per_ledger_mbytes=8,
            ),
            store=store,
            open_peer=open_peer,
            ledger_config=LedgerConfig(ensemble_size=1, write_quorum=1, ack_quorum=1),
            random=random.Random(2),
            registry=CollectorRegistry(),
        )
        stop = asyncio.Event()
        serving = group.create_task(broker.run(stop))
        await broker.ready.wait()
        try:
            async with magnetar.asyncio.Client(broker.registration.grpc_url) as client:
                await trim(client, tmp_path / "bookie")
        finally:
            stop.set()
            await serving
            registering.cancel()
    await store.close()


async def trim(client: magnetar.asyncio.Client, directory: Path) -> None:
    consumer = await client.subscribe("t", "s")
    producer = await client.create_producer("t", batching_enabled=False)
    for _ in range(MESSAGES):
        await producer.send(os.urandom(MESSAGE_BYTES))
    before = size_of(directory)
    assert before >= MESSAGES * MESSAGE_BYTES
    for _ in range(MESSAGES):
        await consumer.acknowledge(await consumer.receive(timeout_millis=20_000))
    trimmed = (MESSAGES - 8) * MESSAGE_BYTES  # the open ledger stays
    goal = before - FREED_SHARE * trimmed
    began_s = time.monotonic()
    while size_of(directory) > goal:
        assert time.monotonic() - began_s < FREED_S, f"{before >> 20} -> {size_of(directory) >> 20}"
        await asyncio.sleep(0.5)
    took_s, after = time.monotonic() - began_s, size_of(directory)
    print(f"{before >> 20} MiB -> {after >> 20} MiB in {took_s:.1f} s")
