"""Explanations, pending entries and keys over HTTP: pages, numbers, and invalid requests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.admin import admin_of
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.wire import wire_to
from support import wait_until

from magnetar.broker.guard import FAILURES_MAX
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_message
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx
    from fakes.wire import WireClient

pytestmark = pytest.mark.real_loop

ONE = "public/default/t/subscription/s"
SHARED, KEY_SHARED = pb.CommandSubscribe.Shared, pb.CommandSubscribe.Key_Shared


@asynccontextmanager
async def scene() -> AsyncIterator[tuple[RunningBroker, WireClient, httpx.AsyncClient]]:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await client.produce("t")
        yield broker, client, admin


def keyed(key: str, number: int, *, ordering: bytes | None = None) -> bytes:
    message = OutgoingMessage(b"x", number, partition_key=key, ordering_key=ordering)
    return b"".join(encode_message(message, EntryHeader("me", 1_700_000_000_000)))


async def publish(client: WireClient, *entries: bytes) -> None:
    for entry in entries:
        await client.publish(entry=entry)
        while not isinstance((await client.receive()).body, pb.CommandSendReceipt):
            pass  # deliveries


async def have(broker: RunningBroker, count: int) -> None:
    """Wait until the consumers of the subscription have this many messages."""
    topic = await broker.broker.stored_topic(TopicName.parse("t"))
    await wait_until(lambda: topic.subscriptions["s"].unacked == count, what="deliveries")


async def test_pending_entries_come_in_pages_with_key_age_and_redeliveries() -> None:
    async with scene() as (broker, client, admin):
        await publish(client, *[keyed(f"k{n}", n, ordering=b"\xff") for n in range(5)])
        await client.subscribe("t", "s", subType=SHARED, consumer_name="c1")
        await client.flow(10)
        await have(broker, 5)
        topic = await broker.broker.stored_topic(TopicName.parse("t"))
        [handle] = topic.subscriptions["s"].consumers.values()
        first = next(iter(handle.machine.pending))
        handle.redeliver([first])
        await have(broker, 5)
        seen = []
        after = None
        while True:
            params = {"limit": 2} if after is None else {"limit": 2, "after": after}
            page = (await admin.get(f"{ONE}/pending", params=params)).json()
            seen += page["entries"]
            after = page["nextAfter"]
            if after is None:
                break
        assert [it["key"] for it in seen] == [f"k{n}" for n in range(5)]
        assert seen[0]["messageId"] == str(first)
        assert [it["redeliveryCount"] for it in seen] == [1, 0, 0, 0, 0]
        assert all(it["consumer"] == "c1" and it["unackedMessages"] == 1 for it in seen)
        assert all(0 <= it["ageMs"] < 60_000 for it in seen)
        assert {it["orderingKey"] for it in seen} == {"/w=="}
        assert {it["hash"] for it in seen} == {None}, "the type has no hashes"
        found = await admin.get(f"{ONE}/pending", params={"consumer": "other"})
        assert found.json() == {"entries": [], "nextAfter": None}


async def test_pending_entries_of_an_exclusive_consumer_are_what_was_delivered() -> None:
    async with scene() as (broker, client, admin):
        await publish(client, *[bytes(entry_of(str(n)).data) for n in range(4)])
        await client.subscribe("t", "s", consumer_name="c1")
        await client.flow(3)
        topic = await broker.broker.stored_topic(TopicName.parse("t"))
        subscription = topic.subscriptions["s"]
        await wait_until(lambda: subscription.delivered.messages == 3, what="deliveries")
        [handle] = subscription.consumers.values()
        page = (await admin.get(f"{ONE}/pending")).json()
        assert len(page["entries"]) == 3
        assert page["entries"][0]["unackedMessages"] is None
        ledger, entry = page["entries"][1]["messageId"].split(":")
        handle.acknowledge([type(subscription.cursor.mark_delete)(int(ledger), int(entry))])
        page = (await admin.get(f"{ONE}/pending", params={"limit": 1})).json()
        assert [it["messageId"] for it in page["entries"]] == [f"{ledger}:0"]
        rest = await admin.get(f"{ONE}/pending", params={"after": page["nextAfter"]})
        assert [it["messageId"] for it in rest.json()["entries"]] == [f"{ledger}:2"]


async def test_a_key_names_its_consumer_and_what_blocks_it() -> None:
    async with scene() as (broker, client, admin):
        await client.subscribe("t", "s", subType=KEY_SHARED, consumer_name="c1")
        await client.flow(100)
        await publish(client, *[keyed(f"k{n}", n) for n in range(8)])
        await have(broker, 8)
        free = (await admin.get(f"{ONE}/key", params={"key": "k1"})).json()
        assert (free["consumer"], free["drainingConsumer"]) == ("c1", None)
        assert (free["pending"], free["waiting"], free["blocked"]) == (1, 0, False)
        async with wire_to(broker, "grpc") as other:
            await other.subscribe("t", "s", subType=KEY_SHARED, consumer_name="c2")
            await other.flow(100)
            await publish(client, *[keyed(f"k{n}", n) for n in range(8)])
            keys = {
                f"k{n}": (await admin.get(f"{ONE}/key", params={"key": f"k{n}"})).json()
                for n in range(8)
            }
            moved = {key: it for key, it in keys.items() if it["drainingConsumer"]}
            assert 0 < len(moved) < 8
            topic = await broker.broker.stored_topic(TopicName.parse("t"))
            machine = topic.subscriptions["s"].dispatcher
            await wait_until(lambda: machine.waiting == len(moved), what="waiting entries")  # type: ignore[union-attr]
            for key in moved:
                it = (await admin.get(f"{ONE}/key", params={"key": key})).json()
                assert (it["consumer"], it["drainingConsumer"]) == ("c2", "c1")
                assert (it["pending"], it["waiting"], it["blocked"]) == (1, 1, True)
                [reason] = it["blockedBy"]
                assert reason["why"] == "draining"
                assert "1 entries are pending at consumer 'c1'" in reason["sentence"]
                [oldest] = it["oldestPending"]
                assert (oldest["key"], oldest["consumer"], oldest["hash"]) == (
                    key,
                    "c1",
                    it["hash"],
                )
                page = await admin.get(f"{ONE}/pending", params={"hash": it["hash"]})
                assert page.json()["entries"][0]["messageId"] == oldest["messageId"]


async def test_explain_returns_the_waiting_entries_and_their_time() -> None:
    async with scene() as (broker, client, admin):
        await client.subscribe("t", "s", subType=SHARED, consumer_name="c1")
        later = OutgoingMessage(b"x", 0, deliver_at_ms=4_000_000_000_000)
        await client.flow(2)
        await publish(
            client,
            b"".join(encode_message(later, EntryHeader("me", 1))),
            *[bytes(entry_of(str(n)).data) for n in range(3)],
        )
        await have(broker, 2)
        it = (await admin.get(f"{ONE}/explain")).json()
        assert (it["type"], it["consumers"], it["backlog"], it["unackedMessages"]) == (
            "Shared",
            1,
            4,
            2,
        )
        reasons = {reason["why"]: reason for reason in it["reasons"]}
        assert reasons["no_permits"]["consumer"] == "c1"
        assert reasons["no_permits"]["facts"] == {"permits": 0, "unacked": 2}
        assert reasons["delayed"]["facts"]["delayed"] == 1
        assert it["nextChangeMs"] == reasons["delayed"]["nextChangeMs"] > 0


async def test_a_quarantined_topic_is_explained_and_not_opened() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        now = asyncio.get_running_loop().time()
        for _ in range(FAILURES_MAX):
            broker.broker.quarantine.on_failure(TopicName.parse("t"), "a bug", now)
        it = (await admin.get(f"{ONE}/explain")).json()
        [reason] = it["reasons"]
        assert reason["why"] == "quarantined"
        assert reason["sentence"].endswith("a bug")
        assert it["nextChangeMs"] == reason["nextChangeMs"] > 0
        assert broker.broker.topics == []


async def test_a_full_publish_budget_and_lost_metadata_are_named_as_reasons() -> None:
    async with scene() as (broker, client, admin):
        await client.subscribe("t", "s", subType=SHARED)
        await client.flow(2)
        budget = broker.broker.publish_budget
        budget.change(budget.bytes_max)
        turn = budget.turn()
        assert turn is not None
        broker.store.suspend()
        it = (await admin.get(f"{ONE}/explain")).json()
        broker.store.reconnect()
        budget.leave(turn)
        budget.change(-budget.bytes_max)
        reasons = {reason["why"]: reason for reason in it["reasons"]}
        assert reasons["publish_budget"]["facts"]["connections"] == 1
        assert reasons["publish_budget"]["facts"]["usedBytes"] == budget.bytes_max
        assert reasons["metadata_away"]["facts"] == {"session": "suspended"}


async def test_a_partitioned_topic_is_asked_for_one_partition() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put("public/default/p/partitions", json=2)
        for what in ("explain", "pending", "key?key=k"):
            found = await admin.get(f"public/default/p/subscription/s/{what}")
            assert found.status_code == 405
            assert "name one of them, as in" in found.json()["reason"]
            assert "p-partition-0" in found.json()["reason"]
            assert "partitioned-stats" in found.json()["advice"]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("s/pending?after=3", 400, "after"),
        ("s/pending?after=99999999999999999999:1", 400, "after"),
        ("s/pending?limit=0", 400, "limit"),
        ("s/pending?limit=101", 400, "limit"),
        ("s/pending?hash=0", 400, "hash"),
        ("s/pending?hash=65536", 400, "hash"),
        ("s/pending?hash=7", 405, "not Key_Shared"),
        ("s/key", 400, "key"),
        ("s/key?key=k", 405, "Key_Shared only"),
        ("s/key?key=%20&base64=true", 400, "base64"),
        ("s/key?key=%C3%A9&base64=true", 400, "base64"),
        (f"s/key?key={'k' * 5_000}", 400, "key"),
        ("other/explain", 404, "other"),
        ("other/pending", 404, "other"),
        ("other/key?key=k", 404, "other"),
    ],
)
async def test_wrong_parameters_are_refused_by_name(path: str, status: int, text: str) -> None:
    async with scene() as (_, client, admin):
        await client.subscribe("t", "s", subType=SHARED)
        found = await admin.get(f"public/default/t/subscription/{path}")
        assert found.status_code == status, found.text
        assert text in found.json()["reason"]
