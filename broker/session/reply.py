"""The commands that a broker sends, as bytes. This module converts values to Pulsar's protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.broker.session.access import Credentials
    from magnetar.metadata.model import SchemaVersion
    from magnetar.protos.framing import Command

NO_REQUEST: Final = 2**64 - 1  # the request id of a command that answers no request
_U64: Final = 2**64 - 1

Type = pb.BaseCommand.Type


def connected(server_version: str, protocol_version: int, max_message_bytes: int) -> bytes:
    body = pb.CommandConnected(
        server_version=server_version,
        protocol_version=protocol_version,
        max_message_size=max_message_bytes,
        feature_flags=pb.FeatureFlags(
            supports_topic_watchers=True,
            supports_drain_consumer=True,
            supports_ordered_negative_acks=True,
            supports_get_partitioned_metadata_without_auto_creation=True,
        ),
    )
    return framing.encode_command(body)


def auth_challenge(server_version: str, protocol_version: int, challenge: Credentials) -> bytes:
    body = pb.CommandAuthChallenge(
        server_version=server_version,
        protocol_version=protocol_version,
        challenge=pb.AuthData(auth_method_name=challenge.method, auth_data=challenge.data),
    )
    return framing.encode_command(body)


def success(request_id: int) -> bytes:
    body = pb.CommandSuccess(request_id=request_id)
    return framing.encode_command(body)


def error(request_id: int, code: pb.ServerError.ValueType, message: str) -> bytes:
    body = pb.CommandError(request_id=request_id, error=code, message=message)
    return framing.encode_command(body)


def error_for(command: Command, code: pb.ServerError.ValueType, message: str) -> bytes:
    """Return the failure of `command`, in the type of answer that its client expects."""
    request_id: int = getattr(command.body, "request_id")  # noqa: B009
    match command.type:
        case Type.LOOKUP:
            return _lookup(
                pb.CommandLookupTopicResponse(
                    request_id=request_id,
                    response=pb.CommandLookupTopicResponse.Failed,
                    error=code,
                    message=message,
                )
            )
        case Type.PARTITIONED_METADATA:
            return partitions_failed(request_id, code, message)
        case Type.CONSUMER_STATS:
            answer = pb.CommandConsumerStatsResponse(
                request_id=request_id, error_code=code, error_message=message
            )
            return framing.encode_command(answer)
        case Type.GET_SCHEMA:
            schema = pb.CommandGetSchemaResponse(
                request_id=request_id, error_code=code, error_message=message
            )
            return framing.encode_command(schema)
        case Type.GET_OR_CREATE_SCHEMA:
            created = pb.CommandGetOrCreateSchemaResponse(
                request_id=request_id, error_code=code, error_message=message
            )
            return framing.encode_command(created)
    return error(request_id, code, message)


def partitions(request_id: int, count: int) -> bytes:
    body = pb.CommandPartitionedTopicMetadataResponse(
        request_id=request_id,
        partitions=count,
        response=pb.CommandPartitionedTopicMetadataResponse.Success,
    )
    return framing.encode_command(body)


def partitions_failed(request_id: int, code: pb.ServerError.ValueType, message: str) -> bytes:
    body = pb.CommandPartitionedTopicMetadataResponse(
        request_id=request_id,
        response=pb.CommandPartitionedTopicMetadataResponse.Failed,
        error=code,
        message=message,
    )
    return framing.encode_command(body)


def lookup(request_id: int, url: str, *, connect: bool, authoritative: bool) -> bytes:
    """Return the answer to a lookup. `connect` True: the broker at `url` serves the topic. False:
    the client must ask the broker at `url`."""
    kinds = pb.CommandLookupTopicResponse
    return _lookup(
        pb.CommandLookupTopicResponse(
            request_id=request_id,
            brokerServiceUrl=url,
            response=kinds.Connect if connect else kinds.Redirect,
            authoritative=authoritative,
        )
    )


def _lookup(body: pb.CommandLookupTopicResponse) -> bytes:
    return framing.encode_command(body)


def schema(request_id: int, stored: SchemaVersion) -> bytes:
    body = pb.CommandGetSchemaResponse(
        request_id=request_id,
        schema=pb.Schema(
            name=stored.name,
            schema_data=stored.data,
            type=pb.Schema.Type.ValueType(stored.type),
            properties=[
                pb.KeyValue(key=key, value=value) for key, value in stored.properties.items()
            ],
        ),
        schema_version=encoded_version(stored.version),
    )
    return framing.encode_command(body)


def encoded_version(version: int | None) -> bytes:
    """Return a schema version in the form that messages carry. b"" for None."""
    return b"" if version is None else version.to_bytes(8, signed=True)


def schema_version(request_id: int, version: bytes) -> bytes:
    """Return the answer to GET_OR_CREATE_SCHEMA. `version` b"": the messages are bytes, without a
    schema."""
    body = pb.CommandGetOrCreateSchemaResponse(request_id=request_id, schema_version=version)
    return framing.encode_command(body)


def producer_success(
    request_id: int,
    name: str,
    last_sequence_id: int,
    topic_epoch: int | None,
    *,
    ready: bool = True,
    schema_version: bytes = b"",
) -> bytes:
    body = pb.CommandProducerSuccess(
        request_id=request_id,
        producer_name=name,
        last_sequence_id=last_sequence_id,
        schema_version=schema_version,
        producer_ready=ready,
    )
    if topic_epoch is not None:
        body.topic_epoch = topic_epoch
    return framing.encode_command(body)


def send_error(
    producer_id: int, sequence_id: int, code: pb.ServerError.ValueType, message: str
) -> bytes:
    body = pb.CommandSendError(
        producer_id=producer_id, sequence_id=sequence_id, error=code, message=message
    )
    return framing.encode_command(body)


def close_producer(producer_id: int, assigned_url: str = "") -> bytes:
    body = pb.CommandCloseProducer(producer_id=producer_id, request_id=NO_REQUEST)
    if assigned_url:
        body.assignedBrokerServiceUrl = assigned_url
    return framing.encode_command(body)


def close_consumer(consumer_id: int, assigned_url: str = "") -> bytes:
    body = pb.CommandCloseConsumer(consumer_id=consumer_id, request_id=NO_REQUEST)
    if assigned_url:
        body.assignedBrokerServiceUrl = assigned_url
    return framing.encode_command(body)


def reached_end_of_topic(consumer_id: int) -> bytes:
    return framing.encode_command(pb.CommandReachedEndOfTopic(consumer_id=consumer_id))


def active_consumer_change(consumer_id: int, *, is_active: bool) -> bytes:
    body = pb.CommandActiveConsumerChange(consumer_id=consumer_id, is_active=is_active)
    return framing.encode_command(body)


def ack_response(
    consumer_id: int, request_id: int, failure: tuple[pb.ServerError.ValueType, str] | None
) -> bytes:
    body = pb.CommandAckResponse(consumer_id=consumer_id, request_id=request_id)
    if failure is not None:
        body.error, body.message = failure
    return framing.encode_command(body)


def message_id(
    ledger: int, entry: int, batch_index: int = -1, *, partition: int = -1
) -> pb.MessageIdData:
    """Return a message id. Ids are signed numbers that travel as unsigned ones: -1 as 2**64 - 1.
    `partition` -1: the topic is not a partition."""
    return pb.MessageIdData(
        ledgerId=ledger & _U64,
        entryId=entry & _U64,
        partition=partition,
        batch_index=batch_index,
    )


def last_message_id(request_id: int, last: pb.MessageIdData, mark_delete: tuple[int, int]) -> bytes:
    body = pb.CommandGetLastMessageIdResponse(
        request_id=request_id,
        last_message_id=last,
        consumer_mark_delete_position=message_id(*mark_delete),
    )
    return framing.encode_command(body)


def consumer_stats(request_id: int, stats: Mapping[str, Any], backlog_entries: int) -> bytes:
    """Return the answer to CONSUMER_STATS. `stats` has the names of Pulsar's ConsumerStats, which
    the command uses, too. The rate of expired messages is left out, because it belongs to the
    subscription."""
    body = pb.CommandConsumerStatsResponse(
        request_id=request_id,
        msgRateOut=stats["msgRateOut"],
        msgThroughputOut=stats["msgThroughputOut"],
        msgRateRedeliver=stats["msgRateRedeliver"],
        consumerName=stats["consumerName"],
        availablePermits=max(0, stats["availablePermits"]),
        unackedMessages=stats["unackedMessages"],
        blockedConsumerOnUnackedMsgs=stats["blockedConsumerOnUnackedMsgs"],
        address=stats["address"],
        connectedSince=stats["connectedSince"],
        type=stats["type"],
        msgBacklog=backlog_entries,
        messageAckRate=stats["messageAckRate"],
    )
    return framing.encode_command(body)


def topics_of_namespace(
    request_id: int, topics: Sequence[str], digest: str, *, filtered: bool, changed: bool
) -> bytes:
    body = pb.CommandGetTopicsOfNamespaceResponse(
        request_id=request_id,
        topics=topics,
        topics_hash=digest,
        filtered=filtered,
        changed=changed,
    )
    return framing.encode_command(body)


def watching(request_id: int, watcher_id: int, topics: Sequence[str], digest: str) -> bytes:
    body = pb.CommandWatchTopicListSuccess(
        request_id=request_id, watcher_id=watcher_id, topic=topics, topics_hash=digest
    )
    return framing.encode_command(body)


def topic_update(watcher_id: int, new: Sequence[str], deleted: Sequence[str], digest: str) -> bytes:
    body = pb.CommandWatchTopicUpdate(
        watcher_id=watcher_id, new_topics=new, deleted_topics=deleted, topics_hash=digest
    )
    return framing.encode_command(body)


PING: Final = framing.encode_command(pb.CommandPing())
PONG: Final = framing.encode_command(pb.CommandPong())
