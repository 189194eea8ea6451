"""SENDs: from the reader's step to the producer, in runs.

This is the only way of a SEND: the machine admits the run, then its producer publishes it. A bad
entry costs its client an error in the order of its SENDs, not the connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.session.session import Close, Sends
from magnetar.protos.entry import parse_entry
from magnetar.protos.errors import EntryError
from magnetar.protos.sends import read_plain_sends
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.broker.session.context import Context
    from magnetar.protos import pulsar_pb2 as pb
    from magnetar.protos.sends import SendRun

log = get_logger(__name__)

read_run: Final = read_plain_sends
"""Reads the run of SENDs at a place of a frame, without parsing. None: there is none, and the
command at that place must be parsed."""


def publish_run(context: Context, run: SendRun, now: float) -> None:
    """A run of SENDs whose entries are checked."""
    producer_id = run.producer_id
    admitted = context.session.on_sends(producer_id, now)
    if admitted is Sends.PUBLISH:
        context.published.add(producer_id)
        context.producers[producer_id].publish_plain(run.sequence_ids, run.entries)
    elif type(admitted) is Close:
        context.end(admitted.reason)


def publish(context: Context, send: pb.CommandSend, entry: memoryview, now: float) -> None:
    """One SEND that was parsed; its entry is not checked yet."""
    producer_id = send.producer_id
    admitted = context.session.on_sends(producer_id, now)
    if admitted is Sends.PUBLISH:
        context.published.add(producer_id)
        handle = context.producers[producer_id]
        try:
            # The entry is copied, because a view of it would keep its whole frame in memory.
            view = parse_entry(bytes(entry))
        except EntryError as error:
            log.warning("entry refused", producer=handle.name, error=str(error))
            handle.refuse(send.sequence_id, error)
        else:
            handle.publish_nowait(send.sequence_id, send.highest_sequence_id, view)
    elif type(admitted) is Close:
        context.end(admitted.reason)
