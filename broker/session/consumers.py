"""SUBSCRIBE and the requests of an open consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.errors import NotAllowed
from magnetar.broker.log.topic_deletion import client_key
from magnetar.broker.session import reply, request, schemas
from magnetar.broker.session.events import SessionConsumerEvents
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from magnetar.broker.session.context import Context


async def subscribe(context: Context, body: pb.CommandSubscribe) -> bytes:
    name, wanted = request.subscribe(body, context.client)
    schema = await schemas.presented(context, body)
    returns = context.returns_to_deleted("consumer", body.consumer_id, name)
    topic = await context.broker.topic(
        name,
        create=body.force_topic_creation and not returns,
        client=client_key("consumer", wanted.subscription, wanted.consumer_name),
    )
    if schema is not None:
        await schemas.admit_consumer(context, topic, schema)
    events = SessionConsumerEvents(context, body.consumer_id, name)
    handle = await topic.subscribe(wanted, events)
    if not context.add_consumer(body.consumer_id, handle):
        return reply.error(
            body.request_id, pb.ServiceNotReady, "the consumer was closed while it was opening"
        )
    events.handle = handle
    return reply.success(body.request_id) + events.take_active()


async def close_consumer(context: Context, body: pb.CommandCloseConsumer) -> bytes:
    """Close the consumer. The answer is an error if its acknowledgements may not be durable. The
    consumer is closed in any case."""
    handle = context.consumers.get(body.consumer_id)
    try:
        if handle is not None:
            await handle.close()
    finally:
        context.remove_consumer(body.consumer_id, handle)
    return reply.success(body.request_id)


async def drain_consumer(context: Context, body: pb.CommandDrainConsumer) -> bytes:
    """Deliver no more to the consumer. The answer comes when the consumer has acknowledged its
    pending messages. After the time limit of a request, the answer is an error, and the client asks
    again."""
    await context.consumer(body.consumer_id).drain()
    return reply.success(body.request_id)


async def unsubscribe(context: Context, body: pb.CommandUnsubscribe) -> bytes:
    handle = context.consumer(body.consumer_id)
    await handle.unsubscribe(force=body.force)
    context.remove_consumer(body.consumer_id, handle)
    return reply.success(body.request_id)


async def seek(context: Context, body: pb.CommandSeek) -> bytes:
    handle = context.consumer(body.consumer_id)
    if body.HasField("message_publish_time"):
        await handle.seek_to_time(body.message_publish_time)
    elif body.HasField("message_id"):
        item = body.message_id
        await handle.seek(
            request.position(item), batch_index=item.batch_index, ack_set=tuple(item.ack_set)
        )
    else:
        raise NotAllowed("seek", "it names neither a message id nor a publish time")
    return reply.success(body.request_id)


async def last_message_id(context: Context, body: pb.CommandGetLastMessageId) -> bytes:
    last = await context.consumer(body.consumer_id).last_message_id()
    ledger, entry = last.position
    message_id = reply.message_id(ledger, entry, last.batch_index, partition=last.partition)
    return reply.last_message_id(body.request_id, message_id, last.mark_delete)


async def consumer_stats(context: Context, body: pb.CommandConsumerStats) -> bytes:
    handle = context.consumer(body.consumer_id)
    backlog = await handle.subscription.backlog_entries()
    return reply.consumer_stats(body.request_id, handle.stats(), backlog)
