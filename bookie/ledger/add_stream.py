"""AddStream: a stream of adds from this process to one bookie, shared by the ledgers that use it.

PeerPool keeps up to three streams for each bookie: for writers, for recoveries and for copies.

Adds go into the stream's outbox. From each frame of acks, the stream gives each ledger all of its
acks in one call. When the stream is lost, it tells every ledger, so no ledger waits for acks that
cannot come. The outcome of the adds in flight is then unknown, and sending them again is harmless.
While a ledger is attached, `run` opens the stream again, with growing pauses.

A stream may have 10,000 ledgers. So in one turn of the event loop it gives acks to at most
ACKED_PER_TURN of them, or tells at most LEDGERS_PER_TURN of them of another event. A ledger may
detach before its call. Each ledger learns of a loss before it learns of the next connection, and
receives no acks in between. A ledger that has not learned of a loss yet may still append. Its adds
are dropped, like the adds in flight. A recovery that begins to write before it learns of a loss may
have to be repeated.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.protos.envelope import BookieCode, FrameDamaged, decode_ack_runs
from magnetar.runtime.frames import Outbox, StreamClosed
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.bookie.ledger.peer import BookiePeer
    from magnetar.metadata.model import Member
    from magnetar.runtime.frames import Buffer, FrameStream
    from magnetar.runtime.supervise import Backoff
    from magnetar.runtime.turns import Turns

    Put = Callable[..., None]  # Outbox.put

log = get_logger(__name__)

RESUME_BELOW_BYTES: Final = 1 << 20
"""A bookie keeps up while fewer bytes than this wait in its outbox: four frames."""

ACKED_PER_TURN: Final = 1_000
"""The ledgers that a stream calls with acks in one turn of the event loop: 5 us each. The streams
do not share this limit: with 10,000 busy ledgers, the last ones would then get their acks late."""

LEDGERS_PER_TURN: Final = 250
"""The ledgers that all streams together tell of a loss, a connection or a refused add in one turn
of the event loop. A lost stream takes 20 us for each ledger. In the next turn, each ledger with
adds in flight looks for a spare bookie."""

HOLD_BYTES: Final = 16 << 10
"""While fewer bytes of adds than this are pending, the outbox holds them until the bookie answers
the previous frame, and at most for HOLD_S_MAX. The bookie syncs that frame first in any case. At
1,000 single messages of 1 KB per second this halves the number of frames, syncs and acks."""

GONE_PAUSE_S: Final = 60.0
"""The pause between attempts while another incarnation answers at the address. The wanted
incarnation is gone, unless it is listed again, which triggers an attempt at once. An idle ledger
can keep the stream in this state for days."""


class AddSink(Protocol):
    """A ledger on the stream. Called on the loop; must not raise."""

    def on_acks(self, stream: AddStream, entries: list[int]) -> None:
        """The bookie has these entries on disk. They are in any order, and some may be repeated."""

    def on_add_failed(self, stream: AddStream, entry: int, code: BookieCode) -> None:
        """The bookie refused the entry."""

    def on_stream(self, stream: AddStream) -> None:
        """`stream.put` has changed; other ledgers may have learned of it earlier. None: the stream
        is lost, and the outcome of the adds in flight is unknown."""


class AddStream:
    """`run` must be running. `peer` returns the bookie at its present address, or raises
    BookieUnavailable."""

    def __init__(
        self,
        member: Member,
        peer: Callable[[], BookiePeer],
        *,
        client_name: str,
        backoff: Backoff,
        open_timeout_s: float,
        turns: Turns,
    ) -> None:
        """`turns`: shared with the other streams of the process, which may be lost together."""
        self.member = member
        self._peer = peer
        self._client_name = client_name
        self._backoff = backoff
        self._open_timeout_s = open_timeout_s
        self._turns = turns
        self._sinks: dict[int, AddSink] = {}  # keyed by ledger
        # The ledgers that have not learned yet that `put` has changed. The next one to call is at
        # the end of the list.
        self._untold: list[tuple[int, AddSink]] = []
        self.put: Put | None = None  # adds go in here; None: there is no stream
        self._outbox: Outbox | None = None
        self._stream: FrameStream | None = None  # None: none is open
        self._wanted = asyncio.Event()  # a ledger is attached, or a task waits in connect()
        self._now = asyncio.Event()  # skip the rest of the pause
        self._waiting: list[asyncio.Future[bool]] = []
        self._gone = False  # another incarnation answered at the bookie's address

    @property
    def keeps_up(self) -> bool:
        """True when the stream is open and the bookie keeps up with it."""
        return self._outbox is not None and self._outbox.pending_bytes < RESUME_BELOW_BYTES

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait to be sent to the bookie."""
        return 0 if self._outbox is None else self._outbox.pending_bytes

    def attach(self, ledger: int, sink: AddSink) -> None:
        """Hand the acks of this ledger to `sink` until `detach`."""
        assert ledger not in self._sinks, f"two writers of ledger {ledger} in one process"
        self._sinks[ledger] = sink
        self._wanted.set()

    def detach(self, ledger: int) -> None:
        self._sinks.pop(ledger, None)

    def hurry(self) -> None:
        """The bookie may be back: try at once."""
        self._now.set()

    def on_end(self) -> None:
        """`run` has ended unexpectedly. The next `run` tells the ledgers of a lost stream."""
        self._answer_waiting(False)
        if self._outbox is not None:
            self._lose()

    async def connect(self, timeout_s: float) -> bool:
        """Return whether the stream is open, now or after the next attempt. False also if the
        attempt does not end within `timeout_s`."""
        if self._outbox is not None:
            return True
        attempt = asyncio.get_running_loop().create_future()
        self._waiting.append(attempt)
        self._wanted.set()
        self._now.set()
        try:
            async with asyncio.timeout(timeout_s):
                return bool(await attempt)
        except TimeoutError:
            return False
        finally:
            if attempt in self._waiting:
                self._waiting.remove(attempt)

    async def run(self) -> None:
        """Keep the stream open while it is wanted, until cancelled. May be called again after
        `on_end`."""
        await self._tell_ledgers()
        if self._stream is not None:
            await self._stream.close()
        delays = self._backoff.delays()
        while True:
            while not (self._sinks or self._waiting):
                self._wanted.clear()
                await self._wanted.wait()
            self._now.clear()
            stream = await self._open()
            if stream is not None:
                delays = self._backoff.delays()
                await self._serve(stream)
            await self._pause(GONE_PAUSE_S if self._gone else next(delays))

    async def _open(self) -> FrameStream | None:
        try:
            async with asyncio.timeout(self._open_timeout_s):
                stream = await self._peer().open_write(self._client_name)
        except (BookieUnavailable, StreamClosed, FrameDamaged, TimeoutError) as error:
            log.info("bookie not reached", bookie=self.member.bookie, error=repr(error))
            code = error.code if isinstance(error, BookieUnavailable) else None
            self._gone = code is BookieCode.WRONG_INCARNATION
            self._answer_waiting(False)
            return None
        self._gone = False
        return stream

    async def _serve(self, stream: FrameStream) -> None:
        """Use the stream until it ends."""
        outbox = Outbox(stream.send, pending_bytes_max=RESUME_BELOW_BYTES, hold_bytes=HOLD_BYTES)
        self._stream = stream
        receiving = True

        async def send() -> None:
            try:
                await outbox.run()
            except BaseException:
                if receiving:  # `_receive` would wait for acks of dropped adds
                    await stream.close()
                raise

        async with asyncio.TaskGroup() as group:  # none of its tasks fails
            sending = group.create_task(send())
            try:
                self._began(outbox)
                await self._tell_ledgers()
                why = await self._receive(stream, outbox)
            finally:
                receiving = False
                sending.cancel()
            log.warning("bookie's stream lost", bookie=self.member.bookie, why=why)
            self._lose()
            await self._tell_ledgers()
            await stream.close()
            self._stream = None

    async def _receive(self, stream: FrameStream, outbox: Outbox) -> str:
        """Hand out acks until the stream ends. Return the reason of its end."""
        try:
            while True:
                frame = await stream.receive()
                outbox.on_answer()
                await self._take(frame)
        except (StreamClosed, FrameDamaged) as error:
            return str(error)

    async def _take(self, frame: Buffer) -> None:
        """Hand out all acks of a frame. Raises FrameDamaged before it hands out any."""
        stored: dict[int, list[int]] = {}
        refused: list[tuple[int, range, BookieCode]] = []
        for ledger, entries, code in decode_ack_runs(frame):
            if code is not BookieCode.OK:
                refused.append((ledger, entries, code))
            elif ledger in stored:
                stored[ledger].extend(entries)
            else:
                stored[ledger] = list(entries)
        for number, (ledger, acked) in enumerate(stored.items(), 1):
            sink = self._sinks.get(ledger)
            if sink is not None:
                sink.on_acks(self, acked)
            if number % ACKED_PER_TURN == 0:
                await asyncio.sleep(0)
        for number, (ledger, entries, code) in enumerate(refused, 1):
            for entry in entries:
                sink = self._sinks.get(ledger)  # the ledger may detach at a refusal
                if sink is not None:
                    sink.on_add_failed(self, entry, code)
            if number % LEDGERS_PER_TURN == 0:
                await self._turns.take()

    def _began(self, outbox: Outbox) -> None:
        self._outbox, self.put = outbox, outbox.put
        self._untold = list(reversed(self._sinks.items()))
        self._answer_waiting(True)

    def _lose(self) -> None:
        self._outbox = self.put = None
        self._untold = list(reversed(self._sinks.items()))

    async def _tell_ledgers(self) -> None:
        """Tell the ledgers that were attached at the last change of `put`, and still are."""
        while self._untold:
            for _ in range(min(LEDGERS_PER_TURN, len(self._untold))):
                ledger, sink = self._untold.pop()
                if self._sinks.get(ledger) is sink:
                    sink.on_stream(self)
            if self._untold:
                await self._turns.take()

    def _answer_waiting(self, connected: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for attempt in waiting:
            if not attempt.done():
                attempt.set_result(connected)

    async def _pause(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._now.wait()
        except TimeoutError:
            pass
