"""The one outstanding read of a subscription.

It lives in a task for as long as one read leads to the next, so that an idle subscription costs no
task, and stopping means to cancel it. A read that fails is tried again with growing delays, for
ever; `failure` says so meanwhile. When the machine has changed its mind by then, it says what to
read instead.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.dispatcher import Read, after
from magnetar.broker.dispatch.positions import runs
from magnetar.broker.errors import LogClosed, LogDamaged, LogFenced, LogUnavailable, ReadFailed
from magnetar.broker.log.position import EARLIEST
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any

    from magnetar.broker.dispatch.dispatcher import Action, Dispatcher, Replay
    from magnetar.broker.errors import LogError
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position

    Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    Tell = Callable[[Callable[[Dispatcher], list[Action]]], None]

RETRY_S_FIRST: Final = 0.1
RETRY_S_MAX: Final = 10.0
"""A bookie that restarts is back within seconds; an entry that is lost is asked for six times a
minute until somebody looks at it."""

REPLAY_GAP_ENTRIES: Final = 8
"""Entries in between that are read in vain rather than making another read: a request to a bookie
costs about as much as reading that many entries of 1 KB."""

log = get_logger(__name__)


class Reading:
    """`tell` gives an answer to the machine and carries out what it says, which may be to `want`
    the next read. `name` is for logs."""

    def __init__(
        self, topic_log: Log, name: str, *, bytes_max: int, spawn: Spawn, tell: Tell
    ) -> None:
        self.failure: LogError | None = None  # of the read that is being tried again
        self._log = topic_log
        self._name = name
        self._bytes_max = bytes_max
        self._spawn = spawn
        self._tell = tell
        self._wanted: Read | Replay | None = None  # None: no read is to be started
        self._task: asyncio.Task[None] | None = None  # None: nothing is being read
        self._delays: Iterator[float] = iter(())  # before the next attempts

    def want(self, wanted: Read | Replay) -> None:
        """Read this; nothing else may be outstanding."""
        assert self._wanted is None, "a second read"
        self._wanted = wanted
        if self._task is None:
            self._task = self._spawn(self._run())
        else:
            assert self._task is asyncio.current_task(), "a second read"

    def stop(self) -> None:
        """What is outstanding is not answered any more."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._wanted = self.failure = None

    async def _run(self) -> None:
        try:
            while (wanted := self._wanted) is not None:
                self._wanted = None
                try:
                    await self._answer_whole(wanted)
                except (ReadFailed, LogUnavailable, LogDamaged) as error:
                    await asyncio.sleep(self._note_failure(error))
                    self._tell(lambda machine: machine.on_read_failed())
        except (LogFenced, LogClosed) as error:
            # The log has ended, and the topic is about to. The machine goes on waiting.
            log.info("reading ended", subscription=self._name, why=str(error))
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _answer_whole(self, wanted: Read | Replay) -> None:
        """That somebody cancelled what the read waited for, and not us, is a failure like others:
        otherwise the machine would wait for its answer for ever."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._answer(wanted)
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            cause = RuntimeError("what it waited for was cancelled")
            raise LogUnavailable(self._name, "reading", cause) from None

    async def _answer(self, wanted: Read | Replay) -> None:
        if isinstance(wanted, Read):
            entries = await self._log.read(
                wanted.first, entries_max=wanted.entries_max, bytes_max=self._bytes_max
            )
            self.failure = None
            self._tell(lambda machine: machine.on_entries(entries))
        else:
            found, through = await self._replay(wanted.positions)
            self.failure = None
            self._tell(lambda machine: machine.on_replayed(found, through))

    async def _replay(self, positions: list[Position]) -> tuple[list[StoredEntry], Position]:
        """The entries at these positions, and how far it came: the limit in bytes, or a failure
        after something was read, cuts it short."""
        entries: list[StoredEntry] = []
        through = EARLIEST
        bytes_left = self._bytes_max
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
                entries += found
                bytes_left -= sum(len(entry.view.data) for entry in found)
                through = min(last, found[-1].position) if found else last
                following = after(through)
        return entries, through

    def _note_failure(self, error: LogError) -> float:
        """In how many seconds to try again."""
        if self.failure is None:
            log.warning("entries cannot be read", subscription=self._name, error=str(error))
            chance = random.Random(self._name)
            self._delays = Backoff(RETRY_S_FIRST, RETRY_S_MAX, chance).delays()
        self.failure = error
        return next(self._delays)
