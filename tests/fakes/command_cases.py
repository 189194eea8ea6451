"""One case for every command of the protocol: what a client sends, and the answer that it must
get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fakes.entries import entry_of

from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from fakes.wire import WireClient
    from google.protobuf.message import Message

TOPIC = "persistent://public/default/t"
IGNORED = None  # the command has no answer
ENDED = "the connection ends"
Type = pb.BaseCommand.Type

BODIES = {
    field.number: getattr(pb, field.message_type.name)
    for field in pb.BaseCommand.DESCRIPTOR.fields
    if field.message_type is not None
}

# The client has producer 1 and consumer 1 of one message.
CASES: dict[int, tuple[Message, type[Message] | str | None]] = {
    Type.CONNECT: (pb.CommandConnect(client_version="again"), ENDED),
    Type.AUTH_RESPONSE: (pb.CommandAuthResponse(), IGNORED),
    Type.PING: (pb.CommandPing(), pb.CommandPong),
    Type.PONG: (pb.CommandPong(), IGNORED),
    Type.PARTITIONED_METADATA: (
        pb.CommandPartitionedTopicMetadata(topic=TOPIC, request_id=9),
        pb.CommandPartitionedTopicMetadataResponse,
    ),
    Type.LOOKUP: (
        pb.CommandLookupTopic(topic=TOPIC, request_id=9),
        pb.CommandLookupTopicResponse,
    ),
    Type.GET_TOPICS_OF_NAMESPACE: (
        pb.CommandGetTopicsOfNamespace(namespace="public/default", request_id=9),
        pb.CommandGetTopicsOfNamespaceResponse,
    ),
    Type.GET_SCHEMA: (pb.CommandGetSchema(topic=TOPIC, request_id=9), pb.CommandGetSchemaResponse),
    Type.GET_OR_CREATE_SCHEMA: (
        pb.CommandGetOrCreateSchema(
            topic=TOPIC,
            request_id=9,
            schema=pb.Schema(name="s", schema_data=b"", type=pb.Schema.Bytes),
        ),
        pb.CommandGetOrCreateSchemaResponse,
    ),
    Type.WATCH_TOPIC_LIST: (
        pb.CommandWatchTopicList(
            namespace="public/default", topics_pattern=".*", watcher_id=4, request_id=9
        ),
        pb.CommandWatchTopicListSuccess,
    ),
    Type.WATCH_TOPIC_LIST_CLOSE: (
        pb.CommandWatchTopicListClose(watcher_id=4, request_id=9),
        pb.CommandSuccess,
    ),
    Type.PRODUCER: (
        pb.CommandProducer(topic=TOPIC, producer_id=2, request_id=9),
        pb.CommandProducerSuccess,
    ),
    Type.SEND: (pb.CommandSend(producer_id=1, sequence_id=7), pb.CommandSendReceipt),
    Type.CLOSE_PRODUCER: (
        pb.CommandCloseProducer(producer_id=1, request_id=9),
        pb.CommandSuccess,
    ),
    Type.SUBSCRIBE: (
        pb.CommandSubscribe(
            topic=TOPIC,
            subscription="other",
            subType=pb.CommandSubscribe.Shared,
            consumer_id=2,
            request_id=9,
        ),
        pb.CommandSuccess,
    ),
    Type.FLOW: (pb.CommandFlow(consumer_id=1, messagePermits=1), pb.CommandMessage),
    Type.ACK: (
        pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, request_id=9),
        pb.CommandAckResponse,
    ),
    Type.REDELIVER_UNACKNOWLEDGED_MESSAGES: (
        pb.CommandRedeliverUnacknowledgedMessages(consumer_id=1),
        IGNORED,
    ),
    Type.SEEK: (
        pb.CommandSeek(consumer_id=1, request_id=9, message_publish_time=0),
        pb.CommandCloseConsumer,
    ),
    Type.GET_LAST_MESSAGE_ID: (
        pb.CommandGetLastMessageId(consumer_id=1, request_id=9),
        pb.CommandGetLastMessageIdResponse,
    ),
    Type.CONSUMER_STATS: (
        pb.CommandConsumerStats(consumer_id=1, request_id=9),
        pb.CommandConsumerStatsResponse,
    ),
    Type.UNSUBSCRIBE: (pb.CommandUnsubscribe(consumer_id=1, request_id=9), pb.CommandSuccess),
    Type.DRAIN_CONSUMER: (
        pb.CommandDrainConsumer(consumer_id=1, request_id=9),
        pb.CommandSuccess,
    ),
    Type.NEGATIVE_ACK: (
        pb.CommandNegativeAck(consumer_id=1, request_id=9),
        pb.CommandError,
    ),
    Type.CLOSE_CONSUMER: (
        pb.CommandCloseConsumer(consumer_id=1, request_id=9),
        pb.CommandSuccess,
    ),
}

CODES: dict[int, int] = {
    Type.GET_SCHEMA: pb.TopicNotFound,
    Type.NEGATIVE_ACK: pb.NotAllowedError,
}
"""The error of the answer. A command without a row succeeds."""


def error_of(answer: Any) -> int:
    """The error code in an answer; 0: the answer has none."""
    return getattr(answer, "error_code", 0) or getattr(answer, "error", 0)


def text_of(answer: Any) -> str:
    """The error's text in an answer."""
    return getattr(answer, "error_message", "") or answer.message


async def prepare(client: WireClient) -> None:
    await client.produce(TOPIC)
    await client.publish("a")
    await client.expect(pb.CommandSendReceipt)
    await client.subscribe(TOPIC)


def encoded(body: Message) -> bytes:
    if isinstance(body, pb.CommandSend | pb.CommandMessage):
        return b"".join(framing.encode_payload_command(body, [bytes(entry_of("x").data)]))
    return framing.encode_command(body)


def example(kind: int) -> Message:
    """A body with every required field."""
    body: Message = filled(BODIES[kind]())
    return body


def filled(body: Any) -> Any:
    for field in body.DESCRIPTOR.fields:
        if not field.is_required:
            continue
        if field.message_type is not None:
            filled(getattr(body, field.name)).SetInParent()
        elif field.cpp_type == field.CPPTYPE_STRING:
            text = field.type == field.TYPE_STRING
            setattr(body, field.name, "x" if text else b"x")
        elif field.enum_type is not None:
            setattr(body, field.name, field.enum_type.values[0].number)
        else:
            setattr(body, field.name, 9)
    return body
