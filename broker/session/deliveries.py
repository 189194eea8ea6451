"""FLOW, ACK, NEGATIVE_ACK and REDELIVER_UNACKNOWLEDGED_MESSAGES: commands of a consumer.

The connection's reader task carries them out. This is a hot path: a client may send one ACK for
each message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.errors import NotAllowed
from magnetar.broker.refusal import OPERATING_ERRORS, code_of
from magnetar.broker.session import reply, request
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.session.context import Context

log = get_logger(__name__)


def flow(context: Context, body: pb.CommandFlow) -> None:
    context.consumers[body.consumer_id].flow(body.messagePermits)


def redeliver(context: Context, body: pb.CommandRedeliverUnacknowledgedMessages) -> None:
    epoch = body.consumer_epoch if body.HasField("consumer_epoch") else None
    positions = [request.position(item) for item in body.message_ids]
    context.consumers[body.consumer_id].redeliver(positions or None, epoch)


def negative_ack(context: Context, body: pb.CommandNegativeAck) -> None:
    """Carry out the command in the reader task, so that a later request to redeliver does not
    overtake it. The answer is queued after the deliveries so far: no message that follows the
    answer overtakes a negatively acknowledged message of its key."""
    positions = [request.position(item) for item in body.message_ids]
    returned = [request.position(item) for item in body.returned]
    try:
        context.consumers[body.consumer_id].negative_ack(positions, returned)
    except OPERATING_ERRORS as error:
        context.put(reply.error(body.request_id, code_of(error), str(error)))
    else:
        context.put(reply.success(body.request_id))


def acknowledge(context: Context, ack: pb.CommandAck) -> None:
    """Acknowledge messages. If the ACK has a request id, the client gets an ACK_RESPONSE when the
    acknowledgement is durable or has failed."""
    handle = context.consumers[ack.consumer_id]
    done = None
    if ack.HasField("request_id"):
        consumer_id, request_id = ack.consumer_id, ack.request_id

        def done(error: BrokerError | None) -> None:
            failure = None if error is None else (code_of(error), str(error))
            context.put_control(reply.ack_response(consumer_id, request_id, failure))

    if ack.HasField("validation_error"):
        kind = pb.CommandAck.ValidationError.Name(ack.validation_error)
        log.error("a consumer discarded an entry", consumer=handle.name, reason=kind)
    try:
        if ack.HasField("txnid_least_bits") or ack.HasField("txnid_most_bits"):
            raise NotAllowed("acknowledging in a transaction", "transactions are not supported")
        if ack.ack_type == pb.CommandAck.Cumulative:
            if len(ack.message_id) != 1:
                why = f"it must name one message id, not {len(ack.message_id)}"
                raise NotAllowed("cumulative acknowledgement", why)
            [item] = ack.message_id
            handle.acknowledge_cumulative(request.position(item), tuple(item.ack_set), done)
            return
        whole = [request.position(item) for item in ack.message_id if not item.ack_set]
        partial = [
            (request.position(item), tuple(item.ack_set)) for item in ack.message_id if item.ack_set
        ]
        handle.acknowledge(whole, partial, done)
    except OPERATING_ERRORS as error:
        if done is None:
            raise
        context.put_control(
            reply.ack_response(ack.consumer_id, ack.request_id, (code_of(error), str(error)))
        )
