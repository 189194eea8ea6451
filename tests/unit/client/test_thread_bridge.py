"""The bridge between threads and loop: one wake-up per burst, no item lost at the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from support import frames_of

from magnetar.client import thread_bridge
from magnetar.client.errors import AlreadyClosed, OperationNotSupported, Timeout
from magnetar.client.message import MessageId
from magnetar.client.thread_bridge import LoopThread, Mailbox, Outcome, ThreadBridge, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable


class StillLoop:
    """A busy loop: it stores the calls and runs none."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def call_soon_threadsafe(self, function: Any) -> None:
        self.asked.append(function)


def test_a_burst_of_calls_wakes_the_loop_once() -> None:
    loop, got = StillLoop(), []
    one: ThreadBridge[int] = ThreadBridge(loop, got.append)  # type: ignore[arg-type]
    for number in range(1000):
        one.put(number)
    assert len(loop.asked) == 1
    loop.asked[0]()
    assert got == [deque(range(1000))]
    one.put(1)
    assert len(loop.asked) == 2


class InterruptedLoop(StillLoop):
    """A loop whose first wake-up is interrupted by Ctrl-C, before or after it takes effect."""

    def __init__(self, *, told: bool) -> None:
        super().__init__()
        self._told = told
        self._interrupts = 1

    def call_soon_threadsafe(self, function: Any) -> None:
        if not self._interrupts:
            super().call_soon_threadsafe(function)
            return
        self._interrupts -= 1
        if self._told:
            super().call_soon_threadsafe(function)
        raise KeyboardInterrupt


class InterruptedItems(deque[int]):
    """A deque whose first append is followed by Ctrl-C."""

    def append(self, item: int, /) -> None:
        super().append(item)
        if item == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["noted", "before", "after"])
def test_interrupted_put_does_not_delay_other_items(when: str) -> None:
    loop, got = InterruptedLoop(told=when == "after"), []
    one: ThreadBridge[int] = ThreadBridge(loop, got.extend)  # type: ignore[arg-type]
    if when == "noted":
        one._items, loop = InterruptedItems(), StillLoop()  # type: ignore[assignment]
        one._loop = loop  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        one.put(0)
    one.put(1)
    for drain in loop.asked:
        drain()
    assert got == [0, 1]
    one.put(2)
    loop.asked[-1]()
    assert got == [0, 1, 2]


def test_all_items_arrive_in_order_also_at_the_end() -> None:
    thread = LoopThread("test")
    got: list[tuple[int, int]] = []
    way = thread.bridge(got.extend)
    refused: list[tuple[int, int]] = []

    def put(sender: int) -> None:
        for number in range(5000):
            try:
                way.put((sender, number))
            except AlreadyClosed:
                refused.append((sender, number))

    senders = [threading.Thread(target=put, args=(sender,)) for sender in range(3)]
    for sender in senders:
        sender.start()
    while len(got) < 1000:
        pass
    thread.stop()  # while the senders still put items
    for one in senders:
        one.join()
    for sender in range(3):
        numbers = [number for who, number in got if who == sender]
        assert numbers == list(range(len(numbers)))
        late = [number for who, number in refused if who == sender]
        assert numbers + late == list(range(5000))


def test_call_runs_on_the_loop_and_raises_its_error() -> None:
    thread = LoopThread("test")

    async def name() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise Timeout("so")

    async def call_again() -> None:
        thread.call(name())

    assert thread.call(name()) == "test"
    with pytest.raises(Timeout, match="so"):
        thread.call(fail())
    with pytest.raises(OperationNotSupported, match="callback"):
        thread.call(call_again())
    thread.stop()
    with pytest.raises(AlreadyClosed):
        thread.call(name())
    thread.stop()


def test_calls_in_progress_at_the_loops_end_raise_already_closed() -> None:
    thread = LoopThread("test")
    errors: list[BaseException] = []

    def call() -> None:
        try:
            while True:
                thread.call(asyncio.sleep(0.001))
        except AlreadyClosed as error:
            errors.append(error)

    callers = [threading.Thread(target=call) for _ in range(5)]
    for caller in callers:
        caller.start()
    time.sleep(0.02)
    thread.stop()
    for caller in callers:
        caller.join(30)
        assert not caller.is_alive()
    assert len(errors) == 5


def is_in(thread: int, function: Callable[..., object]) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def interrupt_in(thread: int, function: Callable[..., object]) -> None:
    """Send a Ctrl-C that does not wake the thread, as if it came just before the thread sleeps."""
    while not is_in(thread, function):
        time.sleep(0.001)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


@pytest.mark.parametrize("what", ["message", "outcome", "room"])
def test_ctrl_c_interrupts_a_waiting_thread(what: str) -> None:
    mailbox, outcome, changed = Mailbox("t", lambda: None), Outcome(), threading.Condition()
    waits: dict[str, tuple[Callable[..., object], Callable[[], object]]] = {
        "message": (Mailbox._wait, lambda: mailbox.take(None)),
        "outcome": (Outcome.wait, outcome.wait),
        "room": (wait_for, lambda: wait_for(changed, lambda: False)),
    }
    function, wait = waits[what]
    main = threading.get_ident()
    thread = threading.Thread(target=lambda: interrupt_in(main, function))
    thread.start()
    with pytest.raises(KeyboardInterrupt), changed:
        wait()
    thread.join()


def test_wait_for_ends_at_its_own_timeout() -> None:
    changed = threading.Condition()
    with changed:
        began = time.monotonic()
        assert not wait_for(changed, lambda: False, 0.05)
        assert time.monotonic() - began >= 0.05
        assert not wait_for(changed, lambda: False, 0)
        assert wait_for(changed, lambda: True, 0)
        came: list[int] = []
        threading.Timer(0.01, lambda: came.append(1)).start()
        assert wait_for(changed, lambda: came)  # without a notification: wait_for polls


def test_an_interrupted_call_is_cancelled() -> None:
    thread = LoopThread("test")
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            interrupt_in(main, thread_bridge._result)
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    main = threading.get_ident()
    with pytest.raises(KeyboardInterrupt):
        thread.call(wait())
    assert cancelled.wait(30)
    thread.stop()


def test_an_outcome_crosses_threads() -> None:
    good, bad = Outcome(), Outcome()
    threading.Thread(target=lambda: good.settle(None, MessageId.earliest)).start()
    threading.Thread(target=lambda: bad.settle(Timeout("late"), None)).start()
    assert good.wait() == MessageId.earliest
    with pytest.raises(Timeout, match="late"):
        bad.wait()


def test_an_error_keeps_no_earlier_waits_in_memory() -> None:
    mailbox, failure = Mailbox("t"), Timeout("late")
    mailbox.fail(failure)

    def wait_for_outcome() -> None:
        outcome = Outcome()
        outcome.settle(failure, None)
        outcome.wait()

    for call in (lambda: mailbox.take(None), wait_for_outcome):
        frames = []
        for _ in range(3):
            with pytest.raises(Timeout) as raised:
                call()
            frames.append(frames_of(raised.value))
        assert len(set(frames)) == 1, frames


def test_a_waiting_thread_asks_again_when_the_queue_was_cleared() -> None:
    """With a queue size of 0, the consumer had asked for one message, which the clearing dropped.
    Without another request the thread would wait without end."""
    asked = threading.Semaphore(0)
    mailbox = Mailbox("t", asked.release)

    def receive() -> None:
        with contextlib.suppress(AlreadyClosed):
            mailbox.take(60)

    waiting = threading.Thread(target=receive)
    waiting.start()
    assert asked.acquire(timeout=30)
    mailbox.clear()
    assert asked.acquire(timeout=30)
    mailbox.fail(AlreadyClosed("the end of the test", topic="t"))
    waiting.join(30)
    assert not waiting.is_alive()
