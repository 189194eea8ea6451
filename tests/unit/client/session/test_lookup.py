"""The questions that a client asks the brokers of its service URL, which may answer with errors."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from fakes.client_world import EARLIEST, TOPIC, A, client_among, data, publish, receive

from magnetar.client.errors import NotAllowedError
from magnetar.client.options import ConsumerType
from magnetar.client.session.lookup import Lookup
from magnetar.protos import pulsar_pb2 as pb

MANY = 1000  # more questions than a client asks within its time limit


def cut_off() -> pb.CommandPartitionedTopicMetadataResponse:
    """The answer of a broker that cannot read the partitions now."""
    response = pb.CommandPartitionedTopicMetadataResponse
    return response(response=response.Failed, error=pb.ServiceNotReady, message="cut off")


async def test_partitions_are_asked_of_the_next_broker_after_a_temporary_error() -> None:
    async with client_among() as (client, cluster):
        cluster.brokers[A].script(
            pb.CommandPartitionedTopicMetadata, *[cut_off() for _ in range(MANY)]
        )
        await client.create_producer("t")
        assert len(cluster.brokers[A].commands(pb.CommandPartitionedTopicMetadata)) == 1


async def test_topics_are_asked_of_the_next_broker_after_a_temporary_error() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 3)
        answers = [pb.CommandError(error=pb.MetadataError, message="cut off") for _ in range(MANY)]
        cluster.brokers[A].script(pb.CommandGetTopicsOfNamespace, *answers)
        consumer = await client.subscribe(
            re.compile("persistent://public/default/t.*"), "s", initial_position=EARLIEST
        )
        assert data(await receive(consumer, 3)) == [0, 1, 2]


@pytest.mark.parametrize("is_partitioned", [False, True])
async def test_get_topic_partitions_asks_again_after_a_temporary_error(
    is_partitioned: bool,
) -> None:
    async with client_among(A, service_url=A) as (client, cluster):
        cluster.partitions[TOPIC] = 2 * is_partitioned
        cluster.brokers[A].script(pb.CommandPartitionedTopicMetadata, cut_off(), cut_off())
        assert len(await client.get_topic_partitions("t")) == 1 + is_partitioned


async def test_consumer_with_retries_asks_for_its_letter_topics_again_after_a_temporary_error() -> (
    None
):
    async with client_among(A, service_url=A) as (client, cluster):
        cluster.brokers[A].script(pb.CommandPartitionedTopicMetadata, cut_off(), cut_off())
        consumer = await client.subscribe("t", "s", ConsumerType.Shared, enable_retry=True)
        assert consumer.is_connected()


async def test_a_broker_that_refuses_the_session_is_not_asked_first_again() -> None:
    """It may be at its limit of connections, while the others have room."""
    asked: list[str] = []

    class RefusingPool:
        async def connection(self, broker: str, _: object) -> str:
            asked.append(broker)
            if len(asked) == 1:
                raise NotAllowedError("too many connections", broker=broker)
            return broker

    lookup = Lookup("grpc://a:1,b:1", cast("Any", RefusingPool()), timeout_s=30, silence_s=5)
    with pytest.raises(NotAllowedError):
        await lookup.any_broker()
    assert cast("Any", await lookup.any_broker()) == asked[1]
    assert asked[0] != asked[1]
