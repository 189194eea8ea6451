"""Entries that a consumer cannot decrypt: raised, discarded or delivered, and their permits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.client_world import EARLIEST, TOPIC, client_among, publish, subscription

from magnetar.client.errors import CryptoError
from magnetar.client.options import ConsumerCryptoFailureAction, ConsumerType
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    Sealed,
    SealedKey,
    encode_batch,
    encode_message,
)


def sealed(payload: bytes) -> Sealed:
    return Sealed([SealedKey("k", b"wrapped")], b"v" * 12, payload)


HEADER = EntryHeader("p", 1, seal=sealed)
ALONE = b"".join(encode_message(OutgoingMessage(b"secret", 1, {"a": "b"}), HEADER))
BATCH = b"".join(encode_batch([OutgoingMessage(b"%d" % n, n) for n in range(3)], HEADER))


async def test_a_failed_decryption_is_raised_and_redelivered_after_the_ack_timeout() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).append(ALONE)
        consumer = await client.subscribe(
            "t",
            "s",
            ConsumerType.Shared,
            initial_position=EARLIEST,
            unacked_messages_timeout_ms=10_000,
        )
        for _ in range(2):
            with pytest.raises(CryptoError, match=r"\(1,0\) cannot be decrypted"):
                await consumer.receive(15_000)
        assert consumer.get_stats().undecryptable == 2
        assert subscription(cluster).acks == []


async def test_a_failed_decryption_is_raised_although_later_messages_wait() -> None:
    """Without the error, a slow program would acknowledge the later messages cumulatively, and with
    them the entry that it never saw."""
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).append(ALONE)
        await publish(client, 3)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await asyncio.sleep(1)
        with pytest.raises(CryptoError):
            await consumer.receive(1000)
        assert [(await consumer.receive(1000)).data() for _ in range(3)] == [b"0", b"1", b"2"]


async def test_discarded_entries_are_acknowledged() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).append(BATCH)
        cluster.topic(TOPIC).append(ALONE)
        await publish(client, 1)
        consumer = await client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            crypto_failure_action=ConsumerCryptoFailureAction.DISCARD,
        )
        assert (await consumer.receive(1000)).data() == b"0"
        await asyncio.sleep(0.2)
        ids = [one.entryId for ack in subscription(cluster).acks for one in ack.message_id]
        assert sorted(ids) == [0, 1]


async def test_consumed_entries_are_delivered_whole() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).append(BATCH)
        cluster.topic(TOPIC).append(ALONE)
        consumer = await client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            crypto_failure_action=ConsumerCryptoFailureAction.CONSUME,
        )
        batch, alone = [await consumer.receive(1000) for _ in range(2)]
        assert (batch.message_id().batch_index(), alone.data()) == (-1, b"secret")
        assert alone.properties() == {"a": "b"}
        contexts: list[Any] = [batch.encryption_context(), alone.encryption_context()]
        assert [one.batch_size() for one in contexts] == [3, -1]
        assert all(one.is_decryption_failed() for one in contexts)
        assert "is_decryption_failed=True" in repr(contexts[0])
        await consumer.acknowledge(batch)
        await asyncio.sleep(0.2)
        assert set(subscription(cluster).unacked) == {(1, 1)}
        assert consumer.get_stats().undecryptable == 2


async def test_permits_of_undelivered_messages_are_granted_again() -> None:
    async with client_among() as (client, cluster):
        for _ in range(5):
            cluster.topic(TOPIC).append(BATCH)
        await publish(client, 1)
        consumer = await client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            receiver_queue_size=2,
            crypto_failure_action=ConsumerCryptoFailureAction.DISCARD,
        )
        assert (await consumer.receive(1000)).data() == b"0"
