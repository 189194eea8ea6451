"""Keeps one producer or consumer attached to the broker that owns its topic.

After the first attachment the client attaches again after every loss: the owner dies, hands the
topic over, or restarts. Each time the client looks the owner up again, with growing delays, until
the producer or consumer is closed. The first attachment fails after an error that is not temporary,
or when the operation's time limit has passed. After the first attachment, only an error that ends
the producer, such as ProducerFenced, ends the attempts. If the first attachment takes longer than
WARN_AFTER_S, the client logs one warning, so that the user notices a wrong address at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.client.errors import (
    START_ADVICE,
    ConnectError,
    PulsarException,
    Timeout,
    is_retriable,
    without_frames,
)
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.client.session.backoff import ReconnectDelay
    from magnetar.client.session.connection import Connection
    from magnetar.client.session.lookup import Lookup
    from magnetar.client.session.pool import Pool, Purpose

WARN_AFTER_S: Final = 0.8
"""The time in seconds without an attachment before the client logs a warning. A broker in the same
region answers within 0.1 s, even while it opens a topic."""

log = get_logger(__name__)


class Attachable(Protocol):
    """The core of a producer or consumer."""

    topic: str

    async def attach(self, connection: Connection) -> None:
        """Register with the broker. Raises the broker's refusal; nothing is then registered."""

    def is_final(self, error: PulsarException) -> bool:
        """Return whether this error ends the core permanently after the first attachment."""

    def on_failed(self, error: PulsarException) -> None:
        """End the core: the attachment failed permanently."""


class Attachment:
    """The attachment of one producer or consumer. `run` makes and renews it, in its own task."""

    def __init__(
        self,
        what: Attachable,
        purpose: Purpose,
        *,
        lookup: Lookup,
        pool: Pool,
        delay: ReconnectDelay,
        timeout_s: float,
        silence_s: float,
    ) -> None:
        """`silence_s`: the time in seconds for the owner to open a session. After this time, the
        attachment asks another broker of the service URL, if there is one, about the owner."""
        self._what = what
        self._purpose = purpose
        self._lookup = lookup
        self._pool = pool
        self._delay = delay
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._lost: asyncio.Future[PulsarException]  # set when the current attachment is lost
        # The value of `Lookup.cluster` when the last broker named the next one, and the URL of this
        # next broker. None: look the owner up.
        self._next_broker: tuple[int, str] | None = None
        self._through: str | None = None  # the last lookup's proxy; None: no proxy
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = loop.create_future()
        self._first.add_done_callback(lambda first: first.cancelled() or first.exception())
        self._lost = loop.create_future()
        self._attached = asyncio.Event()  # also set after a failure or close
        self._failure: PulsarException | None = None  # None: neither failed nor closed
        # The broker has queued the first attachment, which then has no time limit.
        self._patient = False
        self._limit: asyncio.Timeout | None = None  # the limit of the attempt under way
        self.trouble: PulsarException | None = None  # the last failure, until the core clears it

    async def wait_first(self) -> None:
        """Return when the first attachment is made. Raises the reason if it fails."""
        await asyncio.shield(self._first)

    async def wait_attached(self) -> None:
        """Return when attached. Raises the error that ended the attachment permanently."""
        await self._attached.wait()
        if self._failure is not None:
            raise without_frames(self._failure)

    @property
    def is_attached(self) -> bool:
        return self._attached.is_set() and self._failure is None

    def lost(self, error: PulsarException, next_broker: str | None = None) -> None:
        """Note that the broker closed the producer or consumer, or that the connection broke.

        `next_broker`: the URL of the broker to use next; None: look the owner up.
        """
        if not self._lost.done():
            cluster = self._lookup.cluster
            self._next_broker = None if next_broker is None else (cluster, next_broker)
            self._lost.set_result(error)
            if self._failure is None:
                self._attached.clear()

    def wait_without_limit(self) -> None:
        """Remove the time limit: the broker has queued the request to attach."""
        self._patient = True
        if self._limit is not None and not self._limit.expired():  # it may have expired just now
            self._limit.reschedule(None)

    async def run(self) -> None:
        """Attach, and attach again after every loss. Ends after a final error."""
        loop = asyncio.get_running_loop()
        warning = loop.call_later(WARN_AFTER_S, self._warn)
        try:
            await self._attach_again(loop.time() + self._timeout_s)
        finally:
            warning.cancel()

    def _warn(self) -> None:
        """Log one warning with the brokers if the first attachment is not made or queued yet."""
        if not self._first.done() and not self._patient:
            self._lookup.warn_unreachable(self.trouble, self._timeout_s)

    async def _attach_again(self, give_up_at: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            error = await self._attempt(give_up_at)
            if error is None:
                self._delay.on_attached(loop.time())
                self._on_attached()
                error = await self._lost
            self.trouble = error
            if self._is_final(error):
                self._fail(error)
                return
            delay_s = self._delay.on_failed(loop.time())
            too_late = loop.time() + delay_s >= give_up_at
            if not self._first.done() and too_late and not self._patient:
                self._fail(out_of_time(error, self._timeout_s, self._what.topic))
                return
            log.info(
                "attaching again",
                topic=self._what.topic,
                reason=str(error) or type(error).__name__,
                in_s=round(delay_s, 3),
            )
            await asyncio.sleep(delay_s)

    def close(self, error: PulsarException) -> None:
        """Close: calls that wait for the attachment raise `error`. The caller cancels `run`."""
        self._failure = error
        if not self._first.done():
            self._first.set_exception(error)
        self._attached.set()

    async def _attempt(self, give_up_at: float) -> PulsarException | None:
        """Find the owner and attach. Returns the error, or None after success."""
        loop = asyncio.get_running_loop()
        self._lost = loop.create_future()
        has_deadline = not self._first.done() and not self._patient
        end_at = give_up_at if has_deadline else loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(end_at) as self._limit:
                await self._what.attach(await self._owner())
        except PulsarException as error:
            return error
        except TimeoutError:
            reason = f"the broker did not answer within {self._timeout_s:g} s"
            return Timeout(reason, topic=self._what.topic)
        finally:
            self._limit = None
        return None

    async def _owner(self) -> Connection:
        named, self._next_broker = self._next_broker, None
        if named is not None and named[0] == self._lookup.cluster:
            broker = named[1]
        else:
            broker, self._through = await self._lookup.owner(self._what.topic)
        while self._lookup.knows_others(broker):
            try:
                async with asyncio.timeout(self._silence_s):
                    return await self._pool.connection(broker, self._purpose, through=self._through)
            except TimeoutError:  # the owner may have been stopped after the lookup
                owner = await self._lookup.owner_besides(self._what.topic, broker)
                if owner is not None and owner != broker:
                    broker, self._through = owner, None
        return await self._pool.connection(broker, self._purpose, through=self._through)

    def _on_attached(self) -> None:
        if not self._lost.done():  # done: lost in the same turn of the loop
            self._attached.set()
        if not self._first.done():
            self._first.set_result(None)

    def _is_final(self, error: PulsarException) -> bool:
        if self._first.done():
            return self._what.is_final(error)
        if self._patient and isinstance(error, Timeout):
            return False  # the request was queued before: a silent broker is no reason to give up
        return not is_retriable(error)

    def _fail(self, error: PulsarException) -> None:
        self.close(error)
        self._what.on_failed(error)


def out_of_time(error: PulsarException, timeout_s: float, topic: str) -> PulsarException:
    """Return the error of a first attachment whose time limit passed.

    `error`: the error of the last attempt.
    """
    reason = f"gave up after {timeout_s:g} s; last: {error.reason or error}"
    if isinstance(error, ConnectError):
        return ConnectError(reason, topic=topic, advice=START_ADVICE)
    return Timeout(reason, topic=topic)
