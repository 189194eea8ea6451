"""Between threads and loop: one wake-up per burst, nothing lost at the end."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import deque
from typing import Any

import pytest

from magnetar.client.crossing import Crossing, LoopThread, Outcome
from magnetar.client.errors import AlreadyClosed, OperationNotSupported, Timeout
from magnetar.client.message import MessageId


class StillLoop:
    """A loop that is busy: it remembers what it was asked to do."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def call_soon_threadsafe(self, function: Any) -> None:
        self.asked.append(function)


def test_a_burst_is_one_wake_up() -> None:
    loop, got = StillLoop(), []
    crossing: Crossing[int] = Crossing(loop, got.append)  # type: ignore[arg-type]
    for number in range(1000):
        crossing.put(number)
    assert len(loop.asked) == 1
    loop.asked[0]()
    assert got == [deque(range(1000))]
    crossing.put(1)
    assert len(loop.asked) == 2


def test_everything_that_was_put_arrives_in_order_also_at_the_end() -> None:
    thread = LoopThread("test")
    got: list[tuple[int, int]] = []
    crossing = thread.crossing(got.extend)
    refused: list[tuple[int, int]] = []

    def put(sender: int) -> None:
        for number in range(5000):
            try:
                crossing.put((sender, number))
            except AlreadyClosed:
                refused.append((sender, number))

    senders = [threading.Thread(target=put, args=(sender,)) for sender in range(3)]
    for sender in senders:
        sender.start()
    while len(got) < 1000:
        pass
    thread.stop()  # in the middle of it
    for one in senders:
        one.join()
    for sender in range(3):
        numbers = [number for who, number in got if who == sender]
        assert numbers == list(range(len(numbers)))
        late = [number for who, number in refused if who == sender]
        assert numbers + late == list(range(5000))


def test_calls_run_on_the_loop_and_give_back_what_they_raise() -> None:
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


def test_calls_under_way_when_the_loop_ends_are_told() -> None:
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
        caller.join(5)
        assert not caller.is_alive()
    assert len(errors) == 5


def test_an_interrupted_call_is_cancelled() -> None:
    thread = LoopThread("test")
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(0.02)  # it waits by now
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    main = threading.get_ident()
    with pytest.raises(KeyboardInterrupt):
        thread.call(wait())
    assert cancelled.wait(5)
    thread.stop()


def test_an_outcome_crosses_threads() -> None:
    good, bad = Outcome(), Outcome()
    threading.Thread(target=lambda: good.settle(None, MessageId.earliest)).start()
    threading.Thread(target=lambda: bad.settle(Timeout("late"), None)).start()
    assert good.wait() == MessageId.earliest
    with pytest.raises(Timeout, match="late"):
        bad.wait()
