"""Plans reads of many topics for Spark's driver, and protects their messages from trimming.

Each topic of a request gets an answer of its own: another owner, an error or a plan. A broker
answers for the topics that it owns. `FindTopics` reads metadata only, so every broker answers it. A
plan opens a topic only if the topic's last ledger must be recovered (log/closed.py), or if the
request asks for the copies of the topic's ledgers.

A hold is a durable subscription that `HoldTopics` moves, by cumulative acknowledgements. The newest
query that uses a subscription fences the older ones. The owner knows the newest query in memory
only. After a takeover, the first query that asks counts as the newest until a newer one asks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from magnetar.broker.calls import call_each
from magnetar.broker.catalog.listing import NAMES_PER_TURN
from magnetar.broker.errors import NotAllowed, QueryFenced, ReservedName, TopicNotFound
from magnetar.broker.log.position import Position
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.broker.session import ranges
from magnetar.broker.session.ledger_places import LedgerPlaces
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.names import Domain, NamespaceName, TopicName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.broker import Broker
    from magnetar.broker.log.chain import Chain

TOPICS_MAX: Final = 1_000  # the topics of one request
NAMESPACES_MAX: Final = 100  # the namespaces of one request
FOUND_MAX: Final = 100_000  # the topics of one answer: their names fit into a frame
COPIES_MAX: Final = 1_000  # the ledgers of one request: each costs a read of its metadata
CONCURRENT_MAX: Final = 32  # the topics of one request that are opened at the same time
# The holds whose query a broker remembers. Beyond it the least recently used hold is forgotten.
HOLDS_MAX: Final = 10_000
NAME_CHARACTERS_MAX: Final = 256  # the characters of the name of a subscription or a query
# The time that the clock of a query may be ahead of the broker's clock. Without a limit, a query
# with a wrong clock would fence all later queries.
CLOCK_SKEW_MS_MAX: Final = 60_000


class TopicRanges:
    """The calls of Spark's driver about topics."""

    def __init__(self) -> None:
        # (topic, subscription) -> (start in ms, id) of the newest query
        self._queries: OrderedDict[tuple[TopicName, str], tuple[int, str]] = OrderedDict()

    async def find(self, broker: Broker, asked: pb.FindTopicsRequest) -> pb.FindTopicsReply:
        """See FindTopics in broker.proto. Raises InvalidTopicName, InvalidNamespaceName,
        NotAllowed, and the errors of reading the metadata."""
        require_few("topics", len(asked.topics), TOPICS_MAX)
        require_few("namespaces", len(asked.namespaces), NAMESPACES_MAX)
        reply = pb.FindTopicsReply()
        for text in asked.topics:
            name = stored_name(text)
            try:
                count = await broker.partitions_of(name, create=False)
            except (TopicNotFound, ReservedName):  # no such topic or partition
                reply.missing.append(text)
                continue
            require_few("topics in the answer", len(reply.topics) + count, FOUND_MAX)
            parts = [name.with_partition(index) for index in range(count)] or [name]
            reply.topics.extend(map(str, parts))
            await asyncio.sleep(0)  # a topic may have thousands of partitions
        for text in asked.namespaces:
            found = await broker.topics_of(NamespaceName.parse(text))
            require_few("topics in the answer", len(reply.topics) + len(found), FOUND_MAX)
            for first in range(0, len(found), NAMES_PER_TURN):
                reply.topics.extend(map(str, found[first : first + NAMES_PER_TURN]))
                await asyncio.sleep(0)
        return reply

    async def plan(self, broker: Broker, asked: pb.PlanTopicsRequest) -> pb.PlanTopicsReply:
        """See PlanTopics in broker.proto. Raises NotAllowed if there are too many topics or
        ledgers."""
        copies = LedgerPlaces(broker)

        async def one(topic: pb.TopicAsk) -> pb.TopicPlan:
            try:
                return await self._plan_one(broker, topic, copies)
            except OPERATING_ERRORS as error:
                return pb.TopicPlan(error=text_of(error))

        require_few("topics", len(asked.topics), TOPICS_MAX)
        require_few("ledgers", sum(len(it.copies_of) for it in asked.topics), COPIES_MAX)
        topics = await call_each(asked.topics, one, at_once=CONCURRENT_MAX)
        return pb.PlanTopicsReply(topics=topics, bookies=copies.bookies)

    async def _plan_one(
        self, broker: Broker, asked: pb.TopicAsk, copies: LedgerPlaces
    ) -> pb.TopicPlan:
        name = stored_name(asked.topic)
        if owner := await other_owner(broker, name):
            return pb.TopicPlan(owner_url=owner)
        if not asked.copies_of and (chain := await broker.closed_chain(name)) is not None:
            return plan_of(chain, ranges.of_chain(chain, asked.from_ledger))
        try:
            log = (await broker.stored_topic(name, create=False)).log
        except TopicNotFound:
            return pb.TopicPlan(exists=False)
        plan = plan_of(log.chain, ranges.of_log(log, asked.from_ledger))
        for ledger in asked.copies_of:
            if (found := await copies.of(log, ledger)) is not None:
                plan.copies.append(found)
        return plan

    async def find_entry(self, broker: Broker, asked: pb.FindEntryRequest) -> pb.FindEntryReply:
        """See FindEntry in broker.proto. Raises NotOwner, NotAllowed, ReadFailed, and the errors of
        opening a topic."""
        name = stored_name(asked.topic)
        if owner := await other_owner(broker, name):
            return pb.FindEntryReply(owner_url=owner)
        try:
            log = (await broker.stored_topic(name, create=False)).log
        except TopicNotFound:
            return pb.FindEntryReply(exists=False)
        match asked.WhichOneof("target"):
            case "index":
                index = asked.index
                found = await log.search(lambda entry: entry.index >= index)
            case "publish_time_ms":
                time_ms = asked.publish_time_ms
                found = await log.search(lambda entry: entry.view.publish_time_ms >= time_ms)
            case "place":
                found = log.chain.ceiling(_position(asked.place))
            case _:
                raise NotAllowed("FindEntry", "the request names no target")
        before = await log.index_at(_before(log.chain, found))
        return pb.FindEntryReply(
            exists=True, ledger=found.ledger, entry=found.entry, first_index=before + 1
        )

    async def hold(self, broker: Broker, asked: pb.HoldTopicsRequest) -> pb.HoldTopicsReply:
        """See HoldTopics in broker.proto. Raises NotAllowed if a value of the request is too large,
        or the subscription has no name."""

        async def one(topic: pb.TopicPlace) -> pb.HeldTopic:
            try:
                return await self._hold_one(broker, asked, topic)
            except OPERATING_ERRORS as error:
                return pb.HeldTopic(error=text_of(error))

        require_few("topics", len(asked.topics), TOPICS_MAX)
        for what, text in (("subscription", asked.subscription), ("query", asked.query)):
            require_few(f"characters of the {what}", len(text), NAME_CHARACTERS_MAX)
        if not asked.subscription:
            raise NotAllowed("HoldTopics", "the subscription has no name")
        return pb.HoldTopicsReply(topics=await call_each(asked.topics, one, at_once=CONCURRENT_MAX))

    async def _hold_one(
        self, broker: Broker, asked: pb.HoldTopicsRequest, place: pb.TopicPlace
    ) -> pb.HeldTopic:
        name = stored_name(place.topic)
        if owner := await other_owner(broker, name):
            return pb.HeldTopic(owner_url=owner)
        topic = await broker.stored_topic(name, create=False)
        began_ms = min(asked.query_start_ms, broker.now_ms() + CLOCK_SKEW_MS_MAX)
        self._fence(name, asked.subscription, (began_ms, asked.query))
        start = _position(place.place)
        await topic.ensure_subscription(asked.subscription, start)
        subscription = topic.subscriptions[asked.subscription]
        subscription.note_use()
        through = _before(topic.log.chain, topic.log.chain.ceiling(start))
        if through > subscription.cursor.mark_delete:
            await subscription.skip_through(through)
        return pb.HeldTopic()

    def _fence(self, name: TopicName, subscription: str, query: tuple[int, str]) -> None:
        """Note the query of a hold. Raises QueryFenced if a newer query holds the subscription."""
        key = name, subscription
        newest = max(self._queries.get(key, query), query)
        if query != newest:
            raise QueryFenced(str(name), subscription, newest[1])
        self._queries[key] = query
        self._queries.move_to_end(key)
        if len(self._queries) > HOLDS_MAX:
            self._queries.popitem(last=False)


def plan_of(chain: Chain, parts: Sequence[ranges.LedgerRange]) -> pb.TopicPlan:
    """Return the plan of a topic that exists, with some of its ledgers."""
    return pb.TopicPlan(
        exists=True,
        ledgers=map(ledger_range, parts),
        first_index=chain.first_index,
        next_index=chain.next_index,
    )


def ledger_range(part: ranges.LedgerRange) -> pb.LedgerRange:
    """Convert a range to its protobuf message."""
    return pb.LedgerRange(
        ledger=part.ledger,
        first_entry=part.first,
        last_entry=part.last,
        first_index=part.first_index,
        bytes=part.bytes,
        sealed=part.sealed,
    )


async def other_owner(broker: Broker, name: TopicName) -> str:
    """Return the gRPC URL of the topic's owner; "": this broker owns the topic."""
    located = await broker.locate(name, authoritative=False)
    return "" if located.broker == broker.me else located.broker.grpc_url


def _before(chain: Chain, position: Position) -> Position:
    """Return the entry before `position`, which may be the place after the last entry."""
    return chain.confirmed if position == chain.end else chain.previous_position(position)


def _position(place: pb.EntryPlace) -> Position:
    if place.ledger < 0 or place.entry < 0:
        raise NotAllowed("position", f"{place.ledger}:{place.entry} is not an entry's place")
    return Position(place.ledger, place.entry)


def stored_name(text: str) -> TopicName:
    name = TopicName.parse(text)
    if name.domain is not Domain.PERSISTENT:
        raise NotAllowed(str(name), "the messages of a non-persistent topic are not stored")
    return name


def require_few(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise NotAllowed(what, f"there are {count}, more than {limit}")


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
