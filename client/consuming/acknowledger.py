"""Sends a consumer's acknowledgements and handles the answers: the shell around acks.py."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from magnetar.client.consuming.acks import PENDING_IDS_MAX
from magnetar.client.errors import PulsarException, is_retriable
from magnetar.client.guard import guarding
from magnetar.client.ids import write_id
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from google.protobuf.message import Message as Body

    from magnetar.client.consuming.acks import AckGroup, AckTracker
    from magnetar.client.guard import Guarded
    from magnetar.client.ids import Key
    from magnetar.client.session.connection import Connection

log = get_logger(__name__)

Part = tuple["Key", int, int, int]
"""Consecutive messages of one entry: the entry's key, the index of the first message, the size of
the batch, and the number of messages. The index is -1 for an entry that is not a batch."""


class Acknowledger:
    """Sends groups of acknowledgements.

    Every group carries a request id, so that the broker answers when the group is durable.
    """

    def __init__(
        self, owner: Guarded, tracker: AckTracker, on_caught_up: Callable[[], None]
    ) -> None:
        """`owner`: the consumer whose messages are acknowledged. `on_caught_up` is called when the
        consumer may request messages again."""
        self._owner = owner
        self._on_caught_up = on_caught_up
        self._warned = False  # the log has warned of too many acknowledgements
        self._topic = owner.topic
        self._tracker = tracker
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None  # None: not attached
        self._consumer_id = 0
        self._settled: asyncio.Future[None] | None = None  # None: settle() is not waiting
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: PulsarException | None = None  # None: the broker has refused no group
        # A seek is in progress. If the seek succeeds, the client drops the pending
        # acknowledgements: sent after the seek, they would acknowledge redelivered messages.
        self._held = False

    def acknowledge(self, parts: Iterable[Part]) -> list[Key]:
        """Acknowledge messages of several entries. Returns the entries that are wholly acknowledged
        now."""
        now, acknowledge = self._loop.time(), self._tracker.acknowledge
        done = [
            key
            for key, first, batch_size, count in parts
            if acknowledge(key, first, batch_size, now, count)
        ]
        self._after_ack()
        return done

    def acknowledge_entries(self, keys: Iterable[Key]) -> None:
        """Acknowledge whole entries."""
        self.acknowledge((key, -1, 0, 1) for key in keys)

    def acknowledge_cumulative(self, key: Key, batch_index: int, batch_size: int) -> None:
        """Acknowledge a message and all messages before it."""
        now, was_behind = self._loop.time(), self._tracker.is_behind
        self._tracker.acknowledge_cumulative(key, batch_index, batch_size, now)
        self._maybe_caught_up(was_behind)
        self._after_ack()

    def send(self) -> None:
        """Send the pending acknowledgements now, without waiting for more."""
        self._send(hurry=True)

    @property
    def is_behind(self) -> bool:
        """Return whether so many acknowledgements are pending that the consumer must not request
        more messages."""
        return self._tracker.is_behind

    @property
    def is_settled(self) -> bool:
        """Return whether all acknowledgements are durable or were refused."""
        return self._tracker.settled

    async def settle(self) -> None:
        """Return when all acknowledgements are durable; a change of broker does not end the wait.

        Raises the broker's error if the broker refused acknowledgements permanently. The refused
        acknowledgements are not durable.
        """
        self._send(hurry=True)
        while not self._tracker.settled:
            self._settled = self._loop.create_future()
            await self._settled
        if self._refusal is not None:
            raise self._refusal

    def on_attached(self, connection: Connection, consumer_id: int) -> None:
        self._connection, self._consumer_id = connection, consumer_id
        self._send(hurry=True)
        self._arm()

    def on_detached(self) -> None:
        self._connection = None
        self._tracker.on_disconnected(self._loop.time())

    def on_seek(self) -> None:
        """Prepare for a seek. Send the pending acknowledgements up to the limit in flight.

        The rest, and acknowledgements given during the seek, wait for the outcome of the seek.
        """
        self._send(hurry=True)
        self._held = True

    def on_seek_end(self, *, moved: bool) -> None:
        """Send the waiting acknowledgements, or drop them if the seek `moved` the subscription."""
        self._held = False
        if moved:
            self._void()
        self._go_on()

    def on_unsubscribed(self) -> None:
        """Drop all acknowledgements, because the client no longer uses the subscription. `settle`
        returns."""
        self._void()
        self._go_on()

    def close(self, error: PulsarException) -> None:
        """End. Acknowledgements that are not durable yet may be lost."""
        self._connection = None
        if self._settled is not None and not self._settled.done():
            self._settled.set_exception(error)
        if self._timer is not None:
            self._timer.cancel()

    def _void(self) -> None:
        was_behind = self._tracker.is_behind
        self._tracker.on_seek()
        self._refusal = None
        self._maybe_caught_up(was_behind)

    def _after_ack(self) -> None:
        if self._tracker.is_full:
            self._send()
            self._warn_if_behind()
        if self._timer is None:
            self._arm()

    def _send(self, *, hurry: bool = False) -> None:
        if self._connection is None or self._held:
            return
        was_behind = self._tracker.is_behind
        for group in self._tracker.take(self._loop.time(), hurry=hurry):
            self._connection.ask(self._command(group), partial(self._on_answer, group.number))
        self._maybe_caught_up(was_behind)

    def _maybe_caught_up(self, was_behind: bool) -> None:
        """Let the consumer request messages again if the acknowledgements are behind no more."""
        if was_behind and not self._tracker.is_behind:
            self._warned = False
            self._on_caught_up()

    def _warn_if_behind(self) -> None:
        if self._tracker.is_behind and not self._warned:
            self._warned = True
            log.warning(
                "no more messages are requested: the broker does not confirm acknowledgements",
                topic=self._topic,
                pending=PENDING_IDS_MAX,
            )

    def _on_answer(self, number: int, result: Body | PulsarException) -> None:
        if self._connection is None or not self._tracker.is_in_flight(number):
            return  # detached meanwhile (the tracker gives the group again), or dropped by `_void`
        if not isinstance(result, PulsarException):
            self._tracker.on_answered(number)
        elif is_retriable(result):
            self._tracker.on_failed(number, self._loop.time())
        else:
            log.error("the broker refused acknowledgements", topic=self._topic, error=str(result))
            self._refusal = result
            self._tracker.on_answered(number)
        self._go_on()

    def _go_on(self) -> None:
        """Wake `settle` so that it checks again, and send what is due."""
        if self._settled is not None and not self._settled.done():
            self._send(hurry=True)
            self._settled.set_result(None)
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        """Schedule `_on_timer` for the next group."""
        send_at = self._tracker.timer_at()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if send_at is not None and self._connection is not None and not self._held:
            self._timer = self._loop.call_at(send_at, guarding(self._owner, self._on_timer))

    def _on_timer(self) -> None:
        self._timer = None
        self._send()
        self._arm()

    def _command(self, group: AckGroup) -> pb.CommandAck:
        kind = pb.CommandAck.Cumulative if group.is_cumulative else pb.CommandAck.Individual
        command = pb.CommandAck(consumer_id=self._consumer_id, ack_type=kind)
        add = command.message_id.add
        for key, unacked in group.ids.items():
            write_id(add(), key, unacked)
        return command
