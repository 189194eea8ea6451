"""The loop of one connection: reads frames, feeds the session machine, carries out its actions.

Four tasks live as long as the connection: the reader (the task of `run`), the writer (it empties
the outbox), the keep-alive, and the task that offers room to subscriptions. Requests (LOOKUP,
PRODUCER, SUBSCRIBE, …) may wait, so each runs in its own task. The reader task itself handles SEND,
ACK and FLOW, in slices of a frame.

Back-pressure: the reader waits while a topic to which its client publishes has too many bytes in
flight to its bookies. The readers of all publishing connections wait while all topics together have
too many. While the outbox holds DELIVERY_BYTES_MAX or more, no subscription delivers to the
connection. When there is room again, the connection calls the subscriptions that it refused.

An unexpected exception in these tasks is a bug. The connection logs and counts the exception, and
ends. The broker continues.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from magnetar.broker.refusal import OPERATING_ERRORS, code_of
from magnetar.broker.session import reply
from magnetar.broker.session.answers import Answer
from magnetar.broker.session.commands import NOTICES, REQUESTS, RULES, SEND
from magnetar.broker.session.context import DELIVERY_BYTES_MAX, Context, Transport
from magnetar.broker.session.limits import HANDSHAKE_BYTES_MAX, HANDSHAKE_FAIR_S
from magnetar.broker.session.long_lists import in_pieces, is_too_large
from magnetar.broker.session.producers import confirm_producer
from magnetar.broker.session.publishing import publish_parsed, read_run
from magnetar.broker.session.refusals import Refusals
from magnetar.broker.session.session import Carry, Close, Confirm, Decline, Send, Session, Start
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.errors import CommandError, FrameError, MalformedCommand
from magnetar.protos.framing import COMMAND_BYTES_MAX
from magnetar.protos.pieces import long_list
from magnetar.runtime.awake import sleep_until
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.frames import Outbox
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from magnetar.broker.log.budget import Turn
    from magnetar.broker.session.endpoint import Endpoint
    from magnetar.broker.session.session import Action
    from magnetar.protos.framing import Command
    from magnetar.protos.pieces import LongList
    from magnetar.runtime.frames import Buffer, FrameStream

__all__ = ["Connection", "Transport"]

STALL_BYTES: Final = 16 << 20  # beyond these pending bytes the broker does not read from the client
REQUEST_TIMEOUT_S: Final = 60.0  # Pulsar's topicLoadTimeoutSeconds; no request may take longer
REQUESTS_READ_MAX: Final = (
    1_000  # requests under way at which reading pauses. A program that opens all its producers at
    # once sends thousands. If the broker answered with an error instead, Apache's C++ client would
    # close its connection.
)
SLICE_COMMANDS: Final = 100
"""A slice of a frame, and so a step of the event loop, ends after this many commands. A command
takes 10 us, or up to 60 us if it starts a task."""

COMMAND_UNIT_BYTES: Final = 1 << 10
"""A command counts as one more command of SLICE_COMMANDS for every COMMAND_UNIT_BYTES of its size,
because the broker parses all its bytes."""

UNIT_CONSUMERS: Final = 25
"""A FLOW, an ACK or an offer of room counts as one more command of SLICE_COMMANDS for every
UNIT_CONSUMERS consumers of its subscription: a Shared or Key_Shared dispatcher looks at each of
them, in 0.2 us."""

NEGATIVE_ACK_UNIT_IDS: Final = 100
"""A negative acknowledgement counts as one more command of SLICE_COMMANDS for every 100 of its ids,
because 100 ids take 0.3 ms. The longest one that the broker accepts has 10,000 ids: it ends its
slice."""

PROBE_TIMEOUT_S: Final = 5.0  # Pulsar's connectionLivenessCheckTimeoutMillis
# The time limit for the client to take the last command, which states the reason of the close.
LAST_COMMAND_TIMEOUT_S: Final = 1.0
CLOSE_SLICE_S: Final = 0.005
"""The time limit of one step that closes producers and consumers. A connection may have 50,000
consumers. Closing a consumer of a Key_Shared subscription takes 0.5 ms, or longer if the
subscription has many consumers."""

SERVER_VERSION: Final = "Magnetar 0.1.0"
MALFORMED: Final = -1  # stands for the type of a command that cannot be read

_COMMAND_NAMES: Final[dict[int, str]] = {
    number: name for name, number in pb.BaseCommand.Type.items()
}
_CODE_NAMES: Final[dict[int, str]] = {number: name for name, number in pb.ServerError.items()}

_publish_run: Final = SEND.handler

log = get_logger(__name__)


class Connection:
    """One client's connection. `run` serves it until either side ends it."""

    def __init__(
        self,
        stream: FrameStream,
        endpoint: Endpoint,
        transport: Transport,
        *,
        on_connected: Callable[[], None] | None = None,
    ) -> None:
        """`on_connected` is called when the client is authenticated. The transport then admits
        larger frames."""
        self._stream = stream
        self._endpoint = endpoint
        self._session = Session(
            asyncio.get_running_loop().time(),
            SERVER_VERSION,
            endpoint.broker.message_bytes_max,
            rules=RULES,
            authenticator=endpoint.make_authenticator(),
        )
        self._frame_bytes_max = framing.frame_bytes_max(endpoint.broker.message_bytes_max)
        self._outbox = Outbox(self._send, pending_bytes_max=DELIVERY_BYTES_MAX)
        self._context = Context(
            endpoint.broker,
            self._session,
            self._outbox,
            transport=transport,
            peer=stream.peer,
            end=self._end,
            probe=self._probe,
            answers=endpoint.answers,
        )
        self._refusals = Refusals()
        self._declined = 0  # refused requests whose answers are delayed
        self._transport = transport
        self._on_connected = on_connected
        self._admitted = False  # True: `on_connected` was called
        self._steps = endpoint.broker.steps
        self._standstill = endpoint.broker.standstill
        self._heard = asyncio.Event()
        self._answered = asyncio.Event()  # a request has ended
        # True: not reading, because topics, the broker or the number of requests are at a limit.
        self._paused = False
        self._draining = False  # True: not reading, because too many bytes wait for this client
        # The list that `_take_long` carries out next; None: no list.
        self._long: LongList | None = None
        self._turn: Turn | None = None  # None: no wait for the broker's publish budget
        self._tasks: asyncio.TaskGroup

    async def run(self) -> None:
        """Serve until the client leaves or the broker ends the connection. Raises only when it is
        cancelled."""
        limits, peer = self._endpoint.limits, self._stream.peer
        refusal = limits.enter(peer)
        if refusal is not None:
            await self._turn_away(refusal)
            return
        try:
            await self._serve()
        finally:
            limits.leave(peer)

    async def _turn_away(self, refusal: str) -> None:
        log.warning("connection refused", peer=self._stream.peer, reason=refusal)
        with suppress(TimeoutError, StreamClosed):
            async with asyncio.timeout(LAST_COMMAND_TIMEOUT_S):
                error = reply.error(reply.NO_REQUEST, pb.NotAllowedError, refusal)
                await self._stream.send([error])
        await self._stream.close()

    async def _serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                lasting = [
                    self._tasks.create_task(self._guarded(self._write)),
                    self._tasks.create_task(self._guarded(self._keep_alive)),
                    self._tasks.create_task(self._guarded(self._offer_room)),
                ]
                try:
                    await self._guarded(self._read)
                finally:
                    self._leave()
                    for task in lasting:
                        task.cancel()
                    await self._stream.close()
        finally:
            self._context.leave()
            while self._context.close_one():  # work is left only if this task was cancelled
                pass
            for command, code, count in self._refusals.repeated():
                log.info(
                    "requests refused",
                    command=_COMMAND_NAMES.get(command, "malformed"),
                    error=_CODE_NAMES[code],
                    count=count,
                    peer=self._stream.peer,
                )

    async def _guarded(self, work: Callable[..., Awaitable[None]], *arguments: Command) -> None:
        """Run a part of the connection's work. A bug in it ends only this connection."""
        try:
            await work(*arguments)
        except Exception as error:
            self._endpoint.failures += 1
            log.error("connection failed", peer=self._stream.peer, exc_info=error)
            self._end(f"internal error: {type(error).__name__}")

    # ---- reading ---------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read until the stream ends. After the broker has ended the connection, drop the
        frames."""
        context = self._context
        try:
            if self._transport is Transport.GRPC:
                await self._shake_hands()
            while True:
                # No variable holds the frame: an idle connection would keep it in memory.
                await self._take(await self._stream.receive())
        except StreamClosed as end:
            if not (end.clean or context.over):
                log.info("connection lost", peer=self._stream.peer, reason=end.reason)

    async def _shake_hands(self) -> None:
        """Read until the client is connected. The number of concurrent handshakes is bounded."""
        session = self._session
        reason = f"the handshake took longer than {HANDSHAKE_FAIR_S:g} s while others waited"
        async with self._endpoint.handshakes.place(lambda: self._end(reason)):
            while not session.connected:
                await self._take(await self._stream.receive())

    async def _take(self, frame: memoryview) -> None:
        """Carry out one transport frame, which holds whole Pulsar frames, in slices. The event loop
        runs other tasks between two slices. After the connection's end, drop the rest."""
        self._heard.set()
        context, session, steps = self._context, self._session, self._steps
        if context.over:
            return
        if not self._standstill.sure:
            await self._standstill.wait_sure()
        if not session.connected and len(frame) > HANDSHAKE_BYTES_MAX:
            self._end(f"{len(frame)} bytes before the client is connected")
            return
        at, size = 0, len(frame)
        while at < size and not context.over:
            began = steps.begin()
            at = self._take_slice(frame, at)
            steps.end("commands", began)
            if self._long is not None:
                await self._take_long(self._long)
            await self._wait_room()
            if at < size:
                await asyncio.sleep(0)
        if not self._admitted and session.connected:
            self._admitted = True
            if self._on_connected is not None:
                self._on_connected()

    def _take_slice(self, frame: memoryview, at: int) -> int:
        """Carry out the commands from `at` on, up to a long list or SLICE_COMMANDS. Returns the
        place of the next command."""
        now = asyncio.get_running_loop().time()
        context = self._context
        left = SLICE_COMMANDS
        try:
            while at < len(frame) and left > 0 and not context.over:
                run = read_run(frame, at)
                if run is not None:
                    _publish_run(context, run, now)
                    at = run.end
                    left -= len(run.entries) + run.parsed_bytes // COMMAND_UNIT_BYTES
                    continue
                begin = at
                part, at = framing.first_frame(frame, at, bytes_max=self._frame_bytes_max)
                left -= 1 + (at - begin) // COMMAND_UNIT_BYTES
                self._long = long_list(part)
                if self._long is not None:
                    return at
                if is_too_large(part):
                    self._end(f"a command of {len(part)} bytes, the limit is {COMMAND_BYTES_MAX}")
                    return at
                try:
                    command = framing.parse_command(part)
                except CommandError as error:
                    self._refuse(error)
                    continue
                if type(command.body) is pb.CommandSend:
                    publish_parsed(context, command, now)
                else:
                    if type(command.body) is pb.CommandNegativeAck:
                        ids = len(command.body.message_ids) + len(command.body.returned)
                        left -= ids // NEGATIVE_ACK_UNIT_IDS
                    for action in self._session.on_command(command, now):
                        if type(action) is Carry:
                            left -= self._peers(command) // UNIT_CONSUMERS
                        self._carry_out(action)
        except FrameError as error:
            self._end(str(error))
        return at

    def _peers(self, notice: Command) -> int:
        """Return the number of consumers of the subscription to which a notice belongs."""
        return self._context.consumers[cast("Any", notice.body).consumer_id].peers

    async def _take_long(self, command: LongList) -> None:
        """Carry out a command with very many message ids: one piece in each turn of the loop."""
        self._long = None
        loop, steps = asyncio.get_running_loop(), self._steps
        parts = in_pieces(self._context, command)
        while not self._context.over:
            began = steps.begin()
            try:
                more = next(parts, None)
            except CommandError as error:
                self._end(str(error))
                return
            finally:
                steps.end("long list", began)
            if more is None:
                return
            self._session.on_paused(loop.time())  # the client is not silent: its list is read
            await asyncio.sleep(0)

    async def _wait_room(self) -> None:
        """Return when the connection may read from its client again. Raises StreamClosed."""
        published = self._context.published
        self._paused = True
        for producer_id in published:
            while not await self._has_room(producer_id):
                self._outbox.put_control(reply.PING)  # the send fails if the connection is lost
        if published:
            await self._wait_rate()
            await self._wait_turn()
        published.clear()
        while (
            self._session.requests + self._declined >= REQUESTS_READ_MAX and not self._context.over
        ):
            self._answered.clear()
            await self._answered.wait()
        self._paused = False
        if self._outbox.pending_bytes > STALL_BYTES:
            self._draining = True
            await self._outbox.wait_room()
            self._draining = False

    async def _wait_rate(self) -> None:
        """Wait until the publish rate of the broker allows more."""
        rate = self._endpoint.broker.publish_rate
        while not self._context.over and rate.wait_s(asyncio.get_running_loop().time()) > 0:
            if not await self._within(rate.wait()):
                self._outbox.put_control(reply.PING)  # the send fails if the connection is lost

    async def _wait_turn(self) -> None:
        """Wait until the broker has memory for more publishes."""
        budget = self._endpoint.broker.publish_budget
        turn = self._turn = budget.turn()
        if turn is None:
            return
        try:
            while not (turn.done() or self._context.over):
                await asyncio.wait({turn}, timeout=PROBE_TIMEOUT_S)
                self._outbox.put_control(reply.PING)  # the send fails if the connection is lost
        finally:
            self._turn = None
            budget.leave(turn)

    async def _has_room(self, producer_id: int) -> bool:
        """Wait for at most PROBE_TIMEOUT_S until the producer's topic has room, or the producer is
        closed. Returns True if there is no more reason to wait."""
        producer = self._context.producers.get(producer_id)
        if producer is None or producer.has_room:
            return True
        return await self._within(producer.wait_room())

    async def _within(self, wait: Coroutine[Any, Any, None]) -> bool:
        """Wait for at most PROBE_TIMEOUT_S. Returns True if the wait has ended by then."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await wait
        except TimeoutError:
            return False
        return True

    def _refuse(self, error: CommandError) -> None:
        """Refuse a command that did not parse. A request of a connected client gets an error; any
        other command ends the connection."""
        request_id = error.request_id if isinstance(error, MalformedCommand) else None
        if request_id is None or not self._session.connected:
            self._end(str(error))
            return
        delay_s, is_first = self._refusals.on_refused(MALFORMED, pb.NotAllowedError)
        if is_first:
            log.warning("malformed command", peer=self._stream.peer, error=str(error))
        self._answer_later(reply.error(request_id, pb.NotAllowedError, str(error)), delay_s)

    # ---- carrying out ----------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case Carry(command):
                try:
                    NOTICES[command.type](self._context, command.body)
                except OPERATING_ERRORS as error:
                    _, is_first = self._refusals.on_refused(command.type, code_of(error))
                    if is_first:
                        kind, peer = _name(command), self._stream.peer
                        log.warning("command refused", command=kind, peer=peer, error=error)
            case Send(data):
                self._outbox.put_control(data)
            case Decline(command, code, reason):
                delay_s = self._note_refusal(command, code, reason)
                self._answer_later(reply.error_for(command, code, reason), delay_s)
            case Start(command):
                self._tasks.create_task(self._guarded(self._answer, command))
            case Confirm(command):
                assert isinstance(command.body, pb.CommandProducer)
                self._outbox.put_control(confirm_producer(self._context, command.body))
            case Close(reason, last_command):
                self._end(reason, last_command)

    async def _answer(self, command: Command) -> None:
        """Carry out a request in its own task, with exactly one answer."""
        task = asyncio.current_task()
        assert task is not None
        failure: Exception | None = None
        answer: bytes | Answer
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await self._handle(command)
        except OPERATING_ERRORS as error:
            failure = error
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            failure = TimeoutError("the operation that the request waited for was cancelled")
        if failure is None:
            self._refusals.on_success(command.type)
        else:
            code = code_of(failure)
            text = str(failure) or f"{_name(command)} took longer than {REQUEST_TIMEOUT_S:.0f} s"
            answer = reply.error_for(command, code, text)
            await asyncio.sleep(self._note_refusal(command, code, text))
        self._session.on_request_ended(command, failed=failure is not None)
        self._answered.set()
        if isinstance(answer, Answer):
            await self._put_shared(answer)
        else:
            self._outbox.put_control(answer)

    async def _put_shared(self, answer: Answer) -> None:
        """Send an answer that identical requests may share. Until the outbox has room again, the
        answer counts toward ANSWER_BYTES_MAX."""
        try:
            self._outbox.put_control(*answer.parts)
            with suppress(StreamClosed):
                await self._outbox.wait_room()
        finally:
            self._endpoint.answers.release(answer)

    async def _handle(self, command: Command) -> bytes | Answer:
        request, body = REQUESTS[command.type], command.body
        if request.needs is not None:
            self._context.require(request.needs.permission, request.needs.resource(body))
        return await request.handler(self._context, body)

    def _note_refusal(self, command: Command, code: pb.ServerError.ValueType, reason: str) -> float:
        """Log the first refusal of a kind. Returns the delay of the answer in seconds."""
        delay_s, is_first = self._refusals.on_refused(command.type, code)
        if is_first:
            log.info(
                "request refused", command=_name(command), peer=self._stream.peer, error=reason
            )
        return delay_s

    def _answer_later(self, answer: bytes, delay_s: float) -> None:
        """Send the answer after the delay. The request counts as under way until then."""
        if delay_s == 0:
            self._outbox.put_control(answer)
            return
        self._declined += 1
        asyncio.get_running_loop().call_later(delay_s, self._answer_declined, answer)

    def _answer_declined(self, answer: bytes) -> None:
        self._declined -= 1
        self._answered.set()
        self._outbox.put_control(answer)

    # ---- ends ------------------------------------------------------------------------------------

    def _end(self, reason: str, last_command: bytes = b"") -> None:
        """End the connection, after sending `last_command`. Idempotent."""
        if self._context.over:
            return
        log.warning("closing a connection", peer=self._stream.peer, reason=reason)
        self._context.over = True
        if last_command:
            self._outbox.put_control(last_command)
        self._tasks.create_task(self._close(drain=bool(last_command)))

    async def _close(self, *, drain: bool) -> None:
        if drain:
            with suppress(TimeoutError, StreamClosed):
                async with asyncio.timeout(LAST_COMMAND_TIMEOUT_S):
                    await self._outbox.wait_sent()
        await self._stream.close()

    def _leave(self) -> None:
        """Close the producers and consumers of the lost connection. Idempotent."""
        begun = self._context.leave()
        self._heard.set()
        if self._turn is not None:
            self._endpoint.broker.publish_budget.leave(self._turn)
        if begun and self._close_slice():
            self._tasks.create_task(self._guarded(self._close_rest))

    def _close_slice(self) -> bool:
        """Close a slice of the producers and consumers. Returns True if more are left."""
        began, until = self._steps.begin(), time.perf_counter() + CLOSE_SLICE_S
        while more := self._context.close_one():
            if time.perf_counter() >= until:
                break
        self._steps.end("leave", began)
        return more

    async def _close_rest(self) -> None:
        while True:
            await self._endpoint.broker.turns.take()
            if not self._close_slice():
                return

    # ---- beside the reader -----------------------------------------------------------------------

    async def _write(self) -> None:
        await self._outbox.run()
        self._leave()  # the reader may not notice the end: it may wait for a topic

    async def _send(self, parts: Sequence[Buffer]) -> None:
        if not self._standstill.sure:
            await self._standstill.wait_sure()
        await self._stream.send(parts)
        if self._draining:  # the client is alive: it has taken a frame
            self._session.on_paused(asyncio.get_running_loop().time())

    async def _keep_alive(self) -> None:
        loop, awake = asyncio.get_running_loop(), self._endpoint.broker.awake
        stalled_s = awake.stalled_s
        while not self._context.over:
            await sleep_until(self._session.timer_at())
            if awake.stalled_s > stalled_s:
                self._session.on_stalled(awake.stalled_s - stalled_s, loop.time())
                stalled_s = awake.stalled_s
            if self._paused:
                self._session.on_paused(loop.time())
            for action in self._session.on_timer(loop.time()):
                self._carry_out(action)

    async def _offer_room(self) -> None:
        """Whenever there is room again, call the subscriptions that the connection refused."""
        context = self._context
        with suppress(StreamClosed):
            while True:
                await context.lacking_room.wait()
                context.lacking_room.clear()
                await self._standstill.wait_sure()
                await self._outbox.wait_room()
                left = SLICE_COMMANDS
                for handle in context.take_refused():
                    if left <= 0:
                        await asyncio.sleep(0)
                        left = SLICE_COMMANDS
                    left -= 1 + handle.peers // UNIT_CONSUMERS
                    handle.on_writable()

    async def _probe(self) -> bool:
        """Return True if the client answers a PING. While the broker does not read from the client,
        the client counts as alive as long as the connection is open."""
        if self._context.over:
            return False
        self._heard.clear()
        self._outbox.put_control(reply.PING)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._heard.wait()
        except TimeoutError:
            if not (self._paused or self._draining):
                self._end(f"no answer to a PING for {PROBE_TIMEOUT_S:.0f} s")
        return not self._context.over


def _name(command: Command) -> str:
    return pb.BaseCommand.Type.Name(command.type)
