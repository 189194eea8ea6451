"""SENDs: from the connection's reader task to the producer, in runs.

Every SEND takes this path: the session machine admits the run, then the producer publishes it. For
a bad entry the client gets an error, in the order of its SENDs, and the connection stays open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.session.session import Close, Sends
from magnetar.protos.sends import read_sends, run_of

if TYPE_CHECKING:
    from magnetar.broker.session.context import Context
    from magnetar.protos.framing import Command
    from magnetar.protos.sends import SendRun

read_run: Final = read_sends
"""Reads the run of SENDs at a place of a frame. None: there is no run, and the command at that
place must be parsed."""


def publish_run(context: Context, run: SendRun, now: float) -> None:
    """Publish a run of SENDs; the topic's stages check the entries."""
    producer_id = run.producer_id
    admitted = context.session.on_sends(producer_id, now)
    if admitted is Sends.PUBLISH:
        context.published.add(producer_id)
        context.broker.publish_rate.take(run, now)
        context.producers[producer_id].publish(run, now)
    elif type(admitted) is Close:
        context.end(admitted.reason)


def publish_parsed(context: Context, command: Command, now: float) -> None:
    """Publish one SEND in a form that `read_run` leaves to the parser."""
    publish_run(context, run_of(command), now)
