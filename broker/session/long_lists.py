"""ACK and REDELIVER_UNACKNOWLEDGED_MESSAGES with very many message ids, in pieces.

An ACK in pieces is not atomic: when a piece is refused, the messages of the earlier pieces stay
acknowledged, and the ACK_RESPONSE carries the error of the refused piece. If no piece is refused,
the ACK_RESPONSE is sent when all pieces are durable.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from magnetar.broker.refusal import OPERATING_ERRORS, code_of
from magnetar.broker.session import deliveries, reply
from magnetar.broker.session.session import Carry
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.errors import MalformedCommand
from magnetar.protos.framing import COMMAND_BYTES_MAX
from magnetar.protos.pieces import pieces
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.broker.session.context import Context
    from magnetar.protos.framing import Command
    from magnetar.protos.pieces import LongList

log = get_logger(__name__)


def is_too_large(frame: memoryview) -> bool:
    """Return True if the command in a frame exceeds COMMAND_BYTES_MAX. Only a long list may do so.
    The size of the entry after the command does not count."""
    return len(frame) > COMMAND_BYTES_MAX and int.from_bytes(frame[:4], "big") > COMMAND_BYTES_MAX


def in_pieces(context: Context, command: LongList) -> Iterator[bool]:
    """Carry out a command with a long list in steps. Each call of `next` is a step, and carries out
    at most one piece. Raises MalformedCommand."""
    before: Command | None = None
    for piece in pieces(command):
        if piece is not None:
            if before is not None and not _carry_out(context, before, last=False):
                return
            before = piece
        yield True
    if before is not None:
        _carry_out(context, before, last=True)


def _carry_out(context: Context, command: Command, *, last: bool) -> bool:
    """Carry out one piece. Returns True if the next piece may follow."""
    actions = context.session.on_command(command, asyncio.get_running_loop().time())
    if not (len(actions) == 1 and isinstance(actions[0], Carry)):
        if actions:  # a Close: the client is not connected
            context.end("a list of message ids that is not admitted")
        return False
    body = command.body
    if isinstance(body, pb.CommandRedeliverUnacknowledgedMessages):
        deliveries.redeliver(context, body)
        return True
    if not isinstance(body, pb.CommandAck):
        raise MalformedCommand("unknown", "a list of another command")
    if body.ack_type == pb.CommandAck.Cumulative and not last:
        # `acknowledge` refuses a cumulative ACK with several ids. This ACK has several, but this
        # piece may have only one of them: add a second id.
        body.message_id.extend(body.message_id[:1])
    request_id = body.request_id if body.HasField("request_id") else None
    if not last:
        body.ClearField("request_id")
    try:
        deliveries.acknowledge(context, body)
    except OPERATING_ERRORS as error:
        log.warning("command refused", command="ACK", consumer=body.consumer_id, error=error)
        if request_id is not None:
            failure = code_of(error), str(error)
            context.put_control(reply.ack_response(body.consumer_id, request_id, failure))
        return False
    return True
