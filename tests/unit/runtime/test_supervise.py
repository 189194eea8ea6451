"""supervise() always ends when it is cancelled, never because a child failed, always for a bug."""

from __future__ import annotations

import asyncio
import logging
import random
from itertools import islice

import pytest
from support import settle

from magnetar.runtime.supervise import Backoff, is_bug, is_operating_error, supervise


class ConnectionLost(Exception):
    definite = False


def backoff(seed: int = 0, first_s: float = 0.001, max_s: float = 0.008) -> Backoff:
    return Backoff(first_s, max_s, random.Random(seed))


async def nested_group_that_fails(chance: random.Random) -> None:
    """The shape that loses cancellations on 3.11: a group whose child fails at any moment."""

    async def fails(after_turns: int) -> None:
        for _ in range(after_turns):
            await asyncio.sleep(0)
        raise ConnectionLost

    async with asyncio.TaskGroup() as group:
        for _ in range(chance.randrange(1, 3)):
            group.create_task(fails(chance.randrange(8)))
        await asyncio.sleep(3600)


@pytest.mark.parametrize("cancel_after_turns", range(12))
async def test_a_cancellation_is_never_lost(cancel_after_turns: int) -> None:
    """A loop of `try: await child() / except*` would fail a third of these schedules."""

    for seed in range(40):
        chance = random.Random(seed)
        task = asyncio.create_task(  # noqa: TID251
            supervise(
                "child",
                lambda chance=chance: nested_group_that_fails(chance),
                backoff=backoff(seed, 1e-6, 2e-6),
            )
        )
        for _ in range(cancel_after_turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=0.01)
        assert done, f"seed {seed} continued after cancel()"
        assert task.cancelled()
    assert len(asyncio.all_tasks()) == 1


async def test_the_child_has_ended_before_supervise_does() -> None:
    events: list[str] = []

    async def slow_to_leave() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            events.append("child")

    async def supervised() -> None:
        try:
            await supervise("slow", slow_to_leave, backoff=backoff())
        finally:
            events.append("supervise")

    async with asyncio.TaskGroup() as group:
        task = group.create_task(supervised())
        await settle()
        task.cancel()
        await settle(2)
    assert events == ["child", "supervise"]


async def test_a_second_cancellation_does_not_leave_the_child_behind() -> None:
    left = 0

    async def stubborn() -> None:
        nonlocal left
        for _ in range(3):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                left += 1
                if left == 3:
                    raise

    async with asyncio.TaskGroup() as group:
        task = group.create_task(supervise("stubborn", stubborn, backoff=backoff()))
        await settle()
        for _ in range(3):
            task.cancel()
            await settle()
        assert task.cancelled()
    assert left == 3


async def test_a_child_that_fails_or_returns_is_started_again_and_reported() -> None:
    starts = 0
    reports: list[Exception | None] = []

    async def child() -> None:
        nonlocal starts
        starts += 1
        if starts == 1:
            raise ConnectionLost("one")
        if starts == 2:
            return
        if starts == 3:
            raise asyncio.CancelledError  # cancelled itself
        raise AssertionError("enough")

    with pytest.raises(AssertionError, match="enough"):
        await supervise("child", child, backoff=backoff(), on_failure=reports.append)
    assert [str(report) for report in reports] == ["one", "None", "None"]


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_bug_escapes_whatever_it_is_wrapped_in(depth: int) -> None:
    async def child() -> None:
        error: Exception = AssertionError("two owners")
        for _ in range(depth):
            error = ExceptionGroup("", [ConnectionLost(), error])
        raise error

    with pytest.raises(BaseException) as caught:
        await supervise("child", child, backoff=backoff())
    assert is_bug(caught.value)


async def test_a_bug_while_the_child_is_being_cancelled_escapes() -> None:
    async def child() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise AssertionError("cleanup left a lock")

    task = asyncio.create_task(supervise("c", child, backoff=backoff()))  # noqa: TID251
    await settle()
    task.cancel()
    await asyncio.wait({task})
    assert isinstance(task.exception(), AssertionError)


async def test_an_error_while_the_child_is_being_cancelled_does_not_stop_the_cancellation() -> None:
    async def child() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise ConnectionLost

    task = asyncio.create_task(supervise("c", child, backoff=backoff()))  # noqa: TID251
    await settle()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


def test_delays_double_to_the_limit_and_are_drawn_from_the_upper_half() -> None:
    first, maximum = 0.1, 1.0
    for seed in range(50):
        delays = list(islice(backoff(seed, first, maximum).delays(), 8))
        bounds = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]
        assert all(b / 2 <= d <= b for d, b in zip(delays, bounds, strict=True)), delays
    drawn = {next(backoff(seed, first, maximum).delays()) for seed in range(50)}
    assert len(drawn) > 40, "tasks that failed together restart together"


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be moved forward."""

    skew_s = 0.0

    def time(self) -> float:
        return super().time() + self.skew_s


def test_a_child_that_has_lived_long_starts_again_at_the_first_delay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lives_s = [0.0, 0.0, 0.0, 6.0, 0.0]

    async def child() -> None:
        assert lives_s, "enough"
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        loop.skew_s += lives_s.pop(0)
        raise ConnectionLost

    with asyncio.Runner(loop_factory=JumpingLoop) as runner, pytest.raises(AssertionError):
        runner.run(supervise("child", child, backoff=backoff(0, 0.002, 5.0)))
    delays_s = [record.magnetar_fields["again_s"] for record in caplog.records]
    bounds_s = [0.002, 0.004, 0.008, 0.002, 0.004]
    assert all(b / 2 <= d <= b for d, b in zip(delays_s, bounds_s, strict=True)), delays_s


async def test_an_operating_error_logs_a_line_and_a_bug_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: list[Exception] = [ConnectionLost("gone"), OSError("disk"), KeyError("surprise")]

    async def child() -> None:
        assert errors, "enough"
        raise errors.pop(0)

    with caplog.at_level(logging.INFO), pytest.raises(AssertionError):
        await supervise("reader", child, backoff=backoff())
    assert [(r.levelname, r.exc_info is not None) for r in caplog.records] == [
        ("WARNING", False),
        ("WARNING", False),
        ("ERROR", True),
    ]
    assert all("task=reader" in record.getMessage() for record in caplog.records)


def test_a_group_with_a_bug_is_no_operating_error() -> None:
    assert is_operating_error(ConnectionLost())
    assert is_operating_error(ExceptionGroup("", [ConnectionLost(), FileNotFoundError()]))
    assert not is_operating_error(ExceptionGroup("", [ConnectionLost(), TypeError()]))
    assert not is_operating_error(AssertionError())
