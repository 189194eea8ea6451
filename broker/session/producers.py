"""PRODUCER and CLOSE_PRODUCER."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.errors import NotAllowed
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.log.topic_deletion import client_key
from magnetar.broker.session import reply, request, schemas
from magnetar.broker.session.access import Permission
from magnetar.broker.session.events import SessionProducerEvents
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from magnetar.broker.session.context import Context


async def open_producer(context: Context, body: pb.CommandProducer) -> bytes:
    name, wanted = request.producer(body, context.client)
    schema = await schemas.presented(context, body)
    initial = body.initial_subscription_name
    if initial:
        context.require(Permission.CONSUME, name)
    topic = await context.broker.topic(
        name,
        create=not context.returns_to_deleted("producer", body.producer_id, name),
        client=client_key("producer", wanted.name),
        reconnects=wanted.epoch > 0,
    )
    if initial and initial not in topic.subscription_names:
        if not context.broker.policies.policies_of(name).auto_subscription_creation:
            why = "subscriptions are not created automatically here; create it first"
            raise NotAllowed(f"initial subscription {initial!r}", why)
        await topic.ensure_subscription(initial, EARLIEST, properties={})
    version = await schemas.admit_producer(context, topic, schema)
    events = SessionProducerEvents(context, body.producer_id, name, version)
    handle = await topic.add_producer(wanted, events)
    if not context.add_producer(body.producer_id, handle):
        return reply.error(
            body.request_id, pb.ServiceNotReady, "the producer was closed while it was opening"
        )
    return confirm_producer(context, body)


def confirm_producer(context: Context, body: pb.CommandProducer) -> bytes:
    """Return the answer to PRODUCER for a producer that is open or waits for exclusive access. A
    waiting producer gets a second answer when the wait is over. If its client has sent several
    PRODUCER requests, the second answer is for the latest one."""
    handle = context.producers[body.producer_id]
    ready = not handle.is_waiting
    events = handle.events
    assert isinstance(events, SessionProducerEvents)
    events.waiting_request = None if ready else body.request_id
    return reply.producer_success(
        body.request_id,
        handle.name,
        handle.last_sequence_id,
        handle.topic_epoch,
        ready=ready,
        schema_version=events.schema_version,
    )


async def close_producer(context: Context, body: pb.CommandCloseProducer) -> bytes:
    """Close the producer. Before that, wait for the answers to its earlier SENDs, for a limited
    time. If the topic has closed the producer meanwhile, the request succeeds, too."""
    handle = context.producers.get(body.producer_id)
    try:
        if handle is not None:
            await handle.close()
    finally:
        context.remove_producer(body.producer_id, handle)
    return reply.success(body.request_id)
