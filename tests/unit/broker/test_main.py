"""The broker's process: the answer of its health check about its registration."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, NoReturn

import httpx
import pytest
from prometheus_client import CollectorRegistry
from support import wait_until

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.broker.broker import Broker
from magnetar.broker.config import BrokerConfig
from magnetar.broker.log.log import LogConfig
from magnetar.broker.main import BrokerProcess, log_config_of
from magnetar.metadata import codec, paths
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BrokerId, BrokerRegistration

if TYPE_CHECKING:
    from magnetar.metadata.model import Member


def no_peer(member: Member, address: str) -> NoReturn:
    raise AssertionError("this cluster has no bookie")


def broker_on(store: MemoryStore) -> BrokerProcess:
    return BrokerProcess(
        BrokerConfig(
            id="broker-1", metadata_url="zk://unused:1", grpc_port=0, pulsar_port=0, http_port=0
        ),
        store=store,
        open_peer=no_peer,
        ledger_config=LedgerConfig(),
        random=random.Random(1),
        registry=CollectorRegistry(),
    )


def test_a_log_gets_the_settings_of_its_open_ledgers() -> None:
    config = BrokerConfig(
        id="broker-1",
        metadata_url="zk://unused:1",
        degraded_ledger_min_age_in_seconds=2,
        open_ledger_check_interval_in_seconds=1,
    )
    log_config = log_config_of(config)
    assert (log_config.degraded_age_s_min, log_config.check_interval_s) == (2, 1)
    usual = log_config_of(BrokerConfig(id="broker-1", metadata_url="zk://unused:1"))
    assert usual.degraded_age_s_min == LogConfig().degraded_age_s_min
    assert usual.check_interval_s == LogConfig().check_interval_s


@pytest.mark.real_loop
async def test_health_says_unregistered_while_the_session_is_suspended_or_lost() -> None:
    store, stop = MemoryStore(MemoryTree()), asyncio.Event()
    broker = broker_on(store)
    async with asyncio.TaskGroup() as group:
        group.create_task(broker.run(stop))
        await broker.ready.wait()
        url = f"{broker.registration.http_url}/health"
        async with httpx.AsyncClient() as client:

            async def health() -> tuple[int, str]:
                answer = await client.get(url)
                return answer.status_code, answer.json()["state"]

            assert await health() == (200, "serving")
            store.suspend()
            assert await health() == (503, "unregistered")
            store.reconnect()
            assert await health() == (200, "serving")
            store.expire()
            assert await health() == (503, "unregistered")
            store.reconnect()
            while await health() != (200, "serving"):
                pass  # the broker registers again by itself
        stop.set()


@pytest.mark.real_loop
async def test_health_says_stopping_while_the_topics_are_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed_over, stop = asyncio.Event(), asyncio.Event()

    async def hand_over(broker: Broker) -> None:
        await handed_over.wait()

    monkeypatch.setattr(Broker, "_release_all", hand_over)
    broker = broker_on(MemoryStore(MemoryTree()))
    async with asyncio.TaskGroup() as group:
        group.create_task(broker.run(stop))
        await broker.ready.wait()
        stop.set()
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{broker.registration.http_url}/health")
        assert (answer.status_code, answer.json()["state"]) == (503, "stopping")
        handed_over.set()


@pytest.mark.real_loop
async def test_a_broker_that_waits_for_its_registration_can_be_stopped() -> None:
    tree, stop = MemoryTree(), asyncio.Event()
    former = BrokerRegistration(BrokerId("broker-1"), "f" * 32, "grpc://former:1", "", "")
    path = paths.broker_available(former.broker)
    await MemoryStore(tree).create_ephemeral(path, codec.encode_broker_registration(former))
    broker = broker_on(MemoryStore(tree))
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(broker.run(stop))
        await wait_until(lambda: hasattr(broker, "registration"))
        async with httpx.AsyncClient() as client:
            url = f"{broker.registration.http_url}/health"
            assert (await client.get(url)).json()["state"] == "starting"
        stop.set()
