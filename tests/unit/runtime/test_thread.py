"""A worker thread of a loop: it runs work in order, answers on the loop, and drops work that has
not begun at its end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from support import run, wait_until

from magnetar.runtime.thread import WorkerThread

pytestmark = pytest.mark.real_loop


class Gate:
    """Work that is under way until `opened` is set."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        self.opened.wait(10)
        return "done"


async def test_work_is_done_in_order_on_the_worker_thread() -> None:
    thread = WorkerThread("disk")
    seen: list[tuple[int, str]] = []
    jobs = [
        thread.do(lambda number=number: seen.append((number, threading.current_thread().name)))  # type: ignore[misc]
        for number in range(50)
    ]
    await jobs[-1]
    assert seen == [(number, "disk") for number in range(50)]
    assert all(job.done() for job in jobs)
    thread.shutdown()


async def test_an_exception_is_raised_at_the_await_and_the_thread_continues() -> None:
    thread = WorkerThread("disk")
    with pytest.raises(ZeroDivisionError):
        await thread.do(lambda: 1 // 0)
    assert await thread.do(lambda: 7) == 7
    thread.shutdown()


async def test_work_of_a_cancelled_caller_is_skipped() -> None:
    thread, gate, done = WorkerThread("disk"), Gate(), list[str]()
    first = thread.do(gate)
    dropped = thread.do(lambda: done.append("dropped"))
    last = thread.do(lambda: done.append("last"))
    dropped.cancel()
    gate.opened.set()
    await last
    assert (await first, done) == ("done", ["last"])
    thread.shutdown()


async def test_a_caller_that_goes_meanwhile_is_no_error() -> None:
    thread, gate = WorkerThread("disk"), Gate()
    going = thread.do(gate)
    await wait_until(gate.begun.is_set)
    going.cancel()
    gate.opened.set()
    assert await thread.do(lambda: 1) == 1
    thread.shutdown()


async def test_its_end_waits_for_what_is_under_way_and_drops_the_rest() -> None:
    thread, gate = WorkerThread("disk"), Gate()
    under_way, waiting = thread.do(gate), thread.do(lambda: None)
    await wait_until(gate.begun.is_set)
    threading.Timer(0.05, gate.opened.set).start()
    thread.shutdown()
    thread.shutdown()
    assert await under_way == "done"
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="disk has ended"):
        thread.do(lambda: None)


async def test_work_runs_without_an_awaiting_caller() -> None:
    thread, gate = WorkerThread("disk"), Gate()
    under_way = thread.do(gate)
    await wait_until(gate.begun.is_set)
    thread.shutdown(wait=False)
    assert not under_way.done()
    gate.opened.set()
    assert await under_way == "done"


def test_a_loop_that_is_closed_meanwhile_is_no_error() -> None:
    thread, gate = WorkerThread("disk"), Gate()

    async def leave() -> asyncio.Future[str]:
        return thread.do(gate)

    run(leave())
    gate.opened.set()
    assert run(_one(thread)) == 1
    thread.shutdown()


async def _one(thread: WorkerThread) -> int:
    return await thread.do(lambda: 1)


async def test_the_thread_keeps_no_reference_to_finished_work() -> None:
    class Result:
        pass

    thread = WorkerThread("disk")
    result = await thread.do(Result)
    kept = weakref.ref(result)
    del result
    await asyncio.sleep(0)
    await wait_until(lambda: gc.collect() >= 0 and kept() is None)
    thread.shutdown()
