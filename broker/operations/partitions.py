"""Administration of partitioned topics.

The partitions of a topic have different owners. The broker that receives a request sends a request
to the owner of each partition, through the `Ask` that the caller passes in.
"""

from __future__ import annotations

import asyncio
import json
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Protocol

from magnetar.broker.calls import call_each
from magnetar.broker.log.record_limits import require_properties_fit
from magnetar.broker.operations.errors import PartitionBusy, PartitionFailed
from magnetar.broker.operations.model import (
    PartitionedMetadata,
    PartitionedStats,
    TerminatedAt,
)
from magnetar.broker.operations.namespaces import namespace_record
from magnetar.broker.operations.statistics import modelled
from magnetar.protos.names import Domain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.broker.broker import Broker
    from magnetar.protos.names import NamespaceName, TopicName

ASKED_MAX: Final = 16
"""The number of partitions that are asked at the same time."""


class Ask(Protocol):
    """Send a request to the owner of a topic, for example ("GET", name, "/stats"). Returns the HTTP
    status and the answer. Raises operating errors."""

    async def __call__(self, method: str, name: TopicName, rest: str) -> tuple[int, Any]: ...


async def create_partitioned_topic(
    broker: Broker, name: TopicName, partitions: int, properties: Mapping[str, str] | None = None
) -> None:
    """Create a partitioned topic. Raises InvalidPartitionCount, ReservedName, TopicExists,
    TopicFull."""
    require_properties_fit(name, properties or {}, before={})
    await broker.create_partitioned_topic(name, partitions, properties or {})


async def update_partitioned_topic(broker: Broker, name: TopicName, partitions: int) -> None:
    """Add partitions. Raises InvalidPartitionCount (the number never shrinks), TopicNotFound."""
    await broker.catalog.partitioned.grow(name, partitions)


async def partitioned_metadata(
    broker: Broker, name: TopicName, *, create: bool = False
) -> PartitionedMetadata:
    """Return the number of partitions and the properties. With `create`, create a topic that does
    not exist, if the policies create topics with partitions. Raises TopicNotFound."""
    count = await broker.partitions_of(name, create=create)
    record = await broker.catalog.partitioned.find(name) if count else None
    return PartitionedMetadata(
        partitions=count, properties={} if record is None else dict(record.properties)
    )


async def list_partitioned_topics(
    broker: Broker, namespace: NamespaceName, domain: Domain
) -> list[str]:
    """Return the full names, sorted, without -partition-<n>. Raises NamespaceNotFound."""
    await namespace_record(broker, namespace)
    names = await broker.catalog.partitioned.names(namespace, domain)
    return [str(name) for name in names]


async def delete_partitioned_topic(
    broker: Broker, name: TopicName, ask: Ask, *, force: bool
) -> None:
    """Delete all partitions, then the topic. The topic cannot be used once the deletion has begun;
    after a failure, the same request continues the deletion. Without `force`, a partition that is
    in use is not deleted; if it is in use at the start, the deletion does not begin.

    Raises TopicNotFound, PartitionBusy, PartitionFailed.
    """
    partitioned = broker.catalog.partitioned
    record = await partitioned.find_fresh(name)
    if record is not None and not record.deleting and not force:
        names = [name.with_partition(index) for index in range(record.partitions)]
        await _require_unused(await broker.perhaps_open(names), ask)
    left = await partitioned.begin_deletion(name)
    if record is not None and name.domain is Domain.NON_PERSISTENT:
        # A non-persistent partition has no data: only open partitions must be closed.
        names = [name.with_partition(index) for index in range(record.partitions)]
        left = await broker.perhaps_open(names)
    else:
        left = await partitioned.delete_untouched(left)
    query = "?force=true" if force else ""
    for start in range(0, len(left), ASKED_MAX):
        record = await partitioned.find_fresh(name)
        if record is None or not record.deleting:
            return  # another request has finished the deletion: `left` may belong to a new topic
        for answer in await _ask_all(left[start : start + ASKED_MAX], "DELETE", query, ask):
            _require(*answer, allowed=(200, 204, 404))
    await partitioned.end_deletion(name)


async def partitioned_stats(
    broker: Broker, name: TopicName, ask: Ask, *, per_partition: bool
) -> PartitionedStats:
    """Return the sums of the statistics of all partitions. Raises TopicNotFound,
    PartitionFailed."""
    record = await broker.catalog.partitioned.require(name)
    names = [name.with_partition(index) for index in range(record.partitions)]
    parts: dict[str, dict[str, Any]] = {}
    for partition, status, found in await _ask_all(names, "GET", "/stats", ask):
        _require(partition, status, found, allowed=(200, 404))
        if status == 200:
            parts[str(partition)] = found
    metadata = PartitionedMetadata(partitions=record.partitions, properties=dict(record.properties))
    return await asyncio.to_thread(_sums, metadata, parts, per_partition)


def _sums(
    metadata: PartitionedMetadata, parts: Mapping[str, Mapping[str, Any]], per_partition: bool
) -> PartitionedStats:
    total = modelled(merged(list(parts.values())) if parts else _NOTHING)
    shown = {partition: modelled(found) for partition, found in parts.items()}
    return PartitionedStats.model_validate(
        {**dict(total), "metadata": metadata, "partitions": shown if per_partition else {}}
    )


async def terminate_partitioned_topic(
    broker: Broker, name: TopicName, ask: Ask
) -> dict[int, TerminatedAt]:
    """Terminate all partitions: they accept no more messages. Returns the last message of each
    partition, keyed by number. After a failure, repeat the request to finish the termination.
    Raises TopicNotFound, PartitionFailed."""
    record = await broker.catalog.partitioned.require(name)
    names = [name.with_partition(index) for index in range(record.partitions)]
    answers = await _ask_all(names, "POST", "/terminate", ask)
    absent = [partition for partition, status, _ in answers if status == 404]
    if absent:  # create them and terminate them: their first use would create open topics
        for created in await _ask_all(absent, "PUT", "", ask):
            _require(*created, allowed=(204, 409))
        again = {answer[0]: answer for answer in await _ask_all(absent, "POST", "/terminate", ask)}
        answers = [again.get(answer[0], answer) for answer in answers]
    last: dict[int, TerminatedAt] = {}
    for index, answer in enumerate(answers):
        _require(*answer, allowed=(200,))
        last[index] = TerminatedAt.model_validate(answer[2])
    return last


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge statistics of the same form. Numbers are added, except those of `_EQUAL`: the result is
    the first. For a time or an age, the result is the largest value (`_MOST`) or the earliest
    (`_EARLIEST`). A boolean is true if one of the values is true. Maps and named lists are merged
    by name, other lists are united. For other values, the result is the first value that is not
    empty. `averageMsgSize` is the average over all parts. The name of the subscription with the
    oldest backlog comes from the part with the oldest backlog."""
    values: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            values.setdefault(key, []).append(value)
    total = {key: _merged_value(key, found) for key, found in values.items()}
    if "averageMsgSize" in total:
        total["averageMsgSize"] = _average_size(total, values["averageMsgSize"])
    if "oldestBacklogMessageSubscriptionName" in total:
        oldest = max(parts, key=lambda part: part["oldestBacklogMessageAgeSeconds"])
        name = oldest["oldestBacklogMessageSubscriptionName"]
        total["oldestBacklogMessageSubscriptionName"] = name
    return total


def united(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Unite properties. If the values of a key differ, the first part decides."""
    return dict(chain.from_iterable(each.items() for each in reversed(parts)))


def _average_size(total: Mapping[str, Any], averages: Sequence[float]) -> float:
    if "msgInCounter" in total:
        messages = total["msgInCounter"]
        return total["bytesInCounter"] / messages if messages else 0.0
    # A producer has no counters. As in Pulsar, its partitions have equal weights. Unlike in Pulsar,
    # partitions that it has not published to do not count.
    found = [average for average in averages if average]
    return fmean(found) if found else 0.0


def _merged_value(key: str, values: Sequence[Any]) -> Any:
    found = [value for value in values if value not in (None, "None", "")]
    if not found:
        return values[-1]
    if any(isinstance(value, bool) for value in found):
        return any(found)
    if key in _MOST:
        return max(found)
    if key in _EARLIEST:
        return min(filter(None, found), default=0)  # 0: never
    if all(isinstance(value, int | float) for value in found):
        return found[0] if key in _EQUAL else sum(found)
    if key in _BY_NAME:
        return _merged_by_name(found)
    if key in _PROPERTIES:
        return united(found)
    if all(isinstance(value, dict) for value in found):
        return merged(found)
    if all(isinstance(value, list) for value in found):
        return _merged_list(key, list(chain.from_iterable(found)))
    return found[0]


_EQUAL: Final = frozenset({"producerId", "priorityLevel", "avgMessagesPerEntry", "epoch", "hash"})
_MOST: Final = frozenset(
    {
        "lastAckedTime",
        "lastAckedTimestamp",
        "lastConsumedFlowTimestamp",
        "lastConsumedTime",
        "lastConsumedTimestamp",
        "lastExpireTimestamp",
        "lastMarkDeleteAdvancedTimestamp",
        "oldestBacklogMessageAgeSeconds",
    }
)
_EARLIEST: Final = frozenset(
    {
        "earliestMsgPublishTimeInBacklog",
        "earliestMsgPublishTimeInBacklogs",
        "firstConsumedFlowTimestamp",
        "firstMessagesSentTimestamp",
    }
)
_NAMED: Final = {
    "publishers": "producerName",
    "consumers": "consumerName",
    "drainingHashes": "hash",
}


# Clients choose the keys of these maps: a key may be equal to the name of a statistic.
_BY_NAME: Final = frozenset({"subscriptions", "hiddenSubscriptions"})
_PROPERTIES: Final = frozenset({"metadata", "subscriptionProperties"})


def _merged_by_name(maps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    named: dict[str, list[Any]] = {}
    for found in maps:
        for name, value in found.items():
            named.setdefault(name, []).append(value)
    return {name: merged(same) for name, same in named.items()}


def _merged_list(key: str, items: list[Any]) -> list[Any]:
    by = _NAMED.get(key)
    if by is None:
        return list({json.dumps(item): item for item in items}.values())
    named: dict[str, list[Any]] = {}
    for item in items:
        named.setdefault(item[by], []).append(item)
    return [merged(same) for same in named.values()]


_NOTHING: Final[Mapping[str, Any]] = {
    "msgRateIn": 0.0,
    "msgThroughputIn": 0.0,
    "msgInCounter": 0,
    "bytesInCounter": 0,
    "msgRateOut": 0.0,
    "msgThroughputOut": 0.0,
    "msgOutCounter": 0,
    "bytesOutCounter": 0,
    "averageMsgSize": 0.0,
    "storageSize": 0,
    "msgCount": 0,
    "topicEpoch": None,
    "publishers": [],
    "subscriptions": {},
    "managedLedger": {},
}


async def _require_unused(names: Sequence[TopicName], ask: Ask) -> None:
    for partition, status, found in await _ask_all(names, "GET", "/stats", ask):
        _require(partition, status, found, allowed=(200, 404))
        if status == 200:
            subscriptions = [*found["subscriptions"].values()]
            subscriptions += found.get("hiddenSubscriptions", {}).values()
            users = len(found["publishers"])
            users += sum(len(each["consumers"]) for each in subscriptions)
            if users:
                raise PartitionBusy(str(partition), f"{users} producers and consumers use it")


async def _ask_all(
    names: Sequence[TopicName], method: str, rest: str, ask: Ask
) -> list[tuple[TopicName, int, Any]]:
    """Send a request about each partition, at most ASKED_MAX at a time. Returns the answers in the
    order of the names. Raises the errors of `ask`."""

    async def one(name: TopicName) -> tuple[TopicName, int, Any]:
        return name, *(await ask(method, name, rest))

    return await call_each(names, one, at_once=ASKED_MAX)


def _require(name: TopicName, status: int, found: Any, *, allowed: tuple[int, ...]) -> None:
    if status in allowed:
        return
    reason = found.get("reason", "") if isinstance(found, dict) else ""
    text = reason or f"HTTP status {status}"
    raise (
        PartitionBusy(str(name), text) if status in (409, 412) else PartitionFailed(str(name), text)
    )
