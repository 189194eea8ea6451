"""The loop that reads the log for a subscription's dispatcher, one read at a time.

The loop enforces the dispatch rates of the topic and the subscription: a read waits for tokens, and
takes tokens for the entries that it returns.

The loop runs in a task as long as one read follows another, so an idle subscription has no task.
`stop` cancels the task. After a failed read the loop waits, reports the failure to the dispatcher,
and then makes the next read that the dispatcher asks for. The delays grow up to RETRY_S_MAX. The
number of attempts has no limit. `failure` is set until a read succeeds.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import LedgerError, LedgerNotFound
from magnetar.broker.dispatch.dispatcher import Read, after
from magnetar.broker.dispatch.positions import runs
from magnetar.broker.errors import LogClosed, LogDamaged, LogFenced, LogUnavailable, ReadFailed
from magnetar.broker.log.losses import LostRange, lost_by
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.topic.dispatch_rate import longest_wait
from magnetar.broker.topic.read_ahead import ReadAhead
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import LedgerId
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from typing import Any

    from magnetar.broker.dispatch.dispatcher import Action, Dispatcher, Replay
    from magnetar.broker.errors import LogError
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.dispatch_rate import DispatchRate

    Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    Tell = Callable[[Callable[[Dispatcher, float], list[Action]]], None]

RETRY_S_FIRST: Final = 0.1
RETRY_S_MAX: Final = 10.0
"""The longest delay in seconds before a retry. A bookie that restarts is back within seconds. The
loop requests a lost entry about eight times a minute until an operator restores or skips it."""

RATE_LOOK_S: Final = 1.0
"""The time in seconds after which a read that waits for a dispatch rate checks the rate again."""

REPLAY_GAP_ENTRIES: Final = 8
"""A replay joins two requests, and also reads the unwanted entries between them, if there are at
most this many. A request to a bookie costs about as much as reading this many entries of 1 KB."""

SKIP_ENTRIES: Final = 1_000
"""One step of the event loop acknowledges at most this many lost entries. Such a step takes about a
millisecond."""

log = get_logger(__name__)


class ReadLoop:
    """`tell` reports the end of a read to the dispatcher and executes the dispatcher's actions. One
    of these actions may call `want` for the next read. `on_read` gets the entries before the
    dispatcher gets them."""

    __slots__ = (
        "_ahead",
        "_bytes_max",
        "_delays",
        "_log",
        "_on_read",
        "_rates",
        "_retry_at",
        "_skip",
        "_spawn",
        "_subscription",
        "_task",
        "_tell",
        "_topic",
        "_wanted",
        "failure",
    )

    def __init__(
        self,
        topic_log: Log,
        topic: str,
        subscription: str,
        *,
        bytes_max: int,
        rates: Sequence[DispatchRate] = (),
        spawn: Spawn,
        on_read: Callable[[list[StoredEntry]], None],
        tell: Tell,
        skip: Callable[[LostRange], None],
    ) -> None:
        """`skip` acknowledges entries that are lost permanently."""
        self.failure: LogError | None = None  # the failure of the read that the loop tries again
        self._log = topic_log
        self._ahead = ReadAhead(topic_log, spawn)
        self._topic = topic
        self._subscription = subscription
        self._bytes_max = bytes_max
        self._rates = rates
        self._spawn = spawn
        self._on_read = on_read
        self._tell = tell
        self._skip = skip
        self._wanted: Read | Replay | None = None  # None: there is no read to start
        self._task: asyncio.Task[None] | None = None  # None: no read is outstanding
        self._retry_at = 0.0  # the loop's time of the next attempt after a failure
        self._delays: Iterator[float] = iter(())  # the delays before the next attempts

    @property
    def _name(self) -> str:
        """The name of the topic and the subscription, for logs and errors."""
        return f"{self._topic} {self._subscription}"

    def want(self, wanted: Read | Replay) -> None:
        """Start this read. No other read may be outstanding."""
        assert self._wanted is None, "a second read"
        self._wanted = wanted
        if self._task is None:
            self._task = self._spawn(self._run())
        else:
            assert self._task is asyncio.current_task(), "a second read"

    def explain(self) -> str:
        """Return a text about the failed read that the loop retries, with advice for an
        operator."""
        assert self.failure is not None
        detail = f"the broker retries a failed read: {self.failure}"
        if isinstance(self.failure, ReadFailed):
            lost = lost_by(self.failure, self._log.chain)
            if lost is not None:
                detail += (
                    f"; entries {lost} are lost at all bookies: repair the ledger, seek beyond"
                    " these entries, or set auto_skip_non_recoverable_data"
                )
        return detail

    def stop(self) -> None:
        """Cancel the outstanding read. The dispatcher gets no answer."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._wanted = self.failure = None
        self._ahead.drop()

    def drop_ahead(self) -> None:
        """Drop the entries that were read ahead. Call it when no consumer is connected: perhaps no
        consumer will connect again."""
        self._ahead.drop()

    async def _run(self) -> None:
        try:
            while (wanted := self._wanted) is not None:
                self._wanted = None
                try:
                    await self._answer_whole(wanted)
                except (ReadFailed, LogUnavailable, LogDamaged) as error:
                    if not await self._maybe_skip(error):
                        await asyncio.sleep(self._note_failure(error))
                    self._tell(lambda machine, now: machine.on_read_failed(now))
        except (LogFenced, LogClosed) as error:
            # The log has ended and the topic is about to close, so the dispatcher gets no answer.
            log.info("read loop ended", subscription=self._name, error=str(error))
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _answer_whole(self, wanted: Read | Replay) -> None:
        """Answer one read. If an operation that the read waited for was cancelled, raise
        LogUnavailable: an unanswered dispatcher would never ask for another read."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._wait_rate()
            await self._answer(wanted)
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            cause = RuntimeError("an operation that the read waited for was cancelled")
            raise LogUnavailable(self._name, "reading", cause) from None

    @property
    def retry_in_s(self) -> float:
        """The time in seconds until the next attempt after a failure. 0: the attempt is under way,
        or no read has failed."""
        return max(0.0, self._retry_at - _now())

    @property
    def rate_wait_s(self) -> float:
        """The time in seconds that the next read must wait for the dispatch rates."""
        return longest_wait(self._rates, _now())[0]

    @property
    def exhausted(self) -> DispatchRate | None:
        """The dispatch rate for which the next read must wait longest. None: the read need not
        wait."""
        return longest_wait(self._rates, _now())[1]

    async def _wait_rate(self) -> None:
        """Wait until every rate allows the next read. A changed rate applies within RATE_LOOK_S."""
        while True:
            wait_s, _ = longest_wait(self._rates, _now())
            if wait_s <= 0:
                return
            await asyncio.sleep(min(wait_s, RATE_LOOK_S))

    def _room(self) -> tuple[int, int]:
        """Return the limits of messages and bytes for the next read."""
        rooms = [rate.room(_now()) for rate in self._rates if rate.limited]
        messages_max = min((messages for messages, _ in rooms), default=sys.maxsize)
        return messages_max, min([self._bytes_max, *(size for _, size in rooms)])

    def _charge(self, entries: Sequence[StoredEntry]) -> None:
        for rate in self._rates:
            if rate.limited:
                messages = sum(entry.messages for entry in entries)
                rate.take(messages, sum(len(entry.view.data) for entry in entries), _now())

    async def _answer(self, wanted: Read | Replay) -> None:
        entries_max, bytes_max = self._room()
        if isinstance(wanted, Read):
            entries = await self._ahead.read(
                wanted.first,
                entries_max=min(wanted.entries_max, entries_max),
                bytes_max=bytes_max,
            )
            self.failure = None
            self._charge(entries)
            self._on_read(entries)
            self._tell(lambda machine, now: machine.on_entries(entries, now))
        else:
            found, through = await self._replay(wanted.positions[:entries_max], bytes_max)
            self.failure = None
            self._charge(found)
            self._on_read(found)
            self._tell(lambda machine, now: machine.on_replayed(found, through, now))

    async def _replay(
        self, positions: list[Position], bytes_left: int
    ) -> tuple[list[StoredEntry], Position]:
        """Read the entries at these positions. Returns the entries, also the unwanted ones between
        joined requests, and the last position whose read succeeded. The byte limit ends a replay
        early, and so does a failure after the first entries."""
        entries: list[StoredEntry] = []
        through = EARLIEST
        for first, last in runs(positions, REPLAY_GAP_ENTRIES):
            following = first
            while following <= last:
                if bytes_left <= 0:
                    return entries, through
                count = last.entry - following.entry + 1
                try:
                    found = await self._log.read(following, entries_max=count, bytes_max=bytes_left)
                except ReadFailed:
                    if entries:
                        return entries, through
                    raise
                # If the ledger was trimmed, `read` returns entries of a later ledger: drop them.
                found = [entry for entry in found if entry.position <= last]
                entries += found
                bytes_left -= sum(len(entry.view.data) for entry in found)
                through = min(last, found[-1].position) if found else last
                following = after(through)
        return entries, through

    async def _maybe_skip(self, error: LogError) -> bool:
        """Skip lost entries if `auto_skip_non_recoverable_data` is on and the entries are lost
        permanently. Returns True when it has skipped entries."""
        topic_log = self._log
        if not topic_log.config.auto_skip_non_recoverable_data or not isinstance(error, ReadFailed):
            return False
        lost = lost_by(error, topic_log.chain)
        if lost is None or not await self._is_certain(lost, error):
            return False
        if topic_log.losses.note(lost):
            log.error("entries lost, skipped", topic=str(topic_log.name), lost=str(lost))
        log.warning("subscription skips lost entries", subscription=self._name, lost=str(lost))
        for first in range(lost.first, lost.last + 1, SKIP_ENTRIES):
            last = min(first + SKIP_ENTRIES - 1, lost.last)
            self._skip(LostRange(lost.ledger, first, last))
            await asyncio.sleep(0)
        return True

    async def _is_certain(self, lost: LostRange, error: ReadFailed) -> bool:
        """Return True when the entries are certainly lost. First verify that this broker still owns
        the topic: if it does not, the next owner may have deleted the ledger. Then read the
        ledger's metadata again, because the failed read may have used outdated metadata."""
        topic_log = self._log
        try:
            await topic_log.owned_record.verify()
            metadata = await topic_log.ledgers.metadata(LedgerId(lost.ledger))
        except (LogUnavailable, LogDamaged, MetadataError, LedgerError):
            return False
        if not topic_log.chain.is_closed(lost.ledger):  # a trim has removed it from the chain
            return False
        return (metadata is None) == isinstance(error.cause, LedgerNotFound)

    def _note_failure(self, error: LogError) -> float:
        """Record the failure. Returns the delay before the next attempt, in seconds."""
        if self.failure is None:
            log.warning("read failed, will retry", subscription=self._name, error=str(error))
            chance = random.Random(self._name)
            self._delays = Backoff(RETRY_S_FIRST, RETRY_S_MAX, chance).delays()
        self.failure = error
        delay_s = next(self._delays)
        self._retry_at = _now() + delay_s
        return delay_s


def _now() -> float:
    return asyncio.get_running_loop().time()
