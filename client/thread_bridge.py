"""Passes items between user threads and the event loop, with one wake-up per burst.

Waking a thread costs about 20 microseconds, ten times as much as all other work for a message. So
the items of a user thread gather while the loop is busy, and the loop takes all of them at once. In
the other direction, the loop puts messages into the mailbox before it wakes a waiting thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import uvloop

from magnetar.client.errors import (
    AlreadyClosed,
    ClosedDuringCall,
    InterruptedByUser,
    OperationNotSupported,
    PulsarException,
    Timeout,
    without_frames,
)
from magnetar.client.message_queue import (
    QUEUED_ERRORS_MAX,
    Place,
    Sources,
    id_at,
    of_generation,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from magnetar.client.message import Message, MessageId

T = TypeVar("T")
Bridge = TypeVar("Bridge", bound="ThreadBridge[Any]")

_CTRL_C = "Ctrl-C ended the wait"

INTERRUPT_SEEN_S: Final = 1.0
"""The maximum delay of a Ctrl-C in seconds: a waiting thread wakes at this interval. Otherwise a
signal that arrives just before the thread goes to sleep would not wake the thread."""

ENDING_S: Final = 1.0
"""The longest time in seconds for which a stopped loop waits for `LoopThread.ending`."""


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(
        self, name: str, new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        """`new_loop` creates the event loop. None: the loop is uvloop's."""
        # uvloop against asyncio's own loop, measured over pulsar://: one message at a time takes a
        # quarter less time and a third less CPU. The consumption of a backlog takes 6 % more CPU.
        self._new_loop = new_loop or uvloop.new_event_loop
        # The work that the loop waits for before it ends; None: no work. gRPC connections that this
        # work does not close stay open as long as the process runs.
        self.ending: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.is_forked = False  # this process is a fork: it does not have the thread
        self._bridges: weakref.WeakSet[ThreadBridge[Any]] = weakref.WeakSet()
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._ended = False
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self._thread.start()
        started.wait()
        _LOOPS.add(self)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop, wait for it, and return its result or raise its error.

        An interrupt (Ctrl-C) of the waiting thread cancels the coroutine and raises Interrupted.
        Raises OperationNotSupported as `check_may_wait` does, AlreadyClosed if the loop has ended,
        and ClosedDuringCall if it ends during the call.
        """
        try:
            self.check_may_wait()
        except BaseException:
            coroutine.close()
            raise
        try:
            result = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:  # the loop has ended
            coroutine.close()
            raise AlreadyClosed("the client was closed") from None
        try:
            self._calls.add(result)
            if self._ended:
                result.cancel()
            return _result(result)
        except PulsarException as error:  # drop the loop's frames: they do not help the user
            raise error.with_traceback(None) from None
        except concurrent.futures.CancelledError:
            if self._ended:
                coroutine.close()  # the coroutine may not have begun
            raise ClosedDuringCall("the client was closed during the call") from None
        except KeyboardInterrupt:
            result.cancel()
            raise InterruptedByUser(_CTRL_C) from None
        except BaseException:
            result.cancel()
            raise
        finally:
            self._calls.discard(result)

    def bridge(self, take: Callable[[deque[T]], None]) -> ThreadBridge[T]:
        """Create a bridge to the loop. The bridge ends with the loop."""
        return self.add(ThreadBridge(self.loop, take))

    def add(self, bridge: Bridge) -> Bridge:
        """Let a bridge to this loop end with the loop. Returns the bridge."""
        self._bridges.add(bridge)
        return bridge

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs on the loop's thread."""
        return threading.current_thread() is self._thread

    def check_may_wait(self) -> None:
        """Raise OperationNotSupported in a callback or after a fork.

        Raise AlreadyClosed after the loop's end.

        A callback runs on the loop's thread, so a wait there would never end. A wait after a fork
        would never end either, because the new process does not have the thread.
        """
        self.check_not_in_callback()
        self.check_not_forked()
        if not self._thread.is_alive():
            raise AlreadyClosed("the client was closed")

    def check_not_in_callback(self) -> None:
        """Raise OperationNotSupported in a callback."""
        if self.is_current:
            raise OperationNotSupported(
                "a callback must not wait for the client that calls it: use send_async, or call"
                " from another thread"
            )

    def check_not_forked(self) -> None:
        """Raise OperationNotSupported after a fork: the new process does not have the loop."""
        if self.is_forked:
            raise OperationNotSupported("the process was forked; create a client in the new one")

    def on_forked(self) -> None:
        """Note that this process is a fork of the process that has the thread."""
        self.is_forked = True

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call `function` on the loop. No effect after the loop's end or after a fork."""
        if self.is_forked:
            return  # this process shares the wake-up pipe of the parent's loop
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            return

    def stop(self) -> None:
        """End the loop and the thread. Waits for the end, unless called on that thread."""
        self.call_soon(self._stopping.set)
        if not self.is_current:
            self._thread.join()

    def stop_soon(self) -> None:
        """End the loop and the thread without waiting."""
        self.call_soon(self._stopping.set)

    def _run(self, started: threading.Event) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            started.set()
            await self._stopping.wait()
            if self.ending is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(ENDING_S):
                        await self.ending()

        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            runner.run(main())
        self._ended = True
        for call in list(self._calls):
            call.cancel()  # the loop ended before it ran the call
        for bridge in list(self._bridges):
            bridge.end()


_LOOPS: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _after_fork() -> None:
    for loop in list(_LOOPS):
        loop.on_forked()


os.register_at_fork(after_in_child=_after_fork)


def _result(call: concurrent.futures.Future[T]) -> T:
    while True:
        try:
            return call.result(INTERRUPT_SEEN_S)
        except TimeoutError:
            if call.done():
                return call.result()  # the call raised TimeoutError, or has just ended


class Life:
    """Ends the threads and connections of a client that the program drops without closing it.

    The client and all its producers, consumers, readers and table views refer to one Life. The loop
    and its tasks do not. When the program has dropped all these objects, the Life ends the threads:
    at once, or at the next garbage collection if there are listeners.
    """

    def __init__(self, thread: LoopThread, end: Callable[[], None]) -> None:
        """`end` must not wait: it may run in any thread that frees the last object."""
        self.thread = thread
        # Open consumers and readers with a listener. The program does not have to keep them itself.
        self.listening: set[object] = set()
        weakref.finalize(self, end).atexit = False


class ThreadBridge(Generic[T]):
    """Passes items from any thread to one function on the loop, in order.

    Every item that `put` accepted reaches the function. `end` passes on the items that remain after
    the loop's end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[deque[T]], None]) -> None:
        self._loop = loop
        self._take = take
        self._lock = threading.Lock()
        self._items: deque[T] = deque()
        self._woken = False  # the loop was woken for the items
        self._ended = False

    def put(self, item: T) -> None:
        """Pass an item on, and wake the loop unless it was woken for earlier items.

        Raises AlreadyClosed after the loop's end. An interrupt (Ctrl-C) may arrive between any two
        steps. The item may then be passed on or not. The interrupt does not delay other items.
        """
        late = self.pass_on(item)
        if late is not None:
            raise late

    def pass_on(self, item: T) -> BaseException | None:
        """Pass an item on as `put` does, and tell the caller whether it was passed on.

        Raises an exception if the item was not passed on. Otherwise returns None, or the interrupt
        that arrived meanwhile, which the caller must raise.
        """
        passed = False
        try:
            with self._lock:
                if self._ended:
                    raise AlreadyClosed("the client was closed")
                wake = not self._woken
                self._woken = True
                try:
                    self._items.append(item)
                except BaseException:  # the interrupt may have come after `append`
                    passed = bool(self._items) and self._items[-1] is item
                    raise
                passed = True
            if wake:
                self._wake()
        except AlreadyClosed:
            raise
        except BaseException as interrupt:
            self._woken = False  # the wake-up may be missing; a second one is harmless
            self._wake()
            if passed:
                return interrupt
            raise
        return None

    def end(self) -> None:
        """End the bridge: the loop has ended. Passes the remaining items on."""
        with self._lock:
            self._ended = True
        self._drain()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended; end() follows
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            items, self._items = self._items, deque()
            self._woken = False
        if items:
            self._take(items)


class Mailbox:
    """A MessageQueue from which user threads take messages."""

    def __init__(self, topic: str, on_waiting: Callable[[], None] = lambda: None) -> None:
        self._topic = topic
        self.on_waiting = on_waiting
        self._lock = threading.Lock()  # faster to take than the Condition
        self._changed = threading.Condition(self._lock)
        self._messages: deque[Message] = deque()
        self._waiting = 0
        self._failure: PulsarException | None = None  # None: further messages may arrive
        self._errors: deque[PulsarException] = deque()
        self._last_taken: Place | None = None  # None: no message taken since the last clear()
        self.generation = 0
        self._sources: Sources | None = None  # None: all messages are of one topic
        self._has_dropped = False  # the queue still has messages of topics that dropped them
        self.on_put: Callable[[], None] | None = None  # wakes the listener; None: no listener

    # On the loop

    def share(self) -> Sources:
        if self._sources is None:
            self._sources = Sources()
        return self._sources

    def drop(self, topic: str) -> MessageId | None:
        assert self._sources is not None
        with self._changed:
            self._has_dropped = True
            return self._sources.on_dropped(topic)

    def put(self, messages: Sequence[Message]) -> None:
        with self._changed:
            self._remove_dropped()
            if self._failure is None:
                self._messages.extend(messages)
            if self._waiting:
                self._changed.notify(len(messages))
        if self.on_put is not None:
            self.on_put()

    def put_error(self, error: PulsarException) -> None:
        with self._changed:
            if len(self._errors) < QUEUED_ERRORS_MAX and self.on_put is None:  # no listener
                self._errors.append(error)
                self._changed.notify()

    def clear(self) -> MessageId | None:
        with self._changed:
            self.generation += 1
            self._messages.clear()
            self._errors.clear()
            taken, self._last_taken = self.last_taken, None
            if self._waiting:
                self.on_waiting()  # a message that a thread waited for may be gone
            return taken

    def remove(self, unwanted: Callable[[Message], bool]) -> list[Message]:
        with self._changed:
            self._remove_dropped()
            removed = [one for one in self._messages if unwanted(one)]
            if removed:
                self._messages = deque(one for one in self._messages if not unwanted(one))
                if self._waiting:
                    self.on_waiting()
            return removed

    def fail(self, error: PulsarException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._messages.clear()
            self._changed.notify_all()

    @property
    def last_taken(self) -> MessageId | None:
        return id_at(self._last_taken)

    def __len__(self) -> int:
        if self._has_dropped:
            with self._lock:
                self._remove_dropped()
        return len(self._messages)

    # In any thread

    @property
    def is_awaited(self) -> bool:
        """Return whether a thread waits for a message."""
        return self._waiting > 0

    def take(self, timeout_s: float | None) -> Message:
        """Return the next message; wait until there is one.

        Raises Timeout after `timeout_s` seconds, Interrupted after Ctrl-C, and the errors given to
        `put_error` and `fail`.
        """
        with self._changed:
            self._remove_dropped()
            if not self._messages and not self._errors:
                with interruptible():
                    self._wait(timeout_s)
            if self._errors:
                raise self._errors.popleft()
            return self._next()

    def maybe_take(self) -> Message | None:
        """Return the next message, or None if the queue is empty. Without a listener, raises an
        error given to `put_error`."""
        with self._lock:
            if self._errors and self.on_put is None:
                raise self._errors.popleft()
            self._remove_dropped()
            return self._next() if self._messages else None

    def put_back(self, messages: Sequence[Message]) -> None:
        with self._changed:
            self._remove_dropped()
            if self._failure is None:
                if self._sources is None:
                    fresh = of_generation(self.generation, messages)
                else:
                    fresh = self._sources.current(messages)
                self._messages.extendleft(reversed(fresh))
                self._changed.notify(len(fresh))

    def _remove_dropped(self) -> None:
        """Remove the messages that `drop` has left. The caller holds the lock."""
        if self._has_dropped:
            assert self._sources is not None
            self._messages = deque(self._sources.current(self._messages))
            self._has_dropped = False  # last: Ctrl-C may prevent the assignment above

    def _next(self) -> Message:
        message = self._messages.popleft()
        self._last_taken = place_of(message)
        if self._sources is not None:
            self._sources.on_taken(message)
        return message

    def _wait(self, timeout_s: float | None) -> None:
        self._waiting += 1
        try:
            self.on_waiting()
            there = wait_for(self._changed, self._ends_wait, timeout_s)
        finally:
            self._waiting -= 1
        if self._failure is not None:
            raise without_frames(self._failure)
        if not there:
            raise Timeout(f"no message within {timeout_s} s", topic=self._topic)

    def _ends_wait(self) -> bool:
        self._remove_dropped()
        return bool(self._messages or self._errors) or self._failure is not None


@contextmanager
def interruptible() -> Iterator[None]:
    """Convert a Ctrl-C during a wait to InterruptedByUser."""
    try:
        yield
    except InterruptedByUser:
        raise
    except KeyboardInterrupt:
        raise InterruptedByUser(_CTRL_C) from None


def wait_for(
    changed: threading.Condition, predicate: Callable[[], object], timeout_s: float | None = None
) -> object:
    """Wait as `changed.wait_for` does, but let a Ctrl-C end the wait."""
    end_at = None if timeout_s is None else monotonic() + timeout_s
    while True:
        left_s = INTERRUPT_SEEN_S if end_at is None else end_at - monotonic()
        found = changed.wait_for(predicate, min(left_s, INTERRUPT_SEEN_S))
        if found or (end_at is not None and monotonic() >= end_at):
            return found


class Outcome:
    """The outcome of one send. A thread waits for it."""

    __slots__ = ("_arrived", "_error", "_message_id")

    def __init__(self) -> None:
        self._arrived = threading.Lock()  # the cheapest object to wait for
        self._arrived.acquire()
        self._error: PulsarException | None = None
        self._message_id: MessageId | None = None

    def settle(self, error: PulsarException | None, message_id: MessageId | None) -> None:
        if not self._arrived.locked():
            return  # the send has an outcome already
        self._error, self._message_id = error, message_id
        self._arrived.release()

    def wait(self) -> MessageId:
        """Wait for the outcome. Returns the message's id or raises the error.

        After Ctrl-C, raises Interrupted: the message may be stored.
        """
        with interruptible():
            while not self._arrived.acquire(timeout=INTERRUPT_SEEN_S):
                pass
        if self._error is not None:
            raise without_frames(self._error)
        assert self._message_id is not None
        return self._message_id
