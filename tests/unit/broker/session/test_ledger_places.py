"""PlanTopics: the clients that get the addresses of the bookies of sealed ledgers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState

from magnetar.bookie.contract import read_key
from magnetar.broker.errors import NotAllowed
from magnetar.broker.session.access import AllowAll, Permission
from magnetar.broker.session.topic_ranges import TopicRanges
from magnetar.client.asyncio import Client
from magnetar.metadata.model import BookieAddress, BookieRegistration
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.names import TopicName
from magnetar.runtime.errors import CallFailed
from magnetar.runtime.grpc_frames import call_unary, open_channel

if TYPE_CHECKING:
    from fakes.broker import RunningBroker

    from magnetar.broker.session.access import Resource
    from magnetar.metadata.model import Member

pytestmark = pytest.mark.real_loop(deadline_s=60)

TOPIC = "persistent://public/default/t"
PLAN = "/magnetar.broker.Broker/PlanTopics"


def found(member: Member) -> BookieRegistration:
    address = BookieAddress(f"{member.bookie}:3181", "unused:1")
    return BookieRegistration(member.bookie, member.incarnation, 1, address, "", "", False)


class Asking:
    """A topic of two ledgers, of which the first is sealed. `plan` calls PlanTopics over gRPC, like
    a Spark driver."""

    def __init__(self, it: RunningBroker) -> None:
        self._it = it
        self._ledgers: list[int] = []

    async def fill(self) -> None:
        async with Client(self._it.grpc_url) as client:
            await client.subscribe(TOPIC, "keeps")
            producer = await client.create_producer(TOPIC)
            await producer.send(b"1")
            log = (await self._it.broker.stored_topic(TopicName.parse(TOPIC), create=False)).log
            await log.roll()
            await producer.send(b"2")
            self._ledgers = [record.ledger for record in log.chain.records]

    async def plan(self) -> pb.PlanTopicsReply:
        """Request the places of both ledgers and of a ledger that does not exist."""
        request = pb.PlanTopicsRequest()
        request.topics.add(topic=TOPIC, copies_of=[*self._ledgers, self._ledgers[-1] + 1])
        channel = open_channel(self._it.grpc_url.removeprefix("grpc://"))
        try:
            reply = await call_unary(channel, PLAN, request.SerializeToString())
        finally:
            await channel.close()
        return pb.PlanTopicsReply.FromString(reply)


async def test_a_sealed_ledger_comes_with_its_bookies_and_read_key() -> None:
    cluster = ClusterState()
    async with running_broker(cluster, find_bookie=found) as it:
        asking = Asking(it)
        await asking.fill()
        reply = await asking.plan()
    [plan] = reply.topics
    [copies] = plan.copies
    assert [ledger.sealed for ledger in plan.ledgers] == [True, False]
    assert copies.ledger == plan.ledgers[0].ledger
    metadata = cluster.ledgers.ledgers[copies.ledger].metadata
    assert copies.read_key == read_key(metadata.master_key, copies.ledger)
    assert (copies.last_entry, copies.length) == (metadata.last_entry, metadata.length)
    [segment] = copies.segments
    told = [(reply.bookies[it].bookie, reply.bookies[it].address) for it in segment.members]
    assert told == [(it.bookie, f"{it.bookie}:3181") for it in metadata.last_segment.members]


async def test_bookies_without_ports_are_not_named() -> None:
    async with running_broker(ClusterState()) as it:
        asking = Asking(it)
        await asking.fill()
        reply = await asking.plan()
    assert not reply.topics[0].copies
    assert not reply.bookies


class Tokens(AllowAll):
    """Permits all actions in sessions, and no consuming by other calls."""

    def __init__(self) -> None:
        self.consumes = True

    def allow(self, permission: Permission, resource: Resource) -> bool:
        return permission is not Permission.CONSUME or self.consumes


async def test_a_client_that_may_not_consume_gets_no_addresses() -> None:
    access = Tokens()
    async with running_broker(
        ClusterState(), find_bookie=found, make_authenticator=lambda: access
    ) as it:
        asking = Asking(it)
        await asking.fill()
        assert len((await asking.plan()).topics[0].copies) == 1
        access.consumes = False
        with pytest.raises(CallFailed, match="NotAuthorized"):
            await asking.plan()


async def test_a_request_for_too_many_ledgers_is_refused() -> None:
    async with running_broker(ClusterState()) as it:
        request = pb.PlanTopicsRequest()
        for number in range(2):
            request.topics.add(topic=f"{TOPIC}-{number}", copies_of=range(501))
        with pytest.raises(NotAllowed, match="there are 1002, more than 1000"):
            await TopicRanges().plan(it.broker, request)
