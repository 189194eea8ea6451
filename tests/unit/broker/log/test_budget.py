"""The budget of all bytes that a broker holds for producers. Waiting connections continue in FIFO
order once less than half of the budget is used."""

from __future__ import annotations

import asyncio

from support import settle

from magnetar.broker.log.budget import LOOK_S, PublishBudget


async def test_below_the_limit_every_connection_continues() -> None:
    budget = PublishBudget(100)
    budget.change(99)
    assert budget.turn() is None


async def test_turns_come_in_order_once_less_than_half_is_used() -> None:
    budget = PublishBudget(100)
    budget.change(100)
    turns = [budget.turn() for _ in range(5)]
    budget.change(-40)
    await settle(20)
    budget.check()
    assert not any(turn.done() for turn in turns), "60 of 100 are used: not below the half"
    budget.change(-20)
    took: list[int] = []
    for number, turn in enumerate(turns):
        turn.add_done_callback(lambda _, number=number: took.append(number))
    await settle(30)
    assert took == [0, 1, 2, 3, 4]


async def test_turns_stop_when_the_budget_is_exhausted_again() -> None:
    budget = PublishBudget(100)
    budget.change(100)
    turns = [budget.turn() for _ in range(10)]
    for turn in turns:
        turn.add_done_callback(lambda _: budget.change(30))  # a frame with SENDs
    budget.change(-100)
    await settle(50)
    assert [turn.done() for turn in turns] == [True] * 4 + [False] * 6
    assert budget.used == 120, "over the limit by one frame at most"
    budget.change(-120)
    await settle(50)
    assert [turn.done() for turn in turns] == [True] * 8 + [False] * 2


async def test_a_new_connection_does_not_overtake_waiting_connections() -> None:
    budget = PublishBudget(100)
    budget.change(100)
    first = budget.turn()
    budget.change(-90)
    assert first is not None
    assert budget.turn() is not None, "another connection waits already"


async def test_a_connection_that_left_takes_no_turn() -> None:
    budget = PublishBudget(100)
    budget.change(100)
    first, second = budget.turn(), budget.turn()
    assert first is not None
    assert second is not None
    budget.leave(first)
    budget.leave(first)
    budget.change(-100)
    await settle(10)
    assert second.done()
    assert budget.waiting == 0
    budget.check()


async def test_bytes_kept_for_a_slow_bookie_count_and_are_polled() -> None:
    kept = 100
    budget = PublishBudget(100, kept=lambda accepted: accepted + kept)
    turn = budget.turn()
    assert turn is not None
    await asyncio.sleep(10 * LOOK_S)
    assert not turn.done()
    kept = 0  # the budget does not know this number
    await asyncio.sleep(2 * LOOK_S)
    assert turn.done()
